package replicas

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// TestPinsOfAForgottenDisk: the pins of a clone on other disks are deleted with the clone, even after the user took
// the clone's disk out of the node.
func TestPinsOfAForgottenDisk(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	w.on("a", "near", 64*mib)
	w.create(attachment("a"))
	writeDevice(t, w.attached("a").Status.Device, 0, pattern(24*mib))
	w.detach("a")
	w.snapshot("a", "s1")
	w.set("replica-copy-rate-limit", "1")
	c := volume("c", 64*mib)
	c.Spec.DataSource, c.Spec.DiskSelector = "snap://a/s1", []string{"far"}
	w.create(c)
	w.volumeState("c", api.VolumeDetached)
	near, err := w.disks.Get(disk["near"])
	if err != nil {
		t.Fatal(err)
	}
	if pins, err := near.Pins(); err != nil || len(pins) != 1 {
		t.Fatalf("the clone reads from the other disk: %v, %v", pins, err)
	}
	far, err := w.disks.Get(disk["far"])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(far.Path(), far.Path()+".away"); err != nil {
		t.Fatal(err)
	}
	n := &api.Node{ObjectMeta: named(testNode)}
	edit(w, n, func(n *api.Node) {
		n.Spec.Disks = slices.DeleteFunc(n.Spec.Disks, func(d api.DiskSpec) bool { return filepath.Base(d.Path) == "far" })
	})
	await(w, n, &api.NodeList{}, "without the disk", func(n *api.Node) bool {
		return !slices.ContainsFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.UID == disk["far"] && d.Ready })
	})
	w.remove(c)
	gone(w, c, &api.VolumeList{})
	if pins, err := near.Pins(); err != nil || len(pins) > 0 {
		t.Errorf("layers are kept for a clone that is gone: %v, %v", pins, err)
	}
}

// TestRemoveBesideAFailedDisk: a failed disk of the node delays no removal of a replica on another disk. The failed
// disk drops its pins for a removed clone once the disk works again.
func TestRemoveBesideAFailedDisk(t *testing.T) {
	near := mountedDisk(t, 200)
	w := newWorld(t, near, filepath.Join(t.TempDir(), "far"))
	w.on("a", filepath.Base(near), 64*mib)
	w.create(attachment("a"))
	writeDevice(t, w.attached("a").Status.Device, 0, pattern(24*mib))
	w.detach("a")
	w.snapshot("a", "s1")
	w.snapshotIs("s1", "with a digest", func(s *api.Snapshot) bool { return s.Status.Checksum != "" })
	w.set("replica-copy-rate-limit", "1")
	c := volume("c", 64*mib)
	c.Spec.DataSource, c.Spec.DiskSelector = "snap://a/s1", []string{"far"}
	w.create(c)
	w.volumeState("c", api.VolumeDetached)
	b := w.on("b", "far", 16*mib)
	disk, err := w.disks.Get(w.memberOf("a").Spec.Disk)
	if err != nil {
		t.Fatal(err)
	}
	if pins, err := disk.Pins(); err != nil || len(pins) != 1 {
		t.Fatalf("the clone reads from the other disk: %v, %v", pins, err)
	}
	// As soon as no file there is open for writing.
	w.sh("for i in $(seq 600); do mount -o remount,ro " + near + " && exit 0; sleep 0.1; done; exit 1")
	again := func() { w.sh("mount -o remount,rw " + near) }
	t.Cleanup(again)
	for _, v := range []*api.Volume{b, c} {
		w.remove(v)
		gone(w, v, &api.VolumeList{})
	}
	again()
	for tick := time.NewTicker(20 * time.Millisecond); ; { // without a notification
		pins, err := disk.Pins()
		if err != nil {
			t.Fatal(err)
		}
		if len(pins) == 0 {
			tick.Stop()
			break
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			t.Fatalf("layers are kept for a clone that is gone: %v", pins)
		}
	}
}

// TestPinOfABackupStays: a restarted data process removes the pin of a removed replica, and keeps the pin of a backup,
// whose uid is no replica's.
func TestPinOfABackupStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64*mib)
	w.create(attachment("a"))
	writeDevice(t, w.attached("a").Status.Device, 0, pattern(4*mib))
	w.detach("a")
	s := w.snapshot("a", "s1")
	r := w.memberOf("a")
	disk, err := w.disks.Get(r.Spec.Disk)
	if err != nil {
		t.Fatal(err)
	}
	// The process goes through the pins in the order of their uids.
	holder, stale := "00000000-0000-4000-8000-000000000001", "ffffffff-ffff-4fff-8fff-ffffffffffff"
	w.stopData()
	cut := block.SnapshotCut{UID: string(s.Status.UID)}
	if _, _, err := disk.HoldSnapshot(w.ctx, holder, "b", string(r.Spec.UID), cut); err != nil {
		t.Fatal(err)
	}
	if _, err := disk.Pin(w.ctx, stack.Pin{UID: stale, For: "c", Disk: disk.UID()}, string(r.Spec.UID), ""); err != nil {
		t.Fatal(err)
	}
	w.startData()
	for tick := time.NewTicker(20 * time.Millisecond); ; { // without a notification
		if pinned, err := disk.Pinned(stale); err != nil {
			t.Fatal(err)
		} else if !pinned {
			tick.Stop()
			break
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			t.Fatal("the pin of a removed replica stays")
		}
	}
	if held, err := disk.HeldSnapshots(); err != nil || held[holder] != "b" {
		t.Errorf("holders %v, %v", held, err)
	}
	if err := disk.ReleaseSnapshot(holder); err != nil {
		t.Error(err)
	}
}
