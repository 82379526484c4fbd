package peer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/listener"
	"drover.io/drover/block/pace"
)

// Replica is a replica that is open on a loop, as a Server serves it.
type Replica interface {
	block.Submitter
	// AdoptFor adopts a session of the engine on a node.
	AdoptFor(ctx context.Context, node string, epoch, incarnation int64, members []string) error
	// Drain returns at the end of the writes in progress.
	Drain(ctx context.Context) error
	// Info describes the replica.
	Info() Info
	// Call carries out a call by name.
	Call(ctx context.Context, name string, args []byte) ([]byte, error)
	// Close ends the session cleanly, or gives the replica up.
	Close() error
}

// ServerOptions of a Server.
type ServerOptions struct {
	Node string // this node's name
	// TLS of the listener; nil: no TLS, for tests.
	TLS *tls.Config
	// NodeOf names the node of a connection; nil: the client's own word counts.
	NodeOf func(tls.ConnectionState) (string, error)
	// Open opens a replica on a loop. The Server closes the replica after the last session.
	Open func(ctx context.Context, replica, volume string) (Replica, Loop, error)
	// AllowOpen says whether a node may learn about a replica. Nil: every node may.
	AllowOpen func(ctx context.Context, node, replica, volume string) error
	// Allow says whether the API names a node as the node of the volume's engine. An error of kind denied fences.
	Allow func(ctx context.Context, node, replica, volume string, epoch int64) error
	// Linger is how long a replica stays open after the break of its last session; 0: 15 s.
	Linger time.Duration
	// Listen bounds the connections; its Name and Log are set.
	Listen listener.Options
	// Idle is how long a connection without sessions stays open; 0: 5 min.
	Idle time.Duration
	// Stalled is how long a client may take no answers; 0: 30 s.
	Stalled time.Duration
	// Boot names the run of this machine; empty: the kernel's.
	Boot string
	Log  *slog.Logger
}

// serverMemory bounds the payloads of a server in progress; each connection has a credit of connCredit.
const (
	serverMemory = 64 << 20
	connCredit   = 16 << 20
)

// Bounds of a connection. Beyond a bound the server reads the connection again when the client took answers.
const (
	connFrames   = 16 << 10 // of all kinds
	connCalls    = 4 << 10
	connArgs     = connCredit // bytes of calls
	connAnswers  = 4 << 20    // of calls, not sent: beyond it no call begins that reads content
	sessionCalls = 8          // of each kind of call that reads content
	listCalls    = 2          // of each kind of call with a list of regions or pieces
)

// Sessions. An engine has one with each replica, and some more during reconnects.
const (
	nodeSessions    = 4 << 10 // of one node, on all its connections
	serverSessions  = 16 << 10
	replicaSessions = 32 // with one replica, on one connection
)

// Server serves replicas to engines on other nodes.
type Server struct {
	o        ServerOptions
	bufs     *buffers
	sessions sessionCount
	guests   pace.Counter

	mu      sync.Mutex
	ln      *listener.Listener
	conns   map[*served]bool
	targets map[string]*target       // by uid of the replica
	opens   map[string]chan struct{} // by uid of the replica: closed at the end of the open in progress
	closed  bool
	wg      sync.WaitGroup
	refused listener.Tally // connections
}

// NewServer makes a server; Serve listens.
func NewServer(o ServerOptions) (*Server, error) {
	if o.Linger == 0 {
		o.Linger = 15 * time.Second
	}
	if o.Idle == 0 {
		o.Idle = 5 * time.Minute
	}
	if o.Stalled == 0 {
		o.Stalled = 3 * silentAfter
	}
	if o.Boot == "" {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, fmt.Errorf("boot id of the machine: %w", err)
		}
		o.Boot = strings.TrimSpace(string(b))
	}
	return &Server{o: o, bufs: newBuffers(serverMemory), conns: map[*served]bool{}, targets: map[string]*target{},
		opens: map[string]chan struct{}{}}, nil
}

// Serve takes connections until the listener or the server is closed. Any other end is an error.
func (s *Server) Serve(on net.Listener) error {
	bounds := s.o.Listen
	bounds.Name, bounds.Log = "replicas", s.o.Log
	ln := listener.Wrap(on, bounds)
	s.mu.Lock()
	s.ln = ln
	s.mu.Unlock()
	for {
		nc, err := ln.Accept()
		if err != nil {
			if s.isClosed() || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("connections of other nodes: %w", err)
		}
		c := &served{s: s, nc: &hasty{nc, s.o.Stalled}, accepted: nc, sessions: map[uint32]*session{},
			opening: map[uint32]context.CancelFunc{}}
		c.work = sync.NewCond(&c.mu)
		c.ctx, c.cancel = context.WithCancel(context.Background())
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = nc.Close()
			return nil
		}
		s.conns[c] = true
		s.wg.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.wg.Done()
			c.serveConnection()
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
		}()
	}
}

// GuestIO counts the requests that replicas of this node have answered to other nodes.
func (s *Server) GuestIO() pace.GuestIO { return s.guests.GuestIO() }

// Close closes the listener, breaks all connections, and closes their replicas. Requests and calls of connections may
// wait for the end of a cut, which the end of the replica ends: Close waits for the connections last.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	if s.ln != nil {
		_ = s.ln.Close() // may be closed already
	}
	for c := range s.conns {
		c.breakConnection(errClosed)
	}
	targets := slices.Collect(maps.Values(s.targets))
	s.mu.Unlock()
	for _, t := range targets {
		if err := t.closeReplica(); err != nil {
			s.o.Log.Warn("a served replica cannot be closed", "replica", t.uid, "err", err)
		}
	}
	s.wg.Wait()
	s.bufs.close()
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Release closes a served replica, so that another process or an engine of this node can open the replica; its sessions
// break and may come again. Without a served replica Release does nothing.
func (s *Server) Release(replica string) error {
	s.mu.Lock()
	t := s.targets[replica]
	s.mu.Unlock()
	if t == nil {
		return nil
	}
	return t.closeReplica()
}

// ReleaseFrom ends the sessions of a replica that serves a node, and reports whether the replica served the node.
// ReleaseFrom waits for no disk: a goroutine of the Server closes the replica.
func (s *Server) ReleaseFrom(replica, node string) bool {
	s.mu.Lock()
	t := s.targets[replica]
	if t == nil || s.closed {
		s.mu.Unlock()
		return false
	}
	s.wg.Add(1) // with the lock: Close waits afterwards
	s.mu.Unlock()
	if x := t.servingNow(); x == nil || x.c.node != node || !t.endSessions(false) {
		s.wg.Done()
		return false
	}
	go func() {
		defer s.wg.Done()
		if err := t.endReplica(); err != nil {
			s.o.Log.Warn("the replica of a former engine cannot be closed", "replica", t.uid, "err", err)
		}
	}()
	return true
}

// Serves reports whether a replica is open for an engine on another node.
func (s *Server) Serves(replica string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.targets[replica] != nil
}

// Info describes a served replica.
func (s *Server) Info(replica string) (Info, bool) {
	s.mu.Lock()
	t := s.targets[replica]
	s.mu.Unlock()
	if t == nil {
		return Info{}, false
	}
	return t.rep.Info(), true
}
