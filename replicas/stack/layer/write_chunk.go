package layer

import (
	"crypto/sha256"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
)

// WriteChunk implements block.DigestSink.
func (w *Writer) WriteChunk(p []byte, off int64, digest [sumSize]byte) error {
	_, err := w.write(p, off, func(chunk []byte) [sumSize]byte {
		if len(chunk) < len(p) {
			return sha256.Sum256(chunk)
		}
		return digest
	})
	return err
}

// allocateWindow takes room for the data of the window of chunks around c, before the first write to the window: ext4
// runs direct writes at once only into allocated blocks. A failure does no harm.
func (w *Writer) allocateWindow(c int64, kinds *format.Index) {
	const window = 32 // chunks
	n := c / window
	w.Mu.Lock()
	done := w.allocated[n]
	if w.allocated == nil {
		w.allocated = map[int64]bool{}
	}
	w.allocated[n] = true
	w.Mu.Unlock()
	if done {
		return
	}
	for b, end := n*window*chunkBlks, min((n+1)*window*chunkBlks, kinds.Blocks); b < end; {
		v, m := kinds.Run(b, end)
		if block.Kind(v) == block.Data && m<<blockBits >= 64<<10 {
			_ = unix.Fallocate(int(w.data.Fd()), unix.FALLOC_FL_KEEP_SIZE, b<<blockBits, m<<blockBits)
		}
		b += m
	}
}

// PutChunk writes a chunk of known kinds, with its digest and checksums. No other writer writes to the chunk.
func (w *Writer) PutChunk(c int64, kinds *format.Index, buf []byte, sums format.ChunkSums) error {
	const small = 64 << 10 // smaller runs go through the page cache
	first := c * chunkBlks
	if _, err := w.checkAccess(c*chunkSize, int64(len(buf))); err != nil {
		return w.nameError(err)
	}
	w.allocateWindow(c, kinds)
	cached := false
	for b, end := first, first+int64(len(buf))>>blockBits; b < end; {
		v, n := kinds.Run(b, end)
		if block.Kind(v) == block.Data {
			part := buf[(b-first)<<blockBits:][:n<<blockBits]
			h := w.direct
			if len(part) < small {
				h, cached = w.data, true
			}
			if _, err := h.WriteAt(part, b<<blockBits); err != nil {
				return w.nameError(err)
			}
			w.countWritten(int64(len(part)))
		}
		w.Mu.Lock()
		w.kinds.Set(b, b+n, v)
		w.Mu.Unlock()
		b += n
	}
	if cached { // so that no sync takes long: see diskfs.Emptier
		if err := w.data.Writeout(c*chunkSize, int64(len(buf))); err != nil {
			return w.nameError(err)
		}
	}
	if err := w.putSums(c, sums); err != nil {
		return w.nameError(err)
	}
	w.Mu.Lock()
	w.known[c] = true
	w.Mu.Unlock()
	return nil
}
