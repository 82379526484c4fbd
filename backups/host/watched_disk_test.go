package host

import (
	"context"
	"testing"
	"testing/synctest"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// hungDisk is a disk whose calls wait for hangs.
type hungDisk struct {
	block.SnapshotDisk
	hangs    chan struct{}
	released int
}

func (d *hungDisk) HoldSnapshot(context.Context, string, string, string, block.SnapshotCut) ([]string, int64, error) {
	<-d.hangs
	return []string{"layer"}, 1, nil
}

func (d *hungDisk) ReleaseSnapshot(string) error {
	d.released++
	return nil
}

// TestDiskThatHangsGivesAttemptsBack: the attempt of a backup on a disk that hangs fails, and so gives its place back.
// While the hold may still come, no release runs before the hold.
func TestDiskThatHangsGivesAttemptsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hung := &hungDisk{hangs: make(chan struct{})}
		disk, err := WatchDisks(func(api.UID) (block.SnapshotDisk, error) { return hung, nil })(api.NewUID())
		must(t, err)
		if _, _, err := disk.HoldSnapshot(t.Context(), "b", "b", "r", block.SnapshotCut{}); !api.Is(err, api.Unavailable) {
			t.Errorf("a hold on a disk that hangs: %v", err)
		}
		if err := disk.ReleaseSnapshot("b"); !api.Is(err, api.Unavailable) || hung.released > 0 {
			t.Errorf("a release before the hold: %v, %d releases", err, hung.released)
		}
		close(hung.hangs)
		synctest.Wait()
		layers, _, err := disk.HoldSnapshot(t.Context(), "b", "b", "r", block.SnapshotCut{})
		if err != nil || len(layers) != 1 || disk.ReleaseSnapshot("b") != nil || hung.released != 1 {
			t.Errorf("the disk answers: %v, %v, %d releases", layers, err, hung.released)
		}
	})
}
