package peer

import (
	"context"
	"errors"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// target is a replica that is open for sessions.
type target struct {
	s       *Server
	uid     string
	volume  string
	rep     Replica
	loop    Loop
	current *session // loop thread: the one that was adopted last

	adopting sync.Mutex // from the replica's answer to the change of sessions
	// changing is held for reading by a call that changes layers, from the look at its session to its end: none of a
	// former session is carried out after ADOPT was answered.
	changing sync.RWMutex
	mu       sync.Mutex
	sessions map[*session]bool
	serving  *session // that was adopted last
	linger   *time.Timer
	shutting bool
	gone     chan struct{}
	err      error

	inMu  sync.Mutex
	inbox []*incoming
	spare []*incoming
	takes func() // take, for Post
}

// session is one engine on one connection.
type session struct {
	id      uint32
	c       *served
	t       *target
	adopted bool // loop thread
	account account
	failed  error // under the connection's lock: why nothing of it is served any more
	// Places for calls that read content, by their name: a snapshot whose source hangs holds back no digests.
	reading map[string]chan struct{}
}

// incoming is a request on its way to the replica.
type incoming struct {
	req  block.Request
	sess *session
	id   uint64
	buf  []byte
	err  error
}

// target finds or opens a replica.
func (s *Server) target(ctx context.Context, replica, volume string) (*target, error) {
	for {
		s.mu.Lock()
		t := s.targets[replica]
		s.mu.Unlock()
		if t == nil {
			break
		}
		t.mu.Lock()
		shutting := t.shutting
		t.mu.Unlock()
		if !shutting {
			if t.volume != volume {
				return nil, api.Errorf(api.Invalid, "the replica is not one of that volume")
			}
			return t, nil
		}
		select {
		case <-t.gone:
		case <-ctx.Done():
			return nil, api.Errorf(api.Busy, "its last session is being ended: %w", ctx.Err())
		}
	}
	rep, loop, err := s.o.Open(ctx, replica, volume)
	if err != nil {
		return nil, err
	}
	t := &target{s: s, uid: replica, volume: volume, rep: rep, loop: loop, sessions: map[*session]bool{},
		gone: make(chan struct{})}
	t.takes = t.take
	s.mu.Lock()
	if s.targets[replica] != nil || s.closed { // cannot be: a replica has one opener
		s.mu.Unlock()
		return nil, errors.Join(api.Errorf(api.Busy, "it was opened twice"), rep.Close())
	}
	s.targets[replica] = t
	s.mu.Unlock()
	return t, nil
}

// join adds a session.
func (t *target) join(x *session) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shutting {
		return api.Errorf(api.Busy, "its last session is being ended")
	}
	t.stopTimer()
	t.sessions[x] = true
	return nil
}

func (t *target) stopTimer() {
	if t.linger != nil && t.linger.Stop() {
		t.s.wg.Done()
	}
	t.linger = nil
}

// leave takes a session out. The replica stays open for a while: its engine may come again.
func (t *target) leave(x *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.sessions, x)
	if len(t.sessions) > 0 || t.shutting || t.linger != nil || t.s.isClosed() {
		return
	}
	t.s.wg.Add(1)
	t.linger = time.AfterFunc(t.s.o.Linger, func() {
		defer t.s.wg.Done()
		t.mu.Lock()
		idle := len(t.sessions) == 0
		t.linger = nil
		t.mu.Unlock()
		if idle {
			if err := t.shut(); err != nil {
				t.s.o.Log.Warn("a replica that no engine came back for", "replica", t.uid, "err", err)
			}
		}
	})
}

// shut closes the replica: no session has it any more.
func (t *target) shut() error {
	t.mu.Lock()
	if t.shutting {
		t.mu.Unlock()
		<-t.gone
		return t.err
	}
	t.shutting = true
	for x := range t.sessions {
		if x.failure() == nil {
			x.c.drop(x)
		}
	}
	clear(t.sessions)
	t.mu.Unlock()
	ran := make(chan struct{})
	if t.loop.Post(func() { t.current = nil; close(ran) }) { // what comes later is refused
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

// put hands a request to the replica's loop.
func (t *target) put(in *incoming) {
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
			in.sess.c.done(in)
		}
	}
}

// take submits what came. Loop thread.
func (t *target) take() {
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
			if in.err = in.sess.failure(); in.err == nil {
				in.err = errSession
			}
		default:
			in.err = api.Errorf(api.Denied, "another session was adopted")
		}
		in.sess.c.done(in)
	}
	t.inMu.Lock()
	t.spare = list
	t.inMu.Unlock()
}

// adopt makes a session the one that is served. One at a time: an older session that was adopted just before a newer
// one must not take its place.
func (t *target) adopt(ctx context.Context, x *session, a adoption) error {
	t.adopting.Lock()
	defer t.adopting.Unlock()
	t.changing.Lock()
	defer t.changing.Unlock()
	node := x.c.node
	if err := t.rep.AdoptFor(ctx, node, a.Epoch, a.Incarnation, a.Members); err != nil {
		return err
	}
	t.s.o.Log.Info("replica adopted a session", "replica", t.uid, "volume", t.volume, "node", node, "epoch", a.Epoch,
		"incarnation", a.Incarnation)
	// Until the change of sessions the replica took writes of the former session: the drain ends the last of them.
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
	t.serving = x
	t.mu.Unlock()
	if other {
		return t.rep.Drain(ctx)
	}
	return nil
}

// servingNow is the session that was adopted last; nil: none was.
func (t *target) servingNow() *session {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.serving
}

// failure is why nothing of the session is served any more; nil: it is.
func (x *session) failure() error {
	x.c.mu.Lock()
	defer x.c.mu.Unlock()
	return x.failed
}

// isCurrent reports whether the session is the one that is served; an error: it has ended.
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
