package replicas

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack"
)

func (w *world) snapshot(volume, name string) *api.Snapshot {
	w.t.Helper()
	w.create(&api.Snapshot{ObjectMeta: named(name), Spec: api.SnapshotSpec{Volume: volume, CreateSnapshot: true,
		Labels: map[string]string{"why": "test"}}})
	return w.ready(name)
}

func (w *world) snapshotIs(name, what string, ok func(*api.Snapshot) bool) *api.Snapshot {
	w.t.Helper()
	return await(w, &api.Snapshot{ObjectMeta: named(name)}, &api.SnapshotList{}, what, ok)
}

func (w *world) ready(name string) *api.Snapshot {
	w.t.Helper()
	return w.snapshotIs(name, "ready", func(s *api.Snapshot) bool { return s.Status.ReadyToUse })
}

func (w *world) clone(name, source string, size int64) *api.Volume {
	w.t.Helper()
	v := volume(name, size)
	v.Spec.DataSource = source
	w.create(v)
	return w.volumeState(name, api.VolumeDetached)
}

// device is the device of an attached volume: the link in /dev/drover may be another world's.
func (w *world) device(name string) string {
	w.t.Helper()
	a := attachment(name)
	if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(a), a); err != nil || a.Status.Device == "" {
		w.t.Fatalf("volume %s has no device: %v, %+v", name, err, a.Status)
	}
	return a.Status.Device
}

// fill writes text over the first bytes of an attached volume, through to the disk.
func (w *world) fill(name, text string, at int64) {
	w.t.Helper()
	f, err := os.OpenFile(w.device(name), os.O_WRONLY|os.O_SYNC, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(text), at); err != nil {
		w.t.Fatal(err)
	}
}

// holds attaches a volume, compares the content, and detaches the volume.
func (w *world) holds(name string, at int64, text string) {
	w.t.Helper()
	w.create(attachment(name))
	w.attached(name)
	w.reads(name, at, text)
	w.detach(name)
}

func (w *world) reads(name string, at int64, text string) {
	w.t.Helper()
	f, err := os.Open(w.device(name))
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, len(text))
	if _, err := f.ReadAt(b, at); err != nil || string(b) != text {
		w.t.Errorf("volume %s at %d: %q, %v; not %q", name, at, b, err, text)
	}
}

func (w *world) detach(name string) {
	w.t.Helper()
	a := attachment(name)
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
}

func TestSnapshotAttached(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	w.create(attachment("a"))
	w.attached("a")
	w.fill("a", "first", 0)
	w.snapshot("a", "s1")
	w.fill("a", "later", 0)
	s2 := w.snapshot("a", "s2")
	w.fill("a", "never", 0)

	s1 := w.snapshotIs("s1", "a parent", func(s *api.Snapshot) bool { return s.Status.Children["s2"] })
	if s1.Status.RestoreSize != 64<<20 || s1.Status.Size == 0 || !s1.Status.UserCreated || s1.Status.OwnerID != testNode ||
		s1.Status.Labels["why"] != "test" || s1.Labels[api.LabelVolume] != "a" || len(s1.OwnerReferences) != 1 ||
		s1.Status.Children[api.VolumeHead] || s1.Status.Parent != "" || s1.Status.CreationTime == "" {
		t.Errorf("s1 is %+v", s1)
	}
	if s2.Status.Parent != "s1" || !s2.Status.Children[api.VolumeHead] {
		t.Errorf("s2 is %+v", s2.Status)
	}
	for what, change := range map[string]func(*api.SnapshotSpec){
		"labels":         func(s *api.SnapshotSpec) { s.Labels["why"] = "else" },
		"labels away":    func(s *api.SnapshotSpec) { s.Labels = nil },
		"volume":         func(s *api.SnapshotSpec) { s.Volume = "b" },
		"createSnapshot": func(s *api.SnapshotSpec) { s.CreateSnapshot = false },
		"group":          func(s *api.SnapshotSpec) { s.Group = "g" },
	} {
		other := s2.DeepCopy()
		change(&other.Spec)
		if err := w.c.Patch(w.ctx, other, client.MergeFrom(s2)); err == nil || !strings.Contains(err.Error(), "cannot change") {
			t.Errorf("%s: %v", what, err)
		}
	}

	w.clone("c1", "snap://a/s1", 64<<20)
	w.clone("c2", "snap://a/s2", 128<<20)
	c3 := w.clone("c3", "vol://a", 64<<20)
	if c := c3.Status.CloneStatus; c == nil || c.State != api.CloneCompleted || c.Source != "a" || c.Snapshot == "" {
		t.Errorf("clone status %+v", c)
	}
	gone(w, &api.Snapshot{ObjectMeta: named(c3.Status.CloneStatus.Snapshot)}, &api.SnapshotList{})
	w.holds("c1", 0, "first")
	w.holds("c2", 0, "later")
	w.holds("c3", 0, "never")
	w.reads("a", 0, "never")

	w.create(attachment("c2"))
	w.attached("c2")
	w.fill("c2", "own", 100<<20)
	w.clone("c4", "vol://c2", 128<<20)
	w.fill("c2", "too", 0)
	w.holds("c4", 100<<20, "own")
	w.holds("c4", 0, "later")
	w.detach("c2")

	w.remove(s1)
	gone(w, s1, &api.SnapshotList{})
	w.snapshotIs("s2", "the first", func(s *api.Snapshot) bool { return s.Status.Parent == "" })
	w.holds("c1", 0, "first")

	w.detach("a")
	w.remove(volume("a", 0))
	v := w.volumeIs("a", "kept", says("stays for 1 snapshots"))
	if v.Status.State != api.VolumeDeleting {
		t.Errorf("the volume is %s", v.Status.State)
	}
	w.clone("c5", "snap://a/s2", 64<<20)
	w.holds("c5", 0, "later")
	w.remove(s2)
	gone(w, v, &api.VolumeList{})
	for _, c := range []string{"c1", "c2", "c3", "c4", "c5"} {
		w.remove(volume(c, 0))
		gone(w, volume(c, 0), &api.VolumeList{})
	}
	w.stopData()
	if left, _ := filepath.Glob(filepath.Join(w.dir, "disk", "layers", "*")); len(left) > 0 {
		t.Errorf("layers are left: %v", left)
	}
	w.startData()
}

func TestSnapshotDetached(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	w.create(attachment("a"))
	w.attached("a")
	w.fill("a", "first", 0)
	w.detach("a")
	before := w.volumeState("a", api.VolumeDetached).Status.Epoch
	w.snapshot("a", "s1")
	now := w.volumeIs("a", "let go of", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeDetached && v.Status.EngineNode == ""
	})
	if now.Status.Epoch != before+1 {
		t.Errorf("epoch %d after %d", now.Status.Epoch, before)
	}
	w.create(attachment("a"))
	w.attached("a")
	w.reads("a", 0, "first")
	w.fill("a", "later", 0)
	w.detach("a")
	w.holds(w.clone("c", "snap://a/s1", 64<<20).Name, 0, "first")
}

// TestSnapshotFound: the snapshots on the disk count: the process may end between the cut and the status, and objects
// may get lost.
func TestSnapshotFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	s := w.snapshot("a", "s1")
	created := s.Status.CreationTime
	w.snapshot("a", "s2")
	w.stopData()
	for _, name := range []string{"s1", "s2"} {
		var s api.Snapshot
		if err := w.c.Get(w.ctx, client.ObjectKey{Name: name}, &s); err != nil {
			t.Fatal(err)
		}
		if name == "s2" { // the object is lost
			edit(w, &s, func(s *api.Snapshot) { s.Finalizers = nil })
			w.remove(&s)
			continue
		}
		editStatus(w, &s, func(s *api.Snapshot) { s.Status = api.SnapshotStatus{} }) // the process ended before its write
	}
	w.startData()
	if again := w.ready("s1"); again.Status.CreationTime != created {
		t.Errorf("cut again: %s, then %s", created, again.Status.CreationTime)
	}
	if s2 := w.ready("s2"); s2.Spec.CreateSnapshot || s2.Status.UserCreated || s2.Status.Parent != "s1" {
		t.Errorf("s2 is %+v", s2)
	}
	// Now the layers are lost, and the objects stay.
	disk, err := stack.Open(filepath.Join(w.dir, "disk"))
	if err != nil {
		t.Fatal(err)
	}
	w.stopData()
	have, err := disk.Replicas()
	if err != nil || len(have) != 1 || len(have[0].Snapshots) != 2 {
		t.Fatalf("%+v, %v", have, err)
	}
	i := slices.IndexFunc(have[0].Snapshots, func(s stack.Snapshot) bool { return s.Name == "s1" })
	if err := disk.DropSnapshot(have[0].UID, have[0].Snapshots[i].UID); err != nil {
		t.Fatal(err)
	}
	w.startData()
	gone(w, &api.Snapshot{ObjectMeta: named("s1")}, &api.SnapshotList{})
	w.tells("a", "SnapshotLost", "no snapshot s1")
}

func TestCloneRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	w.snapshot("a", "s1")
	for i, c := range []struct {
		source, mode, why string
		size              int64
	}{
		{"snap://a/none", "", "does not exist", 64 << 20},
		{"vol://none", "", "does not exist", 64 << 20},
		{"snap://a/s1", "", "less than", 32 << 20},
		{"vol://a", "", "less than", 32 << 20},
		{"snap://a/s1", "full-copy", "less than", 32 << 20},
	} {
		v := volume(fmt.Sprintf("c%d", i), c.size)
		v.Spec.DataSource, v.Spec.CloneMode = c.source, c.mode
		w.create(v)
		now := w.volumeIs(v.Name, "failed", func(v *api.Volume) bool {
			return v.Status.CloneStatus != nil && v.Status.CloneStatus.State == api.CloneFailed
		})
		if !says(c.why)(now) || now.Status.State != api.VolumeFaulted {
			t.Errorf("%s: %s, %s", c.source, now.Status.State, now.Status.Message)
		}
		w.remove(v)
		gone(w, v, &api.VolumeList{})
	}
	loop := [][2]string{{"self", "vol://self"}, {"x", "vol://y"}, {"y", "vol://x"}}
	for _, c := range loop {
		v := volume(c[0], 64<<20)
		v.Spec.DataSource = c[1]
		w.create(v)
	}
	for _, name := range []string{"self", "y"} {
		w.volumeIs(name, "failed", func(v *api.Volume) bool {
			return v.Status.CloneStatus != nil && v.Status.CloneStatus.State == api.CloneFailed && says("itself")(v)
		})
	}
	for _, c := range loop {
		v := volume(c[0], 64<<20)
		w.remove(v)
		gone(w, v, &api.VolumeList{})
	}
	none := &api.Snapshot{ObjectMeta: named("s9"), Spec: api.SnapshotSpec{Volume: "none", CreateSnapshot: true}}
	w.create(none)
	w.snapshotIs("s9", "refused", func(s *api.Snapshot) bool { return s.Status.Error != "" })
	w.remove(none)
	gone(w, none, &api.SnapshotList{})
}

// TestSnapshotUnderLoad: snapshots come during writes, and each snapshot has one instant of the volume: two copies of
// a counter, written in turn, differ by at most 1.
func TestSnapshotUnderLoad(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	w.create(attachment("a"))
	dev := w.attached("a").Status.Device
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		f, err := os.OpenFile(dev, os.O_WRONLY|os.O_SYNC, 0)
		if err != nil {
			done <- err
			return
		}
		defer f.Close()
		for n := 1; ; n++ {
			for _, at := range []int64{0, 40 << 20} {
				if _, err := f.WriteAt(fmt.Appendf(nil, "%08d", n), at); err != nil {
					done <- err
					return
				}
			}
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
		}
	}()
	many := suite.Count(t, "DROVER_ROUNDS", 6, 20)
	for i := range many {
		w.snapshot("a", fmt.Sprintf("s%d", i))
	}
	close(stop)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	last := 0
	for i := range many {
		c := w.clone(fmt.Sprintf("c%d", i), fmt.Sprintf("snap://a/s%d", i), 64<<20)
		w.create(attachment(c.Name))
		f, err := os.Open(w.attached(c.Name).Status.Device)
		if err != nil {
			t.Fatal(err)
		}
		var n [2]int
		for k, at := range []int64{0, 40 << 20} {
			b := make([]byte, 8)
			if _, err := f.ReadAt(b, at); err != nil {
				t.Fatal(err)
			}
			_, _ = fmt.Sscanf(string(b), "%08d", &n[k])
		}
		f.Close()
		if n[0]-n[1] < 0 || n[0]-n[1] > 1 || n[0] < last {
			t.Errorf("snapshot %d holds %v, the one before %d", i, n, last)
		}
		last = n[0]
		w.detach(c.Name)
	}
	t.Logf("%d writes", last)
}

// TestSnapshotSpace: the node frees the space of a deleted snapshot, attached or not, also of the newest snapshot.
func TestSnapshotSpace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	used := func() string {
		return w.sh("du -sk " + filepath.Join(w.dir, "disk", "layers") + " 2>/dev/null | cut -f1")
	}
	shrinks := func(what string, to int) {
		t.Helper()
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			n, err := strconv.Atoi(strings.TrimSpace(used()))
			if err != nil {
				t.Fatal(err)
			}
			if n <= to {
				tick.Stop()
				return
			}
			select {
			case <-tick.C:
			case <-w.ctx.Done():
				t.Fatalf("%s: %d KiB in layers, not %d", what, n, to)
			}
		}
	}
	text := strings.Repeat("0123456789abcdef", 16<<20/16)
	w.create(attachment("a"))
	w.attached("a")
	var all []*api.Snapshot
	for i := range 4 { // each 16 MiB, at the same place
		w.fill("a", strconv.Itoa(i)+text[1:], 0)
		all = append(all, w.snapshot("a", fmt.Sprintf("s%d", i)))
	}
	drop := func(i int) {
		w.remove(all[i])
		gone(w, all[i], &api.SnapshotList{})
	}
	of := w.memberOf("a")
	rep := of.Spec.UID
	disk, err := w.data.Disks.Get(of.Spec.Disk)
	if err != nil {
		t.Fatal(err)
	}
	before, err := w.data.snapshots.TreeOf(of, disk)
	if err != nil {
		t.Fatal(err)
	}
	drop(1)
	shrinks("one of the middle", 50<<10)
	inNew := func(s *api.Snapshot) bool {
		return s.Status.ReadyToUse && s.Status.Layer != all[2].Status.Layer && s.Status.Size >= 16<<20
	}
	s2 := w.snapshotIs("s2", "in its new layer", inNew)

	// A reconcile between the merge and the news of the merge leaves the snapshot as before.
	w.data.snapshots.KeepTree(rep, before)
	base := s2.DeepCopy()
	delete(s2.Labels, api.LabelVolume)
	if err := w.c.Patch(w.ctx, s2, client.MergeFrom(base)); err != nil {
		t.Fatal(err)
	}
	for tick := time.NewTicker(20 * time.Millisecond); ; { // no change of the object shows the reconcile
		now, err := w.data.snapshots.TreeOf(of, disk)
		if err != nil {
			t.Fatal(err)
		}
		if now != before {
			tick.Stop()
			break
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			t.Fatal("s2 was not looked at")
		}
	}
	w.snapshotIs("s2", "what it was", func(s *api.Snapshot) bool {
		if !s.Status.ReadyToUse || s.Status.Error != "" {
			t.Errorf("it is %+v", s.Status)
		}
		return inNew(s) && s.Labels[api.LabelVolume] != ""
	})
	w.fill("a", "9"+text[1:], 0)
	drop(3)
	shrinks("the newest", 50<<10) // s0, s2, the layer in the place of s3, and a part of the head
	w.detach("a")
	drop(0)
	shrinks("detached", 34<<10)
	w.holds("a", 0, "9123")
	w.holds(w.clone("c", "snap://a/s2", 64<<20).Name, 0, "2123")
}

func (w *world) revert(volume, snapshot, id string) *api.RevertFact {
	w.t.Helper()
	v := w.volumeState(volume, api.VolumeDetached)
	old := v.DeepCopy()
	v.Spec.RevertTo = &api.RevertWish{Snapshot: snapshot, ID: id}
	if err := w.c.Patch(w.ctx, v, client.MergeFrom(old)); err != nil {
		w.t.Fatal(err)
	}
	return w.revertIs(volume, "reverted", func(is *api.RevertFact) bool { return is.State != api.CloneInitiated })
}

// revertIs waits until ok accepts the answer to a volume's revert. An obstacle ends a revert: on a busy machine the only
// node may count as silent for a moment, and revertIs repeats the wish, with another id.
func (w *world) revertIs(volume, what string, ok func(*api.RevertFact) bool) *api.RevertFact {
	w.t.Helper()
	return w.volumeIs(volume, what, func(v *api.Volume) bool {
		is := v.Status.Reverted
		if is == nil || is.ID != v.Spec.RevertTo.ID {
			return false
		}
		if is.State != api.CloneFailed || is.Message != "no replica of the volume can be reached" {
			return ok(is)
		}
		old := v.DeepCopy()
		v.Spec.RevertTo.ID = string(api.NewUID())
		if err := w.c.Patch(w.ctx, v, client.MergeFrom(old)); err != nil {
			w.t.Fatal(err)
		}
		return false
	}).Status.Reverted
}

func TestRevert(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	for i, text := range []string{"first", "later", "never"} {
		w.create(attachment("a"))
		w.attached("a")
		w.fill("a", text, 0)
		w.detach("a")
		if i < 2 {
			w.snapshot("a", fmt.Sprintf("s%d", i))
		}
	}
	if is := w.revert("a", "s0", "1"); is.State != api.CloneCompleted {
		t.Errorf("%+v", is)
	}
	w.holds("a", 0, "first")
	s0 := w.snapshotIs("s0", "below the head", func(s *api.Snapshot) bool { return s.Status.Children[api.VolumeHead] })
	if !s0.Status.Children["s1"] {
		t.Errorf("s0 is %+v", s0.Status)
	}
	w.create(attachment("a"))
	w.attached("a")
	w.fill("a", "other", 0)
	w.detach("a")

	// A restart repeats no completed wish, and no wish with a lost answer.
	w.stopData()
	w.startData()
	w.holds("a", 0, "other")
	is := w.revert("a", "s1", "2")
	if is.State != api.CloneCompleted {
		t.Errorf("%+v", is)
	}
	w.holds("a", 0, "later")
	// The answer is lost between the revert and a write: the revert is not repeated.
	w.stopData()
	var reps api.ReplicaList
	if err := w.c.List(w.ctx, &reps, client.MatchingLabels{api.LabelVolume: "a"}); err != nil || len(reps.Items) != 1 {
		t.Fatalf("%+v, %v", reps.Items, err)
	}
	editStatus(w, &reps.Items[0], func(r *api.Replica) {
		r.Status.Reverted, r.Status.Reverting = "", is.ID+"/head-of-before"
	})
	w.startData()
	await(w, &reps.Items[0], &api.ReplicaList{}, "reverted", func(r *api.Replica) bool { return r.Status.Reverted == is.ID })
	if is := w.revert("a", "none", "3"); is.State != api.CloneFailed {
		t.Errorf("%+v", is)
	}
	w.holds("a", 0, "later")
	w.holds(w.clone("c", "snap://a/s0", 64<<20).Name, 0, "first")
}
