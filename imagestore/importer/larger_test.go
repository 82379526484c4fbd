package importer_test

import (
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// liar is a disk of another node which exaggerates the size of the layers.
type liar struct{ block.Layers }

type larger struct{ block.Source }

func (l larger) Size() int64 { return 1 << 40 }

func (l liar) Open(uid string) (block.Source, error) {
	s, err := l.Layers.Open(uid)
	return larger{s}, err
}

// TestCopyRefusesLargerLayers: a copy refuses a layer larger than the image.
func TestCopyRefusesLargerLayers(t *testing.T) {
	from, to := newDisk(t, t.TempDir()), newDisk(t, t.TempDir())
	want := newWant()
	got, err := importer.Import(t.Context(), from, want, new(importer.Progress), file(sparseFile(t, sample(20<<20))))
	if err != nil {
		t.Fatal(err)
	}
	want.Digest, want.Format, want.VirtualSize, want.Checksum = got.Digest, got.Format, got.VirtualSize, got.Checksum
	if _, err := importer.Copy(t.Context(), liar{from}, to, want, new(importer.Progress)); !api.Is(err, api.Corrupt) {
		t.Errorf("a layer of 1 TiB: %v", err)
	}
	if _, err := importer.Copy(t.Context(), from, to, want, new(importer.Progress)); err != nil {
		t.Error(err)
	}
}
