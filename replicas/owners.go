package replicas

import (
	"context"
	"errors"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/replica"
	"drover.io/drover/replicas/stack"
)

// attached is the attached volumes of this node, for package replica.
type attached struct{ d *Data }

var _ replica.Attachments = attached{}

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
	h, err := a.d.openOffline(ctx, v)
	if err != nil {
		return err
	}
	return errors.Join(h.SealAll(ctx), h.end())
}

// snapshotted is the snapshots of this node, for package replica.
type snapshotted struct{ d *Data }

var _ replica.Snapshots = snapshotted{}

// Changed implements replica.Snapshots.
func (s snapshotted) Changed(replica api.UID, names ...string) { s.d.changed(replica, names...) }

// Found implements replica.Snapshots.
func (s snapshotted) Found(replica api.UID) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	s.d.unseen[replica] = true
}

// CreateObjects implements replica.Snapshots.
func (s snapshotted) CreateObjects(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	return s.d.adopt(ctx, r, disk)
}
