package replica

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// A replica whose files are missing or damaged cannot return. The replica fails, and the planner replaces the replica,
// unless the replica is a member: an administrator may restore the files of a member.

// Damaged notes that a replica could not be opened. If the cause is the replica's files, a reconcile follows.
func (rs *Replicas) Damaged(ctx context.Context, uid api.UID, why error) {
	if !api.Is(why, api.Corrupt) && !api.Is(why, api.NotFound) {
		return
	}
	rs.mu.Lock()
	rs.doubts[uid] = true
	delete(rs.exist, uid)
	rs.mu.Unlock()
	var list api.ReplicaList
	here := client.MatchingFields{watch.ByNode: rs.Name}
	if !rs.APIReached() || rs.Client.List(ctx, &list, here, client.UnsafeDisableDeepCopy) != nil {
		return // the next failure to open asks again
	}
	for i := range list.Items {
		if list.Items[i].Spec.UID == uid {
			rs.Wake(list.Items[i].Name)
		}
	}
}

// isDoubted reports whether a replica could not be opened, for its files.
func (rs *Replicas) isDoubted(uid api.UID) bool {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return rs.doubts[uid]
}

// endDoubt ends the doubt about a replica.
func (rs *Replicas) endDoubt(uid api.UID) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	delete(rs.doubts, uid)
}

// failUnlessMember fails a replica with damaged files, unless the replica is a member. The cache may be behind:
// failUnlessMember asks the API itself.
func (rs *Replicas) failUnlessMember(ctx context.Context, r *api.Replica, why error) error {
	if !api.Is(why, api.Corrupt) {
		return why
	}
	var v api.Volume
	if err := rs.Reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return errors.Join(why, client.IgnoreNotFound(err))
	}
	if v.Status.UID != r.Spec.VolumeUID || len(v.Status.Members) == 0 || slices.Contains(v.Status.Members, r.Name) {
		return why
	}
	r.Status.Mode = api.ReplicaFailed
	rs.Events.Eventf(r, nil, "Warning", "ReplicaLost", "Look", "another replica takes its place: %s", why)
	rs.Log.Error("a replica has failed", "volume", r.Spec.Volume, "replica", r.Name, "err", why)
	rs.endDoubt(r.Spec.UID)
	return why
}

// openDoubted opens a doubted replica that is not a member. The replica fails if its files are damaged.
func (rs *Replicas) openDoubted(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	if r.Status.Mode != api.ReplicaStale || !rs.isDoubted(r.Spec.UID) {
		return nil
	}
	loop, err := rs.Threads.Pick()
	if err != nil {
		return err
	}
	defer rs.Threads.PutBack(loop)
	open, err := disk.OpenReplica(ctx, string(r.Spec.UID), loop.Loop)
	switch {
	case err == nil:
		rs.endDoubt(r.Spec.UID)
		return open.Close()
	case errors.Is(err, fs.ErrNotExist) && !api.Is(err, api.Corrupt):
		return nil // the replica was removed meanwhile
	case api.Is(err, api.Busy):
		return nil // another caller has the replica open
	}
	return rs.failUnlessMember(ctx, r, err)
}
