package replicas

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

// A replica whose own files are missing or damaged cannot come back. Where its volume does without it, it is given up:
// another one is made in its place. A member is never given up for that: its files may be brought back.

// doubt has a replica looked at that could not be opened, if that is for its files.
func (d *Data) doubt(ctx context.Context, uid api.UID, why error) {
	if !api.Is(why, api.Corrupt) && !api.Is(why, api.NotFound) {
		return
	}
	d.mu.Lock()
	d.doubts[uid] = true
	delete(d.made, uid)
	d.mu.Unlock()
	var list api.ReplicaList
	here := client.MatchingFields{watch.ByNode: d.Node}
	if !d.api.Load() || d.client.List(ctx, &list, here, client.UnsafeDisableDeepCopy) != nil {
		return // it is asked for again
	}
	for i := range list.Items {
		if list.Items[i].Spec.UID == uid {
			d.tellReplica(list.Items[i].Name)()
		}
	}
}

func (d *Data) doubted(uid api.UID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.doubts[uid]
}

func (d *Data) trust(uid api.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.doubts, uid)
}

// unusable gives up a replica whose files cannot be used, unless it is a member. The API itself is asked, as a cache
// may be behind.
func (l *replicaLoop) unusable(ctx context.Context, r *api.Replica, why error) error {
	if !api.Is(why, api.Corrupt) {
		return why
	}
	var v api.Volume
	if err := l.reader.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return errors.Join(why, client.IgnoreNotFound(err))
	}
	if v.Status.UID != r.Spec.VolumeUID || len(v.Status.Members) == 0 || slices.Contains(v.Status.Members, r.Name) {
		return why
	}
	r.Status.Mode = api.ReplicaFailed
	l.events.Eventf(r, nil, "Warning", "ReplicaLost", "Look", "another replica takes its place: %s", why)
	l.Log.Error("a replica is given up", "volume", r.Spec.Volume, "replica", r.Name, "err", why)
	l.trust(r.Spec.UID)
	return why
}

// tryOut opens a replica that is not a member and that could not be opened, and gives it up if that is for good.
func (l *replicaLoop) tryOut(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	if r.Status.Mode != api.ReplicaStale || !l.doubted(r.Spec.UID) {
		return nil
	}
	loop, err := l.threads.Pick()
	if err != nil {
		return err
	}
	defer l.threads.PutBack(loop)
	open, err := disk.OpenReplica(ctx, string(r.Spec.UID), loop.Loop)
	switch {
	case err == nil:
		l.trust(r.Spec.UID)
		return open.Close()
	case errors.Is(err, fs.ErrNotExist) && !api.Is(err, api.Corrupt):
		return nil // it was removed meanwhile: that is told otherwise
	case api.Is(err, api.Busy):
		return nil // somebody can open it
	}
	return l.unusable(ctx, r, err)
}
