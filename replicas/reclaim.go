package replicas

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

// reclaimAll reclaims on all attached volumes; anew: also where the heads have not changed.
func (d *Data) reclaimAll(ctx context.Context, anew bool) {
	for _, s := range d.all() {
		if anew {
			s.zeroed.Store(0)
		}
		reclaim := func() error { return d.reclaim(ctx, s, false) }
		if s.owed.Load() {
			reclaim = func() error { return d.reclaimOwed(ctx, s) }
		}
		if err := reclaim(); err != nil && ctx.Err() == nil && !api.Is(err, api.Busy) {
			d.Log.Warn("what was trimmed over layers does not come back yet", "volume", s.Volume, "err", err)
		}
	}
}

// reclaimOwed reclaims for a trim, once no layers of the volume are being merged: the space below a merge is unknown.
func (d *Data) reclaimOwed(ctx context.Context, s *session) error {
	if m := s.member(); s.merges() || m != nil && d.mergeWorker.IsDue(m.Meta().UID) {
		return nil
	}
	s.owed.Store(false)
	err := d.reclaim(ctx, s, true)
	if err != nil {
		s.owed.Store(true) // reclaimAll tries again
	}
	return err
}

// merges reports whether layers of a replica here are being merged.
func (s *session) merges() bool {
	m := s.member()
	return m != nil && m.Meta().Merge != nil
}

// reclaim reclaims on an attached volume; sure: for any gain.
func (d *Data) reclaim(ctx context.Context, s *session, sure bool) error {
	m := s.member()
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
	unlock, ok := d.Locks.LockSoon(s.Volume)
	if !ok {
		return api.Errorf(api.Busy, "something takes long with the volume")
	}
	defer unlock()
	var v api.Volume
	if err := d.Reader.Get(ctx, client.ObjectKey{Name: s.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if d.session(s.Volume) != s || s.member() != m || v.Status.UID != s.VolumeUID {
		return nil
	}
	var uid api.UID
	if m != nil {
		uid = api.UID(m.Meta().UID)
	}
	e, _, end, err := d.engineOf(ctx, &v)
	if err != nil {
		return err
	}
	if err := errors.Join(e.SealAll(ctx), end()); err != nil {
		return err
	}
	d.snapshots.Sealed(ctx, &v, uid)
	d.Log.Info("what was trimmed over layers that nobody needs comes back", "volume", v.Name, "bytes", gain)
	return nil
}
