package origin

import (
	"bytes"
	"crypto/sha256"
	"encoding"
	"testing"
)

// TestHashStatesContinueAndStayBounded: a remembered state leads to the hash of the whole stream, and the number of
// states has a bound.
func TestHashStatesContinueAndStayBounded(t *testing.T) {
	sum := sha256.New()
	var tr HashStates
	if _, ok := tr.Before(1 << 40); ok {
		t.Fatal("a state of nothing")
	}
	tr.Record(0, sum)
	piece := make([]byte, 1<<10)
	const pieces = 3 * maxHashStates * hashStride >> 10
	for i := range pieces {
		piece[0] = byte(i)
		_, _ = sum.Write(piece[:1]) // a byte stands for the whole piece
		tr.Record(int64(i+1)<<10, sum)
	}
	if n := len(tr.states); n >= maxHashStates || n < maxHashStates/4 {
		t.Fatalf("%d states", n)
	}
	m, ok := tr.Before(pieces << 9)
	if !ok || m.Off > pieces<<9 || m.Off < pieces<<9-8*hashStride {
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
