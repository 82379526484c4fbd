package mover

import (
	"crypto/sha256"
	"sync/atomic"
	"testing"
	"time"
)

// TestProgressEstimatesTheEnd: the estimate begins when the total is final and some bytes are done, and follows the
// mean rate.
func TestProgressEstimatesTheEnd(t *testing.T) {
	var p Progress
	if p.At(time.Now()).EstimatedEnd != nil {
		t.Error("before the begin, the end is known")
	}
	p.reset()
	began := *p.began.Load()
	p.total.Store(1000)
	p.done.Store(250)
	if p.At(began.Add(time.Minute)).EstimatedEnd != nil {
		t.Error("the end is known, although the total is not")
	}
	p.complete.Store(true)
	want := began.Add(4 * time.Minute).Truncate(time.Second)
	if end := p.At(began.Add(time.Minute)).EstimatedEnd; end == nil || !end.Time.Equal(want) {
		t.Errorf("%v: want 4 minutes after the begin, %v", end, began)
	}
	p.done.Store(0)
	if p.At(began.Add(time.Minute)).EstimatedEnd != nil {
		t.Error("without progress, the end is known")
	}
}

// TestProgressIsCompleteAfterABackup: after a backup the Progress has the final count of the bytes to store.
func TestProgressIsCompleteAfterABackup(t *testing.T) {
	w := newWorld(t)
	v := newDisk(70*chunkSize + 4096)
	v.fill(1, 0, 66, 70)
	o := options("v")
	o.Progress = &Progress{}
	w.backup(v, o)
	done, total := o.Progress.Bytes()
	if want := int64(2*chunkSize + 4096); done != want || total != want {
		t.Errorf("%d of %d bytes, want %d", done, total, want)
	}
	if o.Progress.At(time.Now()).EstimatedEnd == nil {
		t.Error("the end is not known")
	}
}

// digestDisk is a sink that takes digests.
type digestDisk struct {
	*disk
	taken, wrong atomic.Int64
}

func (d *digestDisk) WriteChunk(p []byte, off int64, digest [32]byte) error {
	d.taken.Add(1)
	if sha256.Sum256(p) != digest {
		d.wrong.Add(1)
	}
	_, err := d.WriteAt(p, off)
	return err
}

// TestRestoreGivesTheDigestsOfWholeChunks: a sink gets the digest of each chunk that is one blob, also of a short last
// chunk, and the bytes of chunks in fragments without digests.
func TestRestoreGivesTheDigestsOfWholeChunks(t *testing.T) {
	w := newWorld(t)
	v := newDisk(3*chunkSize + 8192)
	v.fill(1, 0, 1, 3)
	o := options("v")
	o.FragmentSize = chunkSize / 16
	base := w.backup(v, o).Snapshot
	v.fill(9, 1)
	o.Base, o.Changed = &base, []int64{1}
	blobs, m := w.load(w.backup(v, o).Snapshot)
	got := &digestDisk{disk: newDisk(m.Size)}
	_, err := Restore(t.Context(), blobs, m, got, RestoreOptions{})
	must(t, err)
	if !got.equals(v) || got.taken.Load() != 2 || got.wrong.Load() != 0 {
		t.Errorf("%d digests, %d of them wrong; the bytes are right: %v", got.taken.Load(), got.wrong.Load(), got.equals(v))
	}
}
