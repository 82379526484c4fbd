package targets

import (
	"context"
	"slices"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
)

// SnapshotsOf finds the snapshots whose tags name one of the objects, also in a store whose lists are short.
func SnapshotsOf(ctx context.Context, r *repo.Repository, objects ...api.UID) (found []repo.Snapshot, err error) {
	if len(objects) == 0 {
		return nil, nil
	}
	list, err := r.ListRecorded(ctx)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	err = r.LoadSnapshots(ctx, list.All(), func(_ int, s repo.Snapshot, err error) error {
		switch {
		case repo.IsDamage(err): // deleted meanwhile, or the concern of verification
			return nil
		case err != nil:
			return err
		}
		if facts, ok := tags.Parse(s.Tags); ok && slices.Contains(objects, facts.Object) {
			mu.Lock()
			defer mu.Unlock()
			found = append(found, s)
		}
		return nil
	})
	return found, err
}

// Adopted is the snapshot of an earlier attempt that AdoptSnapshot committed again.
type Adopted struct {
	Snapshot blob.ID
	Facts    tags.Facts
}

// AdoptSnapshot commits a complete snapshot that an earlier attempt left of an unfinished Backup object again, by adopt
// (mover.Adopt), and deletes all that earlier attempts left; nil: no complete one. confirm returns an error unless this
// node makes the Backup. The node confirms after the list: from then on, no earlier attempt completes the Backup with a
// snapshot of the list. Snapshots that another cluster restores, or that the store does not let go, stay until the
// deletion of the Backup.
func AdoptSnapshot(ctx context.Context, r *repo.Repository, object api.UID, confirm func(context.Context) error,
	adopt func(context.Context, *repo.Repository, repo.Snapshot) (id blob.ID, complete bool, err error)) (
	adopted *Adopted, err error) {
	left, err := SnapshotsOf(ctx, r, object)
	if err != nil || len(left) == 0 {
		return nil, err
	}
	if err := confirm(ctx); err != nil {
		return nil, err
	}
	ids := make([]blob.ID, len(left))
	for i, s := range left {
		ids[i] = s.ID
		if adopted != nil {
			continue
		}
		id, complete, err := adopt(ctx, r, s)
		if err != nil {
			return nil, err
		}
		if complete {
			facts, _ := tags.Parse(s.Tags)
			adopted = &Adopted{id, facts}
		}
	}
	kept, err := r.RestoredByOthers(ctx)
	if err == nil {
		err = r.DeleteSnapshots(ctx, slices.DeleteFunc(ids, func(id blob.ID) bool {
			_, is := kept[id]
			return is
		})...)
	}
	if adopted != nil || api.Is(err, api.Denied) {
		return adopted, nil
	}
	return nil, err
}

// IsBegunElsewhere reports whether another node began an unfinished Backup after node did. Then that node may have
// replaced the snapshot that this one stored (AdoptSnapshot), so the Backup is not completed with the snapshot.
func IsBegunElsewhere(ctx context.Context, live client.Reader, b api.StoredBackup, node string) (bool, error) {
	if b.Common().OwnerID == node {
		return false, nil
	}
	now := copyOf(b) // the cache may be older than the begin of this node
	err := live.Get(ctx, client.ObjectKeyFromObject(b), now)
	return err == nil && now.Common().OwnerID != node, client.IgnoreNotFound(err)
}
