package source

import (
	"bytes"
	"crypto/sha256"
	"encoding"
	"testing"
)

// A state leads to the sum of all, and their number stays bounded.
func TestTrail(t *testing.T) {
	sum := sha256.New()
	var tr Trail
	if _, ok := tr.Before(1 << 40); ok {
		t.Fatal("a state of nothing")
	}
	tr.Note(0, sum, 0)
	piece := make([]byte, 1<<10)
	const pieces = 3 * trailMost * trailStride >> 10
	for i := range pieces {
		piece[0] = byte(i)
		_, _ = sum.Write(piece[:1]) // a byte stands for all of them
		tr.Note(int64(i+1)<<10, sum, uint32(i+1))
	}
	if n := len(tr.marks); n >= trailMost || n < trailMost/4 {
		t.Fatalf("%d states", n)
	}
	m, ok := tr.Before(pieces << 9)
	if !ok || m.Off > pieces<<9 || m.Off < pieces<<9-8*trailStride || m.CRC != uint32(m.Off>>10) {
		t.Fatalf("%+v", m)
	}
	again := sha256.New()
	if err := again.(encoding.BinaryUnmarshaler).UnmarshalBinary(m.Sum); err != nil {
		t.Fatal(err)
	}
	for i := m.Off >> 10; i < pieces; i++ {
		_, _ = again.Write([]byte{byte(i)})
	}
	if !bytes.Equal(again.Sum(nil), sum.Sum(nil)) {
		t.Fatal("another sum")
	}
	if _, ok := tr.Before(m.Off - 1); ok {
		t.Fatal("what is before was not forgotten")
	}
}
