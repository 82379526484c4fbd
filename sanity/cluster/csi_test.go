package cluster

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// door is the CSI driver on one machine.
type door struct {
	t *testing.T
	m *Machine
	csi.ControllerClient
	csi.NodeClient
}

func newDoor(t *testing.T, m *Machine) *door {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+filepath.Join(m.Dir, "state", "csi.sock"), grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUnaryInterceptor(insist))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &door{t, m, csi.NewControllerClient(conn), csi.NewNodeClient(conn)}
}

// insist repeats a call that the server had no time for, as an orchestrator does.
func insist(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	for {
		err := call(ctx, method, req, reply, conn, opts...)
		code := status.Code(err)
		if code != codes.Unavailable && code != codes.Aborted &&
			(code != codes.Internal || !strings.Contains(err.Error(), "etcdserver")) {
			return err
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

func wantCode(t *testing.T, what string, err error, code codes.Code) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("%s: %v, not %v", what, err, code)
	}
}

var mountedExt4 = &csi.VolumeCapability{
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
}

func (d *door) paths(volume string) (staging, target string) {
	return filepath.Join(d.m.Dir, "staging-"+volume), filepath.Join(d.m.Dir, "target-"+volume)
}

// up publishes a volume by the controller behind another door, mounts the volume for a pod of d's machine, and
// returns the folder of the pod's files.
func (d *door) up(by *door, volume string) string {
	d.t.Helper()
	ctx := soon(d.t)
	_, err := by.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: d.m.Name,
		VolumeCapability: mountedExt4})
	must(d.t, err)
	staging, target := d.paths(volume)
	must(d.t, os.MkdirAll(staging, 0o700))
	_, err = d.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: volume, StagingTargetPath: staging,
		VolumeCapability: mountedExt4})
	must(d.t, err)
	_, err = d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: volume, StagingTargetPath: staging,
		TargetPath: target, VolumeCapability: mountedExt4})
	must(d.t, err)
	return d.m.View(target)
}

// down unmounts and unpublishes the volume again.
func (d *door) down(by *door, volume string) {
	d.t.Helper()
	ctx := soon(d.t)
	staging, target := d.paths(volume)
	_, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target})
	must(d.t, err)
	_, err = d.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: volume, StagingTargetPath: staging})
	must(d.t, err)
	_, err = by.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: d.m.Name})
	must(d.t, err)
}

func (d *door) create(req *csi.CreateVolumeRequest) string {
	d.t.Helper()
	req.VolumeCapabilities = []*csi.VolumeCapability{mountedExt4}
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: 64 << 20}
	res, err := d.CreateVolume(soon(d.t), req)
	must(d.t, err)
	if at := res.Volume.AccessibleTopology; len(at) != 0 {
		d.t.Errorf("volume %s can be used on %v alone", req.Name, at)
	}
	return res.Volume.VolumeId
}

// write makes a durable file.
func write(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	_, err = f.WriteString(text)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); string(b) != want {
		t.Errorf("%s holds %q, %v, not %q", path, b, err, want)
	}
}

// TestCSIOnSeveralNodes: volumes with several replicas move from node to node as under an orchestrator, through the
// CSI sockets of two controllers and of each node.
func TestCSIOnSeveralNodes(t *testing.T) {
	c := start(t, Options{Nodes: 3, Controllers: 1})
	one, two := newDoor(t, c.Control), newDoor(t, c.Others[0])
	var nodes []*door
	var terms []*csi.Topology
	for _, m := range c.Nodes {
		d := newDoor(t, m)
		info, err := d.NodeGetInfo(soon(t), &csi.NodeGetInfoRequest{})
		must(t, err)
		if info.NodeId != m.Name || len(info.AccessibleTopology.GetSegments()) != 1 {
			t.Fatalf("node %s says it is %v", m.Name, info)
		}
		nodes, terms = append(nodes, d), append(terms, info.AccessibleTopology)
	}

	pair := one.create(&csi.CreateVolumeRequest{Name: "pair", Parameters: map[string]string{"numberOfReplicas": "2"},
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: terms[1:], Preferred: terms[2:]}})
	if at := nodesOf(t, c, pair); !slices.Equal(at, []string{c.Nodes[1].Name, c.Nodes[2].Name}) {
		t.Errorf("the replicas of a volume that may be on two nodes are on %v", at)
	}

	three := map[string]string{"numberOfReplicas": "3"}
	id := one.create(&csi.CreateVolumeRequest{Name: "moves", Parameters: three,
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: terms, Preferred: terms}})
	awaitVolume(t, c, id, "of three replicas", whole)
	files := nodes[0].up(one, id)
	write(t, files+"/first", "written on the first node")
	for _, by := range []*door{one, two} {
		_, err := by.ControllerPublishVolume(soon(t), &csi.ControllerPublishVolumeRequest{VolumeId: id,
			NodeId: c.Nodes[1].Name, VolumeCapability: mountedExt4})
		wantCode(t, "a second node while it is used on the first", err, codes.FailedPrecondition)
		_, err = by.ControllerPublishVolume(soon(t), &csi.ControllerPublishVolumeRequest{VolumeId: id,
			NodeId: c.Nodes[0].Name, VolumeCapability: mountedExt4})
		wantCode(t, "the first node again", err, codes.OK)
		_, err = by.ControllerPublishVolume(soon(t), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "nowhere",
			VolumeCapability: mountedExt4})
		wantCode(t, "a node that does not exist", err, codes.NotFound)
	}
	staging, _ := nodes[1].paths(id)
	must(t, os.MkdirAll(staging, 0o700))
	_, err := nodes[1].NodeStageVolume(soon(t), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging,
		VolumeCapability: mountedExt4})
	wantCode(t, "staging where it is not published", err, codes.FailedPrecondition)
	snap, err := two.CreateSnapshot(soon(t), &csi.CreateSnapshotRequest{SourceVolumeId: id, Name: "snap"})
	must(t, err)
	write(t, files+"/second", "after the snapshot")
	nodes[0].down(one, id)

	files = nodes[1].up(two, id)
	wantFile(t, files+"/first", "written on the first node")
	wantFile(t, files+"/second", "after the snapshot")
	write(t, files+"/third", "written on the second node")
	restored := one.create(&csi.CreateVolumeRequest{Name: "restored", Parameters: three,
		VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snap.Snapshot.SnapshotId}}}})
	there := nodes[2].up(one, restored)
	wantFile(t, there+"/first", "written on the first node")
	if _, err := os.Stat(there + "/second"); !os.IsNotExist(err) {
		t.Errorf("what was written after the snapshot is in what was restored: %v", err)
	}
	nodes[2].down(two, restored)
	nodes[1].down(one, id)

	files = nodes[2].up(one, id)
	wantFile(t, files+"/third", "written on the second node")
	nodes[2].down(two, id)

	_, err = one.DeleteSnapshot(soon(t), &csi.DeleteSnapshotRequest{SnapshotId: snap.Snapshot.SnapshotId})
	must(t, err)
	for _, id := range []string{pair, id, restored} {
		_, err := two.DeleteVolume(soon(t), &csi.DeleteVolumeRequest{VolumeId: id})
		must(t, err)
	}
	eventually(t, "no volume is listed any more", func() bool {
		list, err := one.ListVolumes(soon(t), &csi.ListVolumesRequest{})
		must(t, err)
		return len(list.Entries) == 0
	})
}
