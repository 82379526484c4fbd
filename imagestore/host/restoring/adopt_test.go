package restoring

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// TestCutRestoreContinues: the restore of another process writes the chunks that the layer lacks, and those whose bytes
// on the disk changed. A chunk that the backup does not have is no part of the layer.
func TestCutRestoreContinues(t *testing.T) {
	t.Parallel()
	s := newStore(8*chunk + 512)
	clear(s.content[3*chunk : 4*chunk])
	for c := range int64(8) { // a restore does not write blocks of zeros: it needs holes there
		clear(s.content[c*chunk+5*block.Size:][:block.Size])
	}
	w := newWorld(t, s)
	root := w.plan()
	w.hold = make(chan struct{})
	ctx, cut := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := importer.Restore(ctx, w.disk, w.spec, w.l.Fill(false), nil, &importer.Progress{})
		ended <- err
	}()
	for range 5 {
		w.hold <- struct{}{}
	}
	cut()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("the restore that is cut ends with %v", err)
	}
	damaged := int64(-1)
	for c := range int64(8) {
		if w.written[c] > 0 {
			damaged = c
		}
	}
	data, err := os.OpenFile(filepath.Join(w.disk.Root, "layers", w.uid(), "data"), os.O_RDWR, 0)
	must(t, err)
	for _, off := range []int64{damaged*chunk + 5*block.Size, 3*chunk + 7*block.Size} {
		_, err = data.WriteAt([]byte("other bytes"), off)
		must(t, err)
	}
	must(t, errors.Join(data.Sync(), data.Close()))
	must(t, w.disk.Collect(t.Context(), 0))

	w.end()
	w.hold = nil
	next := worldOn(t, s, w.disk, w.spec)
	next.plan()
	got, err := next.restore(next.l.Fill(false))
	must(t, err)
	for c := range int64(9) {
		want := 1
		switch c {
		case 3:
			want = 0
		case damaged:
			want = 2
		case 8: // behind the last whole chunk, which a checkpoint ends with
			want = min(2, 1+w.written[c]/2)
		}
		if s.written[c] != want {
			t.Errorf("chunk %d was written %d times, want %d", c, s.written[c], want)
		}
	}
	if got.Digest != root {
		t.Errorf("the layer has the root %s, want %s", got.Digest, root)
	}
	must(t, w.disk.Verify(t.Context(), w.uid()))
	src := next.source()
	for c := range int64(9) {
		next.compare(src, c)
	}
}

// adoptingSink is a sink that looks at an earlier restore's chunks for a while.
type adoptingSink struct {
	block.Sink
	adopt    func()
	adopting bool
	written  int // meanwhile
}

func (s *adoptingSink) AdoptChunks(context.Context, func(int64) ([32]byte, bool), func(int64)) error {
	s.adopting = true
	s.adopt()
	s.adopting = false
	return nil
}

func (s *adoptingSink) WriteAt(p []byte, _ int64) (int, error) {
	if s.adopting {
		s.written++
	}
	return len(p), nil
}

func (s *adoptingSink) Sync(context.Context) error { return nil }

// TestNoWriteDuringAdoption: the restore punches holes for chunks that it does not adopt, so a reader's chunk is not
// written meanwhile.
func TestNoWriteDuringAdoption(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(2*chunk))
	w.plan()
	src := w.source()
	s := &adoptingSink{adopt: func() {
		w.compare(src, 1)
		for len(w.set.reading) > 0 { // until the write, if any
			runtime.Gosched()
		}
	}}
	must(t, w.l.Fill(false).Restore(t.Context(), s))
	if s.written > 0 {
		t.Error("a reader's chunk was written during the adoption")
	}
}
