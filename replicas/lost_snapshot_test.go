package replicas

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// dropHere takes a snapshot out of a replica's stack without notice to the data role, which is stopped.
func dropHere(t *testing.T, path, name string) (stacks int) {
	t.Helper()
	disk, err := stack.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	have, err := disk.Replicas()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range have {
		if i := slices.IndexFunc(m.Snapshots, func(s stack.Snapshot) bool { return s.Name == name }); i >= 0 {
			stacks++
			if err := disk.DropSnapshot(m.UID, m.Snapshots[i].UID); err != nil {
				t.Fatal(err)
			}
		}
	}
	return stacks
}

// TestSnapshotLost: the object of a snapshot is deleted when the volume's stack lacks the snapshot, and not while the
// stack cannot be read.
func TestSnapshotLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	w.snapshot("a", "s1")
	w.snapshot("a", "s2")
	w.stopData()
	r := w.replicaOf("a")
	if n := dropHere(t, w.dir+"/disk", "s1"); n != 1 {
		t.Fatalf("s1 was in %d stacks", n)
	}
	good, err := os.ReadFile(w.stackFile(r))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.stackFile(r), []byte("not to be read"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.startData()
	w.snapshotIs("s1", "in doubt", func(s *api.Snapshot) bool { return s.Status.Error != "" })
	w.snapshotIs("s2", "in doubt", func(s *api.Snapshot) bool { return s.Status.Error != "" })
	for _, name := range []string{"s1", "s2"} {
		s := &api.Snapshot{}
		if err := w.c.Get(w.ctx, client.ObjectKey{Name: name}, s); err != nil || s.DeletionTimestamp != nil {
			t.Errorf("%s is given up: %v", name, err)
		}
	}
	if err := os.WriteFile(w.stackFile(r), good, 0o600); err != nil {
		t.Fatal(err)
	}
	gone(w, &api.Snapshot{ObjectMeta: named("s1")}, &api.SnapshotList{})
	w.tells("a", "SnapshotLost", "no snapshot s1")
	w.ready("s2")

	// The object of a missing snapshot is deleted; a requested snapshot is created.
	s3 := &api.Snapshot{ObjectMeta: named("s3"), Spec: api.SnapshotSpec{Volume: "a"}}
	w.create(s3)
	gone(w, s3, &api.SnapshotList{})
	w.snapshot("a", "s3")
	w.holds(w.clone("c", "snap://a/s2", 64<<20).Name, 0, "\x00")
}

// TestSnapshotLostOfSeveral: the same for a volume with several replicas, all without the snapshot.
func TestSnapshotLostOfSeveral(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nodes := w.three()
	v := volume("v", 16<<20)
	v.Spec.NumberOfReplicas = 3
	v.Spec.Nodes = []string{"a", "b", "c"}
	w.create(v)
	w.volumeIs("v", "whole", func(v *api.Volume) bool { return v.Status.Robustness == api.RobustHealthy })
	w.snapshot("v", "s1")
	w.snapshot("v", "s2")
	w.volumeIs("v", "given back", func(v *api.Volume) bool { // a dropped replica has both snapshots once a member again
		return len(v.Status.Members) == 3 && v.Status.EngineNode == ""
	})
	for _, o := range nodes {
		o.stop()
	}
	for _, o := range nodes {
		if n := dropHere(t, filepath.Join(o.dir, "disk"), "s1"); n != 1 {
			t.Fatalf("s1 was in %d stacks of node %s", n, o.name)
		}
	}
	for _, o := range nodes {
		o.start()
	}
	gone(w, &api.Snapshot{ObjectMeta: named("s1")}, &api.SnapshotList{})
	w.tells("v", "SnapshotLost", "no snapshot s1")
	w.ready("s2")
}
