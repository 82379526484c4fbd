package stack

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// Many small pieces are written by way of the page cache, in a goroutine of their own: room for them is found when they
// are written out, together, which takes the file system a fraction of the time that one direct write after another
// does.

// scatterer writes spans for one replica: one goroutine gives them to the page cache, the other has what is there
// written out meanwhile. Close ends both.
type scatterer struct{ put, out *worker }

func (s *scatterer) close() {
	if s.put != nil {
		s.put.close()
		s.out.close()
	}
}

// scatter writes the spans of a request. Loop thread.
func (r *Replica) scatter(q *block.Request) {
	if r.scattering.put == nil {
		r.scattering = scatterer{newWorker(), newWorker()}
	}
	out := r.scattering.out
	f, w := r.flight(q), r.now
	r.metaMu.Lock()
	name := r.dir + "/" + r.meta.Head + dataSuffix
	r.metaMu.Unlock()
	w.left++
	r.scattering.put.put(func() {
		done, torn, err := w.spread(r.disk.FS, name, q)
		out.put(func() {
			var lost error
			if err == nil {
				lost = w.writeOut(block.Span{Off: q.Off, Len: q.Len})
			}
			r.ring.Post(func() {
				for _, s := range q.Spans[:done] {
					r.written(w, q.Buf[s.Off:][:s.Len], q.Off+s.Off)
				}
				for _, s := range torn {
					r.place(w, s.Off>>BlockBits, (s.Off+s.Len)>>BlockBits)
				}
				w.ended()
				switch {
				case err != nil:
					f.end(errnoOf(err))
				case lost != nil:
					r.fail(lost)
					f.end(unix.EIO)
				default:
					f.acknowledge()
				}
			})
		})
	})
}

// spread writes the spans, says how many of them are there, and which ranges of the next one are after an error. In the
// scatterer.
func (w *writes) spread(fsys file.FS, name string, q *block.Request) (done int, torn []block.Span, err error) {
	if w.cached == nil {
		if w.cached, err = fsys.Open(name, os.O_RDWR, 0); err != nil {
			return 0, nil, err
		}
	}
	for _, s := range q.Spans {
		if _, err = w.cached.WriteAt(q.Buf[s.Off:][:s.Len], q.Off+s.Off); err != nil {
			return done, found(int(w.cached.Fd()), q.Off+s.Off, q.Off+s.Off+s.Len), err
		}
		done++
	}
	return done, nil, nil
}

// mostBehind is how many writes stay in the page cache after they were written out, or are being.
const mostBehind = 16

// writeOut begins to write out what was spread over a range, so that no flush has all of it to do, and has the page
// cache forget what was long ago: nobody reads it by way of that. An error of what was waited for must not be passed
// over: the flush would find it, too, but not that of a process that opens the file after the death of this one. In the
// scatterer.
func (w *writes) writeOut(s block.Span) error {
	fd := int(w.cached.Fd())
	_ = unix.SyncFileRange(fd, s.Off, s.Len, unix.SYNC_FILE_RANGE_WRITE) // what fails the wait or the flush tells
	if w.behind = append(w.behind, s); len(w.behind) <= mostBehind {
		return nil
	}
	old := w.behind[0]
	w.behind = append(w.behind[:0], w.behind[1:]...)
	err := unix.SyncFileRange(fd, old.Off, old.Len,
		unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) { // forbidden here: the flush has it all to do
		err = nil
	}
	_ = unix.Fadvise(fd, old.Off, old.Len, unix.FADV_DONTNEED)
	return err
}

// found are the parts of a range that a file holds as data.
func found(fd int, off, end int64) (list []block.Span) {
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

// forget closes what spread has opened. No write is under way.
func (w *writes) forget() error {
	if w == nil || w.cached == nil {
		return nil
	}
	h := w.cached
	w.cached = nil
	return h.Close()
}

// spansFit reports whether the spans of a write are what they should be.
func spansFit(q *block.Request) bool {
	at := int64(0)
	for _, s := range q.Spans {
		if (s.Off|s.Len)&(BlockSize-1) != 0 || s.Off < at || s.Len <= 0 || s.Len > q.Len || s.Off > q.Len-s.Len {
			return false
		}
		at = s.Off + s.Len
	}
	return q.Op == block.OpWrite
}
