package replicas

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// PeerOptions say how the data processes of the nodes reach each other.
type PeerOptions struct {
	// Identity is what this node is known by; nil: other nodes are neither served nor reached.
	Identity *wire.Identity
	// Listener takes engines of other nodes; nil: none are served. Data closes it.
	Listener net.Listener
	// State is a file for what has to be known before the API is reached; empty: nothing is kept.
	State string
}

// peerState is that file: which disks were served, and where other nodes were.
type peerState struct {
	Disks map[api.UID]string `json:"disks,omitempty"`
	Nodes map[string]string  `json:"nodes,omitempty"`
	// Far is where layers are read that are not on this node yet.
	Far map[string][]farPlace `json:"far,omitempty"`
}

// startPeers serves other nodes, from the first moment: engines wait for replicas whose process was restarted.
func (d *Data) startPeers() error {
	id := d.Peers.Identity
	if id == nil {
		return nil
	}
	if d.Log == nil {
		d.Log = slog.Default()
	}
	d.peers = &peer.Dialer{Node: d.Node, Address: d.addressOf}
	d.peers.TLS = func(node string) (*tls.Config, error) { return id.Client(node, peer.Protocol) }
	if d.Peers.Listener == nil {
		return nil
	}
	s, err := peer.NewServer(peer.ServerOptions{Node: d.Node, TLS: id.Server(peer.Protocol), NodeOf: wire.NodeOf,
		Open: d.openForPeer, AllowOpen: d.allowOpen, Allow: d.allowSession, Log: d.Log})
	if err != nil {
		return err
	}
	d.server, d.served = s, make(chan struct{})
	go func() { // stopPeers waits for it
		defer close(d.served)
		if d.serveErr = s.Serve(d.Peers.Listener); d.serveErr != nil {
			d.Log.Error("other nodes are not served any more", "err", d.serveErr)
		}
	}()
	return nil
}

func (d *Data) stopPeers() error {
	if d.peers != nil {
		d.peers.Close()
	}
	if d.server == nil {
		return nil
	}
	_ = d.Peers.Listener.Close()
	d.server.Close()
	<-d.served
	return d.serveErr
}

// announceEvery is how often the Node is looked at, in the cache: it may not exist yet.
const announceEvery = 2 * time.Second

// announce tells where this node's replicas are reached, and again whenever somebody took that away. It returns an
// error, which ends the process, where they are not served any more: the next process serves them again.
func (d *Data) announce(ctx context.Context) error {
	if d.server == nil {
		return nil
	}
	addr := d.Peers.Listener.Addr().String()
	serving, end := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer end()
	watching.Go(func() {
		select {
		case <-d.served:
			end()
		case <-serving.Done():
		}
	})
	err := every(serving, announceEvery, func() {
		var n api.Node
		if d.client.Get(ctx, client.ObjectKey{Name: d.Node}, &n) != nil || n.Status.DataAddress == addr {
			return
		}
		old := n.DeepCopy()
		n.Status.DataAddress = addr
		if err := d.client.Status().Patch(ctx, &n, client.MergeFrom(old)); err != nil && !apierrors.IsConflict(err) {
			d.Log.Warn("the address of this node's replicas cannot be written", "err", err)
		}
	})
	if ctx.Err() != nil || err != nil {
		return err
	}
	if <-d.served; d.serveErr != nil {
		return fmt.Errorf("other nodes are not served any more: %w", d.serveErr)
	}
	return err
}

// addressOf is where another node's data process is. While the API cannot be asked it is where it was last.
func (d *Data) addressOf(ctx context.Context, node string) (string, error) {
	st := d.peerState()
	var n api.Node
	if d.api.Load() && d.client.Get(ctx, client.ObjectKey{Name: node}, &n) == nil && n.Status.DataAddress != "" {
		if addr := n.Status.DataAddress; st.Nodes[node] != addr {
			d.noteState(func(st *peerState) { st.Nodes[node] = addr })
		}
		return n.Status.DataAddress, nil
	}
	if addr := st.Nodes[node]; addr != "" {
		return addr, nil
	}
	return "", api.Errorf(api.Unavailable, "where the replicas of node %s are reached is not known", node)
}

func (d *Data) peerState() peerState {
	st := peerState{Disks: map[api.UID]string{}, Nodes: map[string]string{}, Far: map[string][]farPlace{}}
	if d.Peers.State == "" {
		return st
	}
	if b, err := os.ReadFile(d.Peers.State); err == nil {
		_ = json.Unmarshal(b, &st) // a hint; without it the API is asked
	}
	return st
}

func (d *Data) noteState(change func(*peerState)) {
	if d.Peers.State == "" {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	st := d.peerState()
	change(&st)
	b, err := json.Marshal(st)
	tmp := filepath.Join(filepath.Dir(d.Peers.State), "."+filepath.Base(d.Peers.State))
	if err == nil {
		err = os.WriteFile(tmp, b, 0o600)
	}
	if err == nil {
		err = os.Rename(tmp, d.Peers.State)
	}
	if err != nil {
		d.Log.Warn("what is known of other nodes is not kept", "err", err)
	}
}

// openForPeer opens a replica for an engine on another node.
func (d *Data) openForPeer(ctx context.Context, uid, volume string) (peer.Replica, peer.Loop, error) {
	r, loop, err := d.openLent(ctx, uid, volume)
	if err != nil {
		d.doubt(ctx, api.UID(uid), err)
	}
	return r, loop, err
}

func (d *Data) openLent(ctx context.Context, uid, volume string) (peer.Replica, peer.Loop, error) {
	if d.watch.Buried(uid) {
		return nil, nil, fmt.Errorf("replica %s: %w", uid, peer.ErrGivenUp)
	}
	d.openServedDisks(ctx)
	if d.api.Load() {
		var list api.ReplicaList
		if d.client.List(ctx, &list, client.MatchingFields{watch.ByNode: d.Node}, client.UnsafeDisableDeepCopy) == nil {
			for i := range list.Items {
				if r := &list.Items[i]; string(r.Spec.UID) == uid {
					if err := r.RevertPending(); err != nil {
						return nil, nil, err
					}
					if _, err := d.disk(ctx, r.Spec.Disk); err != nil {
						return nil, nil, err
					}
					d.openLenders(ctx, r.Spec.Disk, r.Spec.Layers)
				}
			}
		}
	}
	disk, err := holder(d.disks.Except(nil), uid)
	if err != nil {
		return nil, nil, err
	}
	if disk == nil {
		return nil, nil, api.Errorf(api.NotFound, "replica %s is on no disk of node %s", uid, d.Node)
	}
	m, err := disk.Stack(uid)
	if err != nil {
		return nil, nil, err
	}
	if m.VolumeUID != volume {
		return nil, nil, api.Errorf(api.Invalid, "replica %s is not one of that volume", uid)
	}
	loop, err := d.threads.Pick()
	if err != nil {
		return nil, nil, err
	}
	r, err := d.openGently(ctx, disk, m, loop)
	if err != nil {
		d.threads.PutBack(loop)
		return nil, nil, err
	}
	if id := api.UID(disk.UID()); d.peerState().Disks[id] != disk.Path() {
		d.noteState(func(st *peerState) { st.Disks[id] = disk.Path() })
	}
	d.Log.Info("replica is served to another node", "replica", uid, "volume", m.Volume)
	l := &lent{peer.NewBackend(r, loop), d, loop, disk, m.Volume}
	d.mu.Lock()
	d.lent[api.UID(uid)] = l
	d.mu.Unlock()
	return l, loop, nil
}

// openServedDisks opens the disks whose replicas other nodes used before.
func (d *Data) openServedDisks(ctx context.Context) {
	for id, path := range d.peerState().Disks {
		if _, err := d.disks.Get(id); err != nil {
			_, _ = d.disks.Open(ctx, path, id, false) // a disk that does not exist has no replica either
		}
	}
}

// holder is the disk that a replica is on, nil if it is on none. One that fails may have it, unless another has.
func holder(disks []*stack.Disk, uid string) (*stack.Disk, error) {
	var errs []error
	for _, disk := range disks {
		there, err := disk.Holds(uid)
		if there {
			return disk, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// lent is a replica that another node's engine uses.
type lent struct {
	*peer.Backend
	d      *Data
	loop   *iothreads.Thread
	disk   *stack.Disk
	volume string
}

// openGently opens a replica for another node. Who merges layers in it gives way.
func (d *Data) openGently(ctx context.Context, disk *stack.Disk, m stack.Meta, loop *iothreads.Thread) (*stack.Replica, error) {
	for tries := 0; ; tries++ {
		r, err := disk.OpenReplica(ctx, m.UID, loop.Loop)
		if !api.Is(err, api.Busy) || tries == 20 || !d.locks.Disturb(m.Volume) {
			return r, err
		}
		pause := time.NewTimer(50 * time.Millisecond)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return nil, err
		}
	}
}

// lentOf is a replica of this node that an engine of another node has open, or nil.
func (d *Data) lentOf(uid string) *lent {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lent[api.UID(uid)]
}

// Call implements peer.Replica. What changes layers has this node look after them.
func (l *lent) Call(ctx context.Context, name string, args []byte) ([]byte, error) {
	b, err := l.Backend.Call(ctx, name, args)
	switch name {
	case "do-cut", "seal", "drop-snapshot":
		uid := l.Meta().UID
		l.d.changed(api.UID(uid))
		l.d.mergeWorker.Due(l.disk, uid, l.volume)
		l.d.mergeWorker.Wake(l.disk)
	}
	return b, err
}

// Close implements peer.Replica.
func (l *lent) Close() error {
	l.d.mu.Lock()
	if uid := api.UID(l.Meta().UID); l.d.lent[uid] == l {
		delete(l.d.lent, uid)
	}
	l.d.mu.Unlock()
	err := l.Backend.Close()
	l.d.threads.PutBack(l.loop)
	return err
}

// ListenPeers opens a listener for engines of other nodes, with the port that it had the last time if that is free.
func ListenPeers(host, state string) (net.Listener, error) {
	port := "0"
	file := filepath.Join(state, "data.port")
	if b, err := os.ReadFile(file); err == nil {
		port = string(b)
	}
	ln, err := wire.Listen(net.JoinHostPort(host, port))
	if err != nil && port != "0" {
		ln, err = wire.Listen(net.JoinHostPort(host, "0"))
	}
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "listen for other nodes at %s: %w", host, err)
	}
	_, port, err = net.SplitHostPort(ln.Addr().String())
	if err == nil {
		err = os.WriteFile(file, []byte(port), 0o600)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", file, err), ln.Close())
	}
	return ln, nil
}
