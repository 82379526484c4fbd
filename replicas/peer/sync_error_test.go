package peer

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/replicas/engine"
)

// failSyncs makes every sync of an open file fail from now on: the descriptors lead to a device without syncs.
func failSyncs(t *testing.T, name string) {
	t.Helper()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	some := false
	for _, fd := range all {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err != nil || to != name {
			continue
		}
		n, err := strconv.Atoi(fd.Name())
		if err == nil {
			err = unix.Dup3(int(null.Fd()), n, unix.O_CLOEXEC)
		}
		if err != nil {
			t.Fatal(err)
		}
		some = true
	}
	if !some {
		t.Fatalf("%s is not open", name)
	}
}

// TestSnapshotWithoutItsDataIsNotTold: the disk has the record of a cut, and the sync of the layer's data fails. The
// replica fails, and does not report the snapshot. Else the API would report the snapshot as ready.
func TestSnapshotWithoutItsDataIsNotTold(t *testing.T) {
	ctx := context.Background()
	c := newCluster(t, testSize, 0, true)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	b := engine.Unwrap(c.members[0].Member).(*Backend)
	head := filepath.Join(c.disk.Path(), "replicas", c.local, b.Meta().Head+".data")
	s := newSnapshot("s")
	cut, err := c.e.PrepareCut(ctx, s)
	if err == nil {
		err = cut.Hold(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	failSyncs(t, head)
	if err := cut.Commit(ctx); err == nil {
		t.Error("the cut succeeded")
	}
	cut.Release()
	if m, err := c.e.Snapshots(ctx); err == nil {
		t.Errorf("the members tell %d snapshots", len(m.Snapshots))
	}
	_ = c.e.Close() // the replica failed
}
