package stack

import (
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// Many small pieces are written by way of the page cache, in a goroutine of their own: room for them is found when they
// are written out, together, which takes the file system a fraction of the time that one direct write after another
// does.

// scatterer writes spans for one replica. It has a goroutine, which Close ends.
type scatterer struct{ work *worker }

// scatter writes the spans of a request. Loop thread.
func (r *Replica) scatter(q *block.Request) {
	if r.scattering.work == nil {
		r.scattering.work = newWorker()
	}
	f, w := r.flight(q), r.now
	r.metaMu.Lock()
	name := r.dir + "/" + r.meta.Head + dataSuffix
	r.metaMu.Unlock()
	w.left++
	r.scattering.work.put(func() {
		done, torn, err := w.spread(r.disk.fs, name, q)
		r.ring.Post(func() {
			for _, s := range q.Spans[:done] {
				r.written(w, q.Buf[s.Off:][:s.Len], q.Off+s.Off)
			}
			for _, s := range torn {
				r.place(w, s.off>>blockBits, (s.off+s.n)>>blockBits)
			}
			w.ended()
			if err != nil {
				f.end(errnoOf(err))
				return
			}
			f.acknowledge()
		})
	})
}

// spread writes the spans, says how many of them are there, and which ranges of the next one are after an error. In the
// scatterer.
func (w *writes) spread(fsys file.FS, name string, q *block.Request) (done int, torn []span, err error) {
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
	// Begun now, so that no flush has all of it to do. What fails the flush tells.
	_ = unix.SyncFileRange(int(w.cached.Fd()), q.Off, q.Len, unix.SYNC_FILE_RANGE_WRITE)
	return done, nil, nil
}

// found are the parts of a range that a file holds as data.
func found(fd int, off, end int64) (list []span) {
	for off < end {
		from, to, err := file.NextData(fd, off, end)
		if err != nil || from >= end {
			break
		}
		list = append(list, span{from, to - from})
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
		if (s.Off|s.Len)&(blockSize-1) != 0 || s.Off < at || s.Len <= 0 || s.Len > q.Len || s.Off > q.Len-s.Len {
			return false
		}
		at = s.Off + s.Len
	}
	return q.Op == block.OpWrite
}
