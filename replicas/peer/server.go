package peer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/listener"
)

// Replica is what a Server serves: a replica that is open on a loop.
type Replica interface {
	block.Submitter
	// AdoptFor adopts a session of the engine on a node.
	AdoptFor(ctx context.Context, node string, epoch, incarnation int64, members []string) error
	// Drain returns when the writes that are under way have ended.
	Drain(ctx context.Context) error
	// Info is what the replica says of itself.
	Info() Info
	// Call carries out a call by name.
	Call(ctx context.Context, name string, args []byte) ([]byte, error)
	// Close ends the session cleanly, or gives the replica up.
	Close() error
}

// ServerOptions say whom a Server serves, and what.
type ServerOptions struct {
	Node string // this one's name
	// TLS of the listener; nil: none, which tests use.
	TLS *tls.Config
	// NodeOf tells which node a connection comes from; nil: what it says itself.
	NodeOf func(tls.ConnectionState) (string, error)
	// Open opens a replica on a loop. What it returns is closed when no session has it any more.
	Open func(ctx context.Context, replica, volume string) (Replica, Loop, error)
	// AllowOpen says whether a node may learn what a replica is. Nil: every node may.
	AllowOpen func(ctx context.Context, node, replica, volume string) error
	// Allow says whether the API names a node as that of the volume's engine. An error of kind denied fences.
	Allow func(ctx context.Context, node, replica, volume string, epoch int64) error
	// Linger is how long a replica stays open after its last session broke; 0: 15 s.
	Linger time.Duration
	// Listen bounds the connections; its Name and Log are set.
	Listen listener.Options
	// Idle is how long a connection without sessions stays open; 0: 5 min.
	Idle time.Duration
	// Stalled is how long a client may take none of its answers; 0: 30 s.
	Stalled time.Duration
	// Boot names the run of this machine; empty: the kernel's.
	Boot string
	Log  *slog.Logger
}

// serverMemory bounds the payloads that a server has under way; a connection is told that it may use connCredit of it.
const (
	serverMemory = 64 << 20
	connCredit   = 16 << 20
)

// What is served of a connection at once. One that asks for more is read again when it took answers.
const (
	connFrames   = 16 << 10 // of all kinds
	connCalls    = 4 << 10
	connArgs     = connCredit // bytes of calls
	connAnswers  = 4 << 20    // of calls, not sent: then no call begins that reads content
	sessionCalls = 8          // of each kind that reads content
	listCalls    = 2          // of each kind that has a list of regions or pieces
)

// Sessions. An engine has one with each replica, and some more while it connects again.
const (
	connSessions    = 4 << 10
	serverSessions  = 16 << 10
	replicaSessions = 32 // of one replica on one connection
)

// Server serves replicas to engines on other nodes.
type Server struct {
	o        ServerOptions
	bufs     *buffers
	sessions atomic.Int64

	mu      sync.Mutex
	ln      *listener.Listener
	conns   map[*served]bool
	targets map[string]*target // by uid of the replica
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
	return &Server{o: o, bufs: newBuffers(serverMemory), conns: map[*served]bool{}, targets: map[string]*target{}}, nil
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
		c := &served{s: s, nc: &hasty{nc, s.o.Stalled}, accepted: nc, sessions: map[uint32]*session{}}
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
			c.run()
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
		}()
	}
}

// Close closes the listener, breaks all connections, and gives up what they had open.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	if s.ln != nil {
		_ = s.ln.Close() // it may be closed already
	}
	for c := range s.conns {
		c.fail(errClosed)
	}
	s.mu.Unlock()
	s.wg.Wait()
	s.mu.Lock()
	targets := s.targets
	s.targets = map[string]*target{}
	s.mu.Unlock()
	for _, t := range targets {
		t.mu.Lock()
		t.stopTimer()
		t.mu.Unlock()
		if err := t.shut(); err != nil {
			s.o.Log.Warn("the end of a replica that was served", "replica", t.uid, "err", err)
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

// Release closes a replica that is served, so that it can be opened by others; its sessions break and may come again.
// Nothing is served: no error.
func (s *Server) Release(replica string) error {
	s.mu.Lock()
	t := s.targets[replica]
	s.mu.Unlock()
	if t == nil {
		return nil
	}
	return t.shut()
}

// Serves reports whether a replica is open for an engine on another node.
func (s *Server) Serves(replica string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.targets[replica] != nil
}

// Info of a replica that is served.
func (s *Server) Info(replica string) (Info, bool) {
	s.mu.Lock()
	t := s.targets[replica]
	s.mu.Unlock()
	if t == nil {
		return Info{}, false
	}
	return t.rep.Info(), true
}
