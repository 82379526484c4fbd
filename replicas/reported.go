package replicas

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// reported tells an engine whether users were told of a snapshot: its object, or that of its group, has the instant of
// the cut, and nobody has asked for its deletion. No member may have lost it then.
func (d *Data) reported(s *session) func(context.Context, stack.Snapshot) (bool, error) {
	return func(ctx context.Context, k stack.Snapshot) (bool, error) {
		var snap api.Snapshot
		if err := d.Reader.Get(ctx, client.ObjectKey{Name: k.Name}, &snap); err != nil {
			return false, unknownUnlessGone(err)
		}
		switch {
		case snap.Spec.Volume != s.Volume || string(uidOf(&snap)) != k.UID || snap.DeletionTimestamp != nil:
			return false, nil
		case snap.Status.CreationTime != "" || snap.Spec.Group == "":
			return snap.Status.CreationTime == instant(k.Created), nil
		}
		var g api.SnapshotGroup
		if err := d.Reader.Get(ctx, client.ObjectKey{Name: snap.Spec.Group}, &g); err != nil {
			return false, unknownUnlessGone(err)
		}
		return g.Status.CreationTime == instant(k.Created), nil
	}
}

// unknownUnlessGone is nil for an object that does not exist.
func unknownUnlessGone(err error) error {
	if err = client.IgnoreNotFound(err); err == nil {
		return nil
	}
	return api.Errorf(api.Unavailable, "the API does not answer: %w", err)
}
