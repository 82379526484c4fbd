package importer

import (
	"bytes"
	"io"

	"drover.io/drover/block"
)

var zeros = make([]byte, 1<<20)

// chunkWriter writes chunks of a layer: a chunk of zeros stays a hole, any other chunk is written as a whole, with its
// zeros. So the digest of a layer follows from the content alone, not from the holes of the origin, and the writer of
// the layer digests each chunk while the chunk is in memory. A last block that is not full is padded.
func chunkWriter(w io.WriterAt) func(p []byte, off int64) error {
	return func(p []byte, off int64) error {
		if isZero(p) {
			return nil
		}
		if tail := len(p) % block.Size; tail != 0 {
			// The memory behind the bytes belongs to the chunk.
			n := len(p)
			p = p[:n+block.Size-tail]
			clear(p[n:])
		}
		_, err := w.WriteAt(p, off)
		return err
	}
}

func isZero(p []byte) bool {
	for len(p) > 0 {
		n := min(len(p), block.Size)
		if !bytes.Equal(p[:n], zeros[:n]) {
			return false
		}
		p = p[n:]
	}
	return true
}

// chunkSource reports a source in whole chunks: a chunk with any data is data from its start to its end. One goroutine
// calls Next.
type chunkSource struct {
	block.Source
	last block.Extent // of the source; a long extent is asked for once
}

func (s *chunkSource) Next(off int64) (block.Extent, error) {
	size := s.Size()
	data := off // the first byte of data at or after off
	for data < size {
		e := s.last
		if data < e.Off || data >= e.End() {
			var err error
			if e, err = s.Source.Next(data); err != nil {
				return e, err
			}
			s.last = e
		}
		if e.Kind == block.Data {
			break
		}
		data = e.End()
	}
	chunk := data / chunkSize * chunkSize
	switch {
	case data >= size:
		return block.Extent{Off: off, Len: size - off, Kind: block.Hole}, nil
	case chunk > off:
		return block.Extent{Off: off, Len: chunk - off, Kind: block.Hole}, nil
	}
	return block.Extent{Off: off, Len: min(chunk+chunkSize, size) - off, Kind: block.Data}, nil
}

// chunkSink is a block.Sink that writes by chunkWriter. Explicit zeros are holes: an image has no layer below.
type chunkSink struct {
	block.Sink
	put func([]byte, int64) error
}

func (s chunkSink) WriteAt(p []byte, off int64) (int, error) {
	n := len(p)
	if tail := n % block.Size; tail != 0 {
		// chunkWriter pads in place, which must not change memory of the caller.
		p = append(make([]byte, 0, n+block.Size-tail), p...)
	}
	if err := s.put(p, off); err != nil {
		return 0, err
	}
	return n, nil
}

func (s chunkSink) ZeroAt(int64, int64) error { return nil }
