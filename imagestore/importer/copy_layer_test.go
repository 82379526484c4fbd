package importer_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/importer"
)

// cutOff is a disk on a connection which ends after some bytes.
type cutOff struct {
	block.Layers
	left, read atomic.Int64
}

func (c *cutOff) Open(uid string) (block.Source, error) {
	s, err := c.Layers.Open(uid)
	return &cutSource{s, c}, err
}

type cutSource struct {
	block.Source
	c *cutOff
}

var errCut = errors.New("the connection is gone")

func (s *cutSource) ReadAt(p []byte, off int64) (int, error) {
	if s.c.left.Add(-int64(len(p))) < 0 {
		return 0, errCut
	}
	s.c.read.Add(int64(len(p)))
	return s.Source.ReadAt(p, off)
}

// TestCopyGoesOn: an interrupted copy continues from the checkpoint; a copy of other content begins again.
func TestCopyGoesOn(t *testing.T) {
	suite.Slow(t)
	content := sample(300 << 20)
	from, to := newDisk(t, t.TempDir()), newDisk(t, t.TempDir())
	want := newWant()
	if _, err := importer.Import(t.Context(), from, want, new(importer.Progress), file(sparseFile(t, content))); err != nil {
		t.Fatal(err)
	}
	want.CheckpointEvery = time.Nanosecond
	far := &cutOff{Layers: from}
	far.left.Store(45 << 20)
	if _, err := importer.Copy(t.Context(), far, to, want, new(importer.Progress)); !errors.Is(err, errCut) {
		t.Fatalf("a copy that is cut off: %v", err)
	}
	first := far.read.Load()
	far.left.Store(1 << 40)
	far.read.Store(0)
	if _, err := importer.Copy(t.Context(), far, to, want, new(importer.Progress)); err != nil {
		t.Fatal(err)
	}
	holds(t, to, want, content)
	if again := far.read.Load(); again > 35<<20 {
		t.Errorf("%d MiB were read before the cut and %d MiB after it, of %d MiB with holes", first>>20, again>>20,
			len(content)>>20)
	}

	// A checkpoint of other content is not continued.
	other := newWant()
	if _, err := importer.Import(t.Context(), from, other, new(importer.Progress), file(sparseFile(t, sample(200<<20)))); err != nil {
		t.Fatal(err)
	}
	far.left.Store(25 << 20)
	other.CheckpointEvery = time.Nanosecond
	if _, err := importer.Copy(t.Context(), far, to, other, new(importer.Progress)); !errors.Is(err, errCut) {
		t.Fatalf("a copy that is cut off: %v", err)
	}
	if err := from.RemoveImage(string(other.UID)); err != nil {
		t.Fatal(err)
	}
	changed := sample(200 << 20)
	changed[len(changed)-1] ^= 1
	changed[1] ^= 1
	if _, err := importer.Import(t.Context(), from, other, new(importer.Progress), file(sparseFile(t, changed))); err != nil {
		t.Fatal(err)
	}
	far.left.Store(1 << 40)
	if _, err := importer.Copy(t.Context(), far, to, other, new(importer.Progress)); err != nil {
		t.Fatal(err)
	}
	holds(t, to, other, changed)
}
