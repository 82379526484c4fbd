package http

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// startTimeout is how long the first connection waits for the answers of the others.
const startTimeout = 3 * time.Second

// rangeWindow fetches several ranges at once and returns their bytes in order. It holds as many ranges in memory as
// there are connections, and uses fewer connections if the server refuses some. One goroutine calls Read; close ends
// the workers.
type rangeWindow struct {
	s      *server
	cancel context.CancelFunc
	stop   func() bool
	wg     sync.WaitGroup

	mu      sync.Mutex
	news    *sync.Cond
	queue   []*rangeBuffer // in order; Read reads the first range
	todo    []*rangeBuffer // ranges of queue without a worker, in order
	free    [][]byte
	next    int64 // first byte behind all ranges
	workers int   // workers
	err     error // final
}

// rangeBuffer is a range in transfer. buf[:have] has arrived and no longer changes.
type rangeBuffer struct {
	off  int64
	buf  []byte
	have int
	read int
}

// newRangeWindow starts at off. a is the answer with the first range, or nil. It returns once the answers of all
// connections are known to have one validator, or ErrChanged.
func newRangeWindow(of *server, a *answer, off int64) (*rangeWindow, error) {
	ctx, cancel := context.WithCancel(of.ctx)
	s := of.withContext(ctx)
	w := &rangeWindow{s: s, cancel: cancel, next: off}
	w.news = sync.NewCond(&w.mu)
	w.stop = context.AfterFunc(ctx, func() { w.fail(ctx.Err()) })
	if a == nil {
		n := min(s.opts.RangeSize, s.size-off)
		var err error
		if a, err = s.getRange(off, n, s.opts.Resumes); err != nil {
			return w, err
		}
		if !a.partial {
			a.body.Close()
			return w, s.errChanged(off)
		}
	}
	w.startWorker(w.addRange(), a)
	type opened struct {
		p   *rangeBuffer
		a   *answer
		err error
	}
	helpers := make(chan opened, s.opts.Connections)
	n := 0
	for ; n < s.opts.Connections-1; n++ {
		p := w.addRange()
		if p == nil {
			break
		}
		w.wg.Go(func() {
			a, err := s.requestRange(p.off, int64(len(p.buf)))
			if err == nil && !a.partial {
				a.body.Close()
				err = s.errChanged(p.off)
			}
			helpers <- opened{p, a, err}
		})
	}
	late := time.NewTimer(startTimeout)
	defer late.Stop()
	for i := range n {
		select {
		case h := <-helpers:
			switch {
			case h.err == nil:
				w.startWorker(h.p, h.a)
			case errors.Is(h.err, origin.ErrChanged):
				w.close()
				return nil, h.err
			default:
				w.requeueRange(h.p)
			}
		case <-late.C:
			// A later answer still gets a worker.
			w.wg.Go(func() {
				for range n - i {
					h := <-helpers
					if h.err == nil {
						w.startWorker(h.p, h.a)
					} else {
						w.requeueRange(h.p)
					}
				}
			})
			return w, nil
		}
	}
	return w, nil
}

// addRange adds the next range; nil without a further range or without memory.
func (w *rangeWindow) addRange() *rangeBuffer {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.addRangeLocked()
}

func (w *rangeWindow) addRangeLocked() *rangeBuffer {
	n := min(w.s.opts.RangeSize, w.s.size-w.next)
	if n <= 0 || len(w.queue) >= w.s.opts.Connections {
		return nil
	}
	var buf []byte
	if len(w.free) > 0 {
		buf, w.free = w.free[0], w.free[1:]
	} else {
		buf = make([]byte, min(w.s.opts.RangeSize, w.s.size))
	}
	p := &rangeBuffer{off: w.next, buf: buf[:n]}
	w.next += n
	w.queue = append(w.queue, p)
	return p
}

// requeueRange leaves a range to another worker.
func (w *rangeWindow) requeueRange(p *rangeBuffer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requeueLocked(p)
}

func (w *rangeWindow) requeueLocked(p *rangeBuffer) {
	at := 0
	for at < len(w.todo) && w.todo[at].off < p.off {
		at++
	}
	w.todo = append(w.todo[:at], append([]*rangeBuffer{p}, w.todo[at:]...)...)
	w.news.Broadcast()
}

// nextRange waits for a range without a worker; nil at the end.
func (w *rangeWindow) nextRange() *rangeBuffer {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		if w.err != nil {
			return nil
		}
		if len(w.todo) > 0 {
			p := w.todo[0]
			w.todo = w.todo[1:]
			return p
		}
		if p := w.addRangeLocked(); p != nil {
			return p
		}
		if w.next >= w.s.size && len(w.queue) == 0 {
			return nil
		}
		w.news.Wait()
	}
}

// startWorker starts a worker with a range and its answer; the worker then fetches further ranges.
func (w *rangeWindow) startWorker(p *rangeBuffer, a *answer) {
	w.mu.Lock()
	w.workers++
	w.mu.Unlock()
	w.wg.Go(func() {
		x := &rangeReader{s: w.s, off: p.off, end: p.off + int64(len(p.buf)), body: a.body}
		for p != nil {
			// Only the last worker waits and asks again, to spare the server.
			patient := w.isLast()
			err := w.fetchRange(x, p, patient)
			x.endRequest()
			if err != nil && w.endWorker(p, err, patient) {
				return
			}
			if err == nil {
				p = w.nextRange()
			}
			if p != nil {
				x = &rangeReader{s: w.s, off: p.off + int64(p.have), end: p.off + int64(len(p.buf))}
			}
		}
		w.mu.Lock()
		w.workers--
		w.mu.Unlock()
	})
}

// fetchRange fetches the missing bytes of a range.
func (w *rangeWindow) fetchRange(x *rangeReader, p *rangeBuffer, patient bool) error {
	if x.body == nil {
		busy := 0
		if patient {
			busy = w.s.opts.Resumes
		}
		err := x.openRange(busy)
		if err != nil && patient && isTemporary(err) && origin.Wait(err) == 0 {
			err = x.resumeRange(err)
		}
		if err != nil {
			return err
		}
	}
	for p.have < len(p.buf) {
		n, err := x.Read(p.buf[p.have:])
		if err != nil {
			return err
		}
		w.mu.Lock()
		p.have += n
		w.news.Broadcast()
		w.mu.Unlock()
	}
	return nil
}

func (w *rangeWindow) isLast() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.workers == 1
}

// isTemporary reports whether the same request may succeed later.
func isTemporary(err error) bool {
	return api.Is(err, api.Unavailable) && !errors.Is(err, origin.ErrChanged)
}

// endWorker handles the error of a worker. With other workers, the range is left to the others; the last worker tries
// once more (false) after a temporary error, or ends the transfer.
func (w *rangeWindow) endWorker(p *rangeBuffer, err error, patient bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case isTemporary(err) && w.workers > 1:
		w.requeueLocked(p)
	case isTemporary(err) && !patient:
		return false
	default:
		w.failLocked(err)
	}
	w.workers--
	return true
}

func (w *rangeWindow) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failLocked(err)
}

func (w *rangeWindow) failLocked(err error) {
	if w.err == nil {
		w.err = err
	}
	w.news.Broadcast()
}

// Read returns the next bytes; bytes that arrived come before an error.
func (w *rangeWindow) Read(p []byte) (int, error) {
	w.mu.Lock()
	for len(w.queue) == 0 && w.next < w.s.size && w.err == nil {
		w.news.Wait()
	}
	if len(w.queue) == 0 {
		defer w.mu.Unlock()
		if w.next >= w.s.size {
			return 0, io.EOF
		}
		return 0, w.err
	}
	head := w.queue[0]
	for head.read == head.have && w.err == nil {
		w.news.Wait()
	}
	have, err := head.have, w.err
	w.mu.Unlock()
	if head.read == have {
		return 0, err
	}
	n := copy(p, head.buf[head.read:have])
	head.read += n
	if head.read == len(head.buf) {
		w.mu.Lock()
		w.queue = w.queue[1:]
		w.free = append(w.free, head.buf[:cap(head.buf)])
		w.news.Broadcast()
		w.mu.Unlock()
	}
	return n, nil
}

// close ends the transfer and waits for the workers.
func (w *rangeWindow) close() {
	w.stop()
	w.fail(api.Errorf(api.Unavailable, "%s: closed", w.s.name))
	w.cancel()
	w.wg.Wait()
}
