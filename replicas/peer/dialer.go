package peer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
)

// errBroken is in the error of a call whose connection broke before the answer.
var errBroken = errors.New("no answer")

// laneCount is the number of connections between two nodes, which the sessions share.
const laneCount = 2

// Dialer keeps this node's connections to other nodes. The zero value with its exported fields set is ready.
type Dialer struct {
	Node string // this node's name
	// TLS returns the configuration for a new connection to a node; nil: no TLS, for tests.
	TLS func(node string) (*tls.Config, error)
	// Address is where a node's data process is, host:port.
	Address func(ctx context.Context, node string) (string, error)

	mu      sync.Mutex
	nodes   map[string]*lanes
	session uint32
	closed  bool
	began   time.Time
	skipped atomic.Int64 // time in which this process did not run
	stop    chan struct{}
	wg      sync.WaitGroup // the clock, and what members do in the background
}

// lanes are the connections to one node.
type lanes struct {
	d    *Dialer
	node string

	mu      sync.Mutex
	conns   [laneCount]*conn
	dialing [laneCount]*dialing
}

type dialing struct {
	done chan struct{}
	c    *conn
	err  error
}

// now is a clock that stands still while this process is stopped, so that the pause does not count as another node's.
func (d *Dialer) now() time.Duration { return time.Since(d.began) - time.Duration(d.skipped.Load()) }

// startClock begins to look at the clock. The caller has the lock.
func (d *Dialer) startClock() {
	if d.stop != nil {
		return
	}
	d.stop, d.began = make(chan struct{}), time.Now()
	d.nodes = map[string]*lanes{}
	d.wg.Add(1)
	go d.runClock()
}

// tickEvery is how fine time-outs are.
const (
	tickEvery    = 50 * time.Millisecond
	stoppedAfter = 20 * tickEvery
)

// startGoroutine starts a goroutine that Close waits for; false: the Dialer is closed.
func (d *Dialer) startGoroutine(f func()) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.wg.Go(f)
	return true
}

func (d *Dialer) runClock() {
	defer d.wg.Done()
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	last := d.now()
	for {
		select {
		case <-d.stop:
			return
		case <-tick.C:
		}
		now := d.now()
		if gap := now - last; gap > stoppedAfter {
			d.skipped.Add(int64(gap - tickEvery))
			now = d.now()
		}
		last = now
		d.mu.Lock()
		var conns []*conn
		for _, l := range d.nodes {
			l.mu.Lock()
			for _, c := range l.conns {
				if c != nil {
					conns = append(conns, c)
				}
			}
			l.mu.Unlock()
		}
		d.mu.Unlock()
		for _, c := range conns {
			c.checkSilence(now)
		}
	}
}

func (d *Dialer) lanesTo(node string) *lanes {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.nodes[node]
	if l == nil {
		l = &lanes{d: d, node: node}
		d.nodes[node] = l
	}
	return l
}

// connectLane returns a connection of the set, and connects if necessary.
func (l *lanes) connectLane(ctx context.Context, lane int) (*conn, error) {
	l.mu.Lock()
	if c := l.conns[lane]; c != nil && c.cause() == nil {
		l.mu.Unlock()
		return c, nil
	}
	on := l.dialing[lane]
	if on == nil {
		on = &dialing{done: make(chan struct{})}
		l.dialing[lane] = on
		l.d.wg.Add(1)
		go func() { // of the Dialer
			defer l.d.wg.Done()
			on.c, on.err = l.dial()
			l.mu.Lock()
			l.dialing[lane] = nil
			if on.err == nil {
				l.conns[lane] = on.c
			}
			l.mu.Unlock()
			close(on.done)
		}()
	}
	l.mu.Unlock()
	select {
	case <-on.done:
		return on.c, on.err
	case <-ctx.Done():
		return nil, api.Errorf(api.Unavailable, "node %s is not reached: %w", l.node, ctx.Err())
	}
}

// dialTime bounds one try to connect.
const dialTime = 5 * time.Second

func (l *lanes) dial() (*conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	go func() { // ends with ctx
		select {
		case <-l.d.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	fail := func(err error) error {
		if api.KindOf(err) == api.Other {
			err = api.Errorf(api.Unavailable, "%w", err)
		}
		return fmt.Errorf("node %s: %w", l.node, err)
	}
	addr, err := l.d.Address(ctx, l.node)
	if err != nil {
		return nil, fail(err)
	}
	nc, err := wire.NewDialer().DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fail(err)
	}
	var below *records
	if l.d.TLS != nil {
		cfg, err := l.d.TLS(l.node)
		if err != nil {
			_ = nc.Close()
			return nil, fail(err)
		}
		below = newRecords(nc)
		t := tls.Client(below, cfg)
		if err := t.HandshakeContext(ctx); err != nil {
			_ = nc.Close()
			return nil, fail(err)
		}
		nc = t
	}
	c, err := dialConn(l, nc, below)
	if err != nil {
		_ = nc.Close()
		return nil, fail(err)
	}
	return c, nil
}

// notifyMembers notifies the members of a connection of its end. Both goroutines of the connection have ended.
func (l *lanes) notifyMembers(c *conn) {
	l.mu.Lock()
	for i := range l.conns {
		if l.conns[i] == c {
			l.conns[i] = nil
		}
	}
	l.mu.Unlock()
	c.mu.Lock()
	members := make([]*Member, 0, len(c.members))
	for _, m := range c.members {
		members = append(members, m)
	}
	left := slices.Collect(maps.Values(c.table))
	left = append(left, c.queue...)
	c.table, c.queue = nil, nil
	err := c.err
	c.mu.Unlock()
	for _, s := range left {
		if s != nil && s.call != nil {
			s.call.answerCall(nil, api.Errorf(api.Unavailable, "the connection to node %s broke: %w", l.node,
				errors.Join(errBroken, err)))
		}
	}
	for _, m := range members {
		m.noteConnEnd(c)
	}
}

// Close ends the connections. The members must be closed before.
func (d *Dialer) Close() {
	d.mu.Lock()
	if d.closed || d.stop == nil {
		d.closed = true
		d.mu.Unlock()
		return
	}
	d.closed = true
	close(d.stop)
	nodes := d.nodes
	d.mu.Unlock()
	d.wg.Wait()
	for _, l := range nodes {
		l.mu.Lock()
		conns := l.conns
		l.mu.Unlock()
		for _, c := range conns {
			if c != nil {
				c.breakConnection(api.Errorf(api.Unavailable, "this process is stopping"))
				<-c.closed
			}
		}
	}
}
