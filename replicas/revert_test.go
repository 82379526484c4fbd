package replicas

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestRevertShutsOut: a former engine, on a node cut off from the API, cannot write to a volume after a revert, and
// acknowledges no further write.
func TestRevertShutsOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nodes := w.three()
	v := volume("v", 16<<20)
	v.Spec.Nodes = []string{"a"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	old := w.attachTo("b", "v")
	write := func(dev string) *exec.Cmd {
		return exec.CommandContext(w.ctx, "dd", "if=/dev/urandom", "of="+dev, "bs=1M", "count=1", "oflag=direct",
			"status=none")
	}
	if out, err := write(old).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	sum := func(dev string) string { return strings.Fields(w.sh("sha256sum < " + dev))[0] }
	first := sum(old)
	w.snapshot("v", "s1")
	if out, err := write(old).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	nodes[1].deafen()
	w.abandon(attachment("v"))
	if is := w.revert("v", "s1", "back"); is.State != api.CloneCompleted {
		t.Fatalf("%+v", is)
	}
	if err := write(old).Run(); err == nil {
		t.Error("a write of the engine of before is acknowledged")
	}
	if now := sum(w.attachTo("c", "v")); now != first {
		t.Error("the volume does not hold what the snapshot holds")
	}
}

// TestRevertWithoutADisk: a live node cannot use the disk of a member. The member delays no revert, whether the disk
// failed before the revert or while the other members reverted. The member is left out, and returns with the volume's
// present data.
func TestRevertWithoutADisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nodes := w.three()
	b := nodes[1]
	v := volume("v", 16<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 3, []string{"a", "b", "c"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	dev := w.attachTo("a", "v")
	whole := func() *api.Volume {
		t.Helper()
		return w.volumeIs("v", "whole", func(v *api.Volume) bool {
			return len(v.Status.Members) == 3 && v.Status.Robustness == api.RobustHealthy
		})
	}
	sum := func(dev string) string { return strings.Fields(w.sh("sha256sum < " + dev))[0] }
	write := func() { w.sh("dd if=/dev/urandom of=" + dev + " bs=1M count=4 oflag=direct status=none") }
	lost := ""
	for _, name := range whole().Status.Members {
		var r api.Replica
		if err := w.c.Get(w.ctx, clientKey(name), &r); err != nil {
			t.Fatal(err)
		}
		if r.Spec.Node == "b" {
			lost = name
		}
	}
	path := filepath.Join(b.dir, "disk")
	fail := func() {
		t.Helper()
		if err := os.Rename(path, path+".away"); err != nil {
			t.Fatal(err)
		}
		await(w, &api.Node{ObjectMeta: named("b")}, &api.NodeList{}, "without its disk",
			func(n *api.Node) bool { return !n.Status.Disks[0].Ready })
	}
	heal := func() {
		t.Helper()
		if err := os.Rename(path+".away", path); err != nil {
			t.Fatal(err)
		}
	}
	write()
	first := sum(dev)
	w.snapshot("v", "s1")
	for _, later := range []bool{false, true} {
		write()
		w.detachFrom("v")
		id := "before"
		if !later {
			fail()
		} else {
			id = "meanwhile"
			b.stop() // the node does not answer
		}
		edit(w, v, func(v *api.Volume) { v.Spec.RevertTo = &api.RevertWish{Snapshot: "s1", ID: id} })
		if later {
			r := &api.Replica{ObjectMeta: named(lost)}
			await(w, r, &api.ReplicaList{}, "asked",
				func(r *api.Replica) bool { return r.Spec.Revert != nil && r.Spec.Revert.ID == id })
			fail()
		}
		is := w.volumeIs("v", "reverted", func(v *api.Volume) bool {
			is := v.Status.Reverted
			return is != nil && is.ID == id && is.State != api.CloneInitiated
		})
		// On a busy machine another node may count as silent, too: the revert leaves out its replica as well.
		if is.Status.Reverted.State != api.CloneCompleted || len(is.Status.Members) == 0 ||
			slices.Contains(is.Status.Members, lost) {
			t.Fatalf("%+v, members %v", is.Status.Reverted, is.Status.Members)
		}
		var member api.Replica
		if err := w.c.Get(w.ctx, clientKey(is.Status.Members[0]), &member); err != nil || member.Spec.Revert == nil ||
			member.Spec.Revert.Epoch != is.Status.RevertedEpoch {
			t.Errorf("the volume was reverted in epoch %d, its member %+v, %v", is.Status.RevertedEpoch, member.Spec.Revert, err)
		}
		dev = w.attachTo("a", "v")
		if sum(dev) != first {
			t.Fatal("the volume does not hold what the snapshot holds")
		}
		write()
		now := sum(dev)
		heal()
		if later {
			b.start()
		}
		whole()
		w.detachFrom("v")
		if dev = w.attachTo("b", "v"); sum(dev) != now {
			t.Fatal("the replica came back with something else")
		}
		w.detachFrom("v")
		dev = w.attachTo("a", "v")
	}
	w.detachFrom("v")
}

// TestSnapshotStaysReadyWithoutADisk: the node responsible for a detached volume loses the disk of its replica. The
// volume's snapshot stays ready, because the other members have the snapshot.
func TestSnapshotStaysReadyWithoutADisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nodes := w.three()
	v := volume("v", 16<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "b"}
	w.create(v)
	v = w.volumeIs("v", "whole", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })
	w.snapshot("v", "s1")
	var first api.Replica
	if err := w.c.Get(w.ctx, clientKey(v.Status.Members[0]), &first); err != nil {
		t.Fatal(err)
	}
	i := slices.Index([]string{"a", "b"}, first.Spec.Node)
	path := filepath.Join(nodes[i].dir, "disk")
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for n := range 30 {
		s := &api.Snapshot{ObjectMeta: named("s1")}
		edit(w, s, func(s *api.Snapshot) { s.Annotations = map[string]string{"test": strconv.Itoa(n)} }) // wakes the reconciler
		<-tick.C
		if err := w.c.Get(w.ctx, clientKey("s1"), s); err != nil || !s.Status.ReadyToUse || s.Status.Error != "" {
			t.Fatalf("after %d changes: ready %v, %q, %v", n, s.Status.ReadyToUse, s.Status.Error, err)
		}
	}
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
}

// TestRevertOfNoDisk: all members are lost before a member reverted: the revert fails, and a returning member does
// not revert.
func TestRevertOfNoDisk(t *testing.T) {
	t.Parallel()
	w, _ := twoDisks(t)
	v := volume("v", 16*mib)
	v.Spec.DiskSelector = []string{"far"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	w.create(attachment("v"))
	w.attached("v")
	w.snapshot("v", "s1")
	w.fill("v", "kept", 0)
	w.detach("v")
	var r api.Replica
	name := w.volumeState("v", api.VolumeDetached).Status.Members[0]
	if err := w.c.Get(w.ctx, clientKey(name), &r); err != nil {
		t.Fatal(err)
	}
	disk, err := w.disks.Get(r.Spec.Disk)
	if err != nil {
		t.Fatal(err)
	}
	w.stopData() // the node does not answer
	edit(w, v, func(v *api.Volume) { v.Spec.RevertTo = &api.RevertWish{Snapshot: "s1", ID: "1"} })
	await(w, &r, &api.ReplicaList{}, "asked", func(r *api.Replica) bool { return r.Spec.Revert != nil })
	path := disk.Path()
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	w.volumeIs("v", "not reverted", func(v *api.Volume) bool {
		is := v.Status.Reverted
		return is != nil && is.State == api.CloneFailed && strings.Contains(is.Message, "can be reached") &&
			len(v.Status.Members) == 1
	})
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	w.startData()
	w.create(attachment("v"))
	w.attached("v")
	w.reads("v", 0, "kept")
	w.detach("v")
}

// TestRevertBeginsAnew: a member was about to revert, and a cut has moved the head since: the member reverts all the
// same.
func TestRevertBeginsAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 16<<20)
	w.create(attachment("a"))
	w.attached("a")
	w.fill("a", "first", 0)
	w.snapshot("a", "s1")
	w.fill("a", "later", 0)
	w.detach("a")
	var list api.ReplicaList
	if err := w.c.List(w.ctx, &list); err != nil || len(list.Items) != 1 {
		t.Fatalf("%d replicas, %v", len(list.Items), err)
	}
	editStatus(w, &list.Items[0], func(r *api.Replica) { r.Status.Reverting = "back/head-of-before" })
	if is := w.revert("a", "s1", "back"); is.State != api.CloneCompleted {
		t.Fatalf("%+v", is)
	}
	w.holds("a", 0, "first")
}

// TestRevertFailsOnOneOfTwo: a member cannot revert, and the other member is lost after the beginning of its revert:
// the revert fails, and the volume keeps the data of the former. The latter returns with the same data.
func TestRevertFailsOnOneOfTwo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nodes := w.three()
	a, b := nodes[0], nodes[1]
	v := volume("v", 16<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "b"}
	w.create(v)
	whole := func() *api.Volume {
		t.Helper()
		return w.volumeIs("v", "whole", func(v *api.Volume) bool {
			return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
		})
	}
	whole()
	dev := w.attachTo("a", "v")
	sum := func(dev string) string { return strings.Fields(w.sh("sha256sum < " + dev))[0] }
	write := func() { w.sh("dd if=/dev/urandom of=" + dev + " bs=1M count=4 oflag=direct status=none") }
	write()
	snap := w.snapshot("v", "s1")
	write()
	want := sum(dev)
	w.detachFrom("v")
	var other *api.Replica
	for _, name := range whole().Status.Members {
		r := &api.Replica{ObjectMeta: named(name)}
		if err := w.c.Get(w.ctx, clientKey(name), r); err != nil {
			t.Fatal(err)
		}
		if r.Spec.Node == "b" {
			other = r
		}
	}
	a.stop()
	b.stop()
	if n := dropHere(t, filepath.Join(a.dir, "disk"), "s1"); n != 1 {
		t.Fatalf("s1 was in %d stacks of node a", n)
	}
	edit(w, v, func(v *api.Volume) { v.Spec.RevertTo = &api.RevertWish{Snapshot: "s1", ID: "1"} })
	await(w, other, &api.ReplicaList{}, "asked", func(r *api.Replica) bool { return r.Spec.Revert != nil })
	path := filepath.Join(b.dir, "disk")
	disk, err := stack.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	m, err := disk.Stack(string(other.Spec.UID))
	if err != nil {
		t.Fatal(err)
	}
	editStatus(w, other, func(r *api.Replica) { r.Status.Reverting = "1/" + m.Head })
	if err := disk.Revert(w.ctx, m.UID, string(snap.Status.UID), other.Spec.Revert.Epoch); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	a.start()
	is := w.volumeIs("v", "not reverted", func(v *api.Volume) bool {
		is := v.Status.Reverted
		return is != nil && is.State != api.CloneInitiated
	})
	if is.Status.Reverted.State != api.CloneFailed || !strings.Contains(is.Status.Reverted.Message, "does not exist") ||
		len(is.Status.Members) != 1 || is.Status.Members[0] == other.Name {
		t.Fatalf("%+v, members %v", is.Status.Reverted, is.Status.Members)
	}
	dev = w.attachTo("a", "v")
	if sum(dev) != want {
		t.Error("the volume does not hold what it held before")
	}
	write()
	want = sum(dev)
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	b.start()
	whole()
	w.detachFrom("v")
	if dev = w.attachTo("b", "v"); sum(dev) != want {
		t.Error("the replica came back with something else")
	}
	if now := whole(); len(now.Status.Members) != 2 {
		t.Errorf("members %v", now.Status.Members)
	}
	w.detachFrom("v")
}
