package restoring

import (
	"context"
	"runtime"
	"testing"

	"drover.io/drover/block"
)

// TestBackupWithoutDigestsContinues: the restore of a backup without digests cannot be read before its end. After an
// outage of the store it fetches the chunks that the layer lacks, and leaves damaged chunks out.
func TestBackupWithoutDigestsContinues(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(8*chunk+512))
	w.damaged[2] = true
	w.set.Remove(w.disk.UID(), w.uid())
	w.l = w.set.Add(w.disk, w.uid(), func(ctx context.Context) (block.Backup, error) {
		b, err := w.open(ctx)
		if err != nil {
			return nil, err
		}
		return struct{ block.IntactBackup }{b.(*backup)}, nil
	})
	if _, _, readable, err := w.l.Open(t.Context()); err != nil || readable {
		t.Fatalf("readable: %v, %v", readable, err)
	}
	w.hold = make(chan struct{})
	f, ended := w.l.Fill(true), make(chan error, 1)
	go func() {
		_, err := w.restore(f)
		ended <- err
	}()
	for range 3 {
		w.hold <- struct{}{}
	}
	w.change(func() { w.away = true })
	w.hold <- struct{}{}
	for gone := false; !gone; runtime.Gosched() {
		w.change(func() { gone = w.closed > 0 })
	}
	w.change(func() { w.away = false })
	close(w.hold)
	must(t, <-ended)
	if len(f.Damaged) != 1 || f.Damaged[0] != 2 {
		t.Errorf("the damaged chunks are %v", f.Damaged)
	}
	for c := range int64(9) {
		if n := w.written[c]; n != 1 && c != 2 {
			t.Errorf("chunk %d was written %d times", c, n)
		}
	}
	clear(w.content[2*chunk : 3*chunk])
	src, err := w.disk.Open(w.uid())
	must(t, err)
	defer src.Close()
	for c := range int64(9) {
		w.compare(src, c)
	}
}
