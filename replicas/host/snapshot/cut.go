package snapshot

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// cutMembers cuts all members at one instant. The tree is older than the cut.
func (ss *Snapshots) cutMembers(ctx context.Context, s *api.Snapshot, v *api.Volume, h *engineHandle,
	tree *Tree) (*node, error) {
	switch {
	case s.Status.CreationTime != "" || !s.Spec.CreateSnapshot:
		// The engine's members have every snapshot of the volume, and the source member lacks this snapshot.
		return nil, ss.deleteLost(ctx, s, v)
	case v.DeletionTimestamp != nil:
		return nil, api.Errorf(api.InUse, "volume %s is being deleted", v.Name)
	}
	if err := h.AwaitOperations(ctx); err != nil { // and before the freeze
		return nil, err
	}
	_, thaw := ss.freeze(ctx, []*api.Volume{v}, []*api.Snapshot{s})
	err := h.Cut(ctx, stack.Snapshot{UID: string(uidOf(s)), Name: s.Name, Created: cutTime()})
	thaw()
	ss.afterCut(ctx, v, h.local, tree)
	if err != nil {
		return nil, err
	}
	if tree, err = h.readTree(ctx); err != nil {
		return nil, err
	}
	k := tree.all[string(uidOf(s))]
	if k == nil {
		return nil, api.Errorf(api.Corrupt, "snapshot %s: the cut succeeded, but the stack lacks the snapshot", s.Name)
	}
	if s.Spec.Labels[api.LabelClone] == "" {
		ss.Events.Eventf(v, s, "Normal", "SnapshotCreated", "Snapshot", "snapshot %s", s.Name)
	}
	ss.attachments.CompareSoon(v.Name, k.Snapshot)
	return k, nil
}

// cutTime is the instant of a cut, as exact as the clock: two tries differ in the instant.
func cutTime() time.Time { return time.Now().UTC() }

// afterCut wakes the snapshots that a cut may have changed. The tree is older than the cut.
func (ss *Snapshots) afterCut(ctx context.Context, v *api.Volume, local api.UID, tree *Tree) {
	var names []string
	for _, k := range tree.all {
		if k.children[api.VolumeHead] {
			names = append(names, k.Name)
		}
	}
	ss.Changed(local, names...) // also after an error: the snapshot may exist
	ss.mergeLocal(ctx, v, local)
}

// mergeLocal has the layers of the member on this node finished and merged.
func (ss *Snapshots) mergeLocal(ctx context.Context, v *api.Volume, local api.UID) {
	if local == "" {
		return
	}
	var list api.ReplicaList
	if err := ss.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return // the next search for layers to merge finds the layer
	}
	for i := range list.Items {
		if r := &list.Items[i]; r.Spec.UID == local {
			if disk, err := ss.Disks.Get(r.Spec.Disk); err == nil {
				ss.merges.Merge(disk, string(local), v.Name)
			}
		}
	}
}
