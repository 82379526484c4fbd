package peer

import (
	"context"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Loop is the thread of a Member's requests and answers.
type Loop interface {
	Post(fn func()) bool
}

// Options of a Member.
type Options struct {
	Node    string // with the replica
	Replica string // uid of the replica
	Volume  string // uid of the volume, which the other side compares
	Loop    Loop
	// Boot of the other machine in the resumed session; empty: a new session.
	Boot string
}

// Member is a replica on another node. Member implements engine.Remote, and has no stall timeout.
type Member struct {
	d    *Dialer
	o    Options
	lane int
	turn chan struct{} // held by a goroutine that connects or adopts

	mu       sync.Mutex
	c        *conn // nil: not connected, or not adopted
	session  uint32
	changed  chan struct{} // closed when c, dead or closed change
	head     *slot         // pending, in the order of Submit
	tail     *slot
	free     *slot
	done     []*slot
	spare    []*slot
	posted   bool
	answers  func() // answer, for Post
	dead     error  // all requests fail with it
	forGood  bool   // also Adopt does not revive the Member
	closed   bool
	onLink   func(down error) // may be nil
	reviving bool
	want     *adoption
	track    bool // intents are on: a replica that was opened again has to be asked again
	boot     string
	info     Info
}

// adoption has the arguments of Adopt.
type adoption struct {
	Epoch       int64    `json:"epoch"`
	Incarnation int64    `json:"incarnation"`
	Members     []string `json:"members"`
}

// openRequest begins a session.
type openRequest struct {
	Replica string `json:"replica"`
	Volume  string `json:"volume"`
}

// Info describes a replica at the begin of a session.
type Info struct {
	Size   int64 `json:"size"`
	Epoch  int64 `json:"epoch"`  // adopted last
	Joined int64 `json:"joined"` // the last epoch as a member
	// Reverted is the epoch of the last revert to a snapshot.
	Reverted int64 `json:"reverted,omitempty"`
	Empty    bool  `json:"empty"` // nothing was ever written
	// Restarted: the machine restarted during the last session.
	Restarted bool `json:"restarted,omitempty"`
}

// Member makes a member, which connects at the first call.
func (d *Dialer) Member(o Options) *Member {
	m := &Member{d: d, o: o, turn: make(chan struct{}, 1), changed: make(chan struct{}), boot: o.Boot}
	m.answers = m.answerFinished
	d.mu.Lock()
	defer d.mu.Unlock()
	d.startClock()
	d.session++
	m.lane = int(d.session) % laneCount
	return m
}

// wakeWaiters wakes the goroutines that wait for a change. The caller has the lock.
func (m *Member) wakeWaiters() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// Submit implements block.Submitter.
func (m *Member) Submit(r *block.Request) {
	m.mu.Lock()
	if m.dead != nil || m.closed {
		err := m.dead
		m.mu.Unlock()
		if r.Err = err; err == nil {
			r.Err = errClosed
		}
		r.Done(r)
		return
	}
	s := m.free
	if s == nil {
		s = &slot{m: m}
	} else {
		m.free = s.next
	}
	*s = slot{m: m, req: r, prev: m.tail}
	s.h = header{off: r.Off, n: r.Len}
	switch r.Op {
	case block.OpRead:
		s.h.kind, s.weight = kindRead, r.Len
	case block.OpWrite:
		s.h.kind, s.weight = kindWrite, r.Len
	case block.OpFlush:
		s.h.kind, s.h.off, s.h.n = kindFlush, 0, 0
	case block.OpDiscard:
		s.h.kind = kindDiscard
	case block.OpZero:
		s.h.kind = kindZero
	}
	if r.FUA {
		s.h.flags = flagFUA
	}
	if m.tail == nil {
		m.head = s
	} else {
		m.tail.next = s
	}
	m.tail = s
	if m.c != nil {
		s.h.session = m.session
		m.c.enqueueSlot(s) // else the next connection sends the slot
	}
	m.mu.Unlock()
}

var errClosed = api.Errorf(api.Unavailable, "the session is closed")

// completeSlot takes the answer to a slot.
func (m *Member) completeSlot(s *slot, err error) {
	if s.call != nil {
		s.call.answerCall(s.call.answer, err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !s.ended {
		m.finishSlot(s, err)
	}
}

// finishSlot takes a slot out and posts the answer to the loop. The caller has the lock.
func (m *Member) finishSlot(s *slot, err error) {
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
	s.ended, s.err = true, err
	s.prev, s.next = nil, nil
	m.done = append(m.done, s)
	if !m.posted {
		m.posted = true
		m.o.Loop.Post(m.answers)
	}
}

// answerFinished answers the finished requests. Loop thread.
func (m *Member) answerFinished() {
	m.mu.Lock()
	list := m.done
	m.done, m.posted = m.spare[:0], false
	m.mu.Unlock()
	for _, s := range list {
		r := s.req
		r.Err = s.err
		s.req = nil
		r.Done(r)
	}
	m.mu.Lock()
	for i, s := range list {
		if !s.kept {
			s.next, m.free = m.free, s
		}
		list[i] = nil
	}
	m.spare = list
	m.mu.Unlock()
}

// Info returns the replica's description at the begin of the session.
func (m *Member) Info() Info {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.info
}

// Boot names the run of the other machine in the session.
func (m *Member) Boot() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.boot
}

// OnLink implements engine.Remote.
func (m *Member) OnLink(fn func(down error)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.onLink = fn
}

// reportLink reports the state of the connection. The caller has the lock.
func (m *Member) reportLink(down error) {
	if m.onLink != nil {
		m.onLink(down)
	}
}

// Abandon implements engine.Remote.
func (m *Member) Abandon(why error) { m.failRequests(why, false) }

// failRequests answers all requests with why, pending and new ones.
func (m *Member) failRequests(why error, forGood bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead != nil || m.closed {
		m.forGood = m.forGood || forGood
		return
	}
	m.dead, m.forGood = why, forGood
	m.takeBack(why)
	m.wakeWaiters()
}

// takeBack answers all pending requests, except requests whose buffers the connection uses: the connection completes
// these. The caller has the lock.
func (m *Member) takeBack(why error) {
	for s := m.head; s != nil; {
		next := s.next
		s.kept = true
		if m.c == nil || m.c.cancelSlot(s) {
			m.finishSlot(s, why)
		}
		s = next
	}
}

// closeTime bounds how long the end of a session is waited for.
const closeTime = 20 * time.Second

// Close implements engine.Member: a clean end, if the replica is reached. No request is outstanding. Close does not
// wait for the end of an abandoned session.
func (m *Member) Close() error {
	m.turn <- struct{}{}
	defer func() { <-m.turn }()
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	c, session, dead := m.c, m.session, m.dead
	m.mu.Unlock()
	var err error
	switch {
	case dead != nil && c != nil:
		m.endSession(c, session)
	case dead != nil:
	case c != nil:
		ctx, cancel := context.WithTimeout(context.Background(), closeTime)
		err = m.callControl(ctx, c, session, kindClose, struct{}{}, nil)
		cancel()
	default:
		err = api.Errorf(api.Unavailable, "no connection: the end is not marked clean")
	}
	m.mu.Lock()
	m.closed = true
	m.takeBack(errClosed)
	c, session = m.c, m.session
	m.wakeWaiters()
	m.mu.Unlock()
	if c != nil {
		c.unsubscribeSession(session)
	}
	if err != nil {
		return m.nameError(err)
	}
	return nil
}
