package attach

import (
	"context"
	"errors"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// The space of blocks that a guest discards above unreferenced layers is freed when the head is cut and merged. The
// node reclaims after a requested trim, and by itself if much space is freed for little work.

// reclaimLeast is the least space that the node reclaims by itself; at least half of the bytes to copy.
const reclaimLeast = 32 << 20

// ReclaimAll reclaims on all attached volumes; again: also where the heads have not changed.
func (as *Attachments) ReclaimAll(ctx context.Context, again bool) {
	for _, s := range as.Sessions() {
		if again {
			s.zeroed.Store(0)
		}
		reclaim := func() error { return as.Reclaim(ctx, s, false) }
		if s.owed.Load() {
			reclaim = func() error { return as.reclaimOwed(ctx, s) }
		}
		if err := reclaim(); err != nil && ctx.Err() == nil && !api.Is(err, api.Busy) {
			as.Log.Warn("the space of trimmed blocks above layers is not freed yet", "volume", s.Volume, "err", err)
		}
	}
}

// reclaimOwed reclaims for a trim, once no layers of the volume are being merged: the space below a merge is unknown.
func (as *Attachments) reclaimOwed(ctx context.Context, s *Session) error {
	if m := s.replicaHere(); s.isMerging() || m != nil && as.merges.IsDue(m.Meta().UID) {
		return nil
	}
	s.owed.Store(false)
	err := as.Reclaim(ctx, s, true)
	if err != nil {
		s.owed.Store(true) // ReclaimAll tries again
	}
	return err
}

// isMerging reports whether layers of a replica here are being merged.
func (s *Session) isMerging() bool {
	m := s.replicaHere()
	return m != nil && m.Meta().Merge != nil
}

// Reclaim reclaims on an attached volume; sure: for any gain.
func (as *Attachments) Reclaim(ctx context.Context, s *Session, sure bool) error {
	m := s.replicaHere()
	if s.ReadOnly || m == nil && !sure {
		return nil
	}
	gain := int64(0) // unknown: the replicas are on other nodes
	if m != nil {
		if n, err := m.Zeroed(); err != nil || n == 0 || !sure && (n < reclaimLeast || n == s.zeroed.Swap(n)) {
			return err
		}
		var cost int64
		var err error
		gain, cost, err = m.Reclaimable()
		if err != nil || gain == 0 || !sure && (gain < reclaimLeast || 2*gain < cost) {
			return err
		}
	}
	unlock, ok := as.Locks.LockSoon(s.Volume)
	if !ok {
		return api.Errorf(api.Busy, "volume %s: another operation takes long", s.Volume)
	}
	defer unlock()
	var v api.Volume
	if err := as.Reader.Get(ctx, client.ObjectKey{Name: s.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if as.Session(s.Volume) != s || s.replicaHere() != m || v.Status.UID != s.VolumeUID {
		return nil
	}
	var uid api.UID
	if m != nil {
		uid = api.UID(m.Meta().UID)
	}
	e, _, end, err := as.Engine(ctx, &v)
	if err != nil {
		return err
	}
	if err := errors.Join(e.SealAll(ctx), end()); err != nil {
		return err
	}
	as.snapshots.Sealed(ctx, &v, uid)
	as.Log.Info("the space of trimmed blocks above unused layers is freed", "volume", v.Name, "bytes", gain)
	return nil
}
