package replicas

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestEvict: detached replicas leave an evicted disk, with their snapshots and branches; the volumes can be used at
// once, and in the end the disk keeps nothing.
func TestEvict(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	w.on("a", "near", 64*mib)
	data := pattern(16 * mib)
	w.create(attachment("a"))
	writeDevice(t, w.attached("a").Status.Device, 8*mib, data)
	w.detach("a")
	w.snapshot("a", "s1")
	for i, name := range []string{"s2", "s3"} {
		w.create(attachment("a"))
		w.attached("a")
		w.fill("a", "later "+name, 0)
		w.detach("a")
		w.snapshot("a", name)
		if i == 0 {
			w.revert("a", "s1", "back")
		}
	}
	w.create(attachment("a"))
	dev := w.attached("a").Status.Device
	w.fill("a", "at last", 40*mib)
	checkDevice(t, dev, 8*mib, data)
	w.detach("a") // an attached volume leaves the disk through the engine
	w.set("replica-copy-rate-limit", "4")
	v := w.volumeState("a", api.VolumeDetached)
	old := v.DeepCopy()
	v.Spec.DiskSelector = nil
	if err := w.c.Patch(w.ctx, v, client.MergeFrom(old)); err != nil {
		t.Fatal(err)
	}
	was := w.memberOf("a").Name
	edit(w, &api.Node{ObjectMeta: named(testNode)}, func(n *api.Node) {
		for i := range n.Spec.Disks {
			n.Spec.Disks[i].EvictionRequested = filepath.Base(n.Spec.Disks[i].Path) == "near"
		}
	})
	w.volumeIs("a", "moved", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeDetached && v.Status.Members[0] != was
	})
	r := w.memberOf("a")
	if r.Spec.Disk != disk["far"] {
		t.Fatalf("%+v", r.Spec)
	}
	w.create(attachment("a"))
	dev = w.attached("a").Status.Device
	checkDevice(t, dev, 8*mib, data)
	checkDevice(t, dev, 40*mib, []byte("at last"))
	w.fill("a", "and on", 50*mib)
	w.stopData()
	w.startData()
	w.set("replica-copy-rate-limit", "0")
	await(w, r, &api.ReplicaList{}, "at home", func(r *api.Replica) bool { return !r.Status.Pinned && r.Status.Copy == nil })
	near, err := w.disks.Get(disk["near"])
	if err != nil {
		t.Fatal(err)
	}
	gone(w, &api.Replica{ObjectMeta: named(was)}, &api.ReplicaList{})
	if err := near.Close(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"layers", "replicas", "pins"} {
		if left, err := os.ReadDir(filepath.Join(near.Path(), dir)); err != nil || len(left) > 0 {
			t.Errorf("%s: %v, %v", dir, left, err)
		}
	}
	checkDevice(t, dev, 50*mib, []byte("and on"))
	w.detach("a")
	for _, name := range []string{"s1", "s2", "s3"} {
		if s := w.ready(name); s.Status.Error != "" {
			t.Errorf("%+v", s.Status)
		}
	}
	w.revert("a", "s2", "aside")
	w.create(attachment("a"))
	dev = w.attached("a").Status.Device
	checkDevice(t, dev, 0, []byte("later s2"))
	checkDevice(t, dev, 8*mib, data)
	w.volumeIs("a", "settled", func(v *api.Volume) bool {
		for _, c := range v.Status.Conditions {
			if c.Type == api.ConditionEvicted {
				return false
			}
		}
		return true
	})
}

// TestEvictAttached: an attached volume moves to another disk of its node through its engine. From then on the new
// replica is the local member, which a reclaim of trimmed space and the next data process ask.
func TestEvictAttached(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	v := w.on("a", "near", 64*mib)
	old := v.DeepCopy()
	v.Spec.DiskSelector = nil
	if err := w.c.Patch(w.ctx, v, client.MergeFrom(old)); err != nil {
		t.Fatal(err)
	}
	w.create(attachment("a"))
	dev := w.attached("a").Status.Device
	data := pattern(16 * mib)
	writeDevice(t, dev, 8*mib, data)
	w.snapshot("a", "s1")
	was := w.memberOf("a").Name
	edit(w, &api.Node{ObjectMeta: named(testNode)}, func(n *api.Node) {
		for i := range n.Spec.Disks {
			n.Spec.Disks[i].EvictionRequested = filepath.Base(n.Spec.Disks[i].Path) == "near"
		}
	})
	gone(w, &api.Replica{ObjectMeta: named(was)}, &api.ReplicaList{})
	r := w.memberOf("a")
	if r.Spec.Disk != disk["far"] {
		t.Fatalf("%+v", r.Spec)
	}
	if _, open := w.data.attachments.OpenedMeta("a", r.Spec.UID); !open {
		t.Error("the session has another local member than the new one")
	}
	checkDevice(t, dev, 8*mib, data)
	w.sh("blkdiscard -o " + strconv.Itoa(8*mib) + " -l " + strconv.Itoa(16*mib) + " " + dev)
	s := &api.Snapshot{ObjectMeta: named("s1")}
	w.remove(s)
	gone(w, s, &api.SnapshotList{})
	if err := w.data.attachments.Reclaim(w.ctx, w.data.attachments.Session("a"), true); err != nil && !api.Is(err, api.Busy) {
		t.Error(err)
	}
	w.stopData()
	w.startData()
	checkDevice(t, dev, 8*mib, make([]byte, 16*mib))
	w.detach("a")
}
