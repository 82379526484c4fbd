package repo

import (
	"sync"

	"drover.io/drover/backups/repo/blob"
)

// A blob is stored compressed if this saves more than 3 %. Samples of a large data blob decide whether compression is
// tried at all: random bytes cost almost nothing then.
const (
	probeFrom   = 128 << 10
	probes      = 8
	probeLength = 8 << 10
	savedPart   = 33 // compressed is at least a 33rd part smaller
)

// scratchPool has memory for compressed blobs.
var scratchPool = sync.Pool{New: func() any { return new([]byte) }}

// compressBlob returns the bytes to store and, if they are compressed, the plain length. The result uses the memory of
// plain or scratch.
func compressBlob(kind blob.Kind, plain []byte, scratch *[]byte) (stored []byte, plainLength int) {
	encoder := fastEncoder()
	if kind == blob.Tree {
		encoder = betterEncoder()
	} else if len(plain) >= probeFrom && !probeSaves(plain, scratch) {
		return plain, 0
	}
	*scratch = encoder.EncodeAll(plain, (*scratch)[:0])
	if !isWorthwhile(len(*scratch), len(plain)) {
		return plain, 0
	}
	return *scratch, len(plain)
}

func isWorthwhile(stored, plain int) bool { return stored < plain-plain/savedPart }

// probeSaves compresses samples of plain.
func probeSaves(plain []byte, scratch *[]byte) bool {
	samples := (*scratch)[:0]
	for i := range probes {
		at := (len(plain) - probeLength) / (probes - 1) * i
		samples = append(samples, plain[at:at+probeLength]...)
	}
	packed := fastEncoder().EncodeAll(samples, samples)
	*scratch = packed[:0]
	return isWorthwhile(len(packed)-len(samples), len(samples))
}
