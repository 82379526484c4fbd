package peer

import (
	"cmp"
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"sync"

	"drover.io/drover/api"
)

// carryOutGuarded carries out a control frame. A panic ends its session alone.
func (c *served) carryOutGuarded(ctx context.Context, h *header, b []byte) (answer []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = c.endSession(h, p)
		}
	}()
	return c.carryOut(ctx, h, b)
}

// endSession ends the session of a control frame that panicked: all frames of the session are answered with the error.
// The server closes the replica, whose state in memory may be inconsistent; engines open the replica again.
func (c *served) endSession(h *header, panicked any) error {
	c.s.o.Log.Error("a call of another node panicked: its session ends", "node", c.node, "panic", panicked,
		"stack", string(debug.Stack()))
	err := api.Errorf(api.Unavailable, "the session ended: a call failed by an internal error of node %s", c.s.o.Node)
	c.mu.Lock()
	x := c.sessions[h.session]
	if x != nil {
		x.failed = err
	}
	c.mu.Unlock()
	if x != nil {
		c.s.wg.Go(func() { // Close waits for the call's connection
			if err := x.t.closeReplica(); err != nil {
				c.s.o.Log.Warn("the replica of an ended session cannot be closed", "replica", x.t.uid, "err", err)
			}
		})
	}
	return err
}

// sessionCount counts the open sessions, so that no node takes the sessions of other nodes. Its lock is taken last.
type sessionCount struct {
	mu    sync.Mutex
	all   int
	nodes map[string]int
}

// hasRoom returns an error if a node may open no more sessions. The caller has the lock.
func (s *sessionCount) hasRoom(node string) error {
	if n := s.nodes[node]; n >= nodeSessions || s.all >= serverSessions {
		return api.Errorf(api.Busy, "node %s has %d sessions of %d here: no more", node, n, s.all)
	}
	return nil
}

// findSession returns the session of a control frame, and why the server refuses its frames.
func (c *served) findSession(h *header) (x *session, refused error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if x = c.sessions[h.session]; x != nil {
		return x, x.failed
	}
	return nil, nil
}

// check returns an error if a node may open no more sessions.
func (s *sessionCount) check(node string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hasRoom(node)
}

// add adds a session of a node.
func (s *sessionCount) add(node string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.hasRoom(node); err != nil {
		return err
	}
	if s.nodes == nil {
		s.nodes = map[string]int{}
	}
	s.nodes[node]++
	s.all++
	return nil
}

// remove removes sessions of a node.
func (s *sessionCount) remove(node string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n == 0 {
		return
	}
	s.all -= n
	if s.nodes[node] -= n; s.nodes[node] == 0 {
		delete(s.nodes, node)
	}
}

// addSession adds an opened session, unless the context of the open has ended, and removes the oldest sessions of the
// connection with the same replica: an engine sends no notice of abandoned sessions.
func (c *served) addSession(ctx context.Context, x *session) error {
	serving := x.t.servingNow()
	c.mu.Lock()
	var extra []*session
	defer func() {
		c.mu.Unlock()
		for _, o := range extra {
			o.t.removeSession(o)
		}
	}()
	switch {
	case c.err != nil:
		extra = []*session{x}
		return c.err
	case ctx.Err() != nil:
		extra = []*session{x}
		return api.Errorf(api.Unavailable, "the engine has given session %d up", x.id)
	case c.sessions[x.id] != nil:
		extra = []*session{x}
		return api.Errorf(api.Invalid, "session %d is open already", x.id)
	}
	for _, o := range c.sessions {
		if o.t == x.t && o != serving {
			extra = append(extra, o)
		}
	}
	slices.SortFunc(extra, func(a, b *session) int { return cmp.Compare(a.id, b.id) })
	extra = extra[:max(0, len(extra)-replicaSessions+1)]
	for _, o := range extra {
		c.dropLocked(o)
	}
	if err := c.s.sessions.add(c.node); err != nil {
		extra = append(extra, x)
		return err
	}
	c.sessions[x.id] = x
	return nil
}

// closeSession ends a session. The end of the served session closes the replica.
func (c *served) closeSession(x *session) error {
	if x.t.giveUp(x) {
		return nil
	}
	if is, err := x.isCurrent(); !is {
		c.dropSession(x)
		x.t.removeSession(x)
		if errors.Is(err, errSession) {
			return nil // no session was adopted; errSession would break the connection, and all other sessions with it
		}
		return err
	}
	return x.t.closeReplica()
}
