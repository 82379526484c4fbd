package replicas

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/stack"
)

// three makes three more nodes.
func (w *world) three() []*other {
	w.t.Helper()
	both, err := wire.NewAuthority()
	if err != nil {
		w.t.Fatal(err)
	}
	ca, err := wire.LoadAuthority(both)
	if err != nil {
		w.t.Fatal(err)
	}
	var list []*other
	for _, name := range []string{"a", "b", "c"} {
		list = append(list, w.other(ca, name))
	}
	for _, o := range list {
		await(w, &api.Node{ObjectMeta: named(o.name)}, &api.NodeList{}, "reachable", func(n *api.Node) bool {
			return n.Status.DataAddress != "" && len(n.Status.Disks) == 1 && n.Status.Disks[0].Ready
		})
	}
	return list
}

func (w *world) attachTo(node, name string) string {
	w.t.Helper()
	at := attachment(name)
	at.Spec.Node = node
	w.create(at)
	return w.attached(name).Status.Device
}

func (w *world) detachFrom(name string) {
	w.t.Helper()
	at := attachment(name)
	w.remove(at)
	gone(w, at, &api.AttachmentList{})
}

// holds digests the content of a snapshot on the node's replica of a volume; empty: the replica lacks the snapshot.
func (o *other) holds(t *testing.T, volume, snapshot string) string {
	t.Helper()
	for tick := time.NewTicker(20 * time.Millisecond); ; <-tick.C {
		sum, err := o.look(volume, snapshot)
		if err == nil {
			tick.Stop()
			return sum
		}
		if !api.Is(err, api.Busy) && !api.Is(err, api.NotFound) { // a merge of the layers is in progress
			t.Fatal(err)
		}
	}
}

func (o *other) look(volume, snapshot string) (string, error) {
	for _, disk := range o.data.Disks.Except(nil) {
		list, err := disk.Replicas()
		if err != nil {
			return "", err
		}
		for _, m := range list {
			i := slices.IndexFunc(m.Snapshots, func(s stack.Snapshot) bool { return s.Name == snapshot })
			if m.Volume != volume || i < 0 {
				continue
			}
			chain, err := m.Chain(m.Snapshots[i].Layer)
			if err != nil {
				return "", err
			}
			v, err := disk.OpenStack(chain, m.Size)
			if err != nil {
				return "", err
			}
			b := make([]byte, v.Size())
			if _, err = v.ReadAt(b, 0); errors.Is(err, io.EOF) {
				err = nil
			}
			return fmt.Sprintf("%x", sha256.Sum256(b)), errors.Join(err, v.Close())
		}
	}
	return "", nil
}

// TestSeveralSnapshots takes, deletes, clones and reverts to snapshots of a volume with three replicas.
func TestSeveralSnapshots(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nodes := w.three()
	v := volume("v", 32<<20)
	v.Spec.NumberOfReplicas = 3
	v.Spec.Nodes = []string{"a", "b", "c"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	dev := w.attachTo("a", "v")
	w.volumeIs("v", "whole", func(v *api.Volume) bool {
		return len(v.Status.Members) == 3 && v.Status.Robustness == api.RobustHealthy
	})
	sum := func(dev string) string { return strings.Fields(w.sh("sha256sum < " + dev))[0] }
	everywhere := func(snapshot, want string) {
		t.Helper()
		w.volumeIs("v", "whole", func(v *api.Volume) bool { return len(v.Status.Members) == 3 }) // see TestSeveral
		for _, o := range nodes {
			if have := o.holds(t, "v", snapshot); have != want {
				t.Errorf("snapshot %s on node %s is %q, not %q", snapshot, o.name, have, want)
			}
		}
	}
	w.sh("dd if=/dev/urandom of=" + dev + " bs=1M count=16 oflag=direct status=none")
	one := sum(dev)
	w.snapshot("v", "s1")
	w.sh("dd if=/dev/urandom of=" + dev + " bs=4k count=200 seek=500 oflag=direct conv=notrunc status=none")
	two := sum(dev)
	s2 := w.snapshot("v", "s2")
	if s2.Status.Parent != "s1" || s2.Status.RestoreSize != 32<<20 || s2.Status.OwnerID != "a" {
		t.Errorf("s2 is %+v", s2.Status)
	}
	w.sh("dd if=/dev/urandom of=" + dev + " bs=4k count=50 seek=5000 oflag=direct conv=notrunc status=none")
	three := sum(dev)
	everywhere("s1", one)
	everywhere("s2", two)
	w.detachFrom("v")

	// While the volume is detached.
	w.snapshot("v", "s3")
	everywhere("s3", three)
	w.remove(s2)
	gone(w, s2, &api.SnapshotList{})
	everywhere("s2", "")
	everywhere("s3", three)
	w.volumeIs("v", "given back", func(v *api.Volume) bool { // a look at a snapshot takes the volume for a moment, too
		return v.Status.State == api.VolumeDetached && len(v.Status.Members) == 3 && v.Status.EngineNode == ""
	})

	// A clone has a replica on each node of the source's replicas.
	clone := volume("clone", 32<<20)
	clone.Spec.NumberOfReplicas, clone.Spec.DataSource = 3, "snap://v/s3"
	w.create(clone)
	got := w.volumeIs("clone", "whole", func(v *api.Volume) bool { return len(v.Status.Members) == 3 })
	on := map[string]bool{}
	for _, m := range got.Status.Members {
		var r api.Replica
		if err := w.c.Get(w.ctx, clientKey(m), &r); err != nil {
			t.Fatal(err)
		}
		on[r.Spec.Node] = true
	}
	if len(on) != 3 {
		t.Errorf("the clone is on %v", on)
	}
	dev = w.attachTo("c", "clone")
	if have := sum(dev); have != three {
		t.Error("the clone holds something else")
	}

	// The full copy runs once, and the other replica is rebuilt from the copy.
	full := volume("full", 32<<20)
	full.Spec.NumberOfReplicas, full.Spec.DataSource, full.Spec.CloneMode = 2, "snap://v/s1", api.CloneFull
	full.Spec.Nodes = []string{"a", "b", "c"}
	w.create(full)
	w.volumeIs("full", "whole", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })

	// Back to the first.
	w.volumeIs("v", "asked to go back", func(v *api.Volume) bool {
		v.Spec.RevertTo = &api.RevertWish{Snapshot: "s1", ID: "x"}
		return w.c.Update(w.ctx, v) == nil
	})
	w.volumeIs("v", "reverted", func(v *api.Volume) bool {
		return v.Status.Reverted != nil && v.Status.Reverted.State == api.CloneCompleted
	})
	dev = w.attachTo("c", "v")
	if have := sum(dev); have != one {
		t.Error("after the revert it holds something else")
	}
	everywhere("s3", three)
	w.sh("dd if=/dev/urandom of=" + dev + " bs=4k count=50 seek=6000 oflag=direct conv=notrunc status=none")
	four := sum(dev)

	// Two volumes with three replicas, at the same instant.
	group := api.NewSnapshotGroup("g", []string{"v", "clone"})
	w.create(group)
	await(w, &api.SnapshotGroup{ObjectMeta: named("g")}, &api.SnapshotGroupList{}, "ready",
		func(g *api.SnapshotGroup) bool { return g.Status.ReadyToUse })
	everywhere("g-v", four)

	// A replica that was away lacks a snapshot, and gets it.
	b := nodes[1]
	b.stop()
	w.sh("dd if=/dev/urandom of=" + dev + " bs=4k count=70 seek=7000 oflag=direct conv=notrunc status=none")
	five := sum(dev)
	w.snapshot("v", "s5")
	b.start()
	w.volumeIs("v", "healthy again", func(v *api.Volume) bool {
		return len(v.Status.Members) == 3 && v.Status.Robustness == api.RobustHealthy
	})
	everywhere("s5", five)
	everywhere("g-v", four)
	w.detachFrom("v")
	w.detachFrom("clone")
	if got := w.volumeState("v", api.VolumeDetached); slices.Contains(got.Status.Members, "") {
		t.Error(got.Status.Members)
	}
}
