package peer

import (
	"context"
	"errors"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// target is an open replica with its sessions.
type target struct {
	s       *Server
	uid     string
	volume  string
	rep     Replica
	loop    Loop
	current *session // loop thread: the last adopted session

	adopting sync.Mutex // from the replica's answer to the change of sessions
	// changing is read-locked by a call that changes layers, from the look at its session to the call's end: no call of
	// a former session runs after the answer to ADOPT.
	changing sync.RWMutex
	mu       sync.Mutex
	sessions map[*session]bool
	serving  *session // the last adopted session
	entering *session // the session whose adoption is in progress
	linger   *time.Timer
	shutting bool
	gone     chan struct{}
	err      error

	inMu  sync.Mutex
	inbox []*incoming
	spare []*incoming
	takes func() // take, for Post
}

// session is an engine's session on one connection.
type session struct {
	id      uint32
	c       *served
	t       *target
	adopted bool // loop thread
	over    bool // guarded by the target's mu: the engine gave the session up while the adoption was in progress
	account account
	failed  error             // guarded by the connection's lock: why the server refuses the session's frames
	scopes  map[string]*scope // guarded by the connection's lock
	// Places for calls that read content, by their name: reads of a snapshot with a hanging source delay no digests.
	reading map[string]chan struct{}
}

// incoming is a request between the connection and the replica.
type incoming struct {
	req  block.Request
	sess *session
	id   uint64
	buf  []byte
	err  error
	at   time.Time // of the request's arrival
}

// openTarget adds a session to an open replica, or opens the replica for the session. One open of a replica runs at a
// time; an open whose context ends leaves the queue.
func (s *Server) openTarget(ctx context.Context, x *session, replica, volume string) error {
	end, err := s.beginOpen(ctx, replica)
	if err != nil {
		return err
	}
	defer end()
	if found, err := s.findTarget(ctx, x, replica, volume); found || err != nil {
		return err
	}
	return s.openReplica(ctx, x, replica, volume)
}

// beginOpen waits for the other opens of a replica. An open waits for a hanging disk: without the queue, all opens that
// waited would open the replica at once afterwards, and refuse each other.
func (s *Server) beginOpen(ctx context.Context, replica string) (end func(), err error) {
	for {
		s.mu.Lock()
		other := s.opens[replica]
		if other == nil {
			ended := make(chan struct{})
			s.opens[replica] = ended
			s.mu.Unlock()
			return func() {
				s.mu.Lock()
				delete(s.opens, replica)
				s.mu.Unlock()
				close(ended)
			}, nil
		}
		s.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, api.Errorf(api.Busy, "another open of the replica is in progress: %w", ctx.Err())
		}
	}
}

// findTarget adds a session to an open replica, and reports whether the replica is open. findTarget waits while the
// replica closes.
func (s *Server) findTarget(ctx context.Context, x *session, replica, volume string) (found bool, err error) {
	for {
		s.mu.Lock()
		t := s.targets[replica]
		s.mu.Unlock()
		switch {
		case t == nil:
			return false, nil
		case t.volume != volume:
			return true, api.Errorf(api.Invalid, "the replica is not one of that volume")
		case t.addSession(x):
			return true, nil
		}
		select {
		case <-t.gone:
		case <-ctx.Done():
			return true, api.Errorf(api.Busy, "the replica's last session is ending: %w", ctx.Err())
		}
	}
}

// openReplica opens a replica for a session. The caller has the replica's turn.
func (s *Server) openReplica(ctx context.Context, x *session, replica, volume string) error {
	if err := ctx.Err(); err != nil {
		return api.Errorf(api.Unavailable, "the engine has given the open up: %w", err)
	}
	rep, loop, err := s.o.Open(ctx, replica, volume)
	if err != nil {
		return err
	}
	x.t = &target{s: s, uid: replica, volume: volume, rep: rep, loop: loop, sessions: map[*session]bool{x: true},
		gone: make(chan struct{})}
	x.t.takes = x.t.submitInbox
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errors.Join(errClosed, rep.Close())
	}
	s.targets[replica] = x.t
	s.mu.Unlock()
	return nil
}

// addSession adds a session, unless the replica closes.
func (t *target) addSession(x *session) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shutting {
		return false
	}
	t.stopTimer()
	x.t, t.sessions[x] = t, true
	return true
}

func (t *target) stopTimer() {
	if t.linger != nil && t.linger.Stop() {
		t.s.wg.Done()
	}
	t.linger = nil
}

// removeSession takes a session out. The replica stays open for a while: its engine may come again.
func (t *target) removeSession(x *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.sessions, x)
	if len(t.sessions) > 0 || t.shutting || t.linger != nil || t.s.isClosed() {
		return
	}
	t.s.wg.Add(1)
	t.linger = time.AfterFunc(t.s.o.Linger, func() {
		defer t.s.wg.Done()
		t.closeIdle()
	})
}

// closeIdle closes a replica without sessions. A session that begins just before keeps the replica open.
func (t *target) closeIdle() {
	if !t.endSessions(true) {
		return
	}
	if err := t.endReplica(); err != nil {
		t.s.o.Log.Warn("a replica that no engine came back for", "replica", t.uid, "err", err)
	}
}

// closeReplica ends the sessions and closes the replica.
func (t *target) closeReplica() error {
	if !t.endSessions(false) {
		<-t.gone
		return t.err
	}
	return t.endReplica()
}

// endSessions ends all sessions, and waits for no disk. The caller then calls endReplica. False: the sessions have
// ended already or, with idleAlone, the replica has sessions.
func (t *target) endSessions(idleAlone bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shutting || idleAlone && len(t.sessions) > 0 {
		return false
	}
	t.stopTimer()
	t.shutting = true
	for x := range t.sessions {
		if x.refusal() == nil {
			x.c.dropSession(x)
		}
	}
	clear(t.sessions)
	return true
}

// endReplica closes the replica after endSessions.
func (t *target) endReplica() error {
	ran := make(chan struct{})
	if t.loop.Post(func() { t.current = nil; close(ran) }) { // later requests are refused
		<-ran
	}
	t.err = t.rep.Close()
	t.s.mu.Lock()
	if t.s.targets[t.uid] == t {
		delete(t.s.targets, t.uid)
	}
	t.s.mu.Unlock()
	close(t.gone)
	return t.err
}

// postRequest hands a request to the replica's loop.
func (t *target) postRequest(in *incoming) {
	t.inMu.Lock()
	t.inbox = append(t.inbox, in)
	first := len(t.inbox) == 1
	t.inMu.Unlock()
	if first && !t.loop.Post(t.takes) {
		t.inMu.Lock()
		list := t.inbox
		t.inbox = nil
		t.inMu.Unlock()
		for _, in := range list {
			in.err = errClosed
			in.sess.c.takeAnswer(in)
		}
	}
}

// submitInbox submits the requests of the inbox. Loop thread.
func (t *target) submitInbox() {
	t.inMu.Lock()
	list := t.inbox
	t.inbox, t.spare = t.spare[:0], nil
	t.inMu.Unlock()
	for i, in := range list {
		list[i] = nil
		switch {
		case t.current == in.sess && in.sess.adopted:
			t.rep.Submit(&in.req)
			continue
		case t.current == nil || !in.sess.adopted:
			if in.err = in.sess.refusal(); in.err == nil {
				in.err = errSession
			}
		default:
			in.err = api.Errorf(api.Denied, "the replica adopted another session")
		}
		in.sess.c.takeAnswer(in)
	}
	t.inMu.Lock()
	t.spare = list
	t.inMu.Unlock()
}

// adoptSession serves a session from now on. One adoption runs at a time, and none of a session that the engine gave up
// meanwhile, so that an older session cannot replace a newer one.
func (t *target) adoptSession(ctx context.Context, x *session, a adoption) error {
	t.adopting.Lock()
	defer t.adopting.Unlock()
	if err := t.enter(x); err != nil {
		return err
	}
	defer t.endEntering(x)
	t.changing.Lock()
	defer t.changing.Unlock()
	node := x.c.node
	if err := t.rep.AdoptFor(ctx, node, a.Epoch, a.Incarnation, a.Members); err != nil {
		return err
	}
	t.s.o.Log.Info("replica adopted a session", "replica", t.uid, "volume", t.volume, "node", node, "epoch", a.Epoch,
		"incarnation", a.Incarnation)
	// Until the change of sessions the replica took writes of the former session: the drain waits for the last write.
	ran := make(chan bool, 1)
	if !t.loop.Post(func() {
		was := t.current
		t.current, x.adopted = x, true
		ran <- was != nil && was != x
	}) {
		return errClosed
	}
	other := <-ran
	t.mu.Lock()
	was := t.serving
	t.serving = x
	t.mu.Unlock()
	if was != nil && was != x {
		was.endCalls()
	}
	if other {
		return t.rep.Drain(ctx)
	}
	return nil
}

// enter notes that the adoption of a session is in progress.
func (t *target) enter(x *session) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.sessions[x] {
		return api.Errorf(api.Unavailable, "the engine has given session %d up", x.id)
	}
	t.entering = x
	return nil
}

// endEntering notes that the adoption of a session has ended, and ends the session if the engine gave it up.
func (t *target) endEntering(x *session) {
	t.mu.Lock()
	t.entering = nil
	over := x.over
	t.mu.Unlock()
	if over {
		x.c.dropSession(x)
		t.removeSession(x)
	}
}

// giveUp notes that the engine gave a session up, and reports whether the adoption of the session is in progress: the
// disk may hang, so the session ends with the adoption. A replica that closes would refuse other sessions until then.
func (t *target) giveUp(x *session) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	x.over = t.entering == x
	return x.over
}

// servingNow returns the last adopted session; nil: none.
func (t *target) servingNow() *session {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.serving
}

// refusal is the reason to refuse the session's frames; nil: served.
func (x *session) refusal() error {
	x.c.mu.Lock()
	defer x.c.mu.Unlock()
	return x.failed
}

// isCurrent reports whether the session is the served one; an error: the session has ended.
func (x *session) isCurrent() (is bool, err error) {
	ran := make(chan struct{})
	if !x.t.loop.Post(func() {
		is = x.t.current == x
		if x.t.current == nil {
			err = errSession
		}
		close(ran)
	}) {
		return false, errClosed
	}
	<-ran
	return is, err
}
