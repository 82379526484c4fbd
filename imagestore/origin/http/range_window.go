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

// helperWait is how long the other connections may take to be there; the first one is not held up longer.
const helperWait = 3 * time.Second

// rangeWindow brings a run of bytes in pieces, several at once, and gives them in order. At most as many pieces as
// there are connections are in memory. A server that wants fewer connections gets fewer. Read belongs to one goroutine;
// the workers belong to the window and end with close.
type rangeWindow struct {
	s      *server
	cancel context.CancelFunc
	stop   func() bool
	wg     sync.WaitGroup

	mu    sync.Mutex
	news  *sync.Cond
	queue []*piece // in order; the first one is being read
	todo  []*piece // of queue: what nobody brings now, in order
	free  [][]byte
	next  int64 // the first byte that no piece has
	alive int   // workers
	err   error // no more bytes come
}

// piece is a run of bytes on its way. buf[:have] is there, and no longer changes.
type piece struct {
	off  int64
	buf  []byte
	have int
	read int
}

// newRangeWindow begins at off. a is the answer with the first piece, or nil. It returns when it is known that the
// answers of all connections are of the same bytes: ErrChanged if they are not.
func newRangeWindow(of *server, a *answer, off int64) (*rangeWindow, error) {
	ctx, cancel := context.WithCancel(of.ctx)
	s := of.within(ctx)
	w := &rangeWindow{s: s, cancel: cancel, next: off}
	w.news = sync.NewCond(&w.mu)
	w.stop = context.AfterFunc(ctx, func() { w.fail(ctx.Err()) })
	if a == nil {
		n := min(s.opts.Piece, s.size-off)
		var err error
		if a, err = s.get(off, n, s.opts.Resumes); err != nil {
			return w, err
		}
		if !a.part {
			a.body.Close()
			return w, s.changed(off)
		}
	}
	w.work(w.cut(), a)
	type opened struct {
		p   *piece
		a   *answer
		err error
	}
	helpers := make(chan opened, s.opts.Connections)
	n := 0
	for ; n < s.opts.Connections-1; n++ {
		p := w.cut()
		if p == nil {
			break
		}
		w.wg.Go(func() {
			a, err := s.once(p.off, int64(len(p.buf)))
			if err == nil && !a.part {
				a.body.Close()
				err = s.changed(p.off)
			}
			helpers <- opened{p, a, err}
		})
	}
	late := time.NewTimer(helperWait)
	defer late.Stop()
	for i := range n {
		select {
		case h := <-helpers:
			switch {
			case h.err == nil:
				w.work(h.p, h.a)
			case errors.Is(h.err, origin.ErrChanged):
				w.close()
				return nil, h.err
			default:
				w.back(h.p)
			}
		case <-late.C:
			// Whoever comes later works all the same.
			w.wg.Go(func() {
				for range n - i {
					h := <-helpers
					if h.err == nil {
						w.work(h.p, h.a)
					} else {
						w.back(h.p)
					}
				}
			})
			return w, nil
		}
	}
	return w, nil
}

// cut makes the next piece, or nil where there is none, or no room for it.
func (w *rangeWindow) cut() *piece {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cutLocked()
}

func (w *rangeWindow) cutLocked() *piece {
	n := min(w.s.opts.Piece, w.s.size-w.next)
	if n <= 0 || len(w.queue) >= w.s.opts.Connections {
		return nil
	}
	var buf []byte
	if len(w.free) > 0 {
		buf, w.free = w.free[0], w.free[1:]
	} else {
		buf = make([]byte, min(w.s.opts.Piece, w.s.size))
	}
	p := &piece{off: w.next, buf: buf[:n]}
	w.next += n
	w.queue = append(w.queue, p)
	return p
}

// back gives a piece to whoever brings it.
func (w *rangeWindow) back(p *piece) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.backLocked(p)
}

func (w *rangeWindow) backLocked(p *piece) {
	at := 0
	for at < len(w.todo) && w.todo[at].off < p.off {
		at++
	}
	w.todo = append(w.todo[:at], append([]*piece{p}, w.todo[at:]...)...)
	w.news.Broadcast()
}

// take waits for a piece to bring; nil: there is none any more.
func (w *rangeWindow) take() *piece {
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
		if p := w.cutLocked(); p != nil {
			return p
		}
		if w.next >= w.s.size && len(w.queue) == 0 {
			return nil
		}
		w.news.Wait()
	}
}

// work brings a piece, whose answer is there, and then others.
func (w *rangeWindow) work(p *piece, a *answer) {
	w.mu.Lock()
	w.alive++
	w.mu.Unlock()
	w.wg.Go(func() {
		x := &section{s: w.s, off: p.off, end: p.off + int64(len(p.buf)), body: a.body}
		for p != nil {
			// Only the last connection waits and asks again: others leave the server in peace.
			patient := w.last()
			err := w.fill(x, p, patient)
			x.drop()
			if err != nil && w.leave(p, err, patient) {
				return
			}
			if err == nil {
				p = w.take()
			}
			if p != nil {
				x = &section{s: w.s, off: p.off + int64(p.have), end: p.off + int64(len(p.buf))}
			}
		}
		w.mu.Lock()
		w.alive--
		w.mu.Unlock()
	})
}

// fill brings what is missing of a piece.
func (w *rangeWindow) fill(x *section, p *piece, patient bool) error {
	if x.body == nil {
		busy := 0
		if patient {
			busy = w.s.opts.Resumes
		}
		err := x.open(busy)
		if err != nil && patient && passing(err) && origin.Wait(err) == 0 {
			err = x.resume(err)
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

func (w *rangeWindow) last() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.alive == 1
}

// passing reports that the same request may be answered later.
func passing(err error) bool {
	return api.Is(err, api.Unavailable) && !errors.Is(err, origin.ErrChanged)
}

// leave is what a worker does about an error: it leaves its piece to the others, or is the last one and tries once
// more (false) where that may help, or ends the transfer.
func (w *rangeWindow) leave(p *piece, err error, patient bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case passing(err) && w.alive > 1:
		w.backLocked(p)
	case passing(err) && !patient:
		return false
	default:
		w.failLocked(err)
	}
	w.alive--
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

// Read gives the next bytes; what is there is given before an error.
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
