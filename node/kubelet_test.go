package node_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"drover.io/drover/api"
	"drover.io/drover/node"
)

// TestPublishAgainBesideMountsOfTheCaller: a restarted kubelet publishes again, beside mounts of the kubelet on the
// published paths: a subPath of a file system, a device map of a block volume.
func TestPublishAgainBesideMountsOfTheCaller(t *testing.T) {
	mine := func(from, to string) {
		sh(t, "mount", "--bind", from, to)
		t.Cleanup(func() { _ = exec.Command("umount", to).Run() })
	}
	v := attach(t, 64*mib, false)
	c := mounted("", singleWriter)
	must(t, v.stage(c))
	must(t, v.publish(c, v.target, false))
	sub := filepath.Join(t.TempDir(), "subpath")
	must(t, os.Mkdir(sub, 0o700))
	must(t, os.Mkdir(filepath.Join(v.target, "data"), 0o700))
	mine(filepath.Join(v.target, "data"), sub)
	must(t, v.publish(c, v.target, false))
	wantKind(t, v.publish(c, v.target2, false), api.InUse)
	sh(t, "umount", sub)
	must(t, v.unpublish(v.target))
	must(t, v.unstage())

	b := attachNamed(t, v.name+"-block", 64*mib, false)
	must(t, b.stage(raw(singleWriter)))
	must(t, b.publish(raw(singleWriter), b.target, false))
	device := filepath.Join(t.TempDir(), "map")
	must(t, os.WriteFile(device, nil, 0o600))
	mine(b.target, device)
	must(t, b.publish(raw(singleWriter), b.target, false))
	wantKind(t, b.publish(raw(singleWriter), b.target2, false), api.InUse)
	sh(t, "umount", device)
	must(t, b.unpublish(b.target))
}

// TestStagedOtherwise: a stage call which differs from the existing stage is refused.
func TestStagedOtherwise(t *testing.T) {
	v := attach(t, 64*mib, false)
	must(t, v.stage(mounted("ext4", writer)))
	must(t, v.stage(mounted("", writer)))
	wantKind(t, v.stage(mounted("xfs", writer)), api.Exists, "ext4", "xfs")
	wantKind(t, v.stage(raw(writer)), api.Exists, v.staging)
	if v.annotation(api.AnnotationFS) != "ext4" {
		t.Error("the mark of its file system is gone")
	}
	must(t, v.unstage())
	must(t, v.stage(raw(writer)))
}

// TestHiddenMount: a mount hidden by another mount cannot be taken off, so the call fails instead of waiting without
// end.
func TestHiddenMount(t *testing.T) {
	v := attach(t, 64*mib, false)
	over := filepath.Dir(v.staging)
	must(t, v.stage(mounted("", writer)))
	sh(t, "mount", "-t", "tmpfs", "none", over)
	t.Cleanup(func() { _ = exec.Command("umount", over).Run() })
	must(t, os.Mkdir(v.staging, 0o700))
	ended := make(chan error, 1)
	go func() { ended <- v.unstage() }()
	select {
	case err := <-ended:
		wantKind(t, err, api.Other, v.staging)
	case <-time.After(time.Minute):
		sh(t, "umount", over)
		<-ended
		t.Fatal("unstage did not come back")
	}
	sh(t, "umount", over)
	must(t, v.unstage())
}

// TestBusy: a call returns Busy if the caller has left.
func TestBusy(t *testing.T) {
	v := attach(t, 64*mib, false)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := node.New(store, nodeName).NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.name,
		StagingTargetPath: v.staging, VolumeCapability: mounted("", writer)})
	wantKind(t, err, api.Busy)
}

// TestDeviceOfAStranger: after a crash, an attachment names the old device until the new device exists. Another device
// may have the old number by then, and is not taken for the volume's.
func TestDeviceOfAStranger(t *testing.T) {
	v := attach(t, 64*mib, false)
	v.vol.Status.UID = api.NewUID()
	must(t, store.Status().Update(t.Context(), v.vol))
	own := node.New(store, nodeName)
	stage := func(c *csi.VolumeCapability, wait time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		_, err := own.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.name, StagingTargetPath: v.staging,
			VolumeCapability: c})
		return err
	}
	publish := func(c *csi.VolumeCapability, wait time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		_, err := own.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.name, VolumeCapability: c,
			StagingTargetPath: v.staging, TargetPath: v.target})
		return err
	}
	refused := func() {
		t.Helper()
		for _, c := range []*csi.VolumeCapability{mounted("", writer), raw(writer)} {
			wantKind(t, stage(c, time.Second), api.Unavailable, v.dev, "not one of volume "+v.name)
			wantKind(t, publish(c, time.Second), api.Unavailable, v.dev, "not one of volume "+v.name)
		}
	}
	refused()
	if v.annotation(api.AnnotationFS) != "" || v.annotation(api.AnnotationMkfs) != "" {
		t.Error("a file system was to be made on it")
	}
	back := func(name string) {
		t.Helper()
		v.detach()
		file := filepath.Join(filepath.Dir(v.file), name)
		must(t, os.Rename(v.file, file))
		v.file = file
		v.loop(false, true)
	}
	back("drover-" + string(api.NewUID()) + ".01234567") // another volume's
	refused()
	back("drover-" + string(v.vol.Status.UID) + ".01234567")
	must(t, stage(mounted("", writer), time.Minute))
	must(t, publish(mounted("", writer), time.Minute))
	must(t, v.unpublish(v.target))
	must(t, v.unstage())
}
