package replicas

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// An offline engine on the node of the first member rebuilds the replicas of a detached volume. The engine claims the
// volume like any other, and gives the volume up to any other operation: an attach, a snapshot or a removal on the same
// node ends the engine first; an attach elsewhere waits for the end, which comes within a second.

// Times of upkeep: between two looks for volumes, between two looks for the end of a run, for a run without progress,
// and before the next try after such a run.
const (
	upkeepEvery = 3 * time.Second
	upkeepLook  = 200 * time.Millisecond
	upkeepIdle  = 20 * time.Second
	upkeepLater = time.Minute
)

// isRebuilding reports whether this node rebuilds a detached volume.
func (d *Data) isRebuilding(volume string) bool { return d.upkeep.InProgress(volume) }

// keepUp rebuilds the detached volumes of this node, until ctx ends.
func (d *Data) keepUp(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	return every(ctx, upkeepEvery, func() {
		var list api.ReplicaList
		if d.Client.List(ctx, &list, client.MatchingFields{watch.ByNode: d.Name}, client.UnsafeDisableDeepCopy) != nil {
			return
		}
		for i := range list.Items {
			volume, name := list.Items[i].Spec.Volume, list.Items[i].Name
			if !d.wantsUpkeep(ctx, &list.Items[i]) || !d.upkeep.Begin(volume, d.CopiesAtOnce(ctx)) {
				continue
			}
			all.Go(func() {
				again, err := d.makeWhole(ctx, volume)
				if err != nil && ctx.Err() == nil {
					d.Log.Warn("a detached volume is not made whole yet", "volume", volume, "err", err)
				}
				if d.upkeep.End(volume, again); again == 0 {
					d.upkeep.Forget(volume)
				}
				d.replicas.Wake(name) // the reconciler deferred the replica meanwhile
			})
		}
	})
}

// wantsUpkeep reports whether r is the member whose node rebuilds the volume.
func (d *Data) wantsUpkeep(ctx context.Context, r *api.Replica) bool {
	var v api.Volume
	if d.Client.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v) != nil || v.DeletionTimestamp != nil ||
		v.RevertInProgress() != nil || v.Status.UID != r.Spec.VolumeUID || !slices.Contains(v.Status.Members, r.Name) {
		return false
	}
	if v.Status.EngineNode != "" && v.Status.EngineNode != d.Name || d.session(v.Name) != nil || !d.detached(ctx, &v) {
		return false
	}
	mine, lacks, err := d.lacking(ctx, &v)
	if err != nil || lacks == 0 && v.Status.EngineNode == "" {
		return false
	}
	for _, m := range mine { // the first member whose node is not silent
		if !slices.Contains(v.Status.Members, m.Name) {
			continue
		}
		var n api.Node
		if d.Client.Get(ctx, client.ObjectKey{Name: m.Spec.Node}, &n) == nil &&
			(m.Name == r.Name || time.Since(n.Status.Heartbeat.Time) < n.SilentAfter()) {
			return m.Name == r.Name
		}
	}
	return false
}

// detached reports whether the volume has no attachment, as far as the cache knows.
func (d *Data) detached(ctx context.Context, v *api.Volume) bool {
	for _, held := range d.Host.Held() {
		if held.Key == string(v.Status.UID) {
			return false
		}
	}
	return apierrors.IsNotFound(d.Client.Get(ctx, client.ObjectKey{Name: v.Name}, &api.Attachment{}))
}

// lacking lists the replicas of a volume by name, and counts the replicas that are damaged, or could be members and are
// not.
func (d *Data) lacking(ctx context.Context, v *api.Volume) (mine []api.Replica, n int, err error) {
	var list api.ReplicaList
	if err := d.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return nil, 0, err
	}
	for _, r := range list.Items {
		if r.Spec.VolumeUID != v.Status.UID || r.Spec.From != nil && r.Spec.From.Whole {
			continue
		}
		mine = append(mine, r)
		hurt := wantsRepair(&r) && len(v.Status.Members) > 1
		if !hurt && slices.Contains(v.Status.Members, r.Name) || r.DeletionTimestamp != nil || r.Spec.Leave ||
			r.Status.Mode != api.ReplicaCurrent && r.Status.Mode != api.ReplicaStale {
			continue
		}
		var node api.Node
		if d.Client.Get(ctx, client.ObjectKey{Name: r.Spec.Node}, &node) == nil &&
			time.Since(node.Status.Heartbeat.Time) < node.SilentAfter() {
			n++
		}
	}
	slices.SortFunc(mine, func(a, b api.Replica) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return mine, n, nil
}

// makeWhole claims a detached volume and rebuilds its replicas until all are members, another operation wants the
// volume, or no progress is made; again is the pause before the next try.
func (d *Data) makeWhole(ctx context.Context, volume string) (again time.Duration, err error) {
	ctx, unlock, ok := d.Locks.LockYielding(ctx, volume)
	if !ok {
		return upkeepLater, nil
	}
	defer unlock()
	var v api.Volume
	if err := d.Reader.Get(ctx, client.ObjectKey{Name: volume}, &v); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	if v.Status.EngineNode == d.Name && d.session(volume) == nil && d.detached(ctx, &v) { // a dead process's
		if err := d.giveBack(ctx, volume, v.Status.Epoch); err != nil {
			return 0, err
		}
		v.Status.EngineNode = ""
		return 0, nil
	}
	if v.Status.EngineNode != "" || d.session(volume) != nil ||
		v.DeletionTimestamp != nil || v.RevertInProgress() != nil ||
		!apierrors.IsNotFound(d.Reader.Get(ctx, client.ObjectKey{Name: volume}, &api.Attachment{})) {
		return 0, nil
	}
	if !d.somebodyCame(ctx, &v) {
		return 0, nil
	}
	list, err := d.probeMembers(ctx, &v)
	if err != nil {
		return upkeepLater, err
	}
	// The engine drops no member that does not answer: no guest writes.
	take, err := selectMembers(&v, list)
	if err != nil || len(take) < len(list) {
		return upkeepLater, err
	}
	b, size, err := d.claim(ctx, &v, take)
	switch {
	case apierrors.IsConflict(err):
		return 0, nil
	case err != nil:
		return upkeepLater, err
	}
	end := context.WithoutCancel(ctx)
	s, err := d.openSession(ctx, b, size, true)
	if err != nil {
		return upkeepLater, errors.Join(err, d.giveBack(end, v.Name, b.Epoch))
	}
	d.startRebuilds(s)
	d.Log.Info("a detached volume is being made whole", "volume", volume, "epoch", b.Epoch)
	again = d.awaitWhole(ctx, s)
	err = errors.Join(d.close(s), d.giveBack(end, volume, s.at()))
	return again, err
}

// somebodyCame reports whether a replica that the volume lacks answers, or a member is to leave the volume: else a
// claim would only delay other operations.
func (d *Data) somebodyCame(ctx context.Context, v *api.Volume) bool {
	mine, _, err := d.lacking(ctx, v)
	if err != nil {
		return false
	}
	loop, err := d.Threads.Pick()
	if err != nil {
		return false
	}
	defer d.Threads.PutBack(loop)
	var all sync.WaitGroup
	var came atomic.Bool
	for i := range mine {
		r := &mine[i]
		switch is := slices.Contains(v.Status.Members, r.Name); {
		case r.DeletionTimestamp != nil || !is && r.Spec.Leave:
		case is && (r.Spec.Leave || wantsRepair(r)) || !is && r.Spec.Node == d.Name:
			came.Store(true)
		case !is:
			all.Go(func() {
				if d.probeReplica(ctx, loop, r) == nil {
					came.Store(true)
				}
			})
		}
	}
	all.Wait()
	return came.Load()
}

// awaitWhole returns when the session of a detached volume is to end.
func (d *Data) awaitWhole(ctx context.Context, s *session) time.Duration {
	idle := time.Now()
	tick := time.NewTicker(upkeepLook)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0
		}
		var v api.Volume
		if d.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v) != nil || v.Status.UID != s.VolumeUID ||
			!d.detached(ctx, &v) || s.fence.Load() != nil {
			return 0
		}
		_, members, err := s.engine.Epoch(ctx)
		if err != nil {
			return 0
		}
		mine, _, err := d.lacking(ctx, &v)
		if err != nil {
			return 0
		}
		left := 0
		for i := range mine {
			is := slices.Contains(members, string(mine[i].Spec.UID))
			r := &mine[i]
			switch {
			case r.DeletionTimestamp != nil:
			case is == r.Spec.Leave: // to join, or to leave
				left++
			case is && wantsRepair(r) && len(members) > 1 && !s.mates.repairs.Ended(r.Spec.UID):
				left++
			}
		}
		switch {
		case left == 0 && v.Status.Epoch >= s.at():
			return 0
		case len(s.rebuilding()) > 0:
			idle = time.Now()
		case time.Since(idle) > upkeepIdle:
			return upkeepLater
		}
	}
}
