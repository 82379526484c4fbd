package replicas

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestDiskIsMountedElsewhere: the node knows a disk by the uid at any mount point, and uses the disk's volumes from
// there.
func TestDiskIsMountedElsewhere(t *testing.T) {
	t.Parallel()
	suite.System(t)
	dir := t.TempDir()
	first, second := filepath.Join(dir, "b-first"), filepath.Join(dir, "c-second")
	third := filepath.Join(dir, "a-third")
	mount := func(at string) {
		t.Helper()
		if out, err := exec.Command("mount", "-o", "loop", filepath.Join(dir, "img"), at).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	w := &world{t: t, ctx: t.Context()}
	w.sh("mkdir " + first + " " + second + " " + third + "; truncate -s 200M " + dir + "/img; mkfs.ext4 -q -b 4096 -m 0 " +
		dir + "/img")
	mount(first)
	t.Cleanup(func() { // at any mount point
		for _, at := range []string{first, second, third} {
			_ = exec.Command("umount", at).Run()
		}
	})
	w = newWorld(t, first)
	w.make("v1", 32*mib)
	data := pattern(8 * mib)
	w.create(attachment("v1"))
	writeDevice(t, w.attached("v1").Status.Device, 4*mib, data)
	w.detach("v1")
	w.snapshot("v1", "s1")
	uid := w.memberOf("v1").Spec.Disk
	n := &api.Node{ObjectMeta: named(testNode)}
	change := func(f func(*api.NodeSpec)) {
		t.Helper()
		if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(n), n); err != nil {
			t.Fatal(err)
		}
		old := n.DeepCopy()
		f(&n.Spec)
		if err := w.c.Patch(w.ctx, n, client.MergeFrom(old)); err != nil {
			t.Fatal(err)
		}
	}
	at := first
	for i, to := range []string{second, third} {
		w.sh("umount -l " + at)
		mount(to)
		change(func(s *api.NodeSpec) { s.Disks = append(s.Disks, api.DiskSpec{Path: to}) })
		await(w, n, &api.NodeList{}, "with the disk at "+to, func(n *api.Node) bool {
			return n.Status.Disks[0].Path == to && n.Status.Disks[0].Ready && n.Status.Disks[0].UID == uid
		})
		w.create(attachment("v1"))
		dev := w.attached("v1").Status.Device
		checkDevice(t, dev, 4*mib, data)
		w.fill("v1", "once more", int64(i)*mib)
		w.detach("v1")
		w.snapshot("v1", "at"+filepath.Base(to))
		change(func(s *api.NodeSpec) { s.Disks = []api.DiskSpec{{Path: to}} })
		await(w, n, &api.NodeList{}, "at the new place alone", func(n *api.Node) bool { return len(n.Status.Disks) == 1 })
		if left, err := os.ReadDir(at); err != nil || len(left) > 0 {
			t.Errorf("something was made below the mount that is gone: %v, %v", left, err)
		}
		at = to
	}
	for _, name := range []string{"s1", "atc-second", "ata-third"} {
		if s := w.ready(name); s.Status.Error != "" {
			t.Errorf("%+v", s.Status)
		}
	}
}
