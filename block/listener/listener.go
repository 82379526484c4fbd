// Package listener takes connections for the program's servers, so that neither a burst of connections nor a lack of
// descriptors ends a server or keeps other clients out.
//
// A connection is unknown until the server has identified its client. The Listener owns the bounds: the number of
// unknown connections in all and of each source address, the time until a connection must be identified, the number of
// connections of each identified peer, and the number of descriptors that stay free for the rest of the process.
//
// Invariants: Accept continues after each temporary error, and returns all others. A connection beyond a bound replaces
// an unknown connection of the source with the most unknown connections: a source that floods the server competes with
// itself.
//
// Goroutines: none. Lock order: the Listener's mutex alone; connections are closed outside of it.
package listener

import (
	"container/list"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// Options bound the connections of a Listener. The zero value of each field stands for its default.
type Options struct {
	Name      string        // of the server, for the log
	Unknown   int           // unknown connections at once; 256
	PerSource int           // unknown connections of one IPv4 address or one IPv6 network of 64 bits; 16
	PerPeer   int           // connections of one identified peer; 64
	Deadline  time.Duration // for a connection to be identified; 10 s
	Reserve   int           // descriptors that stay free; 64, at most an eighth of the process's limit
	Log       *slog.Logger
}

// Pauses after a temporary error.
const (
	firstPause = 5 * time.Millisecond
	lastPause  = time.Second
)

// Listener is a net.Listener with bounds.
type Listener struct {
	net.Listener
	o      Options
	closed chan struct{}
	once   sync.Once

	failing time.Time // since when Accept fails, or zero; only the goroutine that calls Accept uses it
	failed  Tally

	mu      sync.Mutex
	unknown *list.List // *Conn, oldest first
	sources map[netip.Prefix]int
	peers   map[string]int
	refused Tally
}

// Wrap bounds the connections of ln. One goroutine calls Accept.
func Wrap(ln net.Listener, o Options) *Listener {
	def := func(v *int, n int) {
		if *v == 0 {
			*v = n
		}
	}
	def(&o.Unknown, 256)
	def(&o.PerSource, 16)
	def(&o.PerPeer, 64)
	def(&o.Reserve, 64)
	if o.Deadline == 0 {
		o.Deadline = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return &Listener{Listener: ln, o: o, closed: make(chan struct{}), unknown: list.New(),
		sources: map[netip.Prefix]int{}, peers: map[string]int{}}
}

// Close implements net.Listener.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// Accept implements net.Listener. Accept returns permanent errors only.
func (l *Listener) Accept() (net.Conn, error) {
	for pause := firstPause; ; {
		nc, err := l.Listener.Accept()
		switch {
		case err == nil:
			l.reportRecovered()
			pause = firstPause
			if c := l.admitConn(nc); c != nil {
				return c, nil
			}
			continue
		case !isTemporary(err):
			return nil, err
		}
		if l.failing.IsZero() {
			l.failing = time.Now()
		}
		if n, report := l.failed.Count(); report {
			l.o.Log.Error("connections wait: none can be accepted now", "server", l.o.Name, "times", n, "err", err)
		}
		wait := time.NewTimer(pause)
		select {
		case <-wait.C:
		case <-l.closed:
			wait.Stop()
			return nil, net.ErrClosed
		}
		pause = min(2*pause, lastPause)
	}
}

func (l *Listener) reportRecovered() {
	if l.failing.IsZero() {
		return
	}
	l.o.Log.Info("connections are accepted again", "server", l.o.Name, "after",
		time.Since(l.failing).Round(time.Millisecond))
	l.failing = time.Time{}
}

// isTemporary reports whether an error of accept(2) is temporary: descriptors or memory ran out, or the client of the
// connection closed it early.
func isTemporary(err error) bool {
	var no syscall.Errno
	if !errors.As(err, &no) {
		return false
	}
	switch no {
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EPROTO,
		syscall.ENETDOWN, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.EHOSTUNREACH, syscall.ENONET,
		syscall.ENOPROTOOPT, syscall.EINTR, syscall.EPERM:
		return true
	}
	return false
}

// Conn is a connection of a Listener.
type Conn struct {
	net.Conn
	l      *Listener
	source netip.Prefix
	late   *time.Timer

	// Under the Listener's lock.
	place *list.Element // in the list of unknown connections, or nil
	peer  string        // the peer that the connection counts for
	over  bool
}

// NetConn is the connection below.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// sourceOf is the source address, or network, of a connection.
func sourceOf(a net.Addr) netip.Prefix {
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{}
	}
	ip := at.Addr().Unmap().WithZone("")
	bits := 64
	if ip.Is4() {
		bits = 32
	}
	p, err := ip.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// admitConn takes a connection, or refuses it.
func (l *Listener) admitConn(nc net.Conn) *Conn {
	if l.descriptorsScarce(nc) {
		_ = nc.Close()
		l.reportRefused("descriptors are scarce", nc)
		return nil
	}
	c := &Conn{Conn: nc, l: l, source: sourceOf(nc.RemoteAddr())}
	l.mu.Lock()
	c.place = l.unknown.PushBack(c)
	l.sources[c.source]++
	var victim *Conn
	why := ""
	switch {
	case l.sources[c.source] > l.o.PerSource:
		victim, why = l.oldestUnknown(c.source), "the address has too many connections without a hello"
	case l.unknown.Len() > l.o.Unknown:
		victim, why = l.oldestUnknown(l.busiestSource()), "the listener has too many connections without a hello"
	}
	c.late = time.AfterFunc(l.o.Deadline, func() { c.expire() })
	l.mu.Unlock()
	if victim != nil {
		_ = victim.Close()
		l.reportRefused(why, victim)
	}
	return c
}

// oldestUnknown is the oldest unknown connection of a source. The caller has the lock.
func (l *Listener) oldestUnknown(source netip.Prefix) *Conn {
	for e := l.unknown.Front(); e != nil; e = e.Next() {
		if c := e.Value.(*Conn); c.source == source {
			return c
		}
	}
	return nil
}

// busiestSource is the source with the most unknown connections; among equals, the source of the oldest connection. The
// caller has the lock.
func (l *Listener) busiestSource() (source netip.Prefix) {
	most := 0
	for e := l.unknown.Front(); e != nil; e = e.Next() {
		if s := e.Value.(*Conn).source; l.sources[s] > most {
			source, most = s, l.sources[s]
		}
	}
	return source
}

// descriptorsScarce reports whether a connection has one of the last descriptors: the kernel gives the lowest free
// number.
func (l *Listener) descriptorsScarce(nc net.Conn) bool {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return false
	}
	reserve := min(uint64(l.o.Reserve), limit.Cur/8)
	few := false
	err = raw.Control(func(fd uintptr) { few = uint64(fd) >= limit.Cur-reserve })
	return err == nil && few
}

func (l *Listener) reportRefused(why string, nc net.Conn) {
	if n, report := l.refused.Count(); report {
		l.o.Log.Warn("connections are refused", "server", l.o.Name, "why", why, "from", nc.RemoteAddr().String(), "times", n)
	}
}

// expire ends a connection that the server did not identify in time.
func (c *Conn) expire() {
	c.l.mu.Lock()
	still := c.place != nil
	c.l.mu.Unlock()
	if still {
		_ = c.Close()
		c.l.reportRefused("the client did not authenticate in time", c)
	}
}

// removeUnknown removes a connection from the unknown connections. The caller has the lock.
func (c *Conn) removeUnknown() {
	if c.place == nil {
		return
	}
	c.l.unknown.Remove(c.place)
	c.place = nil
	if c.l.sources[c.source]--; c.l.sources[c.source] == 0 {
		delete(c.l.sources, c.source)
	}
	c.late.Stop()
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.l.mu.Lock()
	if !c.over {
		c.over = true
		c.removeUnknown()
		if c.peer != "" {
			if c.l.peers[c.peer]--; c.l.peers[c.peer] == 0 {
				delete(c.l.peers, c.peer)
			}
		}
	}
	c.l.mu.Unlock()
	return c.Conn.Close()
}

// Identify names the peer of a connection, which may be a TLS connection over one of a Listener. From then on the
// connection counts for the peer. Identify fails if the peer has too many connections, or if the connection is closed.
// It ignores connections of other listeners.
func Identify(nc net.Conn, peer string) error {
	for {
		if c, ok := nc.(*Conn); ok {
			return c.identify(peer)
		}
		below, ok := nc.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		nc = below.NetConn()
	}
}

func (c *Conn) identify(peer string) error {
	c.l.mu.Lock()
	defer c.l.mu.Unlock()
	switch {
	case c.over:
		return net.ErrClosed
	case c.peer != "":
		return nil
	case c.l.peers[peer] >= c.l.o.PerPeer:
		return fmt.Errorf("connections of %s: it has %d already", peer, c.l.peers[peer])
	}
	c.removeUnknown()
	c.peer = peer
	c.l.peers[peer]++
	return nil
}
