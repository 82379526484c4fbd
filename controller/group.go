package controller

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// groupScheme begins the CSI id of a group of snapshots.
const groupScheme = "group://"

// GroupControllerGetCapabilities lists what the GroupController RPCs can do.
func (s *Server) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (
	*csi.GroupControllerGetCapabilitiesResponse, error) {
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{{
		Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
			Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT}}}}}, nil
}

// CreateVolumeGroupSnapshot creates the SnapshotGroup, or verifies that an existing group of the name is of the same
// volumes, and waits until all snapshots of the group can be used.
func (s *Server) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (
	*csi.CreateVolumeGroupSnapshotResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if err := checkName(req.GetName()); err != nil {
		return nil, err
	}
	if len(req.GetSourceVolumeIds()) == 0 {
		return nil, api.Errorf(api.Invalid, "snapshot group %.80q: the request names no volume", req.GetName())
	}
	if class, err := parseSnapshotClass(req.GetParameters()); err != nil {
		return nil, err
	} else if class != (snapshotClass{}) {
		return nil, api.Errorf(api.Invalid, "snapshot group %.80q: a group is made of snapshots of type snap, not %s",
			req.GetName(), req.GetParameters()["type"])
	}
	g, err := s.ensureGroup(ctx, req)
	if err != nil {
		return nil, err
	}
	why, uid := "", g.UID
	g, err = await.Until(ctx, s.client, g.Name, func(now *api.SnapshotGroup) (bool, error) {
		if why = now.Status.Error; why != "" {
			why = " (" + why + ")"
		}
		if now.UID != uid || now.DeletionTimestamp != nil {
			return false, api.Errorf(api.Busy, "deleted while it was being created: try again")
		}
		return now.Status.ReadyToUse, nil
	})
	if err != nil {
		return nil, api.Explain(err, "snapshot group %s%s", req.GetName(), why)
	}
	for _, m := range g.Status.Members {
		_, err := await.Until(ctx, s.client, m.Snapshot, func(now *api.Snapshot) (bool, error) {
			if strings.HasPrefix(now.Status.Error, "lost") {
				return false, api.Errorf(api.Corrupt, "%s", now.Status.Error)
			}
			return now.Status.ReadyToUse, nil
		})
		if err != nil {
			return nil, api.Explain(err, "snapshot %s of group %s", m.Snapshot, req.GetName())
		}
	}
	out, err := s.groupInCSI(ctx, g)
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: out}, nil
}

func (s *Server) ensureGroup(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*api.SnapshotGroup,
	error) {
	name := snapshotName(req.GetName())
	if len(name) > 100 || name != req.GetName() {
		name = "group-" + strings.TrimPrefix(objectName("group "+req.GetName()), "vol-")
	}
	wish := api.NewSnapshotGroup(name, req.GetSourceVolumeIds())
	if name != req.GetName() {
		wish.Annotations = map[string]string{annotationName: req.GetName()}
	}
	for {
		g := &api.SnapshotGroup{}
		err := s.client.Get(ctx, client.ObjectKey{Name: name}, g)
		switch {
		case err == nil && !slices.Equal(g.Spec.Volumes, wish.Spec.Volumes):
			return nil, api.Errorf(api.Exists, "snapshot group %s exists already, for volumes %s", req.GetName(),
				strings.Join(g.Spec.Volumes, ", "))
		case err == nil && g.DeletionTimestamp != nil:
			return nil, api.Errorf(api.Busy, "snapshot group %s of the same name is being deleted: try again", name)
		case err == nil:
			return g, nil
		case !apierrors.IsNotFound(err):
			return nil, api.Explain(err, "read snapshot group %s", name)
		}
		for _, id := range wish.Spec.Volumes {
			vol, err := s.readVolume(ctx, id)
			if err != nil {
				return nil, err
			}
			if vol.DeletionTimestamp != nil {
				return nil, api.Errorf(api.NotFound, "volume %s is being deleted", vol.Name)
			}
		}
		if err := s.client.Create(ctx, wish); !apierrors.IsAlreadyExists(err) {
			return wish, api.Explain(err, "create snapshot group %s", name)
		}
	}
}

// readGroup reads a group by CSI id.
func (s *Server) readGroup(ctx context.Context, id string) (*api.SnapshotGroup, error) {
	if id == "" {
		return nil, api.Errorf(api.Invalid, "the request names no snapshot group")
	}
	none := api.Errorf(api.NotFound, "snapshot group %.200q does not exist", id)
	name, ok := strings.CutPrefix(id, groupScheme)
	if !ok || !validID(name) {
		return nil, none
	}
	g := &api.SnapshotGroup{}
	err := s.client.Get(ctx, client.ObjectKey{Name: name}, g)
	if apierrors.IsNotFound(err) {
		return nil, none
	}
	return g, api.Explain(err, "read snapshot group %s", id)
}

// sameMembers refuses a list of snapshots that differs from the group's snapshots. No list is fine.
func sameMembers(g *api.SnapshotGroup, ids []string) error {
	var have []string
	for _, m := range g.Status.Members {
		have = append(have, api.DataSource(m).String())
	}
	if len(ids) > 0 && !slices.Equal(slices.Sorted(slices.Values(ids)), slices.Sorted(slices.Values(have))) {
		return api.Errorf(api.Invalid, "snapshot group %s has the snapshots %s, not %s", g.Name, strings.Join(have, ", "),
			strings.Join(ids, ", "))
	}
	return nil
}

func (s *Server) groupInCSI(ctx context.Context, g *api.SnapshotGroup) (*csi.VolumeGroupSnapshot, error) {
	out := &csi.VolumeGroupSnapshot{GroupSnapshotId: groupScheme + g.Name, ReadyToUse: g.Status.ReadyToUse}
	if t, err := time.Parse(time.RFC3339Nano, g.Status.CreationTime); err == nil {
		out.CreationTime = timestamppb.New(t)
	}
	for _, m := range g.Status.Members {
		snap := &api.Snapshot{}
		err := s.client.Get(ctx, client.ObjectKey{Name: m.Snapshot}, snap)
		if apierrors.IsNotFound(err) {
			out.ReadyToUse = false // a user deleted this snapshot alone
			continue
		}
		if err != nil {
			return nil, api.Explain(err, "read snapshot %s", m.Snapshot)
		}
		one := snapshotInCSI(snap)
		one.AccessibleTopology = nil
		out.Snapshots = append(out.Snapshots, one)
		out.ReadyToUse = out.ReadyToUse && one.ReadyToUse
	}
	return out, nil
}

// GetVolumeGroupSnapshot is the present state of a group.
func (s *Server) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (
	*csi.GetVolumeGroupSnapshotResponse, error) {
	g, err := s.readGroup(ctx, req.GetGroupSnapshotId())
	if err != nil {
		return nil, err
	}
	if err := sameMembers(g, req.GetSnapshotIds()); err != nil {
		return nil, err
	}
	out, err := s.groupInCSI(ctx, g)
	if err != nil {
		return nil, err
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: out}, nil
}

// DeleteVolumeGroupSnapshot removes a group with the group's snapshots and waits until the group is gone. An id of
// nothing is no error.
func (s *Server) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (
	*csi.DeleteVolumeGroupSnapshotResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	g, err := s.readGroup(ctx, req.GetGroupSnapshotId())
	if api.Is(err, api.NotFound) {
		return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	if err := sameMembers(g, req.GetSnapshotIds()); err != nil {
		return nil, err
	}
	uid := g.UID
	if err := s.client.Delete(ctx, g, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "delete snapshot group %s", g.Name)
	}
	if err := await.Gone(ctx, s.client, g, nil); err != nil {
		return nil, api.Explain(err, "delete snapshot group %s", g.Name)
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}
