package engine

import (
	"context"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// A replica can stop answering without an error: its disk hangs, or its node. A WatchedMember, local or remote, is then
// abandoned: its requests and calls fail, and the engine drops the member. The kernel or a connection may still use the
// buffer of such a request: the buffer is leased until the replica answers.

// StallTimeout is how long a member may take to answer: the limit of a request is a multiple of the longest wait seen
// lately, between the two. A call, such as the adoption of an epoch, may take up to Max.
type StallTimeout struct{ Min, Max time.Duration }

// stallTimeout outlasts the restart of another node's data process, and a disk that is slow for once.
func stallTimeout() StallTimeout { return StallTimeout{Min: 4 * time.Second, Max: 30 * time.Second} }

const stallFactor = 8

// Remote is a member behind a connection. After a broken connection the member connects by itself, and sends the
// unanswered requests again.
type Remote interface {
	Cutter
	// OnLink subscribes fn to the connection: the cause when the connection broke or could not be made, nil when a session
	// was adopted on a new connection. Fn must neither block nor call the member.
	OnLink(fn func(down error))
	// Abandon answers all requests with why, each as soon as the connection does not use its buffer, and does not block.
	// No request is sent again. Adopt takes the member back in a new session; Close ends the session.
	Abandon(why error)
}

// WatchOptions of a member.
type WatchOptions struct {
	Loop    Loop
	Replica string
	// OnStall is called from the Watch's goroutine when the member was abandoned for a stall; may be nil.
	OnStall func(why error)
	// Timeout is called at each check, for tests; nil: the default.
	Timeout func() StallTimeout
}

// WatchedMember is a member with a stall timeout.
type WatchedMember struct {
	on    Cutter
	watch *Watch
	o     WatchOptions

	mu     sync.Mutex
	head   *watchedSlot // in progress, in the order of Submit
	tail   *watchedSlot
	free   *watchedSlot
	calls  map[*watchedCall]bool
	left   int                     // requests that were answered while the replica still had them
	dead   error                   // why the member was abandoned
	alive  context.Context         // ends when the member is abandoned
	end    context.CancelCauseFunc // of alive
	closed bool
	gone   bool          // closed after the member was abandoned: the replica is closed as soon as it is idle
	quiet  chan struct{} // not nil: Close waits for this, until the replica is idle
	last   bool
	peak   time.Duration // the longest wait seen lately
	faded  time.Duration // when peak was reduced last
	down   error         // why a remote member has no connection
	downAt time.Duration // since when
	linked time.Duration // the last change of the connection: the wait of an older request says nothing about the disk
}

// watchedSlot is a request in progress: the engine's request, and the request that the replica has.
type watchedSlot struct {
	in         block.Request
	out        *block.Request // nil: the engine's request was answered
	lease      *block.BufferLease
	since      time.Duration
	prev, next *watchedSlot
}

type watchedCall struct{ since time.Duration }

// Member makes a watched member, which owns on.
func (w *Watch) Member(on Cutter, o WatchOptions) *WatchedMember {
	if o.Timeout == nil {
		o.Timeout = stallTimeout
	}
	m := &WatchedMember{on: on, watch: w, o: o, calls: map[*watchedCall]bool{}, faded: w.now(), linked: -1}
	m.alive, m.end = context.WithCancelCause(context.Background())
	if r, ok := on.(Remote); ok {
		r.OnLink(m.recordLink)
	}
	w.addMember(m)
	return m
}

// Unwrap returns the member inside a WatchedMember, whose calls have no stall timeout, or m.
func Unwrap(m Member) Member {
	if w, ok := m.(*WatchedMember); ok {
		return w.on
	}
	return m
}

// Submit implements block.Submitter.
func (m *WatchedMember) Submit(q *block.Request) {
	m.mu.Lock()
	if why := m.dead; why != nil || m.closed {
		m.mu.Unlock()
		if q.Err = why; why == nil {
			q.Err = errEnded
		}
		q.Done(q)
		return
	}
	s := m.free
	if s == nil {
		s = &watchedSlot{}
		s.in.Done = func(*block.Request) { m.takeAnswer(s) }
	} else {
		m.free = s.next
	}
	s.out, s.lease, s.since, s.prev, s.next = q, nil, m.watch.now(), m.tail, nil
	s.in.Op, s.in.FUA, s.in.Off, s.in.Len, s.in.Buf, s.in.Err = q.Op, q.FUA, q.Off, q.Len, q.Buf, nil
	s.in.Spans = q.Spans
	if m.tail == nil {
		m.head = s
	} else {
		m.tail.next = s
	}
	m.tail = s
	m.mu.Unlock()
	m.on.Submit(&s.in)
}

var errEnded = api.Errorf(api.Unavailable, "the session has ended")

// removeSlot takes a slot out of those in progress. The caller has the lock.
func (m *WatchedMember) removeSlot(s *watchedSlot) {
	if s.prev == nil {
		m.head = s.next
	} else {
		s.prev.next = s.next
	}
	if s.next == nil {
		m.tail = s.prev
	} else {
		s.next.prev = s.prev
	}
	s.prev, s.next = nil, nil
}

// takeAnswer takes the replica's answer. Loop thread.
func (m *WatchedMember) takeAnswer(s *watchedSlot) {
	m.mu.Lock()
	out, lease, err := s.out, s.lease, s.in.Err
	if out != nil {
		m.removeSlot(s)
		if s.since > m.linked {
			m.peak = max(m.peak, m.watch.now()-s.since)
		}
	} else {
		m.left--
	}
	s.out, s.lease, s.in.Buf, s.in.Spans = nil, nil, nil, nil
	s.next, m.free = m.free, s
	m.closeIfIdle()
	m.mu.Unlock()
	if out != nil {
		out.Err = err
		out.Done(out)
		return
	}
	lease.Release()
}

// recordLink records the state of the connection.
func (m *WatchedMember) recordLink(down error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.linked = m.watch.now()
	if down != nil && m.down == nil {
		m.downAt = m.linked
	}
	m.down = down
}

// DisconnectedFor is how long a remote member has been without a connection.
func (m *WatchedMember) DisconnectedFor() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down == nil {
		return 0
	}
	return m.watch.now() - m.downAt
}

// Abandoned implements Abandonable.
func (m *WatchedMember) Abandoned() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dead
}

// stallReason returns the reason to abandon the member; nil: there is none. The caller has the lock.
func (m *WatchedMember) stallReason(now time.Duration) error {
	t := m.o.Timeout()
	limit := min(max(stallFactor*m.peak, t.Min), t.Max)
	if m.down != nil && now-m.downAt > limit {
		return api.Errorf(api.Unavailable, "replica %s: no connection for %v: %v", m.o.Replica, limit, m.down)
	}
	late := m.head != nil && now-m.head.since > limit
	for c := range m.calls {
		if now-c.since > t.Max {
			late, limit = true, t.Max
		}
	}
	if late {
		return api.Errorf(api.Unavailable, "replica %s: no answer for %v", m.o.Replica, limit)
	}
	return nil
}

// checkStall abandons the member if the replica exceeds the stall timeout.
func (m *WatchedMember) checkStall(now time.Duration) {
	m.mu.Lock()
	if now-m.faded > time.Second {
		m.peak -= m.peak / 64
		m.faded = now
	}
	why := m.stallReason(now)
	if m.last || m.dead != nil {
		why = nil
	}
	m.mu.Unlock()
	if why != nil && m.abandon(why) && m.o.OnStall != nil {
		m.o.OnStall(why)
	}
}

// abandon fails all requests and calls, pending and new ones. False: the member was abandoned before.
func (m *WatchedMember) abandon(why error) bool {
	m.mu.Lock()
	if m.dead != nil {
		m.mu.Unlock()
		return false
	}
	m.dead = why
	m.end(why)
	m.mu.Unlock()
	if r, ok := m.on.(Remote); ok {
		r.Abandon(why)
	}
	m.o.Loop.Post(func() { m.answerAll(why) })
	return true
}

// answerAll answers the requests in progress. Loop thread.
func (m *WatchedMember) answerAll(why error) {
	var list []*block.Request
	m.mu.Lock()
	if m.dead != why { //nolint:errorlint // the member was taken back meanwhile
		m.mu.Unlock()
		return
	}
	for s := m.head; s != nil; s = m.head {
		m.removeSlot(s)
		m.left++
		s.lease = &block.BufferLease{}
		s.out.Err, s.out.Lease = why, s.lease
		list = append(list, s.out)
		s.out = nil
	}
	m.mu.Unlock()
	for _, q := range list {
		q.Done(q)
	}
}

// isIdle reports whether the replica has no request and no call. The caller has the lock.
func (m *WatchedMember) isIdle() bool { return m.left == 0 && m.head == nil && len(m.calls) == 0 }

// closeIfIdle closes an abandoned replica that is idle, or lets Close do so. The caller has the lock.
func (m *WatchedMember) closeIfIdle() {
	if m.quiet != nil && m.isIdle() {
		close(m.quiet)
		m.quiet = nil
	}
	if !m.gone || !m.isIdle() {
		return
	}
	m.gone = false
	m.watch.wg.Go(func() {
		_ = m.on.Close() // a rebuild resyncs the replica
		m.watch.mu.Lock()
		delete(m.watch.abandoned, m.o.Replica)
		m.watch.mu.Unlock()
	})
}

// Last implements Laster.
func (m *WatchedMember) Last(is bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = is
}

// Close implements Member. Close of an abandoned member returns at once: the replica is closed when the disk has
// answered. Calls may be in progress whose callers do not wait any more: Close waits for these. Requests are in
// progress only if the engine dropped the member: a remote member is abandoned then.
func (m *WatchedMember) Close() error {
	w := m.watch
	defer w.removeMember(m)
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	_, remote := m.on.(Remote)
	if remote && m.head != nil {
		m.mu.Unlock()
		m.abandon(errEnded)
		m.mu.Lock()
	}
	if m.dead == nil {
		quiet := make(chan struct{})
		m.quiet = quiet
		m.closeIfIdle()
		m.mu.Unlock()
		return m.closeWhenIdle(quiet)
	}
	m.gone = true
	w.mu.Lock()
	w.abandoned[m.o.Replica] = true
	w.mu.Unlock()
	m.closeIfIdle()
	m.mu.Unlock()
	return api.Errorf(api.Unavailable, "replica %s was abandoned: its end is not marked clean", m.o.Replica)
}

// hasRequests reports whether requests are in progress.
func (m *WatchedMember) hasRequests() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.head != nil
}

// closeWhenIdle closes the replica as soon as it is idle, and waits for the end no longer than for a call. Then
// closeWhenIdle abandons a member with requests, so that no operation waits for a dropped member.
func (m *WatchedMember) closeWhenIdle(quiet <-chan struct{}) error {
	w, replica := m.watch, m.o.Replica
	shut := make(chan error, 1)
	w.wg.Go(func() {
		<-quiet
		err := m.on.Close()
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.abandoned, replica)
		shut <- err
	})
	late := time.NewTimer(m.o.Timeout().Max)
	defer late.Stop()
	select {
	case err := <-shut:
		return err
	case <-m.alive.Done(): // the member stalled meanwhile
	case <-late.C:
		if m.hasRequests() { // after Close the Watch checks the member no more
			m.abandon(api.Errorf(api.Unavailable, "replica %s: no answer for %v", replica, m.o.Timeout().Max))
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case err := <-shut: // just now
		return err
	default:
	}
	w.abandoned[replica] = true
	return api.Errorf(api.Unavailable, "replica %s: the disk does not answer, the end is not marked clean", replica)
}
