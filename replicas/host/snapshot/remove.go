package snapshot

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// removeSnapshot removes the snapshot from all members, then the finalizer from the object.
func (ss *Snapshots) removeSnapshot(ctx context.Context, s *api.Snapshot, v *api.Volume) (err error) {
	if len(s.Finalizers) == 0 {
		return nil
	}
	s.Status.MarkRemoved, s.Status.ReadyToUse = true, false
	if err := ss.beingCloned(ctx, s); err != nil {
		return err
	}
	h, err := ss.openEngine(ctx, v)
	if err != nil {
		if gone, gerr := ss.diskOfLastMemberForgotten(ctx, v); gerr != nil || !gone {
			return err // the disk may return with the snapshot
		}
		return ss.removeFinalizer(ctx, s)
	}
	defer func() {
		if herr := h.end(); err == nil && herr != nil {
			ss.Log.Warn("the end of an offline engine", "volume", v.Name, "err", herr)
		}
	}()
	tree, err := h.readTree(ctx)
	if err != nil {
		return err
	}
	if err := h.DropSnapshot(ctx, string(uidOf(s))); err != nil {
		return err
	}
	if k := tree.all[string(uidOf(s))]; k != nil {
		ss.Log.Info("snapshot removed", "snapshot", s.Name, "volume", s.Spec.Volume)
		if k.children[api.VolumeHead] && v.DeletionTimestamp == nil {
			// The newest layer merges only with another layer: SealAll makes the head a layer.
			if err := h.SealAll(ctx); err != nil {
				ss.Log.Info("the space of the newest snapshot is freed with the next snapshot", "volume", v.Name, "why", err)
			}
		}
		ss.Changed(h.local, k.neighbours()...)
		ss.mergeLocal(ctx, v, h.local)
	}
	return ss.removeFinalizer(ctx, s)
}

// diskOfLastMemberForgotten reports whether the disk of a volume's only member, on this node, was taken out of the
// node.
func (ss *Snapshots) diskOfLastMemberForgotten(ctx context.Context, v *api.Volume) (bool, error) {
	if len(v.Status.Members) != 1 || ss.attachments.HasSession(v.Name) {
		return false, nil
	}
	r, err := ss.MemberOn(ctx, v, ss.Name)
	if err != nil || r == nil {
		return false, err
	}
	if _, err := ss.replicas.Disk(ctx, r.Spec.Disk); !api.Is(err, api.Unavailable) {
		return false, nil
	}
	return ss.DiskForgotten(ctx, r.Spec.Disk)
}

// removeFinalizer lets the object be deleted.
func (ss *Snapshots) removeFinalizer(ctx context.Context, s *api.Snapshot) error {
	if controllerutil.RemoveFinalizer(s, api.Finalizer) {
		return client.IgnoreNotFound(ss.Client.Update(ctx, s))
	}
	return nil
}

// beingCloned returns an error while a clone is being made from a snapshot.
func (ss *Snapshots) beingCloned(ctx context.Context, s *api.Snapshot) error {
	var clones api.ReplicaList
	if err := ss.Client.List(ctx, &clones, client.MatchingFields{watch.BySource: string(uidOf(s))}); err != nil {
		return err
	}
	for _, c := range clones.Items {
		if c.DeletionTimestamp == nil && !c.Status.Pinned && (c.Status.Mode == "" || c.Status.Mode == api.ReplicaCreating) {
			return api.Errorf(api.Busy, "snapshot %s: volume %s is being cloned from the snapshot", s.Name, c.Spec.Volume)
		}
	}
	return nil
}
