package replicas

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// twoDisks is a machine with the disks near and far, by name.
func twoDisks(t *testing.T) (w *world, disk map[string]api.UID) {
	dir := t.TempDir()
	w = newWorld(t, filepath.Join(dir, "near"), filepath.Join(dir, "far"))
	var n api.Node
	n.Name = testNode
	await(w, &n, &api.NodeList{}, "ready", func(n *api.Node) bool {
		return len(n.Status.Disks) == 2 && n.Status.Disks[0].Ready && n.Status.Disks[1].Ready
	})
	disk = map[string]api.UID{}
	for _, d := range n.Status.Disks {
		disk[filepath.Base(d.Path)] = d.UID
	}
	return w, disk
}

func (w *world) on(name, disk string, size int64) *api.Volume {
	w.t.Helper()
	v := volume(name, size)
	v.Spec.DiskSelector = []string{disk}
	w.create(v)
	return w.volumeState(name, api.VolumeDetached)
}

func (w *world) set(name, value string) {
	w.t.Helper()
	s := &api.Setting{ObjectMeta: named(name), Value: value}
	if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(s), s); err == nil {
		edit(w, s, func(s *api.Setting) { s.Value = value })
		return
	}
	w.create(s)
}

// begin starts a clone on a disk.
func (w *world) begin(name, source, disk, mode string, size int64) {
	w.t.Helper()
	v := volume(name, size)
	v.Spec.DataSource, v.Spec.CloneMode, v.Spec.DiskSelector = source, mode, []string{disk}
	w.create(v)
}

func (w *world) memberOf(volume string) *api.Replica {
	w.t.Helper()
	v := &api.Volume{ObjectMeta: named(volume)}
	if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(v), v); err != nil || len(v.Status.Members) == 0 {
		w.t.Fatalf("%s: %v, %v", volume, v.Status.Members, err)
	}
	r := &api.Replica{ObjectMeta: named(v.Status.Members[0])}
	if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(r), r); err != nil {
		w.t.Fatal(err)
	}
	return r
}

// pattern is n bytes, a multiple of 16, with no two equal groups of 16 bytes.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := 0; i < n; i += 16 {
		binary.LittleEndian.PutUint64(b[i:], uint64(i)|1<<63)
	}
	return b
}

// TestCloneOutlivesItsSource: a clone on another disk than its source can be used at once, hydrates while the clone is
// used, outlives the source, and needs the source's disk no more in the end. So does a clone of this clone, created
// before.
func TestCloneOutlivesItsSource(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	w.set("replica-copy-rate-limit", "1")
	w.on("a", "near", 128*mib)
	w.create(attachment("a"))
	data := pattern(96 * mib) // a minute and a half of copying: the steps below come before the end
	writeDevice(t, w.attached("a").Status.Device, 5*mib, data)
	w.begin("b", "vol://a", "far", "", 160*mib)
	b := w.volumeState("b", api.VolumeDetached)
	if b.Status.CloneStatus.State != api.CloneCompleted || b.Status.Size != 160*mib {
		t.Fatalf("%+v", b.Status)
	}
	r := w.memberOf("b")
	if r.Spec.Disk != disk["far"] || !r.Status.Pinned {
		t.Fatalf("%+v", r)
	}
	w.create(attachment("b"))
	dev := w.attached("b").Status.Device
	checkDevice(t, dev, 5*mib, data)
	own := bytes.Repeat([]byte("own data"), mib/8)
	writeDevice(t, dev, 134*mib, own)
	// The source is deleted, with its own layers.
	w.detach("a")
	a := &api.Volume{ObjectMeta: named("a")}
	w.remove(a)
	gone(w, a, &api.VolumeList{})
	w.begin("c", "vol://b", "far", "", 160*mib) // while b still hydrates
	w.volumeState("c", api.VolumeDetached)
	w.begin("d", "vol://b", "near", "full-copy", 160*mib) // and back
	w.volumeIs("d", "begun", func(v *api.Volume) bool {
		return v.Status.CloneStatus != nil && strings.Contains(v.Status.Message, "is being copied")
	})
	w.detach("b")
	b = &api.Volume{ObjectMeta: named("b")}
	w.remove(b) // before b has hydrated
	gone(w, b, &api.VolumeList{})
	w.stopData()
	w.startData()
	w.set("replica-copy-rate-limit", "0")
	rc := w.memberOf("c")
	await(w, rc, &api.ReplicaList{}, "at home", func(r *api.Replica) bool { return !r.Status.Pinned && r.Status.Copy == nil })
	d := w.volumeState("d", api.VolumeDetached)
	if s := d.Status.CloneStatus; s.State != api.CloneCompleted || s.Progress != 100 {
		t.Fatalf("%+v", s)
	}
	rd := w.memberOf("d")
	await(w, rd, &api.ReplicaList{}, "at home", func(r *api.Replica) bool { return !r.Status.Pinned && r.Status.Copy == nil })
	near, err := w.disks.Get(disk["near"])
	if err != nil {
		t.Fatal(err)
	}
	if pins, err := near.Pins(); err != nil || len(pins) > 0 {
		t.Fatalf("%v, %v", pins, err)
	}
	w.create(attachment("d"))
	dev = w.attached("d").Status.Device
	checkDevice(t, dev, 5*mib, data)
	checkDevice(t, dev, 134*mib, own)
	w.detach("d")
	if err := os.RemoveAll(filepath.Join(near.Path(), "layers")); err != nil {
		t.Fatal(err)
	}
	w.create(attachment("c"))
	dev = w.attached("c").Status.Device
	checkDevice(t, dev, 5*mib, data)
	checkDevice(t, dev, 134*mib, own)
}

// TestFullCopySharesNothing: a full copy shares no layer with its source, can be used when the copy is complete, and
// continues after the end of its process. The source can be deleted as soon as the copy has begun.
func TestFullCopySharesNothing(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	w.set("replica-copy-rate-limit", "2") // a busy machine, too, has to see the beginning
	w.on("a", "near", 64*mib)
	w.create(attachment("a"))
	data := pattern(32 * mib)
	writeDevice(t, w.attached("a").Status.Device, 8*mib, data)
	w.detach("a")
	w.snapshot("a", "s1")
	w.begin("b", "snap://a/s1", "near", "full-copy", 64*mib)
	w.volumeIs("b", "begun", func(v *api.Volume) bool {
		c := v.Status.CloneStatus
		return c != nil && c.State == api.CloneInitiated && c.Progress > 10
	})
	s := &api.Snapshot{ObjectMeta: named("s1")}
	w.remove(s)
	gone(w, s, &api.SnapshotList{})
	a := &api.Volume{ObjectMeta: named("a")}
	w.remove(a)
	gone(w, a, &api.VolumeList{})
	w.stopData()
	w.startData()
	v := w.volumeIs("b", "going on", func(v *api.Volume) bool { return v.Status.CloneStatus.Progress > 40 })
	base := v.DeepCopy()
	v.Spec.Size = 96 * mib // during the copy
	if err := w.c.Patch(w.ctx, v, client.MergeFrom(base)); err != nil {
		t.Fatal(err)
	}
	w.set("replica-copy-rate-limit", "0")
	b := w.volumeIs("b", "larger", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeDetached && v.Status.Size == 96*mib
	})
	if b.Status.CloneStatus.State != api.CloneCompleted {
		t.Fatalf("%+v", b.Status)
	}
	w.create(attachment("b"))
	checkDevice(t, w.attached("b").Status.Device, 8*mib, data)
	r := w.memberOf("b")
	await(w, r, &api.ReplicaList{}, "alone", func(r *api.Replica) bool {
		return r.Status.Shared == 0 && r.Status.Used >= 32*mib && r.Status.Used < 34*mib
	})
	near, err := w.disks.Get(disk["near"])
	if err != nil {
		t.Fatal(err)
	}
	if pins, err := near.Pins(); err != nil || len(pins) > 0 {
		t.Fatalf("%v, %v", pins, err)
	}
}

// TestFullCopyOfADamagedSourceFails: the full copy of a damaged layer fails with a message, and can be tried again.
func TestFullCopyOfADamagedSourceFails(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	w.on("a", "near", 64*mib)
	w.create(attachment("a"))
	data := pattern(8 * mib)
	writeDevice(t, w.attached("a").Status.Device, 8*mib, data)
	w.detach("a")
	s := w.snapshot("a", "s1")
	near, err := w.disks.Get(disk["near"])
	if err != nil {
		t.Fatal(err)
	}
	if err := near.Finish(w.ctx, string(s.Status.Layer)); err != nil && !api.Is(err, api.Busy) {
		t.Fatal(err)
	}
	name := filepath.Join(near.Path(), "layers", string(s.Status.Layer), "data")
	flip := func() {
		t.Helper()
		if err := os.Chmod(name, 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var b [1]byte
		if _, err := f.ReadAt(b[:], 9*mib); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b[:], 9*mib); err != nil {
			t.Fatal(err)
		}
	}
	for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C { // the node may be making the digests already
		if _, _, err := near.Digest(string(s.Status.Layer)); err == nil {
			tick.Stop()
			break
		}
		if w.ctx.Err() != nil {
			t.Fatal("the layer has no digests")
		}
	}
	flip()
	w.begin("b", "snap://a/s1", "far", "full-copy", 64*mib)
	b := w.volumeIs("b", "failed", func(v *api.Volume) bool {
		return v.Status.CloneStatus != nil && v.Status.CloneStatus.State == api.CloneFailed
	})
	if b.Status.State != api.VolumeFaulted || !strings.Contains(b.Status.CloneStatus.Message, "do not match their digest") {
		t.Fatalf("%+v", b.Status.CloneStatus)
	}
	flip()
	old := b.DeepCopy()
	b.Annotations = map[string]string{api.AnnotationRetry: "1"}
	if err := w.c.Patch(w.ctx, b, client.MergeFrom(old)); err != nil {
		t.Fatal(err)
	}
	b = w.volumeState("b", api.VolumeDetached)
	if c := b.Status.CloneStatus; c.State != api.CloneCompleted || c.Retried != "1" || c.Message != "" {
		t.Fatalf("%+v", c)
	}
	w.create(attachment("b"))
	checkDevice(t, w.attached("b").Status.Device, 8*mib, data)
}

// TestReturnedDiskDropsPinsOfDeletedClones: a clone elsewhere is deleted while the source's disk is away; the disk
// drops the clone's pin when the disk is back.
func TestReturnedDiskDropsPinsOfDeletedClones(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	w.set("replica-copy-rate-limit", "1")
	w.on("a", "near", 64*mib)
	w.create(attachment("a"))
	writeDevice(t, w.attached("a").Status.Device, 0, pattern(56*mib))
	w.detach("a")
	w.begin("b", "vol://a", "far", "", 64*mib)
	w.volumeState("b", api.VolumeDetached)
	near, err := w.disks.Get(disk["near"])
	if err != nil {
		t.Fatal(err)
	}
	pins := func() int {
		t.Helper()
		list, err := near.Pins()
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	if pins() != 1 {
		t.Fatalf("%d pins", pins())
	}
	if err := os.Rename(near.Path(), near.Path()+".away"); err != nil {
		t.Fatal(err)
	}
	b := &api.Volume{ObjectMeta: named("b")}
	w.remove(b)
	gone(w, b, &api.VolumeList{})
	if err := os.Rename(near.Path()+".away", near.Path()); err != nil {
		t.Fatal(err)
	}
	if pins() != 1 {
		t.Fatalf("%d pins on a disk that was not there", pins())
	}
	end := time.Now().Add(time.Minute)
	for tick := time.NewTicker(20 * time.Millisecond); pins() > 0; <-tick.C {
		if time.Now().After(end) {
			t.Fatal("the pin stays")
		}
	}
}
