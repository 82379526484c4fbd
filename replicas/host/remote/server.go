package remote

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/listener"
	"drover.io/drover/block/pace"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/disks"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/host/volumelock"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// Node is the node whose replicas are served.
type Node interface {
	// APIReached reports whether objects can be read.
	APIReached() bool
	// Disk is a disk of the node by its uid, opened if need be.
	Disk(ctx context.Context, uid api.UID) (*stack.Disk, error)
	// Damaged notes that a replica could not be opened, and why.
	Damaged(ctx context.Context, replica api.UID, why error)
	// LayersChanged notes that a call of another node changed the layers of a replica.
	LayersChanged(disk *stack.Disk, replica, volume string)
}

// Options of a Server.
type Options struct {
	Node     string
	Identity *wire.Identity // of the node; nil: other nodes are neither served nor reached
	Listener net.Listener   // takes engines of other nodes; nil: none are served. The Server closes the listener
	Places   *Places
	Host     Node
	Disks    *disks.Registry
	Threads  *iothreads.Threads
	Locks    *volumelock.Locks
	Watch    *engine.Watch
	Log      *slog.Logger
}

// Server serves the replicas of a node, and dials the replicas of others.
type Server struct {
	o      Options
	client client.Client
	reader client.Reader
	events events.EventRecorder

	dialer   *peer.Dialer
	server   *peer.Server  // nil: other nodes are not served
	served   chan struct{} // closed when the server has ended
	serveErr error         // why; nil: Close ended the server. Set before served is closed

	mu       sync.Mutex
	open     map[api.UID]*Served
	refusals map[string]*listener.Tally // of other nodes, by volume and node

	questions map[string]chan struct{} // places for questions to the API, by node
}

// New has a server that does not serve yet.
func New(o Options) (*Server, error) {
	s := &Server{o: o, open: map[api.UID]*Served{}, refusals: map[string]*listener.Tally{},
		questions: map[string]chan struct{}{}}
	id := o.Identity
	if id == nil {
		return s, nil
	}
	s.dialer = &peer.Dialer{Node: o.Node, Address: s.addressOf}
	s.dialer.TLS = func(node string) (*tls.Config, error) { return id.Client(node, peer.Protocol) }
	if o.Listener == nil {
		return s, nil
	}
	server, err := peer.NewServer(peer.ServerOptions{Node: o.Node, TLS: id.Server(peer.Protocol), NodeOf: wire.NodeOf,
		Open: s.Open, AllowOpen: s.AllowOpen, Allow: s.AllowSession, Log: o.Log})
	if err != nil {
		return nil, err
	}
	s.server, s.served = server, make(chan struct{})
	return s, nil
}

// Serve serves other nodes until Close. A process serves as soon as its owners are connected, before the API answers:
// engines wait for replicas whose process was restarted.
func (s *Server) Serve() {
	if s.server == nil {
		return
	}
	go func() {
		defer close(s.served)
		if s.serveErr = s.server.Serve(s.o.Listener); s.serveErr != nil {
			s.o.Log.Error("other nodes are not served any more", "err", s.serveErr)
		}
	}()
}

// GuestIO counts the requests that other nodes had answered.
func (s *Server) GuestIO() pace.GuestIO {
	if s.server == nil {
		return pace.GuestIO{}
	}
	return s.server.GuestIO()
}

// Use gives the server its clients, before the node has reached the API.
func (s *Server) Use(c client.Client, reader client.Reader, e events.EventRecorder) {
	s.client, s.reader, s.events = c, reader, e
}

// Close ends the server and the connections to other nodes. Serve was called.
func (s *Server) Close() error {
	if s.dialer != nil {
		s.dialer.Close()
	}
	if s.server == nil {
		return nil
	}
	_ = s.o.Listener.Close()
	s.server.Close()
	<-s.served
	return s.serveErr
}

// Member is a replica of another node, for an engine of this node. Unsupported: this node has no identity.
func (s *Server) Member(o peer.Options) (*peer.Member, error) {
	if s.dialer == nil {
		return nil, api.Errorf(api.Unsupported, "replica %s of node %s cannot be reached: node %s has no identity", o.Replica,
			o.Node, s.o.Node)
	}
	return s.dialer.Member(o), nil
}

// Release takes a replica away from the engine of another node that has the replica open.
func (s *Server) Release(replica string) error {
	if s.server == nil {
		return nil
	}
	return s.server.Release(replica)
}

// Info is a replica that an engine of another node has open. False: none has.
func (s *Server) Info(replica string) (peer.Info, bool) {
	if s.server == nil {
		return peer.Info{}, false
	}
	return s.server.Info(replica)
}

// Announce reads the Node from the cache so often: before the Node exists, and later.
const (
	announceSoon  = 100 * time.Millisecond
	announceEvery = 2 * time.Second
)

// Announce keeps the address of the server in the Node's status, and ends the sessions of former engines. Announce
// returns an error, which ends the process, when the server has ended: the next process serves the replicas again.
func (s *Server) Announce(ctx context.Context) error {
	if s.server == nil {
		return nil
	}
	addr := s.o.Listener.Addr().String()
	serving, end := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer end()
	watching.Go(func() {
		select {
		case <-s.served:
			end()
		case <-serving.Done():
		}
	})
	for {
		pause := announceEvery
		s.releaseFormer(ctx)
		if !s.writeAddress(ctx, addr) {
			pause = announceSoon
		}
		select {
		case <-time.After(pause):
			continue
		case <-serving.Done():
		}
		break
	}
	if ctx.Err() != nil {
		return nil
	}
	if <-s.served; s.serveErr != nil {
		return fmt.Errorf("node %s: other nodes are not served any more: %w", s.o.Node, s.serveErr)
	}
	return nil
}

// writeAddress writes the address of the server into the Node's status, unless the status has the address. It reports
// whether the Node exists.
func (s *Server) writeAddress(ctx context.Context, addr string) (exists bool) {
	var n api.Node
	if s.client.Get(ctx, client.ObjectKey{Name: s.o.Node}, &n) != nil {
		return false
	}
	if n.Status.DataAddress == addr {
		return true
	}
	old := n.DeepCopy()
	n.Status.DataAddress = addr
	if err := s.client.Status().Patch(ctx, &n, client.MergeFrom(old)); err != nil && !apierrors.IsConflict(err) {
		s.o.Log.Warn("the address of this node's replicas cannot be written", "err", err)
	}
	return true
}

// addressOf is the address of another node's data process: as the API has the address, else the last one that is known.
func (s *Server) addressOf(ctx context.Context, node string) (string, error) {
	st := s.o.Places.Get()
	var n api.Node
	if s.o.Host.APIReached() && s.client.Get(ctx, client.ObjectKey{Name: node}, &n) == nil && n.Status.DataAddress != "" {
		if addr := n.Status.DataAddress; st.Nodes[node] != addr {
			s.o.Places.Change(func(st *Known) { st.Nodes[node] = addr })
		}
		return n.Status.DataAddress, nil
	}
	if addr := st.Nodes[node]; addr != "" {
		return addr, nil
	}
	return "", api.Errorf(api.Unavailable, "node %s: the address of its replicas is not known", node)
}
