package attach

import (
	"context"
	"errors"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/pace"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/stack"
)

// Attached is for package replica.
func (as *Attachments) Attached(volume string, uid api.UID) bool {
	if as.Session(volume) != nil {
		return true
	}
	for _, held := range as.host.Held() {
		if held.Key == string(uid) {
			return true
		}
	}
	return false
}

// Opened is for package replica.
func (as *Attachments) Opened(volume string, replica api.UID) (*stack.Replica, bool) {
	s := as.Session(volume)
	if s == nil {
		return nil, false
	}
	r := s.localReplica(replica)
	return r, r != nil && s.noting.Load() == r
}

// Uses is for package replica.
func (as *Attachments) Uses(ctx context.Context, volume string, replica api.UID) (bool, error) {
	s := as.Session(volume)
	if s == nil || s.localReplica(replica) == nil {
		return false, nil
	}
	return s.usesReplica(ctx, replica)
}

// Expand is for package replica.
func (as *Attachments) Expand(ctx context.Context, volume string, replica api.UID, size int64) (bool, error) {
	s := as.Session(volume)
	if s == nil || s.localReplica(replica) == nil {
		return false, nil
	}
	if err := s.expand(ctx, size); err != nil {
		return false, err
	}
	as.Wake(volume)
	return true, nil
}

// RoomOn is for package replica.
func (as *Attachments) RoomOn(disk api.UID) {
	for _, s := range as.Sessions() {
		if m, r := s.memberHere(); r != nil && m.Disk == disk {
			s.retryFull()
		}
	}
}

// SealOffline is for package replica.
func (as *Attachments) SealOffline(ctx context.Context, v *api.Volume) error {
	e, _, end, err := as.openOffline(ctx, v)
	if err != nil {
		return err
	}
	return errors.Join(e.SealAll(ctx), end())
}

// HasSession is for package snapshot.
func (as *Attachments) HasSession(volume string) bool { return as.Session(volume) != nil }

// OpenedMeta is for package snapshot.
func (as *Attachments) OpenedMeta(volume string, replica api.UID) (stack.Meta, bool) {
	s := as.Session(volume)
	if s == nil {
		return stack.Meta{}, false
	}
	m, r := s.memberHere()
	if r == nil || m.UID != replica {
		return stack.Meta{}, false
	}
	return r.Meta(), true
}

// Freeze is for package snapshot.
func (as *Attachments) Freeze(ctx context.Context, v *api.Volume) (thaw func() error, err error) {
	s := as.Session(v.Name)
	if s == nil || s.VolumeUID != v.Status.UID || s.ReadOnly || s.fence.Load() != nil {
		return nil, nil
	}
	frozen, err := s.dev.Freeze(ctx)
	if frozen == nil || err != nil {
		return nil, err
	}
	return frozen.Thaw, nil
}

// CompareSoon is for package snapshot.
func (as *Attachments) CompareSoon(volume string, snapshot stack.Snapshot) {
	if s := as.Session(volume); s != nil {
		s.membership.compareSoon(snapshot)
	}
}

// HasDevice reports whether this node has a device of a volume by this name, be the device resumed or not.
func (as *Attachments) HasDevice(volume string) bool {
	return as.Session(volume) != nil ||
		slices.ContainsFunc(as.host.Held(), func(held device.Spec) bool { return held.Name == volume })
}

// GuestRequests is how many requests the engines of this node have answered.
func (as *Attachments) GuestRequests() (n uint64) {
	for _, s := range as.Sessions() {
		for _, c := range s.engine.Stats() {
			n += c.Ops
		}
	}
	return n
}

// GuestIO counts these requests with their latencies.
func (as *Attachments) GuestIO() (io pace.GuestIO) {
	for _, s := range as.Sessions() {
		for _, c := range s.engine.Stats() {
			io.Requests += c.Ops
			io.Latency += time.Duration(c.Seconds * float64(time.Second))
		}
	}
	return io
}

// OpenedOn are the replicas of a disk that engines of this node have for their local member.
func (as *Attachments) OpenedOn(disk *stack.Disk) (all []*stack.Replica) {
	for _, s := range as.Sessions() {
		if r := s.replicaHere(); r != nil && r.Disk() == disk {
			all = append(all, r)
		}
	}
	return all
}
