package replicas

import (
	"context"
	"errors"

	"drover.io/drover/api"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/replica"
	"drover.io/drover/replicas/host/snapshot"
	"drover.io/drover/replicas/stack"
)

// attached is the attached volumes of this node, for the packages replica and snapshot.
type attached struct{ d *Data }

var (
	_ replica.Attachments  = attached{}
	_ snapshot.Attachments = attached{}
)

// Attached implements replica.Attachments.
func (a attached) Attached(volume string, uid api.UID) bool {
	if a.d.session(volume) != nil {
		return true
	}
	for _, held := range a.d.Host.Held() {
		if held.Key == string(uid) {
			return true
		}
	}
	return false
}

// Resuming implements replica.Attachments.
func (a attached) Resuming(volume string) bool { return a.d.beingResumed(volume) }

// Rebuilding implements replica.Attachments.
func (a attached) Rebuilding(volume string) bool { return a.d.isRebuilding(volume) }

// Opened implements replica.Attachments.
func (a attached) Opened(volume string, replica api.UID) (*stack.Replica, bool) {
	s := a.d.session(volume)
	if s == nil {
		return nil, false
	}
	r := s.local(replica)
	return r, r != nil && s.noting.Load() && s.member() == r
}

// Uses implements replica.Attachments.
func (a attached) Uses(ctx context.Context, volume string, replica api.UID) (bool, error) {
	s := a.d.session(volume)
	if s == nil || s.local(replica) == nil {
		return false, nil
	}
	return s.uses(ctx, replica)
}

// Expand implements replica.Attachments.
func (a attached) Expand(ctx context.Context, volume string, replica api.UID, size int64) (bool, error) {
	s := a.d.session(volume)
	if s == nil || s.local(replica) == nil {
		return false, nil
	}
	if err := s.expand(ctx, size); err != nil {
		return false, err
	}
	a.d.stir(volume)
	return true, nil
}

// RoomOn implements replica.Attachments.
func (a attached) RoomOn(disk api.UID) {
	for _, s := range a.d.all() {
		if s.Disk == disk {
			s.room()
		}
	}
}

// SealOffline implements replica.Attachments.
func (a attached) SealOffline(ctx context.Context, v *api.Volume) error {
	e, _, end, err := a.d.openOffline(ctx, v)
	if err != nil {
		return err
	}
	return errors.Join(e.SealAll(ctx), end())
}

// HasSession implements snapshot.Attachments.
func (a attached) HasSession(volume string) bool { return a.d.session(volume) != nil }

// Engine implements snapshot.Attachments.
func (a attached) Engine(ctx context.Context, v *api.Volume) (*engine.Engine, api.UID, func() error, error) {
	return a.d.engineOf(ctx, v)
}

// OpenedMeta implements snapshot.Attachments.
func (a attached) OpenedMeta(volume string, replica api.UID) (stack.Meta, bool) {
	s := a.d.session(volume)
	if s == nil || s.Replica != replica {
		return stack.Meta{}, false
	}
	return s.member().Meta(), true
}

// Freeze implements snapshot.Attachments.
func (a attached) Freeze(ctx context.Context, v *api.Volume) (thaw func() error, err error) {
	s := a.d.session(v.Name)
	if s == nil || s.VolumeUID != v.Status.UID || s.ReadOnly || s.fence.Load() != nil {
		return nil, nil
	}
	frozen, err := s.dev.Freeze(ctx)
	if frozen == nil || err != nil {
		return nil, err
	}
	return frozen.Thaw, nil
}

// CompareSoon implements snapshot.Attachments.
func (a attached) CompareSoon(volume, before string, snapshot stack.Snapshot) {
	if s := a.d.session(volume); s != nil {
		s.mates.compareSoon(before, snapshot)
	}
}
