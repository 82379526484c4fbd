package block

import "testing"

// TestAlignedBufferIsAligned: Aligned accepts every buffer of AlignedBuffer of whole blocks at whole blocks, and
// nothing else.
func TestAlignedBufferIsAligned(t *testing.T) {
	for range 100 {
		b := AlignedBuffer(2 * Size)
		if len(b) != 2*Size || cap(b) != len(b) || !Aligned(b, 0) || !Aligned(b, Size) || !Aligned(b[Size:], 0) {
			t.Fatalf("a buffer of %d bytes, capacity %d, is not aligned", len(b), cap(b))
		}
		if Aligned(b, 512) || Aligned(b[:512], 0) || Aligned(b[512:512+Size], 0) || Aligned(b[:0], 0) || Aligned(nil, 0) {
			t.Fatal("a buffer counts as aligned, although its place, length or offset is not whole blocks")
		}
	}
	if b := AlignedBuffer(0); len(b) != 0 {
		t.Fatalf("an empty buffer has %d bytes", len(b))
	}
}
