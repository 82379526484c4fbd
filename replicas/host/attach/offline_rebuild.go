package attach

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
	"drover.io/drover/replicas/host/attempts"
)

// An offline engine on the node of the first member rebuilds the replicas of a detached volume. The engine claims the
// volume like any other, and gives the volume up to any other operation: an attach, a snapshot or a removal on the same
// node ends the engine first; an attach elsewhere waits for the end, which comes within a second.

// Times of upkeep: between two looks for volumes, between two looks for the end of a run, for a run without progress,
// and before the next try after such a run.
const (
	offlineEvery = 3 * time.Second
	offlineProbe = 200 * time.Millisecond
	offlineIdle  = 20 * time.Second
	offlineLater = time.Minute
)

// offlineRebuilds rebuilds detached volumes.
type offlineRebuilds struct {
	*Attachments

	runs attempts.Log[string] // by volume
}

// Rebuilding reports whether this node rebuilds a detached volume.
func (as *Attachments) Rebuilding(volume string) bool { return as.offline.runs.InProgress(volume) }

// runRebuilds rebuilds the detached volumes of this node, until ctx ends.
func (u *offlineRebuilds) runRebuilds(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	return callEvery(ctx, offlineEvery, func() {
		var list api.ReplicaList
		if u.Client.List(ctx, &list, client.MatchingFields{watch.ByNode: u.Name}, client.UnsafeDisableDeepCopy) != nil {
			return
		}
		for i := range list.Items {
			volume, name := list.Items[i].Spec.Volume, list.Items[i].Name
			if !u.wantsOfflineRebuild(ctx, &list.Items[i]) || !u.runs.Begin(volume, u.CopiesAtOnce(ctx)) {
				continue
			}
			all.Go(func() {
				again, err := u.rebuildOffline(ctx, volume)
				if err != nil && ctx.Err() == nil {
					u.Log.Warn("a detached volume is not rebuilt yet", "volume", volume, "err", err)
				}
				if u.runs.End(volume, again); again == 0 {
					u.runs.Forget(volume)
				}
				u.replicas.Wake(name) // the reconciler deferred the replica meanwhile
			})
		}
	})
}

// wantsOfflineRebuild reports whether r is the member whose node rebuilds the volume.
func (u *offlineRebuilds) wantsOfflineRebuild(ctx context.Context, r *api.Replica) bool {
	var v api.Volume
	if u.Client.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v) != nil || v.Status.UID != r.Spec.VolumeUID ||
		!slices.Contains(v.Status.Members, r.Name) || u.Session(v.Name) != nil || !u.isDetached(ctx, &v) {
		return false
	}
	if v.Status.EngineNode == u.Name { // the claim of a dead process, unless another operation has the lock
		return true
	}
	if v.DeletionTimestamp != nil || v.RevertInProgress() != nil || v.Status.EngineNode != "" {
		return false
	}
	mine, lacks, err := u.listLacking(ctx, &v)
	if err != nil || lacks == 0 {
		return false
	}
	for _, m := range mine { // the first member whose node is not silent
		if !slices.Contains(v.Status.Members, m.Name) {
			continue
		}
		var n api.Node
		if u.Client.Get(ctx, client.ObjectKey{Name: m.Spec.Node}, &n) == nil &&
			(m.Name == r.Name || time.Since(n.Status.Heartbeat.Time) < n.SilentAfter()) {
			return m.Name == r.Name
		}
	}
	return false
}

// isDetached reports whether the volume has no attachment, as far as the cache knows.
func (as *Attachments) isDetached(ctx context.Context, v *api.Volume) bool {
	for _, held := range as.host.Held() {
		if held.Key == string(v.Status.UID) {
			return false
		}
	}
	return apierrors.IsNotFound(as.Client.Get(ctx, client.ObjectKey{Name: v.Name}, &api.Attachment{}))
}

// listLacking lists the replicas of a volume by name, and counts the replicas that are damaged, or could be members and
// are not.
func (u *offlineRebuilds) listLacking(ctx context.Context, v *api.Volume) (mine []api.Replica, n int, err error) {
	var list api.ReplicaList
	if err := u.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
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
		if u.Client.Get(ctx, client.ObjectKey{Name: r.Spec.Node}, &node) == nil &&
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

// rebuildOffline claims a detached volume and rebuilds its replicas until all are members, another operation wants the
// volume, or no progress is made; again is the pause before the next try.
func (u *offlineRebuilds) rebuildOffline(ctx context.Context, volume string) (again time.Duration, err error) {
	ctx, unlock, ok := u.Locks.LockYielding(ctx, volume)
	if !ok {
		return offlineLater, nil
	}
	defer unlock()
	var v api.Volume
	if err := u.Reader.Get(ctx, client.ObjectKey{Name: volume}, &v); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	if v.Status.EngineNode == u.Name && u.Session(volume) == nil && u.isDetached(ctx, &v) { // a dead process's
		return 0, u.releaseClaim(ctx, volume, v.Status.Epoch)
	}
	if v.Status.EngineNode != "" || u.Session(volume) != nil ||
		v.DeletionTimestamp != nil || v.RevertInProgress() != nil ||
		!apierrors.IsNotFound(u.Reader.Get(ctx, client.ObjectKey{Name: volume}, &api.Attachment{})) {
		return 0, nil
	}
	if !u.someReplicaAnswers(ctx, &v) {
		return 0, nil
	}
	list, err := u.probeMembers(ctx, &v)
	if err != nil {
		return offlineLater, err
	}
	// The engine drops no member that does not answer: no guest writes.
	take, err := selectMembers(&v, list)
	if err != nil || len(take) < len(list) {
		return offlineLater, err
	}
	b, size, err := u.claimVolume(ctx, &v, take)
	switch {
	case apierrors.IsConflict(err):
		return 0, nil
	case err != nil:
		return offlineLater, err
	}
	end := context.WithoutCancel(ctx)
	s, err := u.openSession(ctx, b, size, true)
	if err != nil {
		return offlineLater, errors.Join(err, u.releaseClaim(end, v.Name, b.Epoch))
	}
	u.startRebuilds(s)
	u.Log.Info("a detached volume is being rebuilt", "volume", volume, "epoch", b.Epoch)
	again = u.awaitRebuilt(ctx, s)
	err = errors.Join(u.closeSession(s), u.releaseClaim(end, volume, s.askedEpoch()))
	return again, err
}

// someReplicaAnswers reports whether a replica that the volume lacks answers, or a member is to leave the volume: else
// a claim would only delay other operations.
func (u *offlineRebuilds) someReplicaAnswers(ctx context.Context, v *api.Volume) bool {
	mine, _, err := u.listLacking(ctx, v)
	if err != nil {
		return false
	}
	loop, err := u.Threads.Pick()
	if err != nil {
		return false
	}
	defer u.Threads.PutBack(loop)
	var all sync.WaitGroup
	var came atomic.Bool
	for i := range mine {
		r := &mine[i]
		switch is := slices.Contains(v.Status.Members, r.Name); {
		case r.DeletionTimestamp != nil || !is && r.Spec.Leave:
		case is && (r.Spec.Leave || wantsRepair(r)) || !is && r.Spec.Node == u.Name:
			came.Store(true)
		case !is:
			all.Go(func() {
				if u.probeReplica(ctx, loop, r) == nil {
					came.Store(true)
				}
			})
		}
	}
	all.Wait()
	return came.Load()
}

// awaitRebuilt returns when the session of a detached volume is to end.
func (u *offlineRebuilds) awaitRebuilt(ctx context.Context, s *Session) time.Duration {
	idle := time.Now()
	tick := time.NewTicker(offlineProbe)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0
		}
		var v api.Volume
		if u.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v) != nil || v.Status.UID != s.VolumeUID ||
			!u.isDetached(ctx, &v) || s.fence.Load() != nil {
			return 0
		}
		_, members, err := s.engine.Epoch(ctx)
		if err != nil {
			return 0
		}
		mine, _, err := u.listLacking(ctx, &v)
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
			case is && wantsRepair(r) && len(members) > 1 && !s.membership.repairs.Ended(r.Spec.UID):
				left++
			}
		}
		switch {
		case left == 0 && v.Status.Epoch >= s.askedEpoch():
			return 0
		case len(s.listRebuilds()) > 0:
			idle = time.Now()
		case time.Since(idle) > offlineIdle:
			return offlineLater
		}
	}
}
