package node_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

const (
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	readerOnly   = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
)

// canGrowExt4 reports whether the kernel lets us grow a mounted ext4: some sandboxes lack the capability.
func canGrowExt4(t *testing.T) bool {
	t.Helper()
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	must(t, unix.Capget(&hdr, &data[0]))
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// TestGrow: xfs and btrfs grow while mounted; ext4 too, if the kernel allows the growth, else at the next stage.
func TestGrow(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			v := attach(t, 512*mib, false)
			c := mounted(fs, writer)
			must(t, v.stage(c))
			must(t, v.publish(c, v.target, false))
			file := filepath.Join(v.target, "file")
			must(t, os.WriteFile(file, []byte("before"), 0o600))
			wantKind(t, v.expand(1024*mib), api.OutOfRange)
			v.grow(1024 * mib)
			err := v.expand(1024 * mib)
			if fs == "ext4" && !canGrowExt4(t) {
				wantKind(t, err, api.InUse, "CAP_SYS_RESOURCE", "staged")
				must(t, v.unpublish(v.target))
				must(t, v.unstage())
				must(t, v.stage(c))
				must(t, v.publish(c, v.target, false))
				err = v.expand(1024 * mib)
			}
			must(t, err)
			if n := v.total(); n < 900*mib {
				t.Errorf("the file system has %d bytes", n)
			}
			if b, err := os.ReadFile(file); err != nil || string(b) != "before" {
				t.Errorf("file: %q, %v", b, err)
			}
		})
	}
}

// TestGrowImage: a file system from an image is smaller than the volume, and fills the volume once staged.
func TestGrowImage(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			v := attach(t, 512*mib, false)
			sh(t, map[string]string{"ext4": "mkfs.ext4", "xfs": "mkfs.xfs", "btrfs": "mkfs.btrfs"}[fs], "-q", v.dev)
			v.detach()
			v.grow(2048 * mib)
			v.loop(false, false)
			c := mounted("", writer) // the image's file system
			must(t, v.stage(c))
			must(t, v.publish(c, v.target, false))
			if n := v.total(); n < 1800*mib {
				t.Errorf("the file system has %d bytes", n)
			}
		})
	}
}

func TestBlock(t *testing.T) {
	v := attach(t, 64*mib, false)
	c := raw(singleWriter)
	for range 2 {
		must(t, v.stage(c))
		must(t, v.publish(c, v.target, false))
	}
	var dev, at unix.Stat_t
	must(t, unix.Stat(v.dev, &dev))
	must(t, unix.Stat(v.target, &at))
	if dev.Rdev != at.Rdev || at.Mode&unix.S_IFMT != unix.S_IFBLK {
		t.Fatal("the target is not the device")
	}
	if n := v.total(); n != 64*mib {
		t.Errorf("statistics say %d bytes", n)
	}
	wantKind(t, v.publish(c, v.target2, false), api.InUse, v.target)
	wantKind(t, v.publish(c, v.target, true), api.InUse, "read-only")
	v.grow(128 * mib)
	must(t, v.expand(128*mib))
	if n := v.total(); n != 128*mib {
		t.Errorf("after expanding, statistics say %d bytes", n)
	}
	for range 2 {
		must(t, v.unpublish(v.target))
		must(t, v.unstage())
	}
	if _, err := os.Lstat(v.target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("target: %v", err)
	}
	v.detach()
	v.loop(true, false)
	must(t, v.stage(c))
	must(t, v.publish(c, v.target, true))
	if f, err := os.OpenFile(v.target, os.O_WRONLY, 0); err == nil {
		_, err = f.Write(make([]byte, 4096))
		if err == nil {
			err = f.Sync()
		}
		f.Close()
		if err == nil {
			t.Error("a device attached read-only takes writes")
		}
	}
}

// TestPathOfAnEarlierLife: after a crash the volume has a device of another number. The path of a workload that used the
// old device does not keep the next workload from the volume.
func TestPathOfAnEarlierLife(t *testing.T) {
	v := attach(t, 64*mib, false)
	c := raw(writer)
	must(t, v.stage(c))
	must(t, v.publish(c, v.target, false))
	old := v.dev
	v.detach()
	for n := 2; exec.Command("losetup", old).Run() != nil; n++ { // others take the number
		attachNamed(t, fmt.Sprintf("%s-%d", v.name, n), 64*mib, false)
	}
	v.loop(false, true)
	must(t, v.stage(c))
	must(t, v.publish(c, v.target2, false))
	var dev, at unix.Stat_t
	must(t, unix.Stat(v.dev, &dev))
	must(t, unix.Stat(v.target2, &at))
	if dev.Rdev != at.Rdev {
		t.Error("the path is not the volume's device")
	}
	wantKind(t, v.publish(c, v.target+"-3", false), api.InUse, v.target2)
	must(t, v.unpublish(v.target))
	must(t, v.unpublish(v.target2))
}

func TestAccessModes(t *testing.T) {
	v := attach(t, 64*mib, false)
	must(t, v.stage(mounted("", writer)))
	for _, m := range []csi.VolumeCapability_AccessMode_Mode{writer, singleWriter} {
		must(t, v.publish(mounted("", m), v.target, false))
		wantKind(t, v.publish(mounted("", m), v.target2, false), api.InUse, v.target)
		wantKind(t, v.publish(mounted("", m), v.target, true), api.Exists)
		must(t, v.unpublish(v.target))
	}
	must(t, v.publish(mounted("", multiWriter), v.target, false))
	must(t, v.publish(mounted("", multiWriter), v.target2, true))
	must(t, os.WriteFile(filepath.Join(v.target, "f"), nil, 0o600))
	if err := os.WriteFile(filepath.Join(v.target2, "g"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write to a read-only publication: %v", err)
	}
	must(t, v.publish(mounted("", multiWriter), v.target2, true))
	wantKind(t, v.publish(mounted("", multiWriter), v.target2, false), api.Exists)
	must(t, v.unpublish(v.target2))
	must(t, v.unpublish(v.target))
	must(t, v.unstage())

	must(t, v.stage(mounted("", readerOnly)))
	must(t, v.publish(mounted("", readerOnly), v.target, false))
	if err := os.WriteFile(filepath.Join(v.target, "g"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write in a reader's mode: %v", err)
	}
	for _, m := range []csi.VolumeCapability_AccessMode_Mode{
		csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
		csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_UNKNOWN} {
		wantKind(t, v.publish(mounted("", m), v.target, false), api.Invalid)
	}
}

// TestDeadMounts: the door takes down no other volume's mount, no busy mount, and no folder or file with content.
func TestDeadMounts(t *testing.T) {
	v := attach(t, 64*mib, false)
	c := mounted("", writer)
	must(t, v.stage(c))
	must(t, v.publish(c, v.target, false))

	// Another volume's mount at our path is not ours to take down.
	other := attach2(t, v)
	wantKind(t, v.stageAt(c, other.staging), api.Exists)
	wantKind(t, v.publish(c, other.staging, false), api.InUse)

	// A busy mount: the call names and keeps the mount.
	f, err := os.Create(filepath.Join(v.target, "open"))
	must(t, err)
	wantKind(t, v.unpublish(v.target), api.InUse, v.target)
	must(t, f.Close())
	must(t, v.unpublish(v.target))
	must(t, v.unstage())

	// The door removes no folder and no file with content.
	must(t, os.Mkdir(v.target, 0o700))
	must(t, os.WriteFile(filepath.Join(v.target, "precious"), []byte("x"), 0o600))
	wantKind(t, v.unpublish(v.target), api.InUse)
	wantKind(t, v.unpublish(filepath.Join(v.target, "precious")), api.InUse)
	if _, err := os.Stat(filepath.Join(v.target, "precious")); err != nil {
		t.Error(err)
	}
}

// attach2 is another staged volume.
func attach2(t *testing.T, like *volume) *volume {
	out := attachNamed(t, like.name+"-2", 64*mib, false)
	must(t, out.stage(mounted("", writer)))
	return out
}

func (v *volume) stageAt(c *csi.VolumeCapability, path string) error {
	_, err := door.NodeStageVolume(v.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.name, StagingTargetPath: path,
		VolumeCapability: c})
	return err
}

func TestRefusals(t *testing.T) {
	v := attach(t, 64*mib, false)
	c := mounted("", writer)
	for _, p := range []string{"", "relative/path", "/", "/tmp/../etc", "/tmp/a\x00b", "//"} {
		if err := v.stageAt(c, p); !api.Is(err, api.Invalid) {
			t.Errorf("staging at %q: %v", p, err)
		}
		if err := v.publish(c, p, false); !api.Is(err, api.Invalid) {
			t.Errorf("publishing at %q: %v", p, err)
		}
		if err := v.unpublish(p); !api.Is(err, api.Invalid) {
			t.Errorf("unpublishing at %q: %v", p, err)
		}
	}
	wantKind(t, v.publish(c, v.target, false), api.InUse, "not staged")
	wantKind(t, v.stage(mounted("ntfs", writer)), api.Invalid, "ntfs")
	wantKind(t, v.stage(nil), api.Invalid)
	for _, id := range []string{"no-such-volume", "../../etc", "a/b", "x y", strings.Repeat("a", 300)} {
		bad := *v
		bad.name = id
		wantKind(t, bad.stage(c), api.NotFound)
		wantKind(t, bad.publish(c, v.target, false), api.NotFound)
		must(t, bad.unstage())
		_, err := door.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: "/tmp"})
		wantKind(t, err, api.NotFound)
	}
	_, err := door.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.name, VolumePath: "/tmp"})
	wantKind(t, err, api.NotFound)

	dev, att := v.dev, v.att
	must(t, store.Delete(t.Context(), v.att))
	wantKind(t, v.stage(c), api.InUse, "not attached")
	att = att.DeepCopy()
	att.ObjectMeta = metav1.ObjectMeta{Name: v.name}
	att.Spec.Node = "elsewhere"
	must(t, store.Create(t.Context(), att))
	wantKind(t, v.stage(c), api.InUse, "elsewhere")
	v.att, v.dev = att, dev
}

// TestManyAtOnce: many calls at once make a single file system and a single mount.
func TestManyAtOnce(t *testing.T) {
	v := attach(t, 512*mib, false)
	c := mounted("xfs", writer)
	var wg sync.WaitGroup
	errs := make([]error, 24)
	for i := range errs {
		wg.Go(func() {
			if errs[i] = v.stage(c); errs[i] == nil {
				errs[i] = v.publish(c, v.target, false)
			}
		})
	}
	wg.Wait()
	must(t, errors.Join(errs...))
	if n := strings.Count(sh(t, "findmnt", "-rno", "TARGET", "-S", v.dev), "\n") + 1; n != 2 {
		t.Errorf("%d mounts, want 2: one staged, one published", n)
	}
}

// TestWaitsForDevice: a stage waits for the device, and ends with the caller.
func TestWaitsForDevice(t *testing.T) {
	v := attach(t, 64*mib, false)
	was := v.att.Status
	v.att.Status = api.AttachmentStatus{Message: "the disk is being looked for"}
	must(t, store.Status().Update(t.Context(), v.att))
	done := make(chan error, 1)
	go func() { done <- v.stage(mounted("", writer)) }()
	v.att.Status = was
	must(t, store.Status().Update(t.Context(), v.att))
	must(t, <-done)

	ctx, cancel := context.WithCancel(t.Context())
	v.att.Status.Ready = false
	must(t, store.Status().Update(ctx, v.att))
	cancel()
	_, err := door.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.name, StagingTargetPath: v.staging,
		VolumeCapability: mounted("", writer)})
	wantKind(t, err, api.Busy)
}

func TestInfoAndHealth(t *testing.T) {
	info, err := door.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	must(t, err)
	if info.NodeId != nodeName || info.AccessibleTopology.Segments[api.TopologyNode] != nodeName ||
		info.MaxVolumesPerNode != 256 {
		t.Errorf("info %v", info)
	}
	set := &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: "volume-attach-limit"}, Value: "7"}
	must(t, store.Create(t.Context(), set))
	info, err = door.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	must(t, err)
	must(t, store.Delete(t.Context(), set))
	if info.MaxVolumesPerNode != 7 {
		t.Errorf("limit %d", info.MaxVolumesPerNode)
	}

	n := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	must(t, store.Create(t.Context(), n))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), n)) })
	n.Status.Disks = []api.DiskStatus{{Path: "/a", Ready: true}, {Path: "/b", Message: "gone"}}
	must(t, store.Status().Update(t.Context(), n))
	h, err := door.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	must(t, err)
	if len(h.BackendHealth) != 1 || h.BackendHealth[0].Status != csi.StorageHealthErrorType_STORAGE_DEGRADED ||
		!strings.Contains(h.BackendHealth[0].Message, "/b: gone") {
		t.Errorf("storage health %v", h)
	}

	v := attach(t, 64*mib, false)
	must(t, v.stage(mounted("", writer)))
	health := func() []*csi.VolumeHealth_VolumeHealthEntry {
		r, err := door.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.name,
			StagingTargetPath: v.staging})
		must(t, err)
		return r.VolumeHealth.HealthStatuses
	}
	if h := health(); len(h) > 0 {
		t.Errorf("a well volume: %v", h)
	}
	sh(t, "mount", "-o", "remount,ro", v.dev, v.staging) // the file system
	sh(t, "mount", "-o", "remount,bind,rw", v.staging)   // but not the mount: as after an error
	v.att.Status.Ready, v.att.Status.Message = false, "the disk is gone"
	v.att.Status.Conditions = []metav1.Condition{{Type: api.ConditionIntact, Status: "False", Reason: "DigestMismatch",
		LastTransitionTime: metav1.Now(), Message: "2 MiB at 7"}}
	must(t, store.Status().Update(t.Context(), v.att))
	var reasons []string
	for _, e := range health() {
		reasons = append(reasons, e.Reason)
	}
	slices.Sort(reasons)
	if !slices.Equal(reasons, []string{"DataDamaged", "DeviceNotReady", "FilesystemReadOnly"}) {
		t.Errorf("health says %v", reasons)
	}
}

// deadMount leaves a dead FUSE server's mount at path.
func deadMount(t *testing.T, path string) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o700))
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	must(t, unix.Mount("dead", path, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)))
	must(t, unix.Close(fd))
	if _, err := os.Stat(path); !errors.Is(err, unix.ENOTCONN) {
		t.Fatalf("the mount is not dead: %v", err)
	}
}

func TestDeadServer(t *testing.T) {
	v := attach(t, 64*mib, false)
	c := mounted("", writer)
	deadMount(t, v.staging)
	deadMount(t, v.target)
	must(t, v.stage(c))
	must(t, v.publish(c, v.target, false))
	must(t, os.WriteFile(filepath.Join(v.target, "f"), nil, 0o600))
	deadMount(t, v.target) // over a live mount
	_, err := v.stats()
	wantKind(t, err, api.NotFound)
	must(t, v.unpublish(v.target))
	deadMount(t, v.staging)
	must(t, v.unstage())
	if out, err := exec.Command("findmnt", "-S", v.dev).CombinedOutput(); err == nil {
		t.Errorf("still mounted: %s", out)
	}
}
