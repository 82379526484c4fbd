package transfer_test

import (
	"bytes"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/transfer"
)

// TestViewForgetsPages: a reader of a whole large source has only some pages of the index in memory, and reads the
// forgotten pages again as before.
func TestViewForgetsPages(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	d, err := stack.Add(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	const pages = 3 * transfer.KeptPages
	uid, size := string(api.NewUID()), int64(pages*format.PageSize)
	w, err := d.Create(t.Context(), uid, size)
	if err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(int(format.BlockSize))
	for p := range int64(pages) {
		buf[0], buf[1] = byte(p), byte(p>>8)|0x80
		if _, err := w.WriteAt(buf, p*format.PageSize+format.BlockSize); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := w.Seal(t.Context()); err != nil {
		t.Fatal(err)
	}
	src, err := d.OpenStack([]string{uid}, size)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	v := src.(*transfer.View)
	none, one, most := v.IndexMemory(), int64(0), int64(0)
	got := make([]byte, format.BlockSize)
	read := func(p int64) {
		t.Helper()
		if _, err := v.ReadAt(got, p*format.PageSize+format.BlockSize); err != nil {
			t.Fatal(err)
		}
		buf[0], buf[1] = byte(p), byte(p>>8)|0x80
		if !bytes.Equal(got, buf) {
			t.Fatalf("page %d holds other data", p)
		}
	}
	for p := range int64(pages) {
		read(p)
		if most = max(most, v.IndexMemory()-none); p == 0 {
			one = most
		}
	}
	if most > (2*transfer.KeptPages+1)*one {
		t.Errorf("the index of %d pages takes %d bytes, one page %d", pages, most, one)
	}
	read(0)
	read(pages - 1)
}
