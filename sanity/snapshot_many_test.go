package sanity_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"drover.io/drover/block/suite"
)

// snapshotsAtOnce: callers create snapshots of two volumes at once, then clones of all snapshots, under writes to the
// sources, then delete everything at once. Each object exists after its creation, and nothing is left in the end.
func snapshotsAtOnce(t *testing.T, w *world) {
	callers := suite.Count(t, "DROVER_CALLERS", 8, 20)
	all := func(call func(i int) error) {
		t.Helper()
		var wg sync.WaitGroup
		errs := make([]error, callers)
		for i := range errs {
			wg.Go(func() { errs[i] = call(i) })
		}
		wg.Wait()
		must(t, errors.Join(errs...))
	}
	var sources [2]*pod
	var counts [2]*counting
	for i := range sources {
		var err error
		sources[i], err = w.create(fmt.Sprintf("many-%d", i), gib, mountCap("ext4"))
		must(t, err)
		must(t, sources[i].up())
		counts[i] = sources[i].count("n", loadPace())
	}
	ids, clones := make([]string, callers), make([]*pod, callers)
	all(func(i int) (err error) {
		ids[i], err = w.snap(sources[i%2].id, fmt.Sprintf("many-%d-at-%d", i%2, i))
		return err
	})
	all(func(i int) (err error) {
		clones[i], err = w.from(ids[i], fmt.Sprintf("many-clone-%d", i), 0, mountCap("ext4"))
		return err
	})
	for i, c := range counts {
		close(c.stop)
		must(t, <-c.end)
		must(t, clones[i].up())
		if n := clones[i].counted("n"); n > c.n.Load() {
			t.Errorf("clone %d holds %d, and %d was written last", i, n, c.n.Load())
		}
		must(t, clones[i].down())
	}
	all(func(i int) error { return clones[i].remove() })
	all(func(i int) error {
		_, err := w.controller.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: ids[i]})
		return err
	})
	list, err := w.controller.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	must(t, err)
	for _, e := range list.Entries {
		if slices.Contains(ids, e.Snapshot.SnapshotId) {
			t.Errorf("%s is left", e.Snapshot.SnapshotId)
		}
	}
	for _, p := range sources {
		do(t, p.down, p.remove)
	}
}
