package replicas

import (
	"context"
	"net"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/host/remote"
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

// ListenPeers opens a listener for engines of other nodes, with the port of the last time if the port is free.
func ListenPeers(host, state string) (net.Listener, error) { return remote.Listen(host, state) }

// served is this node for the package remote.
type served struct{ d *Data }

var _ remote.Node = served{}

// APIReached implements remote.Node.
func (s served) APIReached() bool { return s.d.APIReached() }

// Disk implements remote.Node.
func (s served) Disk(ctx context.Context, uid api.UID) (*stack.Disk, error) {
	return s.d.replicas.Disk(ctx, uid)
}

// Damaged implements remote.Node.
func (s served) Damaged(ctx context.Context, replica api.UID, why error) {
	s.d.replicas.Damaged(ctx, replica, why)
}

// LayersChanged implements remote.Node.
func (s served) LayersChanged(disk *stack.Disk, replica, volume string) {
	s.d.snapshots.Changed(api.UID(replica))
	s.d.mergeWorker.Merge(disk, replica, volume)
}
