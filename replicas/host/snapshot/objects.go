package snapshot

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/replicas/stack"

	"drover.io/drover/api"
)

// deleteLost deletes the object of a lost snapshot: a readable stack of a current replica lacks the snapshot. An
// unreadable stack, and a stale or missing replica, prove no loss. The next reconcile removes the finalizer.
func (ss *Snapshots) deleteLost(ctx context.Context, s *api.Snapshot, v *api.Volume) error {
	is := "its object is deleted"
	if s.Status.CreationTime != "" {
		is = "cut at " + s.Status.CreationTime + "; " + is
	}
	err := ss.Client.Delete(ctx, s, client.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion})
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	ss.Log.Warn("a snapshot is lost", "volume", v.Name, "snapshot", s.Name)
	ss.Events.Eventf(v, s, "Warning", "SnapshotLost", "Snapshot", "volume %s has no snapshot %s: %s", v.Name, s.Name, is)
	return api.Errorf(api.NotFound, "lost: volume %s has no such snapshot", v.Name)
}

// CreateObjects creates the objects that snapshots of a found replica lack, for example after a loss of objects.
func (ss *Snapshots) CreateObjects(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	ss.mu.Lock()
	found := ss.found[r.Spec.UID]
	ss.mu.Unlock()
	if !found {
		return nil
	}
	var v api.Volume
	if err := ss.Client.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != r.Spec.VolumeUID || !slices.Contains(v.Status.Members, r.Name) {
		return nil // not a member yet
	}
	tree, err := ss.TreeOf(r, disk)
	if err != nil {
		return err
	}
	var have api.SnapshotList
	if err := ss.Reader.List(ctx, &have); err != nil {
		return err
	}
	named := map[string]bool{}
	for _, s := range have.Items {
		if s.Spec.Volume == v.Name {
			delete(tree.all, string(uidOf(&s)))
		}
		named[s.Name] = s.Spec.Volume != v.Name || s.Spec.CreateSnapshot
	}
	for _, k := range tree.all {
		s := api.NewSnapshot(&v, k.Name)
		if s.Spec.CreateSnapshot = false; named[k.Name] {
			ss.Log.Warn("a snapshot on the disk has no object, and its name is taken", "volume", v.Name, "snapshot", k.Name)
			continue
		}
		if err := ss.Client.Create(ctx, s); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("snapshot %s: %w", k.Name, err)
		}
		ss.Log.Info("a snapshot on the disk has an object again", "volume", v.Name, "snapshot", k.Name)
	}
	ss.Changed(r.Spec.UID)
	ss.mu.Lock()
	delete(ss.found, r.Spec.UID)
	ss.mu.Unlock()
	return nil
}

// Reported reports whether users know a snapshot of a volume: the object, or the object of the group, has the instant
// of the cut, and no user has deleted the snapshot. No member may lack a reported snapshot.
func (ss *Snapshots) Reported(ctx context.Context, volume string, k stack.Snapshot) (bool, error) {
	var snap api.Snapshot
	if err := ss.Reader.Get(ctx, client.ObjectKey{Name: k.Name}, &snap); err != nil {
		return false, unknownUnlessGone(err)
	}
	switch {
	case snap.Spec.Volume != volume || string(uidOf(&snap)) != k.UID || snap.DeletionTimestamp != nil:
		return false, nil
	case snap.Status.CreationTime != "" || snap.Spec.Group == "":
		return snap.Status.CreationTime == formatInstant(k.Created), nil
	}
	var g api.SnapshotGroup
	if err := ss.Reader.Get(ctx, client.ObjectKey{Name: snap.Spec.Group}, &g); err != nil {
		return false, unknownUnlessGone(err)
	}
	return g.Status.CreationTime == formatInstant(k.Created), nil
}

// unknownUnlessGone is nil for an object that does not exist.
func unknownUnlessGone(err error) error {
	if err = client.IgnoreNotFound(err); err == nil {
		return nil
	}
	return api.Errorf(api.Unavailable, "the API does not answer: %w", err)
}
