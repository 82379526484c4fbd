package engine

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// A disk can hang without an error. Near is a member on a disk of the engine's own node that is given up then, as a
// Member on another node is: what it has under way is answered with an error, and the engine drops it. The kernel may
// still use the memory of that, which is lent until the disk answers. Only then is the replica closed, and can be
// opened again and come back.

// NearPatience is how long a Near is waited for: the limit is a multiple of the longest wait seen lately, between the
// two. What is no request, such as the adoption of an epoch, is waited for up to Max.
type NearPatience struct{ Min, Max time.Duration }

var nearPatience = NearPatience{Min: 4 * time.Second, Max: 30 * time.Second}

const (
	nearFactor = 8
	nearTick   = 250 * time.Millisecond
)

// Watch looks at the Nears of a process. Time is counted in ticks: while the process itself stands still there are
// none, nor while there is no Near. It has a goroutine, which Close ends.
type Watch struct {
	ticks atomic.Int64
	some  chan struct{} // there is a Near again
	stop  chan struct{}
	ended chan struct{}
	wg    sync.WaitGroup // replicas that are being closed

	mu     sync.Mutex
	nears  map[*Near]bool
	buried map[string]bool // replicas of which a disk that hangs has something still
}

// NewWatch starts one.
func NewWatch() *Watch {
	w := &Watch{some: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{}),
		nears: map[*Near]bool{}, buried: map[string]bool{}}
	go func() {
		defer close(w.ended)
		tick := time.NewTicker(nearTick)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				w.ticks.Add(1)
				if w.look() == 0 {
					tick.Stop() // an idle process is not woken for nothing
				}
			case <-w.some:
				tick.Reset(nearTick)
			case <-w.stop:
				return
			}
		}
	}()
	return w
}

func (w *Watch) now() time.Duration { return time.Duration(w.ticks.Load()) * nearTick }

// add begins to look at a Near.
func (w *Watch) add(n *Near) {
	w.mu.Lock()
	w.nears[n] = true
	first := len(w.nears) == 1
	w.mu.Unlock()
	if first {
		select {
		case w.some <- struct{}{}:
		default: // it is going to be heard anyway
		}
	}
}

// look looks at all of them, and returns how many there are.
func (w *Watch) look() int {
	w.mu.Lock()
	list := make([]*Near, 0, len(w.nears))
	for n := range w.nears {
		list = append(list, n)
	}
	w.mu.Unlock()
	for _, n := range list {
		n.look(w.now())
	}
	return len(list)
}

// Buried reports whether a replica was given up and its disk has not let go of it yet.
func (w *Watch) Buried(replica string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buried[replica]
}

// Waits is the number of those.
func (w *Watch) Waits() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.buried)
}

// Close ends the goroutine, and waits for replicas that are being closed. None may be buried.
func (w *Watch) Close() {
	close(w.stop)
	<-w.ended
	w.wg.Wait()
}

// NearOptions of a Near.
type NearOptions struct {
	Watch   *Watch
	Loop    Loop
	Replica string
	// OnDown is told, from the Watch's goroutine, that it was given up; may be nil.
	OnDown func(why error)
	// Patience is for tests.
	Patience NearPatience
}

// Near is a member on a disk of this node.
type Near struct {
	on Cutter
	o  NearOptions

	mu     sync.Mutex
	head   *nearSlot // under way, in the order of Submit
	tail   *nearSlot
	free   *nearSlot
	calls  map[*nearCall]bool
	left   int   // requests that were given up and are with the disk still
	dead   error // everything is answered with it
	died   chan struct{}
	closed bool
	buried bool
	quiet  chan struct{} // not nil: Close waits for this, with which what is under way has ended
	last   bool
	peak   time.Duration
	faded  time.Duration
}

// nearSlot is a request under way: the engine's own is answered before the disk's where that hangs.
type nearSlot struct {
	in         block.Request
	out        *block.Request // nil: it was given up
	lent       *block.Lent
	since      time.Duration
	prev, next *nearSlot
}

type nearCall struct{ since time.Duration }

// NewNear makes a member of a replica of this node, and owns it.
func NewNear(on Cutter, o NearOptions) *Near {
	if o.Patience == (NearPatience{}) {
		o.Patience = nearPatience
	}
	n := &Near{on: on, o: o, calls: map[*nearCall]bool{}, died: make(chan struct{}), faded: o.Watch.now()}
	o.Watch.add(n)
	return n
}

// Submit implements block.Submitter.
func (n *Near) Submit(q *block.Request) {
	n.mu.Lock()
	if why := n.dead; why != nil || n.closed {
		n.mu.Unlock()
		if q.Err = why; why == nil {
			q.Err = errEnded
		}
		q.Done(q)
		return
	}
	s := n.free
	if s == nil {
		s = &nearSlot{}
		s.in.Done = func(*block.Request) { n.answered(s) }
	} else {
		n.free = s.next
	}
	s.out, s.lent, s.since, s.prev, s.next = q, nil, n.o.Watch.now(), n.tail, nil
	s.in.Op, s.in.FUA, s.in.Off, s.in.Len, s.in.Buf, s.in.Err = q.Op, q.FUA, q.Off, q.Len, q.Buf, nil
	s.in.Spans = q.Spans
	if n.tail == nil {
		n.head = s
	} else {
		n.tail.next = s
	}
	n.tail = s
	n.mu.Unlock()
	n.on.Submit(&s.in)
}

var errEnded = api.Errorf(api.Unavailable, "the session has ended")

// unlink takes a slot out of those under way. The caller has the lock.
func (n *Near) unlink(s *nearSlot) {
	if s.prev == nil {
		n.head = s.next
	} else {
		s.prev.next = s.next
	}
	if s.next == nil {
		n.tail = s.prev
	} else {
		s.next.prev = s.prev
	}
	s.prev, s.next = nil, nil
}

// answered takes the disk's answer. Loop thread.
func (n *Near) answered(s *nearSlot) {
	n.mu.Lock()
	out, lent, err := s.out, s.lent, s.in.Err
	if out != nil {
		n.unlink(s)
		n.peak = max(n.peak, n.o.Watch.now()-s.since)
	} else {
		n.left--
	}
	s.out, s.lent, s.in.Buf, s.in.Spans = nil, nil, nil, nil
	s.next, n.free = n.free, s
	n.settle()
	n.mu.Unlock()
	if out != nil {
		out.Err = err
		out.Done(out)
		return
	}
	lent.Return()
}

// look gives the replica up where it takes too long.
func (n *Near) look(now time.Duration) {
	n.mu.Lock()
	if now-n.faded > time.Second {
		n.peak -= n.peak / 64
		n.faded = now
	}
	p := n.o.Patience
	limit := min(max(nearFactor*n.peak, p.Min), p.Max)
	late := n.head != nil && now-n.head.since > limit
	for c := range n.calls {
		if now-c.since > p.Max {
			late, limit = true, p.Max
		}
	}
	if !late || n.last || n.dead != nil {
		n.mu.Unlock()
		return
	}
	n.dead = api.Errorf(api.Unavailable, "replica %s: its disk does not answer for %v", n.o.Replica, limit)
	why := n.dead
	close(n.died)
	n.mu.Unlock()
	n.o.Loop.Post(func() { n.giveUp(why) })
	if n.o.OnDown != nil {
		n.o.OnDown(why)
	}
}

// giveUp answers what is under way. Loop thread.
func (n *Near) giveUp(why error) {
	var list []*block.Request
	n.mu.Lock()
	if n.dead != why { //nolint:errorlint // it was taken back meanwhile
		n.mu.Unlock()
		return
	}
	for s := n.head; s != nil; s = n.head {
		n.unlink(s)
		n.left++
		s.lent = &block.Lent{}
		s.out.Err, s.out.Lent = why, s.lent
		list = append(list, s.out)
		s.out = nil
	}
	n.mu.Unlock()
	for _, q := range list {
		q.Done(q)
	}
}

// idle reports whether the disk has nothing any more. The caller has the lock.
func (n *Near) idle() bool { return n.left == 0 && n.head == nil && len(n.calls) == 0 }

// settle closes a replica that was given up and is let go of by its disk, or lets Close do so. The caller has the lock.
func (n *Near) settle() {
	if n.quiet != nil && n.idle() {
		close(n.quiet)
		n.quiet = nil
	}
	if !n.buried || !n.idle() {
		return
	}
	n.buried = false
	n.o.Watch.wg.Go(func() {
		_ = n.on.Close() // whatever it lacks, it is made equal when it comes back
		n.o.Watch.mu.Lock()
		delete(n.o.Watch.buried, n.o.Replica)
		n.o.Watch.mu.Unlock()
	})
}

// nearAnswer is what came of a call.
type nearAnswer[T any] struct {
	v   T
	err error
}

// bound calls fn, which may hang. After an error it may be under way still, until the disk answers: it keeps to memory
// of its own. Anyway is for what may be called of a replica that was given up.
func bound[T any](ctx context.Context, n *Near, anyway bool, fn func() (T, error)) (none T, err error) {
	c := &nearCall{since: n.o.Watch.now()}
	n.mu.Lock()
	died := n.died
	if err = n.dead; n.closed {
		err = errEnded
	}
	if err != nil && !(anyway && !n.closed && n.idle()) {
		n.mu.Unlock()
		return none, err
	}
	n.calls[c] = true
	n.mu.Unlock()
	done := make(chan nearAnswer[T], 1)
	go func() { // settle waits for it
		v, err := fn()
		done <- nearAnswer[T]{v, err}
		n.mu.Lock()
		delete(n.calls, c)
		n.settle()
		n.mu.Unlock()
	}()
	if err != nil {
		died = nil // it was dead before
	}
	select {
	case a := <-done:
		return a.v, a.err
	case <-died:
		return none, errEnded
	case <-ctx.Done():
		return none, api.Errorf(api.Unavailable, "replica %s does not answer: %w", n.o.Replica, ctx.Err())
	}
}

func (n *Near) bound(ctx context.Context, fn func() error) error {
	_, err := bound(ctx, n, false, func() (struct{}, error) { return struct{}{}, fn() })
	return err
}

// Adopt implements Member. A replica that was given up is taken back once its disk has answered everything.
func (n *Near) Adopt(ctx context.Context, epoch, incarnation int64, members []string) error {
	n.mu.Lock()
	was := n.dead
	n.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, n.o.Patience.Max)
	defer cancel()
	_, err := bound(ctx, n, true, func() (struct{}, error) {
		return struct{}{}, n.on.Adopt(ctx, epoch, incarnation, members)
	})
	if err == nil && was != nil {
		n.mu.Lock()
		if n.dead == was { //nolint:errorlint // the very same death
			n.dead, n.died, n.peak = nil, make(chan struct{}), 0
		}
		n.mu.Unlock()
	}
	return err
}

// OnFetched implements Fetcher.
func (n *Near) OnFetched(fn func()) {
	if f, ok := n.on.(Fetcher); ok {
		f.OnFetched(fn)
	}
}

// Last implements Laster.
func (n *Near) Last(is bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last = is
}

// Close implements Member. Of a replica that was given up it returns at once: the rest is done when the disk answers.
// Calls whose caller did not wait for them are under way still; that alone is no reason to give a replica up.
func (n *Near) Close() error {
	w := n.o.Watch
	w.mu.Lock()
	delete(w.nears, n)
	w.mu.Unlock()
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	if n.dead == nil {
		quiet := make(chan struct{})
		n.quiet = quiet
		n.settle()
		n.mu.Unlock()
		return n.shut(quiet)
	}
	n.buried = true
	w.mu.Lock()
	w.buried[n.o.Replica] = true
	w.mu.Unlock()
	n.settle()
	n.mu.Unlock()
	return api.Errorf(api.Unavailable, "replica %s was given up: its end is not marked clean", n.o.Replica)
}

// shut closes the replica as soon as it is quiet. A disk that begins to hang here is not waited for any longer than for
// an answer.
func (n *Near) shut(quiet <-chan struct{}) error {
	w, replica := n.o.Watch, n.o.Replica
	shut := make(chan error, 1)
	w.wg.Go(func() {
		<-quiet
		err := n.on.Close()
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.buried, replica)
		shut <- err
	})
	late := time.NewTimer(n.o.Patience.Max)
	defer late.Stop()
	select {
	case err := <-shut:
		return err
	case <-late.C:
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case err := <-shut: // just now
		return err
	default:
	}
	w.buried[replica] = true
	return api.Errorf(api.Unavailable, "its disk does not answer: its end is not marked clean")
}

// Forgo is for a Near that no engine came to have: the replica stays open.
func (n *Near) Forgo() {
	n.o.Watch.mu.Lock()
	defer n.o.Watch.mu.Unlock()
	delete(n.o.Watch.nears, n)
}

// Expand implements Member.
func (n *Near) Expand(ctx context.Context, size int64) error {
	return n.bound(ctx, func() error { return n.on.Expand(ctx, size) })
}

// Track implements Mirror.
func (n *Near) Track(ctx context.Context, on bool) error {
	return n.bound(ctx, func() error { return n.on.Track(ctx, on) })
}

// Intents implements Mirror.
func (n *Near) Intents(ctx context.Context) (stack.Intents, error) {
	return bound(ctx, n, false, func() (stack.Intents, error) { return n.on.Intents(ctx) })
}

// Intend implements Mirror.
func (n *Near) Intend(ctx context.Context, regions []int64) error {
	return n.bound(ctx, func() error { return n.on.Intend(ctx, regions) })
}

// Mark implements Mirror.
func (n *Near) Mark(ctx context.Context, token int64) error {
	return n.bound(ctx, func() error { return n.on.Mark(ctx, token) })
}

// Clean implements Mirror.
func (n *Near) Clean(ctx context.Context, token, epoch int64, regions []int64) error {
	return n.bound(ctx, func() error { return n.on.Clean(ctx, token, epoch, regions) })
}

// Digests implements Mirror.
func (n *Near) Digests(ctx context.Context, off, size int64) ([]byte, error) {
	return bound(ctx, n, false, func() ([]byte, error) { return n.on.Digests(ctx, off, size) })
}

// State implements Cutter.
func (n *Near) State(ctx context.Context) (stack.Meta, error) { return n.on.State(ctx) }

// PrepareCut implements Cutter.
func (n *Near) PrepareCut(ctx context.Context, s stack.Snapshot) error {
	return n.bound(ctx, func() error { return n.on.PrepareCut(ctx, s) })
}

// DoCut implements Cutter.
func (n *Near) DoCut(ctx context.Context, layer string) error {
	return n.bound(ctx, func() error { return n.on.DoCut(ctx, layer) })
}

// AbortCut implements Cutter.
func (n *Near) AbortCut(ctx context.Context) error {
	return n.bound(ctx, func() error { return n.on.AbortCut(ctx) })
}

// Forget implements Cutter.
func (n *Near) Forget(ctx context.Context, uid string) error {
	return n.bound(ctx, func() error { return n.on.Forget(ctx, uid) })
}

// Seal implements Cutter.
func (n *Near) Seal(ctx context.Context, list ...stack.Snapshot) error {
	return n.bound(ctx, func() error { return n.on.Seal(ctx, list...) })
}

// Changed implements Cutter.
func (n *Near) Changed(ctx context.Context, from, to string, base []string, piece int64) ([]int64, error) {
	return bound(ctx, n, false, func() ([]int64, error) { return n.on.Changed(ctx, from, to, base, piece) })
}

// SnapDigests implements Cutter.
func (n *Near) SnapDigests(ctx context.Context, uid string, off, size int64) ([]byte, error) {
	return bound(ctx, n, false, func() ([]byte, error) { return n.on.SnapDigests(ctx, uid, off, size) })
}

// SnapRead implements Cutter.
func (n *Near) SnapRead(ctx context.Context, uid string, off int64, buf []byte) error {
	mine, err := bound(ctx, n, false, func() ([]byte, error) {
		b := make([]byte, len(buf))
		return b, n.on.SnapRead(ctx, uid, off, b)
	})
	if err == nil {
		copy(buf, mine)
	}
	return err
}

// SnapEnd implements Cutter.
func (n *Near) SnapEnd(ctx context.Context) error {
	return n.bound(ctx, func() error { return n.on.SnapEnd(ctx) })
}
