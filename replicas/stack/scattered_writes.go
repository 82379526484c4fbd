package stack

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// Many small spans are written through the page cache, in a goroutine of their own: the file system allocates blocks
// for all spans together at the writeout, in a fraction of the time of one direct write after another.

// scatterer writes spans for one replica: one goroutine writes to the page cache, the other one writes the page cache
// out meanwhile. Close ends both.
type scatterer struct{ put, out *worker }

func (s *scatterer) close() {
	if s.put != nil {
		s.put.close()
		s.out.close()
	}
}

// scatterWrite writes the spans of a request. Loop thread.
func (r *Replica) scatterWrite(q *block.Request) {
	if r.scattering.put == nil {
		r.scattering = scatterer{newWorker(), newWorker()}
	}
	out := r.scattering.out
	f, w := r.newRequest(q), r.now
	r.metaMu.Lock()
	name := r.dir + "/" + r.meta.Head + dataSuffix
	r.metaMu.Unlock()
	w.left++
	r.scattering.put.put(func() {
		done, torn, err := w.writeSpans(r.disk.FS, name, q)
		out.put(func() {
			var lost error
			if err == nil {
				lost = w.writeOut(block.Span{Off: q.Off, Len: q.Len})
			}
			r.ring.Post(func() {
				for _, s := range q.Spans[:done] {
					r.indexWrite(w, q.Buf[s.Off:][:s.Len], q.Off+s.Off)
				}
				for _, s := range torn {
					r.indexBlocks(w, s.Off>>blockBits, (s.Off+s.Len)>>blockBits)
				}
				w.writeEnded()
				switch {
				case err != nil:
					f.endRequest(errnoOf(err))
				case lost != nil:
					r.failWrites(lost)
					f.endRequest(unix.EIO)
				default:
					f.acknowledge()
				}
			})
		})
	})
}

// writeSpans writes the spans, and returns how many are written, and after an error the written ranges of the next
// span. In the scatterer.
func (w *writes) writeSpans(fsys file.FS, name string, q *block.Request) (done int, torn []block.Span, err error) {
	if w.cached == nil {
		if w.cached, err = fsys.Open(name, os.O_RDWR, 0); err != nil {
			return 0, nil, err
		}
	}
	for _, s := range q.Spans {
		if _, err = w.cached.WriteAt(q.Buf[s.Off:][:s.Len], q.Off+s.Off); err != nil {
			return done, findData(int(w.cached.Fd()), q.Off+s.Off, q.Off+s.Off+s.Len), err
		}
		done++
	}
	return done, nil, nil
}

// mostBehind is how many writes stay in the page cache during and after their writeout.
const mostBehind = 16

// writeOut starts the writeout of a range, so that a flush has less to do, and drops older ranges from the page cache,
// which no reader uses. writeOut returns errors of the older writeout: the next flush reports them, too, but a process
// that opens the file after the death of this one would not see them. In the scatterer.
func (w *writes) writeOut(s block.Span) error {
	fd := int(w.cached.Fd())
	_ = unix.SyncFileRange(fd, s.Off, s.Len, unix.SYNC_FILE_RANGE_WRITE) // the wait or the flush reports errors
	if w.behind = append(w.behind, s); len(w.behind) <= mostBehind {
		return nil
	}
	old := w.behind[0]
	w.behind = append(w.behind[:0], w.behind[1:]...)
	err := unix.SyncFileRange(fd, old.Off, old.Len,
		unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) { // not permitted here: the flush writes all
		err = nil
	}
	_ = unix.Fadvise(fd, old.Off, old.Len, unix.FADV_DONTNEED)
	return err
}

// findData returns the parts of a range that a file holds as data.
func findData(fd int, off, end int64) (list []block.Span) {
	for off < end {
		from, to, err := file.NextData(fd, off, end)
		if err != nil || from >= end {
			break
		}
		list = append(list, block.Span{Off: from, Len: to - from})
		off = to
	}
	return list
}

// closeCached closes the buffered file. No write is in progress.
func (w *writes) closeCached() error {
	if w == nil || w.cached == nil {
		return nil
	}
	h := w.cached
	w.cached = nil
	return h.Close()
}

// spansFit reports whether the spans of a write are valid.
func spansFit(q *block.Request) bool {
	at := int64(0)
	for _, s := range q.Spans {
		if (s.Off|s.Len)&(blockSize-1) != 0 || s.Off < at || s.Len <= 0 || s.Len > q.Len || s.Off > q.Len-s.Len {
			return false
		}
		at = s.Off + s.Len
	}
	return q.Op == block.OpWrite
}
