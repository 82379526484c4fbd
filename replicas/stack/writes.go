package stack

import (
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// writes are those to one head that are under way. A cut leaves them to the layer that the head becomes: they were
// issued before its instant, and nobody was told of their end. The loop thread's.
type writes struct {
	value uint16        // of their blocks in the index
	left  int           // under way
	over  chan struct{} // of a head that was cut off: closed when none is left
	zeros []block.Span  // of a head that was cut off: all-zero writes that its log does not have

	cached file.Handle  // the head, buffered; nil: not needed so far. The scatterer's
	behind []block.Span // of it, that the page cache may have still
}

// seal says that no more come: their blocks are those of a layer from now on.
func (w *writes) seal(value uint16, zeros []block.Span) {
	w.value, w.zeros, w.over = value, zeros, make(chan struct{})
	if w.left == 0 {
		close(w.over)
	}
}

// ended takes one out, at its end.
func (w *writes) ended() {
	if w.left--; w.left == 0 && w.over != nil {
		close(w.over)
	}
}

// calm reports whether all that is under way may see a new head come: reads and writes have the files that they began
// with. What is recorded, and pages of the index that are being built, are of the head that is there.
func (r *Replica) calm() bool { return r.slow == 0 && r.syncing == 0 && len(r.waiting) == 0 }

// written takes note of blocks that are in the head now, or in the layer that it became. Until then readers see what
// was there before. All-zero blocks that hide lower data are remembered: should the file system not keep them as data,
// the record still says what they are. It becomes durable with the next flush.
func (r *Replica) written(w *writes, buf []byte, off int64) {
	b, end := off>>BlockBits, (off+int64(len(buf)))>>BlockBits
	zero := func(i int64) bool { return format.IsZero(buf[(i-b)<<BlockBits:][:BlockSize]) }
	switch {
	case w.value != FromHead:
		for i := b; i < end && w.value > FromLayer; i++ {
			if zero(i) {
				w.zeros = addSpan(w.zeros, i<<BlockBits, BlockSize)
			}
		}
	case len(r.layers) > 0:
		for i := b; i < end; {
			v, n := r.idx.Run(i, end)
			for j := i; v >= FromLayer && j < i+n; j++ {
				if zero(j) {
					r.zeros = addSpan(r.zeros, j<<BlockBits, BlockSize)
				}
			}
			i += n
		}
	}
	r.place(w, b, end)
}

// place puts the blocks [b, end), which a write has reached, into the index. What the head has is newer than what a
// late write brings to a layer.
func (r *Replica) place(w *writes, b, end int64) {
	if w.value == FromHead {
		r.idx.Set(b, end, FromHead)
		return
	}
	for b < end {
		v, n := r.idx.Run(b, end)
		if v != FromHead {
			r.idx.Set(b, b+n, w.value)
		}
		b += n
	}
}

// recordZeros writes what the log lacks, and waits for it.
func (r *Replica) recordZeros() error {
	done := make(chan error, 1)
	err := r.onLoop(func() {
		spans := r.takeZeros()
		if len(spans) == 0 {
			done <- nil
			return
		}
		r.record(spans, func(err error) {
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
