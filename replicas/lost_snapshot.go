package replicas

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// A Snapshot's object goes by itself where its snapshot surely is not there any more: the volume's replica was read, is
// current, and does not have it. A stack that cannot be read, a replica that is out of date or not reached says
// nothing.

// lost deletes the object of a snapshot that is not there; the next step takes its finalizer.
func (l *snapshotLoop) lost(ctx context.Context, s *api.Snapshot, v *api.Volume) error {
	is := "its object goes"
	if s.Status.CreationTime != "" {
		is = "it was of " + s.Status.CreationTime + "; " + is
	}
	err := l.Client.Delete(ctx, s, client.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion})
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	l.Log.Warn("a snapshot is lost", "volume", v.Name, "snapshot", s.Name)
	l.Events.Eventf(v, s, "Warning", "SnapshotLost", "Snapshot", "volume %s has no snapshot %s: %s", v.Name, s.Name, is)
	return api.Errorf(api.NotFound, "lost: volume %s has no such snapshot", v.Name)
}
