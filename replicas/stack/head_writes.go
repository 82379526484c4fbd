package stack

import (
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// writes holds the writes to one head in progress. After a cut the writes belong to the layer that the head became:
// they began before the instant of the cut, and are not acknowledged yet. The fields belong to the loop's thread.
type writes struct {
	value uint16        // of the blocks in the index
	left  int           // in progress
	over  chan struct{} // of a former head: closed at the end of the last write
	zeros []block.Span  // of a former head: all-zero writes that the log lacks

	cached file.Handle  // the head, buffered; nil: not needed so far. The scatterer's
	behind []block.Span // ranges that the page cache may still hold
}

// seal ends the list of writes: their blocks belong to a layer from now on.
func (w *writes) seal(value uint16, zeros []block.Span) {
	w.value, w.zeros, w.over = value, zeros, make(chan struct{})
	if w.left == 0 {
		close(w.over)
	}
}

// writeEnded counts the end of a write.
func (w *writes) writeEnded() {
	if w.left--; w.left == 0 && w.over != nil {
		close(w.over)
	}
}

// maySwitchHead reports whether a new head may come during the requests in progress: reads and writes keep their files,
// but zero records and pages of the index that are being built belong to the present head.
func (r *Replica) maySwitchHead() bool { return r.slow == 0 && r.syncing == 0 && len(r.waiting) == 0 }

// indexWrite puts written blocks of the head, or of the layer that the head became, into the index; before, readers see
// the old content. All-zero blocks over lower data also get a zero record, which the next flush makes durable, in case
// the file system does not keep zeros as data.
func (r *Replica) indexWrite(w *writes, buf []byte, off int64) {
	b, end := off>>blockBits, (off+int64(len(buf)))>>blockBits
	zero := func(i int64) bool { return format.IsZero(buf[(i-b)<<blockBits:][:blockSize]) }
	switch {
	case w.value != fromHead:
		for i := b; i < end && w.value > fromLayer; i++ {
			if zero(i) {
				w.zeros = addSpan(w.zeros, i<<blockBits, blockSize)
			}
		}
	case len(r.layers) > 0:
		for i := b; i < end; {
			v, n := r.idx.Run(i, end)
			for j := i; v >= fromLayer && j < i+n; j++ {
				if zero(j) {
					r.zeros = addSpan(r.zeros, j<<blockBits, blockSize)
				}
			}
			i += n
		}
	}
	r.indexBlocks(w, b, end)
}

// indexBlocks puts the written blocks [b, end) into the index. Blocks of the head are newer than a late write to a
// layer.
func (r *Replica) indexBlocks(w *writes, b, end int64) {
	if w.value == fromHead {
		r.idx.Set(b, end, fromHead)
		return
	}
	for b < end {
		v, n := r.idx.Run(b, end)
		if v != fromHead {
			r.idx.Set(b, b+n, w.value)
		}
		b += n
	}
}

// recordZeros writes the missing zero records and waits for the sync.
func (r *Replica) recordZeros() error {
	done := make(chan error, 1)
	err := r.onLoop(func() {
		spans := r.takeZeros()
		if len(spans) == 0 {
			done <- nil
			return
		}
		r.appendZeros(spans, func(err error) {
			if err != nil {
				r.zeros = append(spans, r.zeros...)
			}
			done <- err
		})
	})
	if err != nil {
		return err
	}
	return <-done
}
