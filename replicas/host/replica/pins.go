package replica

import (
	"context"
	"errors"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// unpin removes the pins of a replica from all disks. UnpinLeft follows on a disk that does not answer now.
func (rs *Replicas) unpin(replica api.UID, own *stack.Disk) error {
	errs := []error{own.Unpin(string(replica))}
	for _, other := range rs.Disks.Except(own) {
		err := rs.unpinOn(replica, other)
		if api.Is(err, api.Unavailable) {
			rs.unpinLater(replica, other)
			err = nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// unpinOn removes the pin of a replica from one disk.
func (rs *Replicas) unpinOn(replica api.UID, disk *stack.Disk) error {
	pinned, err := disk.Pinned(string(replica))
	if err != nil || !pinned {
		return err
	}
	if err := disk.Unpin(string(replica)); err != nil {
		return err
	}
	rs.merges.Freed(disk)
	return nil
}

// unpinOrLater removes the pin of a deleted replica from another disk. A disk that fails does not keep replicas of
// other disks: UnpinLeft follows.
func (rs *Replicas) unpinOrLater(replica api.UID, disk *stack.Disk) {
	err := rs.unpinOn(replica, disk)
	if err == nil {
		return
	}
	rs.Log.Warn("a pin for a deleted replica stays for now", "disk", disk.Path(), "replica", replica, "err", err)
	rs.unpinLater(replica, disk)
}

// unpinLater notes a pin for UnpinLeft.
func (rs *Replicas) unpinLater(replica api.UID, disk *stack.Disk) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	uid := api.UID(disk.UID())
	if !slices.Contains(rs.pinned[uid], replica) {
		rs.pinned[uid] = append(rs.pinned[uid], replica)
	}
}

// UnpinLeft removes the pins that unpinLater noted.
func (rs *Replicas) UnpinLeft() {
	for _, disk := range rs.Disks.Except(nil) {
		uid := api.UID(disk.UID())
		rs.mu.Lock()
		left := rs.pinned[uid]
		delete(rs.pinned, uid)
		rs.mu.Unlock()
		for i, replica := range left {
			if rs.unpinOn(replica, disk) == nil {
				continue
			}
			rs.mu.Lock()
			rs.pinned[uid] = append(rs.pinned[uid], left[i:]...)
			rs.mu.Unlock()
			break
		}
	}
}

// dropStalePins removes pins from a disk whose replicas were removed while the disk was missing.
func (rs *Replicas) dropStalePins(ctx context.Context, disk *stack.Disk) error {
	pins, err := disk.Pins()
	if err != nil || len(pins) == 0 {
		return err
	}
	var all api.ReplicaList
	if err := rs.Reader.List(ctx, &all); err != nil {
		return err
	}
	for _, p := range pins {
		isReplica := func(r api.Replica) bool { return string(r.Spec.UID) == p.UID }
		if p.Image || p.Backup || slices.ContainsFunc(all.Items, isReplica) {
			continue
		}
		// Objects can be lost: the replica on the disk counts, and a missing disk may have the replica.
		on, err := rs.Disk(ctx, api.UID(p.Disk))
		if err != nil {
			continue
		}
		if there, err := on.Holds(p.UID); err != nil || there {
			continue
		}
		rs.Log.Info("the pin of a removed replica is removed", "disk", disk.Path(), "volume", p.For)
		if err := disk.Unpin(p.UID); err != nil {
			return err
		}
		rs.merges.Freed(disk)
	}
	return nil
}

// pinSource pins the source's layers on the source's disk.
func (rs *Replicas) pinSource(ctx context.Context, r *api.Replica) (*stack.Disk, stack.Pin, error) {
	src, err := rs.sourceDisk(ctx, r)
	if err != nil {
		return nil, stack.Pin{}, err
	}
	from := r.Spec.From
	pin, err := src.Pin(ctx, stack.Pin{UID: string(r.Spec.UID), For: r.Spec.Volume, Disk: string(r.Spec.Disk)},
		string(from.Replica), string(from.Snapshot))
	if api.Is(err, api.NotFound) {
		return nil, pin, api.Errorf(api.NotFound, "snapshot %s of volume %s does not exist any more: %w", from.Name,
			from.Volume, err)
	}
	if err == nil {
		err = rs.pinElsewhere(ctx, r, src, pin.Layers)
	}
	r.Status.Pinned = err == nil
	return src, pin, err
}

// pinElsewhere pins the layers that the source itself reads on other disks: the source may be removed before it has
// copied these layers.
func (rs *Replicas) pinElsewhere(ctx context.Context, r *api.Replica, src *stack.Disk, layers []string) error {
	lacks, err := src.LackingOf(layers)
	if err != nil {
		return err
	}
	for _, uid := range lacks {
		if slices.Contains(r.Spec.Layers, api.UID(uid)) {
			continue // a layer of an image
		}
		err := api.Errorf(api.Busy, "layer %s is being copied; try again", uid)
		for _, other := range rs.layers.Beside(src) {
			if none, lerr := other.LackingOf([]string{uid}); lerr != nil || len(none) > 0 {
				continue
			}
			p := stack.Pin{UID: string(r.Spec.UID), For: r.Spec.Volume, Disk: string(r.Spec.Disk), Layers: []string{uid}}
			if err = other.PinLayers(ctx, p); err == nil {
				break
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
