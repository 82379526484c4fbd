package remote

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block/listener"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// A certificate says which node asks. Only the API, or the replica's own record of its adopted session, allows the node
// to ask: docs/replication.md, "Who may ask a replica".

// recordOf is the record of a replica of this node: from memory where another node has it open, else from its disk.
func (s *Server) recordOf(ctx context.Context, replica string) (stack.Meta, error) {
	if l := s.Opened(replica); l != nil {
		return l.Meta(), nil
	}
	if s.o.Watch.Abandoned(replica) {
		return stack.Meta{}, fmt.Errorf("replica %s: %w", replica, peer.ErrAbandoned)
	}
	s.openServedDisks(ctx)
	disk, err := findDiskOf(s.o.Disks.Except(nil), replica)
	if err != nil {
		return stack.Meta{}, err
	}
	if disk == nil {
		return stack.Meta{}, api.Errorf(api.NotFound, "replica %s is on no disk of node %s", replica, s.o.Node)
	}
	return disk.Stack(replica)
}

// AllowOpen says whether a node may ask about a replica. The node of the last adopted session may, without the API,
// unless the engine has ended.
func (s *Server) AllowOpen(ctx context.Context, node, replica, volume string) error {
	if l := s.Opened(replica); l != nil {
		if m := l.Meta(); m.EngineNode == node && !s.hasEnded(ctx, m) {
			return nil
		}
	}
	known := s.o.Host.APIReached()
	var name string
	if known {
		r, err := s.replicaHere(ctx, replica)
		if err != nil {
			return err
		}
		if r != nil {
			name = r.Spec.Volume
			if is, err := s.isNamed(ctx, s.client, name, volume, node); err == nil && is {
				return nil
			}
		}
	}
	m, err := s.recordOf(ctx, replica)
	switch {
	case err == nil && m.EngineNode == node && m.VolumeUID == volume && !s.hasEnded(ctx, m):
		return nil
	case !known && err != nil:
		return err
	case !known:
		return api.Errorf(api.Unavailable, "node %s cannot ask the API yet", s.o.Node)
	case name == "":
		return api.Errorf(api.Unavailable, "the API knows no replica %s", replica)
	}
	end, err := s.beginQuestion(ctx, node)
	if err != nil {
		return err
	}
	defer end()
	is, err := s.isNamed(ctx, s.reader, name, volume, node) // the cache may be behind
	if err != nil {
		return api.Errorf(api.Unavailable, "volume %s: %w", name, err)
	}
	if !is {
		err := api.Errorf(api.Denied, "volume %s: node %s has neither its engine, nor its attachment, nor a replica of it",
			name, node)
		s.reportRefused(name, replica, node, err)
		return err
	}
	return nil
}

// questionsAtOnce is how many questions about one node's requests the API gets at once.
const questionsAtOnce = 8

// beginQuestion waits until the API may be asked about a request of a node: a node whose requests are refused leaves
// the API to others.
func (s *Server) beginQuestion(ctx context.Context, node string) (end func(), err error) {
	s.mu.Lock()
	places := s.questions[node]
	if places == nil {
		places = make(chan struct{}, questionsAtOnce)
		s.questions[node] = places
	}
	s.mu.Unlock()
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	case <-ctx.Done():
		return nil, api.Errorf(api.Unavailable, "node %s waits for the API: %w", s.o.Node, ctx.Err())
	}
}

// replicaHere is the object of a replica of this node, nil if the cache has none.
func (s *Server) replicaHere(ctx context.Context, uid string) (*api.Replica, error) {
	var list api.ReplicaList
	err := s.client.List(ctx, &list, client.MatchingFields{watch.ByNode: s.o.Node}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "replicas of node %s: %w", s.o.Node, err)
	}
	i := slices.IndexFunc(list.Items, func(r api.Replica) bool { return string(r.Spec.UID) == uid })
	if i < 0 {
		return nil, nil
	}
	return &list.Items[i], nil
}

// isNamed reports whether the API names a node for a volume: the node has the engine or the attachment, or may get
// them because the node has a replica.
func (s *Server) isNamed(ctx context.Context, r client.Reader, name, uid, node string) (bool, error) {
	var v api.Volume
	if err := r.Get(ctx, client.ObjectKey{Name: name}, &v); err != nil {
		return false, err
	}
	if string(v.Status.UID) != uid {
		return false, nil
	}
	if v.Status.EngineNode == node {
		return true, nil
	}
	var a api.Attachment
	if err := r.Get(ctx, client.ObjectKey{Name: name}, &a); err == nil && a.Spec.Node == node {
		return true, nil
	} else if client.IgnoreNotFound(err) != nil {
		return false, err
	}
	var list api.ReplicaList
	err := s.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: name}, client.UnsafeDisableDeepCopy)
	return slices.ContainsFunc(list.Items, func(r api.Replica) bool {
		return r.Spec.Node == node && string(r.Spec.VolumeUID) == uid
	}), err
}

// hasEnded reports whether the API is known to have ended the engine that a replica's record names: in the record's
// epoch or in a later one, the volume has no engine or another node's. A detach clears the engine's node, and each
// claim begins a new epoch. A status of an older epoch proves nothing: the cache may be behind the claim.
func (s *Server) hasEnded(ctx context.Context, m stack.Meta) bool {
	var v api.Volume
	if !s.o.Host.APIReached() || s.client.Get(ctx, client.ObjectKey{Name: m.Volume}, &v) != nil ||
		string(v.Status.UID) != m.VolumeUID || v.Status.EngineNode == m.EngineNode {
		return false
	}
	return v.Status.Epoch >= m.Epoch
}

// releaseFormer takes replicas away from engines that the API has ended and that keep their sessions.
func (s *Server) releaseFormer(ctx context.Context) {
	s.mu.Lock()
	open := slices.Collect(maps.Values(s.open))
	s.mu.Unlock()
	for _, l := range open {
		m := l.Meta()
		if m.EngineNode == "" || !s.hasEnded(ctx, m) {
			continue
		}
		if s.server.ReleaseFrom(m.UID, m.EngineNode) {
			s.o.Log.Warn("the session of a former engine is ended", "node", m.EngineNode, "replica", m.UID, "volume", m.Volume,
				"epoch", m.Epoch)
		}
	}
}

// AllowSession says whether the API names a node for the volume's engine. The node whose session the replica adopted in
// the same epoch needs no API to resume, unless the engine has ended.
func (s *Server) AllowSession(ctx context.Context, node, replica, volume string, epoch int64) error {
	if l := s.Opened(replica); l != nil {
		if m := l.Meta(); m.Epoch == epoch && m.EngineNode == node && !s.hasEnded(ctx, m) {
			return nil
		}
	}
	if !s.o.Host.APIReached() {
		return api.Errorf(api.Unavailable, "node %s cannot ask the API yet", s.o.Node)
	}
	r, err := s.replicaHere(ctx, replica)
	if err != nil {
		return err
	}
	if r == nil {
		return api.Errorf(api.Unavailable, "the API knows no replica %s", replica)
	}
	end, err := s.beginQuestion(ctx, node)
	if err != nil {
		return err
	}
	defer end()
	var v api.Volume
	if err := s.reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return api.Errorf(api.Unavailable, "volume %s: %w", r.Spec.Volume, err)
	}
	switch {
	case string(v.Status.UID) != volume:
		err = api.Errorf(api.Denied, "volume %s is another one now", v.Name)
	case v.Status.EngineNode != node:
		err = api.Errorf(api.Denied, "the engine of volume %s is on node %q, not %q", v.Name, v.Status.EngineNode, node)
	case epoch > v.Status.Epoch:
		return api.Errorf(api.Unavailable, "volume %s is at epoch %d, not at %d", v.Name, v.Status.Epoch, epoch)
	}
	if err != nil {
		s.reportRefused(v.Name, replica, node, err)
	}
	return err
}

// reportRefused reports a refused node in the log and in an event of the volume, once a minute for each node and
// volume.
func (s *Server) reportRefused(volume, replica, node string, why error) {
	s.mu.Lock()
	key := volume + "\n" + node
	t := s.refusals[key]
	if t == nil {
		t = &listener.Tally{}
		s.refusals[key] = t
	}
	n, now := t.Count()
	s.mu.Unlock()
	if !now {
		return
	}
	s.o.Log.Warn("a node was refused a replica", "node", node, "replica", replica, "volume", volume, "times", n, "err",
		why)
	var v api.Volume
	if err := s.client.Get(context.Background(), client.ObjectKey{Name: volume}, &v); err == nil {
		s.events.Eventf(&v, nil, "Warning", "AdoptionRefused", "Adopt", "node %s was refused replica %s: %v", node, replica,
			why)
	}
}
