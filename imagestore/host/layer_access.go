package host

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/listener"
)

// A node serves a layer to another node only if the API holds an object with a need of the other node: an ImageCopy, or
// a Replica above the layer. The cache answers, also without a connection to the API. Before a refusal the node asks
// the API itself, at most once a second for each node.

const (
	accessRecent = time.Second     // how long an answer of the API counts
	accessTrust  = 5 * time.Second // how long a permission counts
	accessMost   = 4096            // permissions
)

// layerAccess decides which layers other nodes may read.
type layerAccess struct {
	cached, live client.Reader
	log          *slog.Logger

	apiQueries sync.Mutex           // guards answers; taken before mu. Requests that the cache answers take no apiQueries
	answers    map[string]nodeNeeds // of the API, by node

	mu      sync.Mutex
	trusted map[[3]string]time.Time // node, disk and uid; end of the permission
	refused listener.Tally
}

// nodeNeeds are the objects with the needs of nodes.
type nodeNeeds struct {
	at       time.Time
	copies   []api.ImageCopy
	replicas []api.Replica
}

func (n *nodeNeeds) listObjects(ctx context.Context, r client.Reader) error {
	var copies api.ImageCopyList
	if err := r.List(ctx, &copies, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	var replicas api.ReplicaList
	if err := r.List(ctx, &replicas, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	n.copies, n.replicas = copies.Items, replicas.Items
	return nil
}

// needsLayer reports whether a node needs a layer or the record of an image; without a uid, whether the node needs any
// data of the disk.
func (n *nodeNeeds) needsLayer(node, disk, uid string) bool {
	for i := range n.replicas {
		r := &n.replicas[i]
		if r.Spec.Node != node {
			continue
		}
		if uid != "" && slices.Contains(r.Spec.Layers, api.UID(uid)) {
			return true
		}
	}
	for i := range n.copies {
		c := &n.copies[i]
		if c.Spec.Node != node {
			continue
		}
		if uid != "" && (uid == string(c.Spec.UUID) || slices.Contains(c.Spec.Layers, api.UID(uid))) {
			return true
		}
		for j := range n.copies { // the node of another copy knows the layers of an export first
			o := &n.copies[j]
			switch {
			case o.Spec.UUID != c.Spec.UUID || o.Spec.Node == node:
			case uid == "" && string(o.Spec.Disk) == disk:
				return true
			case uid != "" && (slices.Contains(o.Spec.Layers, api.UID(uid)) || slices.Contains(o.Status.Layers, api.UID(uid))):
				return true
			}
		}
	}
	return false
}

// checkAccess returns nil if a node may read a layer or the record of an image from a disk of this node, or acquire a
// slot of the disk.
func (l *layerAccess) checkAccess(ctx context.Context, node, disk, uid string) error {
	key := [3]string{node, disk, uid}
	if l.isTrusted(key) {
		return nil
	}
	var n nodeNeeds
	err := n.listObjects(ctx, l.cached)
	if err == nil && n.needsLayer(node, disk, uid) {
		l.addTrust(key)
		return nil
	}
	if n, err = l.queryAPI(ctx, node); err != nil {
		return api.Errorf(api.Unavailable, "whether node %s may read layer %s: %w", node, uid, err)
	}
	if n.needsLayer(node, disk, uid) {
		l.addTrust(key)
		return nil
	}
	if n, report := l.refused.Count(); report {
		l.log.Warn("a node was refused a layer", "node", node, "disk", disk, "layer", uid, "times", n)
	}
	return api.Errorf(api.Denied, "node %s has neither a copy of an image with layer %s of disk %s nor a replica of one",
		node, uid, disk)
}

func (l *layerAccess) isTrusted(key [3]string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Before(l.trusted[key])
}

func (l *layerAccess) addTrust(key [3]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.trusted) >= accessMost {
		clear(l.trusted)
	}
	l.trusted[key] = time.Now().Add(accessTrust)
}

func newLayerAccess(cached, live client.Reader, log *slog.Logger) *layerAccess {
	return &layerAccess{cached: cached, live: live, log: log, answers: map[string]nodeNeeds{},
		trusted: map[[3]string]time.Time{}}
}

// queryAPI returns the objects in the API, at most accessRecent old.
func (l *layerAccess) queryAPI(ctx context.Context, node string) (nodeNeeds, error) {
	l.apiQueries.Lock()
	defer l.apiQueries.Unlock() // requests of a node share one answer
	if n, ok := l.answers[node]; ok && time.Since(n.at) < accessRecent {
		return n, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	n := nodeNeeds{}
	if err := n.listObjects(ctx, l.live); err != nil {
		return n, err
	}
	n.at = time.Now()
	l.answers[node] = n
	return n, nil
}
