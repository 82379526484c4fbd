package targets

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestManyBackupsAreListed: a cluster that is pointed at a store makes a Backup with a status for each of its backups,
// once, also where the backups of several volumes have one name. The log has the time; DROVER_BACKUPS=10000 measures
// ten thousand.
func TestManyBackupsAreListed(t *testing.T) {
	n := suite.Count(t, "DROVER_BACKUPS", 300, 2000)
	s := newShelf(t, api.PublishedPassword)
	var tags [][]string
	for i := range n {
		f := factsOf(fmt.Sprintf("daily-%d", i/2)) // two backups have one name
		f.Volume, f.Object = fmt.Sprintf("vol-%d", i%100), api.NewUID()
		tags = append(tags, f.Tags())
	}
	ids := s.saveMany(1000, tags...)
	w := newWorld(t, "node-1")
	start, cpu := time.Now(), processorTime(t)
	w.addTarget("far", s.url(), "")
	found := w.awaitReason("far", api.ReasonAvailable, "")
	t.Logf("%d backups listed in %v, %v of processor time", n, time.Since(start), processorTime(t)-cpu)
	if found.Status.Backups != int32(n) {
		t.Errorf("status.backups %d, want %d", found.Status.Backups, n)
	}
	if note := w.awaitEvent("BackupFound"); note != fmt.Sprintf("%d backups found in the store", n) {
		t.Errorf("event: %s", note)
	}
	left := map[string]bool{}
	for _, id := range ids {
		left[id.String()] = true
	}
	for name, b := range w.backups() {
		id := b.Spec.SnapshotID
		if !left[id] || b.Status.SnapshotID != id || b.Status.State != api.BackupCompleted {
			t.Errorf("Backup %s of snapshot %.8s: %+v", name, id, b.Status.CommonBackupStatus)
		}
		delete(left, id)
	}
	if len(left) > 0 {
		t.Errorf("%d backups have no Backup", len(left))
	}
}

// processorTime is the processor time of this process.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var use syscall.Rusage
	must(t, syscall.Getrusage(syscall.RUSAGE_SELF, &use))
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}
