package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"drover.io/drover/api"
)

// noteConnEnd notes the end of a connection, which uses no buffer any more.
func (m *Member) noteConnEnd(c *conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.c != c {
		return
	}
	m.c = nil
	for s := m.head; s != nil; s = s.next {
		s.state = slotIdle
	}
	m.wakeWaiters()
	m.reportLink(c.cause())
	m.startRevival()
}

// startRevival connects again in the background. The caller has the lock.
func (m *Member) startRevival() {
	if m.reviving || m.dead != nil || m.closed {
		return
	}
	m.reviving = m.d.startGoroutine(m.runRevival)
}

const (
	reviveFirst = 10 * time.Millisecond
	reviveLast  = 500 * time.Millisecond
)

func (m *Member) runRevival() {
	wait := time.NewTimer(0)
	defer wait.Stop()
	for pause := reviveFirst; ; pause = min(2*pause, reviveLast) {
		select {
		case <-wait.C:
		case <-m.d.stop:
		}
		if m.tryRevival() {
			return
		}
		wait.Reset(pause)
	}
}

// tryRevival tries once, and reports whether there is nothing more to try.
func (m *Member) tryRevival() (over bool) {
	m.turn <- struct{}{}
	defer func() { <-m.turn }()
	m.mu.Lock()
	if m.c != nil || m.dead != nil || m.closed || m.want == nil || m.d.stopped() {
		m.reviving = false
		m.mu.Unlock()
		return true
	}
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	err := m.openSession(ctx, nil)
	m.mu.Lock()
	defer m.mu.Unlock()
	over = err == nil && m.c != nil
	m.reviving = !over
	if err != nil {
		m.reportLink(err)
	}
	return over
}

func (d *Dialer) stopped() bool {
	select {
	case <-d.stop:
		return true
	default:
		return false
	}
}

// openSession opens a session, adopts, and sends the pending requests. Was is the reason for which the engine abandoned
// the member before: openSession revokes the reason, unless a new one came meanwhile. The caller has the turn.
func (m *Member) openSession(ctx context.Context, was error) error {
	c, err := m.d.lanesTo(m.o.Node).connectLane(ctx, m.lane)
	if err != nil {
		return m.nameError(err)
	}
	m.mu.Lock()
	boot, want, track := m.boot, *m.want, m.track
	m.mu.Unlock()
	if boot != "" && boot != c.boot {
		m.failRequests(m.nameError(ErrRestarted), true)
		return m.nameError(ErrRestarted)
	}
	m.d.mu.Lock()
	m.d.session++
	session := m.d.session
	m.d.mu.Unlock()
	c.subscribeMember(session, m)
	var info Info
	err = m.callControl(ctx, c, session, kindOpen, openRequest{m.o.Replica, m.o.Volume}, &info)
	opened := err == nil
	if err == nil {
		err = m.callControl(ctx, c, session, kindAdopt, want, nil)
	}
	if err == nil && track { // before anything is written
		err = m.callOnce(ctx, c, session, trackCall.name, onArgs{true})
	}
	if err != nil {
		m.giveSessionUp(ctx, c, session, opened)
		return m.handleRefusal(err)
	}
	m.mu.Lock()
	if m.closed || m.forGood {
		m.mu.Unlock()
		c.unsubscribeSession(session)
		return m.nameError(errClosed)
	}
	old, ended := m.c, m.session
	m.boot, m.info = c.boot, info
	m.c, m.session = c, session
	if m.dead == was { //nolint:errorlint // the very same reason
		m.dead = nil
		m.reportLink(nil)
	}
	alive := true
	for s := m.head; s != nil && alive; s = s.next {
		s.h.session = session
		alive = c.enqueueSlot(s)
	}
	m.wakeWaiters()
	m.mu.Unlock()
	if old != nil {
		m.endSession(old, ended)
	}
	if c.cause() != nil {
		<-c.ended
		m.noteConnEnd(c) // the connection may have notified its members before this one was added
		return m.nameError(api.Errorf(api.Unavailable, "the connection broke: %w", c.cause()))
	}
	return nil
}

// giveSessionUp ends a session that did not begin: the server may have opened the replica, or may do so yet, and would
// keep the replica open as long as the connection lives. An older server breaks the connection at the end of a session
// that it does not know.
func (m *Member) giveSessionUp(ctx context.Context, c *conn, session uint32, opened bool) {
	if opened || ctx.Err() != nil && c.version >= notFetchedSince {
		m.endSession(c, session)
		return
	}
	c.unsubscribeSession(session)
}

// endSession ends a session at the server, if the connection lives, and does not wait for the answer.
func (m *Member) endSession(c *conn, session uint32) {
	c.unsubscribeSession(session)
	c.enqueueSlot(&slot{m: m, call: &call{payload: []byte("{}"), done: make(chan struct{})}, kept: true,
		h: header{kind: kindClose, session: session}})
}

// handleRefusal looks at why a session does not begin: some reasons are for good.
func (m *Member) handleRefusal(err error) error {
	err = m.nameError(err)
	if api.Is(err, api.Denied) || errors.Is(err, ErrRestarted) {
		m.failRequests(err, true)
	}
	return err
}

func (m *Member) nameError(err error) error {
	return fmt.Errorf("replica %s on node %s: %w", m.o.Replica, m.o.Node, err)
}

// Adopt implements engine.Member. An abandoned member gets a new session, whose adoption drains the disk I/O of the
// former session, unless the machine of the replica restarted.
func (m *Member) Adopt(ctx context.Context, epoch, incarnation int64, members []string) error {
	select {
	case m.turn <- struct{}{}:
	case <-ctx.Done():
		return m.nameError(api.Errorf(api.Unavailable, "%w", ctx.Err()))
	}
	defer func() { <-m.turn }()
	m.mu.Lock()
	if m.forGood || m.closed || m.dead != nil && m.head != nil { // a connection uses a buffer
		err := m.dead
		m.mu.Unlock()
		if err == nil {
			err = errClosed
		}
		return err
	}
	want := adoption{epoch, incarnation, slices.Clone(members)}
	m.want = &want
	c, session, was := m.c, m.session, m.dead
	m.mu.Unlock()
	if c != nil && was == nil {
		switch err := m.callControl(ctx, c, session, kindAdopt, want, nil); {
		case err == nil:
			return nil
		case !errors.Is(err, errBroken):
			return m.handleRefusal(err)
		}
		select {
		case <-c.closed: // the connection uses no buffer any more
		case <-ctx.Done():
			return m.nameError(api.Errorf(api.Unavailable, "%w", ctx.Err()))
		}
	}
	return m.openSession(ctx, was)
}

// Probe asks the replica for its description, without a session, and names the run of the replica's machine.
func (m *Member) Probe(ctx context.Context) (Info, string, error) {
	var info Info
	c, err := m.d.lanesTo(m.o.Node).connectLane(ctx, m.lane)
	if err != nil {
		return info, "", m.nameError(err)
	}
	m.d.mu.Lock()
	m.d.session++
	session := m.d.session
	m.d.mu.Unlock()
	if err := m.callControl(ctx, c, session, kindOpen, openRequest{m.o.Replica, m.o.Volume}, &info); err != nil {
		m.giveSessionUp(ctx, c, session, false)
		return info, "", m.nameError(err)
	}
	m.endSession(c, session)
	return info, c.boot, nil
}

// answerCall answers a call.
func (k *call) answerCall(answer []byte, err error) {
	k.answer, k.err = answer, err
	close(k.done)
}

// callControl makes a control call on a connection, once.
func (m *Member) callControl(ctx context.Context, c *conn, session uint32, k kind, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	if err := checkFrame("request", b); err != nil {
		return err
	}
	answer, err := m.callRaw(ctx, c, session, k, b)
	if err == nil && out != nil {
		if err = json.Unmarshal(answer, out); err != nil {
			err = api.Errorf(api.Corrupt, "an answer that makes no sense: %w", err)
		}
	}
	if i, ok := out.(*Info); ok && err == nil {
		err = i.validate()
	}
	return err
}

func (m *Member) callRaw(ctx context.Context, c *conn, session uint32, k kind, payload []byte) ([]byte, error) {
	s := &slot{m: m, call: &call{payload: payload, done: make(chan struct{})}, kept: true,
		h: header{kind: k, session: session}}
	if !c.enqueueSlot(s) {
		return nil, api.Errorf(api.Unavailable, "the connection broke: %w", errors.Join(errBroken, c.cause()))
	}
	select {
	case <-s.call.done:
		return s.call.answer, s.call.err
	case <-ctx.Done():
		c.cancelSlot(s)
		return nil, api.Errorf(api.Unavailable, "no answer: %w", ctx.Err())
	}
}

// callOnce makes a call of the replica on a connection, once.
func (m *Member) callOnce(ctx context.Context, c *conn, session uint32, name string, args any) error {
	payload, err := callOf(name, args, c.version)
	if err == nil {
		_, err = m.callRaw(ctx, c, session, kindCall, payload)
	}
	return err
}

// callByName makes a call of the replica by name, and repeats a repeatable call if the connection breaks.
func (m *Member) callByName(ctx context.Context, name string, args any, repeat bool) ([]byte, error) {
	for {
		m.mu.Lock()
		c, session, changed := m.c, m.session, m.changed
		err := m.dead
		if m.closed {
			err = errClosed
		}
		m.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if c == nil {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				return nil, m.nameError(api.Errorf(api.Unavailable, "no connection: %w", ctx.Err()))
			}
		}
		payload, err := callOf(name, args, c.version) // the next connection may be to a newer process
		if err == nil {
			err = c.checkCallSize(name, payload)
		}
		if err != nil {
			return nil, m.nameError(err)
		}
		answer, err := m.callRaw(ctx, c, session, kindCall, payload)
		if err == nil {
			return answer, nil
		}
		if !repeat || !errors.Is(err, errBroken) {
			return nil, m.nameError(err)
		}
		select {
		case <-c.closed: // the same connection is not asked again
		case <-ctx.Done():
			return nil, m.nameError(err)
		}
	}
}

// checkCallSize refuses a call beyond the size of a frame.
func (c *conn) checkCallSize(call string, payload []byte) error {
	err := checkFrame(fmt.Sprintf("call %q", call), payload)
	if err != nil && c.version < Version {
		err = fmt.Errorf("%w; node %s speaks version %d of the replica protocol: upgrade it", err, c.set.node, c.version)
	}
	return err
}
