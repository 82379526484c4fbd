package replicas

import (
	"context"
	"errors"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/engine"
)

// An operation on all members of a volume at once goes through an engine: the engine of the attached volume, or an
// offline engine, which claims an epoch like any other engine and is fenced by an attach.

// engineHandle is the engine of a volume for the time of one operation.
type engineHandle struct {
	*engine.Engine
	local api.UID // the member on this node; empty: none
	end   func() error
}

// responsibleNode is the node that looks after the snapshots of a volume: the node of the attachment, else the node
// of the first member whose node is not silent.
func (d *Data) responsibleNode(ctx context.Context, v *api.Volume) (node string, attached bool, err error) {
	var a api.Attachment
	err = d.client.Get(ctx, client.ObjectKey{Name: v.Name}, &a)
	if err == nil {
		return a.Spec.Node, true, nil
	}
	if !apierrors.IsNotFound(err) {
		return "", false, err
	}
	var list api.ReplicaList
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return "", false, err
	}
	for _, name := range v.Status.Members {
		i := slices.IndexFunc(list.Items, func(r api.Replica) bool { return r.Name == name })
		if i < 0 {
			continue
		}
		if quiet, err := d.quiet(ctx, list.Items[i].Spec.Node); err != nil {
			return "", false, err
		} else if !quiet {
			return list.Items[i].Spec.Node, false, nil
		}
	}
	return "", false, nil
}

// mayKeep reports whether this node could come to look after the snapshots of a volume.
func (d *Data) mayKeep(ctx context.Context, v *api.Volume) bool {
	if len(v.Status.Members) < 2 || d.client.Get(ctx, client.ObjectKey{Name: v.Name}, &api.Attachment{}) == nil {
		return false
	}
	r, err := memberOn(ctx, d.client, v, d.Node)
	return err == nil && r != nil
}

// quiet reports whether a node gives no sign of life.
func (d *Data) quiet(ctx context.Context, node string) (bool, error) {
	if node == d.Node {
		return false, nil
	}
	var n api.Node
	if err := d.client.Get(ctx, client.ObjectKey{Name: node}, &n); apierrors.IsNotFound(err) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	return time.Since(n.Status.Heartbeat.Time) > n.SilentAfter(), nil
}

// silentAfter is how old a heartbeat may be, of nodes like this one.
func (d *Data) silentAfter(ctx context.Context) time.Duration {
	var n api.Node
	_ = d.client.Get(ctx, client.ObjectKey{Name: d.Node}, &n) // else the default
	return n.SilentAfter()
}

// engineOf gets the engine of a volume. The caller has the volume's lock, and calls end.
func (d *Data) engineOf(ctx context.Context, v *api.Volume) (*engineHandle, error) {
	s := d.session(v.Name)
	if s == nil {
		return d.openOffline(ctx, v)
	}
	if s.VolumeUID != v.Status.UID {
		return nil, api.Errorf(api.Busy, "volume %s is being taken over", v.Name)
	}
	if why := s.fence.Load(); why != nil {
		return nil, api.Errorf(api.Unavailable, "the volume is being taken over: %w", *why)
	}
	return &engineHandle{s.engine, s.localMember(d.Node), func() error { return nil }}, nil
}

// openOffline opens an offline engine for a detached volume.
func (d *Data) openOffline(ctx context.Context, v *api.Volume) (*engineHandle, error) {
	key := client.ObjectKey{Name: v.Name}
	var now api.Volume
	if err := d.reader.Get(ctx, key, &now); err != nil {
		return nil, err
	}
	// The Attachment is read after the volume: whoever attaches the volume from now on changes it, and the claim below
	// fails. A deleted volume that no node has attached stays so.
	var a api.Attachment
	switch err := d.reader.Get(ctx, key, &a); {
	case err == nil && (now.DeletionTimestamp == nil || now.Status.EngineNode != "" || a.Status.Ready):
		return nil, api.Errorf(api.Unavailable, "volume %s is being attached or detached: the snapshot follows", v.Name)
	case client.IgnoreNotFound(err) != nil:
		return nil, err
	}
	for _, held := range d.Host.Held() {
		if held.Key == string(v.Status.UID) {
			return nil, api.Errorf(api.Unavailable, "the device of volume %s is being taken over: the snapshot follows", v.Name)
		}
	}
	if now.UID != v.UID || now.Status.UID != v.Status.UID || len(now.Status.Members) == 0 {
		return nil, api.Errorf(api.Busy, "volume %s has changed", v.Name)
	}
	if err := d.memberReverting(ctx, &now); err != nil {
		return nil, err
	}
	list, err := d.probeMembers(ctx, &now)
	if err != nil {
		return nil, err
	}
	for _, f := range list { // no guest waits: a member that is about to return is not left behind
		if f.err == nil {
			continue
		}
		if quiet, err := d.quiet(ctx, f.spec.Node); err != nil {
			return nil, err
		} else if !quiet {
			return nil, api.Errorf(api.Unavailable, "replica %s cannot be reached: %w", f.spec.Name, f.err)
		}
	}
	take, err := selectMembers(&now, list)
	if err != nil {
		return nil, err
	}
	b, size, err := d.claim(ctx, &now, take)
	if err != nil {
		return nil, err
	}
	s, err := d.openSession(ctx, b, size, true)
	if err != nil {
		return nil, errors.Join(err, d.giveBack(ctx, v.Name, b.Epoch))
	}
	return &engineHandle{s.engine, s.Replica, func() error {
		return errors.Join(d.close(s), d.giveBack(context.WithoutCancel(ctx), s.Volume, s.at()))
	}}, nil
}

// memberReverting returns an error if a volume, or a member of the volume, is to be reverted first.
func (d *Data) memberReverting(ctx context.Context, v *api.Volume) error {
	if err := v.RevertInProgress(); err != nil {
		return err
	}
	for _, name := range v.Status.Members {
		var r api.Replica
		if err := d.reader.Get(ctx, client.ObjectKey{Name: name}, &r); client.IgnoreNotFound(err) != nil {
			return err
		} else if err == nil {
			if err := r.RevertPending(); err != nil {
				return err
			}
		}
	}
	return nil
}

// tree has the snapshots that all members have, with their neighbours.
func (h *engineHandle) tree(ctx context.Context) (*snapshotTree, error) {
	m, err := h.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	return &snapshotTree{m.Head, buildSnapshotTree(m)}, nil
}
