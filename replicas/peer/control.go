package peer

import (
	"bytes"
	"context"
	"encoding/json"

	"drover.io/drover/api"
)

// Control frames: open, adopt, close, and the calls.

// beginControl returns the context of a control frame, and ends the contexts of earlier frames that the frame gives up.
// The goroutines of the frames run in any order, so the reading goroutine calls beginControl in the frames' order.
func (c *served) beginControl(h *header, b []byte) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calling++
	c.args += int64(len(b))
	x := c.sessions[h.session]
	switch h.kind {
	case kindOpen:
		c.endOpening(h.session)
		ctx, cancel := context.WithCancel(c.ctx)
		c.opening[h.session] = cancel
		return ctx
	case kindClose:
		c.endOpening(h.session)
		if x != nil {
			x.endCallsLocked()
		}
	case kindCall:
		name, _, _ := bytes.Cut(b, []byte("\n"))
		if m := methods[string(name)]; m != nil && x != nil {
			return x.beginCall(m)
		}
	}
	return c.ctx
}

// endOpening ends the context of an open in progress. The caller has the lock.
func (c *served) endOpening(session uint32) {
	if cancel := c.opening[session]; cancel != nil {
		cancel()
	}
}

// scope is the context of the calls of a session for one piece of work, until a later call gives the work up.
type scope struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
}

// errScopeEnded is the cause of the end of a call's context by a later call of the session.
var errScopeEnded = api.Errorf(api.Unavailable, "a later call of the engine has given the call up")

// beginCall returns the context of a call. The caller has the connection's lock.
func (x *session) beginCall(m servedMethod) context.Context {
	of, ends := m.scopeName()
	if was := x.scopes[of]; ends && was != nil {
		was.cancel(errScopeEnded)
		delete(x.scopes, of)
	}
	if of == "" {
		return x.c.ctx
	}
	if x.scopes[of] == nil {
		s := &scope{}
		s.ctx, s.cancel = context.WithCancelCause(x.c.ctx)
		x.scopes[of] = s
	}
	return x.scopes[of].ctx
}

// endCalls ends the contexts of the calls with a scope.
func (x *session) endCalls() {
	x.c.mu.Lock()
	defer x.c.mu.Unlock()
	x.endCallsLocked()
}

// endCallsLocked is endCalls for a caller with the connection's lock.
func (x *session) endCallsLocked() {
	for _, s := range x.scopes {
		s.cancel(nil)
	}
	clear(x.scopes)
}

// answerControl carries out a control frame, in a goroutine of its own.
func (c *served) answerControl(ctx context.Context, h header, b []byte) {
	answer, err := c.carryOutGuarded(ctx, &h, b)
	if err == nil {
		err = checkFrame("answer", answer)
	}
	o := outgoing{h: header{kind: kindAnswer, id: h.id}, payload: answer}
	if err != nil {
		o = errorAnswer(h.id, err)
	}
	o.call = true
	c.mu.Lock()
	if h.kind == kindOpen {
		c.endOpening(h.session)
		delete(c.opening, h.session)
	}
	c.calling--
	c.args -= int64(len(b))
	c.answers += int64(len(o.payload))
	c.out = append(c.out, o)
	c.work.Broadcast()
	c.mu.Unlock()
}

func (c *served) carryOut(ctx context.Context, h *header, b []byte) ([]byte, error) {
	x, failed := c.findSession(h)
	if failed != nil {
		switch h.kind {
		case kindClose:
			c.dropSession(x)
		case kindAdopt: // the engine wants the replica again, in a new session
			c.dropSession(x)
			failed = errSession
		}
		return nil, failed
	}
	if h.kind == kindOpen {
		var q openRequest
		if err := json.Unmarshal(b, &q); err != nil || x != nil {
			return nil, api.Errorf(api.Invalid, "open: it makes no sense")
		}
		if err := q.validate(); err != nil {
			return nil, err
		}
		if c.s.o.AllowOpen != nil {
			if err := c.s.o.AllowOpen(ctx, c.node, q.Replica, q.Volume); err != nil {
				return nil, err
			}
		}
		if err := c.s.sessions.check(c.node); err != nil {
			return nil, err
		}
		x = &session{id: h.session, c: c, account: account{of: &c.account}, scopes: map[string]*scope{},
			reading: map[string]chan struct{}{}}
		for name, m := range methods {
			if n := m.mostAtOnce(); n > 0 {
				x.reading[name] = make(chan struct{}, n)
			}
		}
		if err := c.s.openTarget(ctx, x, q.Replica, q.Volume); err != nil {
			return nil, err
		}
		if err := c.addSession(ctx, x); err != nil {
			return nil, err
		}
		return json.Marshal(x.t.rep.Info())
	}
	switch {
	case x == nil && h.kind == kindClose: // errSession would break the connection, and all other sessions with it
		return nil, api.Errorf(api.Unavailable, "the session has ended already")
	case x == nil:
		return nil, errSession
	}
	switch h.kind {
	case kindAdopt:
		var a adoption
		if err := json.Unmarshal(b, &a); err != nil {
			return nil, api.Errorf(api.Invalid, "adopt: %w", err)
		}
		if err := a.validate(); err != nil {
			return nil, err
		}
		if c.s.o.Allow != nil {
			if err := c.s.o.Allow(ctx, c.node, x.t.uid, x.t.volume, a.Epoch); err != nil {
				return nil, err
			}
		}
		return nil, x.t.adoptSession(ctx, x, a)
	case kindClose:
		return nil, c.closeSession(x)
	}
	name, args, _ := bytes.Cut(b, []byte("\n"))
	if places := x.reading[string(name)]; places != nil {
		if err := x.beginRead(places); err != nil {
			return nil, err
		}
		defer func() { <-places }()
	}
	if is := methods[string(name)]; is != nil && is.changesLayers() {
		x.t.changing.RLock()
		defer x.t.changing.RUnlock()
	}
	switch is, err := x.isCurrent(); {
	case err != nil:
		return nil, err
	case !is:
		return nil, api.Errorf(api.Denied, "the replica adopted another session")
	}
	return x.t.rep.Call(ctx, string(name), args)
}

// beginRead waits until a call may read content: few calls of a kind do at once in a session, and none while answers
// wait for the client.
func (x *session) beginRead(places chan struct{}) error {
	c := x.c
	select {
	case places <- struct{}{}:
	case <-c.ctx.Done():
		return errClosed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil && c.answers >= connAnswers {
		c.work.Wait()
	}
	if c.err != nil {
		<-places
	}
	return c.err
}
