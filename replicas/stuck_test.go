package replicas

import (
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
)

// TestMergeFails: the file of a layer cannot be changed for a while, so the space of a deleted snapshot stays in use.
// The volume reports the failure, over a restart too, until the merge succeeds.
func TestMergeFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("stuck", 64<<20)
	w.create(attachment("stuck"))
	w.attached("stuck")
	for i, name := range []string{"s1", "s2"} {
		w.fill("stuck", name+strings.Repeat("x", (2-i)<<20), 0)
		w.snapshot("stuck", name)
	}
	s1 := w.snapshotIs("s1", "with a digest", func(s *api.Snapshot) bool { return s.Status.Checksum != "" })
	s2 := w.snapshotIs("s2", "with a digest", func(s *api.Snapshot) bool { return s.Status.Checksum != "" })
	file := func(s *api.Snapshot) string {
		return filepath.Join(w.dir, "disk", "layers", string(s.Status.Layer), "data")
	}
	if out, err := exec.Command("chattr", "+i", file(s1), file(s2)).CombinedOutput(); err != nil {
		t.Skipf("files cannot be made immutable here: %v: %s", err, out)
	}
	free := func() {
		for _, s := range []*api.Snapshot{s1, s2} {
			_ = exec.Command("chattr", "-i", file(s)).Run() // for files still there
		}
	}
	t.Cleanup(free)
	w.remove(s1)
	gone(w, s1, &api.SnapshotList{}) // at once all the same
	text := w.conditionIs("stuck", api.ConditionMerged, "False")
	if !strings.Contains(text, "not permitted") {
		t.Error(text)
	}
	w.tells("stuck", "MergeFailed", "not permitted")
	if r := w.memberOf("stuck"); !strings.Contains(r.Status.MergeError, "not permitted") {
		t.Errorf("the replica says %q", r.Status.MergeError)
	}
	w.reads("stuck", 0, "s2xx")
	w.snapshot("stuck", "s3") // unmerged layers hinder no snapshot

	w.detach("stuck")
	w.stopData()
	w.startData()
	w.conditionIs("stuck", api.ConditionMerged, "False")
	free()
	w.conditionIs("stuck", api.ConditionMerged, "True")
	w.tells("stuck", "Merged", "")
	if r := w.memberOf("stuck"); r.Status.MergeError != "" {
		t.Errorf("the replica still says %q", r.Status.MergeError)
	}
	w.snapshotIs("s2", "in its new layer", func(s *api.Snapshot) bool {
		return s.Status.ReadyToUse && s.Status.Layer != s2.Status.Layer && s.Status.Checksum != s2.Status.Checksum
	})
	w.holds("stuck", 0, "s2xx")
}

// TestMergeIsLetEnd: a revert, and a move to another disk, wait for a merge and do not disturb the merge: otherwise
// every try would end the merge.
func TestMergeIsLetEnd(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	var files []string
	for _, name := range []string{"back", "away"} {
		w.on(name, "near", 64<<20)
		w.create(attachment(name))
		w.attached(name)
		for i, s := range []string{"1", "2"} {
			w.fill(name, name+s+strings.Repeat("x", (2-i)<<20), 0)
			w.snapshot(name, name+s)
		}
		for _, s := range []string{"1", "2"} {
			is := w.snapshotIs(name+s, "with a digest", func(s *api.Snapshot) bool { return s.Status.Checksum != "" })
			files = append(files, string(is.Status.Layer))
		}
		w.detach(name)
	}
	near, err := w.disks.Get(disk["near"])
	if err != nil {
		t.Fatal(err)
	}
	for i, layer := range files {
		files[i] = filepath.Join(near.Path(), "layers", layer, "data")
	}
	if out, err := exec.Command("chattr", append([]string{"+i"}, files...)...).CombinedOutput(); err != nil {
		t.Skipf("files cannot be made immutable here: %v: %s", err, out)
	}
	free := func() {
		for _, file := range files {
			_ = exec.Command("chattr", "-i", file).Run() // for files still there
		}
	}
	t.Cleanup(free)
	for _, name := range []string{"back1", "away1"} {
		is := &api.Snapshot{ObjectMeta: named(name)}
		w.remove(is)
		gone(w, is, &api.SnapshotList{})
	}
	w.stopData()
	w.startData() // the node sees both volumes at once
	var locks []func()
	unlock := sync.OnceFunc(func() {
		for _, free := range locks {
			free()
		}
	})
	defer unlock() // the world could not end else
	for _, name := range []string{"back", "away"} {
		r := w.memberOf(name)
		for tick := time.NewTicker(20 * time.Millisecond); ; <-tick.C { // the merge begins, and does not end
			m, err := near.Stack(string(r.Spec.UID))
			if err != nil || w.ctx.Err() != nil {
				t.Fatalf("no merge of %s: %+v, %v", name, m, err)
			}
			if m.Merge != nil {
				tick.Stop()
				break
			}
		}
		// As a merge worker holds the lock: with two failed tries the revert would fail, too.
		locks = append(locks, w.data.Locks.Lock(name))
	}
	w.volumeIs("away", "to go anywhere", func(v *api.Volume) bool {
		v.Spec.DiskSelector = nil
		return w.c.Update(w.ctx, v) == nil
	})
	was := w.memberOf("away").Name
	edit(w, volume("back", 0), func(v *api.Volume) { v.Spec.RevertTo = &api.RevertWish{Snapshot: "back2", ID: "1"} })
	edit(w, &api.Node{ObjectMeta: named(testNode)}, func(n *api.Node) {
		for i := range n.Spec.Disks {
			n.Spec.Disks[i].EvictionRequested = filepath.Base(n.Spec.Disks[i].Path) == "near"
		}
	})
	w.revertIs("back", "waiting for the merge", func(is *api.RevertFact) bool {
		return strings.Contains(is.Message, "are being merged")
	})
	w.replicaSays("away", "are being merged")
	unlock()
	w.stopData()
	free()
	w.startData()
	w.revertIs("back", "reverted", func(is *api.RevertFact) bool { return is.State == api.CloneCompleted })
	w.volumeIs("away", "moved", func(v *api.Volume) bool {
		return len(v.Status.Members) == 1 && v.Status.Members[0] != was
	})
	w.holds("back", 0, "back2xx")
	w.holds("away", 0, "away2xx")
}

// TestRevertBesideAMergeThatFails: a revert does not wait for ever for a failing merge. The revert fails and says
// why, the volume can be used, and once the merge has succeeded a revert to the snapshot succeeds.
func TestRevertBesideAMergeThatFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("stuck", 64<<20)
	w.create(attachment("stuck"))
	w.attached("stuck")
	var files []string
	for i, name := range []string{"s1", "s2"} {
		w.fill("stuck", name+strings.Repeat("x", (2-i)<<20), 0)
		w.snapshot("stuck", name)
		is := w.snapshotIs(name, "with a digest", func(s *api.Snapshot) bool { return s.Status.Checksum != "" })
		files = append(files, filepath.Join(w.dir, "disk", "layers", string(is.Status.Layer), "data"))
	}
	w.fill("stuck", "later", 0)
	w.detach("stuck")
	if out, err := exec.Command("chattr", append([]string{"+i"}, files...)...).CombinedOutput(); err != nil {
		t.Skipf("files cannot be made immutable here: %v: %s", err, out)
	}
	free := func() {
		for _, file := range files {
			_ = exec.Command("chattr", "-i", file).Run() // for files still there
		}
	}
	t.Cleanup(free)
	s1 := &api.Snapshot{ObjectMeta: named("s1")}
	w.remove(s1)
	gone(w, s1, &api.SnapshotList{})
	w.conditionIs("stuck", api.ConditionMerged, "False")
	if is := w.revert("stuck", "s2", "beside"); is.State != api.CloneFailed ||
		!strings.Contains(is.Message, "merged") || !strings.Contains(is.Message, "not permitted") {
		t.Errorf("%+v", is)
	}
	w.holds("stuck", 0, "later")
	free()
	w.conditionIs("stuck", api.ConditionMerged, "True")
	if is := w.revert("stuck", "s2", "after"); is.State != api.CloneCompleted {
		t.Errorf("%+v", is)
	}
	w.holds("stuck", 0, "s2xx")
}

// replicaSays waits until some replica of a volume has a message.
func (w *world) replicaSays(volume, text string) {
	w.t.Helper()
	var list api.ReplicaList
	watch := w.watch(&list)
	defer watch.Stop()
	for {
		if err := w.c.List(w.ctx, &list); err != nil {
			w.t.Fatal(err)
		}
		for i := range list.Items {
			if r := &list.Items[i]; r.Spec.Volume == volume && strings.Contains(r.Status.Message, text) {
				return
			}
		}
		select {
		case <-watch.ResultChan():
		case <-w.ctx.Done():
			w.t.Fatalf("no replica of volume %s says %q: %+v", volume, text, list.Items)
		}
	}
}
