package replicas

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A replica that begins with a snapshot of another one. On the disk of that it shares the layers. On another disk it
// reads them where they are, and copies them home meanwhile. A full copy is made before the replica can be used. In the
// latter two a pin keeps the layers where they are until they are copied: snapshot and volume can go at once.

// begin makes a replica with what its source holds.
func (l *replicaLoop) begin(ctx context.Context, r *api.Replica, disk *stack.Disk, s stack.Spec) error {
	from := r.Spec.From
	if from.Whole {
		return l.move(ctx, r, disk, s)
	}
	if there, err := l.holds(disk, r.Spec.UID); there || err != nil {
		return err // whatever became of its source
	}
	switch {
	case from.Layer != "":
		return l.copyAll(ctx, r, disk, s)
	case from.Disk == "" || from.Disk == r.Spec.Disk:
		return l.share(ctx, r, disk, s)
	}
	_, pin, err := l.pin(ctx, r)
	if err != nil {
		return err
	}
	s.Layers = pin.Layers
	return disk.CreateReplica(ctx, s)
}

// source is the disk that a replica's source is on.
func (l *replicaLoop) source(ctx context.Context, r *api.Replica) (*stack.Disk, error) {
	if d := r.Spec.From.Disk; d != "" {
		return l.disk(ctx, d)
	}
	return l.disk(ctx, r.Spec.Disk)
}

// pin makes sure that the source's layers stay.
func (l *replicaLoop) pin(ctx context.Context, r *api.Replica) (*stack.Disk, stack.Pin, error) {
	src, err := l.source(ctx, r)
	if err != nil {
		return nil, stack.Pin{}, err
	}
	from := r.Spec.From
	pin, err := src.Pin(ctx, stack.Pin{UID: string(r.Spec.UID), For: r.Spec.Volume, Disk: string(r.Spec.Disk)},
		string(from.Replica), string(from.Snapshot))
	if api.Is(err, api.NotFound) {
		return nil, pin, api.Errorf(api.NotFound, "snapshot %s of volume %s is gone: %w", from.Name, from.Volume, err)
	}
	if err == nil {
		err = l.pinElsewhere(ctx, r, src, pin.Layers)
	}
	r.Status.Pinned = err == nil
	return src, pin, err
}

// pinElsewhere makes sure that those of the layers stay that the source itself reads on other disks: it may go before
// it has copied them.
func (l *replicaLoop) pinElsewhere(ctx context.Context, r *api.Replica, src *stack.Disk, layers []string) error {
	lacks, err := src.LackingOf(layers)
	if err != nil {
		return err
	}
	for _, uid := range lacks {
		if slices.Contains(r.Spec.Layers, api.UID(uid)) {
			continue // an image's
		}
		err := api.Errorf(api.Busy, "layer %s is on its way; try again", uid)
		for _, other := range l.otherDisks(src) {
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

// errCopying is a copy that is on its way.
func errCopying(c *api.CopyStatus) error {
	return api.Errorf(api.Unavailable, "is being copied: %d %% of %s", c.Progress, api.SizeText(c.Total))
}

// copyAll makes a replica that has all in a layer of its own; until that is whole the error is of kind unavailable.
func (l *replicaLoop) copyAll(ctx context.Context, r *api.Replica, disk *stack.Disk, s stack.Spec) error {
	from := r.Spec.From
	src, pin, err := l.pin(ctx, r)
	if err != nil {
		return err
	}
	own := pin.Layers
	if n := len(s.Layers); n <= len(own) && slices.Equal(own[:n], s.Layers) {
		own = own[n:] // the rest is the image, of which a disk has one copy for all
	} else {
		s.Layers = nil
	}
	j := l.bringer.get(r.Spec.UID)
	if j == nil || !j.running() && j.err != nil {
		if j != nil {
			if err := l.tryAgain(ctx, r, j); err != nil {
				return err
			}
		}
		rate := l.rate(l.bringer.ctx)
		j = l.bringer.start(r.Spec.UID, api.UID(src.UID()), l.copiesAtOnce(ctx), l.tellReplica(r.Name),
			func(ctx context.Context, j *bringing) error {
				return disk.Flatten(ctx, append([]*stack.Disk{src}, l.otherDisks(src)...), own, string(from.Layer),
					stack.BringOptions{BytesPerSecond: rate, Progress: j.at})
			})
		if j == nil {
			return api.Errorf(api.Unavailable, "the data role is stopping")
		}
	}
	st, moved := j.status()
	r.Status.Copy = st
	if j.running() {
		if stall := l.stall(ctx); stall > 0 && time.Since(moved) > stall {
			l.bringer.stop(r.Spec.UID)
			return l.giveUp(r, disk, src, api.Errorf(api.Invalid, "the copy has made no progress for %s", stall))
		}
		return errCopying(st)
	}
	if len(s.Layers) > 0 {
		if err := l.layersReady(ctx, r); err != nil {
			return err
		}
	}
	s.Layers = append(slices.Clone(s.Layers), string(from.Layer))
	if err := disk.CreateReplica(ctx, s); err != nil {
		return err
	}
	l.bringer.forget(r.Spec.UID)
	r.Status.Copy = nil
	l.Log.Info("full copy finished", "volume", r.Spec.Volume, "source", from.Volume, "bytes", st.Total)
	defer l.mergeWorker.Freed(src)
	return src.Unpin(string(r.Spec.UID))
}

func (l *replicaLoop) copiesAtOnce(ctx context.Context) int {
	return max(int(l.setting(ctx, "concurrent-replica-copies-per-node")), 1)
}

func (l *replicaLoop) stall(ctx context.Context) time.Duration {
	return time.Duration(l.setting(ctx, "clone-stall-timeout")) * time.Minute
}

// tryAgain decides what becomes of a full copy that ended with an error. Nil: it is to be tried again now.
func (l *replicaLoop) tryAgain(ctx context.Context, r *api.Replica, j *bringing) error {
	st, moved := j.status()
	r.Status.Copy = st
	err := j.err
	disk, derr := l.disk(ctx, r.Spec.Disk)
	src, serr := l.source(ctx, r)
	if e := errors.Join(derr, serr); e != nil {
		return api.Errorf(api.Unavailable, "the copy waits: %w", e)
	}
	switch stall := l.stall(ctx); {
	case api.Is(err, api.Corrupt), api.Is(err, api.NotFound), api.Is(err, api.Invalid):
		return l.giveUp(r, disk, src, err)
	case stall > 0 && time.Since(moved) > stall:
		return l.giveUp(r, disk, src, api.Errorf(api.Invalid, "the copy has made no progress for %s: %w", stall, err))
	case time.Since(j.stopped) < bringRetry:
		if api.Is(err, api.Full) && !strings.Contains(r.Status.Message, "no room") {
			l.events.Eventf(r, nil, "Warning", "DiskFull", "Copy", "%s", err)
		}
		// Of kind busy: nobody tells when it is time.
		return api.Errorf(api.Busy, "the copy is tried again: %w", err)
	}
	return nil
}

// giveUp ends a full copy for good: what it held goes.
func (l *replicaLoop) giveUp(r *api.Replica, disk, src *stack.Disk, why error) error {
	l.bringer.forget(r.Spec.UID)
	err := errors.Join(disk.Drop(string(r.Spec.From.Layer)), src.Unpin(string(r.Spec.UID)))
	l.mergeWorker.Freed(src)
	if err != nil {
		l.Log.Warn("what a copy left is not removed", "volume", r.Spec.Volume, "err", err)
	}
	r.Status.Copy, r.Status.Pinned = nil, false
	return api.Errorf(api.Invalid, "volume %s cannot be copied: %w", r.Spec.From.Volume, why)
}

// abandon ends what is under way for a replica that goes, and lets go of what was kept for it.
func (l *replicaLoop) abandon(r *api.Replica, disk *stack.Disk) error {
	l.bringer.stop(r.Spec.UID)
	var errs []error
	if from := r.Spec.From; from != nil && from.Layer != "" {
		errs = append(errs, disk.Drop(string(from.Layer)))
	}
	errs = append(errs, disk.Unpin(string(r.Spec.UID)))
	for _, other := range l.disks.Except(disk) {
		l.unpinSoon(r.Spec.UID, other)
	}
	return errors.Join(errs...)
}

// unpin takes the pins of a replica off all disks. One that is not there now is looked at when it comes back.
func (d *Data) unpin(replica api.UID, own *stack.Disk) error {
	errs := []error{own.Unpin(string(replica))}
	for _, other := range d.disks.Except(own) {
		err := d.unpinOn(replica, other)
		if api.Is(err, api.Unavailable) {
			d.unpinLater(replica, other)
			err = nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (d *Data) unpinOn(replica api.UID, disk *stack.Disk) error {
	pinned, err := disk.Pinned(string(replica))
	if err != nil || !pinned {
		return err
	}
	if err := disk.Unpin(string(replica)); err != nil {
		return err
	}
	d.mergeWorker.Freed(disk)
	return nil
}

// unpinSoon takes the pin of a replica that goes off another disk. That a disk fails keeps no replica of other disks:
// there the pin goes when it works again.
func (d *Data) unpinSoon(replica api.UID, disk *stack.Disk) {
	err := d.unpinOn(replica, disk)
	if err == nil {
		return
	}
	d.Log.Warn("layers stay that were kept for a replica", "disk", disk.Path(), "replica", replica, "err", err)
	d.unpinLater(replica, disk)
}

func (d *Data) unpinLater(replica api.UID, disk *stack.Disk) {
	d.mu.Lock()
	defer d.mu.Unlock()
	uid := api.UID(disk.UID())
	if !slices.Contains(d.pinned[uid], replica) {
		d.pinned[uid] = append(d.pinned[uid], replica)
	}
}

// unpinLeft does what unpinLater left.
func (d *Data) unpinLeft() {
	for _, disk := range d.disks.Except(nil) {
		uid := api.UID(disk.UID())
		d.mu.Lock()
		left := d.pinned[uid]
		delete(d.pinned, uid)
		d.mu.Unlock()
		for i, replica := range left {
			if d.unpinOn(replica, disk) == nil {
				continue
			}
			d.mu.Lock()
			d.pinned[uid] = append(d.pinned[uid], left[i:]...)
			d.mu.Unlock()
			break
		}
	}
}

// hydrate copies the layers home that a replica reads on other disks of the node. Those of an image are brought by who
// looks after images.
func (l *replicaLoop) hydrate(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	l.mu.Lock()
	whole := l.whole[r.Spec.UID]
	l.mu.Unlock()
	if whole {
		r.Status.Copy, r.Status.Pinned = nil, false // the write that said so first may have lost a race
		return nil
	}
	lacks, err := disk.Lacking(string(r.Spec.UID))
	if err != nil {
		return err
	}
	if r.Labels[api.LabelImage] != "" {
		lacks = slices.DeleteFunc(lacks, func(uid string) bool { return slices.Contains(r.Spec.Layers, api.UID(uid)) })
	}
	j := l.bringer.get(r.Spec.UID)
	if j != nil {
		r.Status.Copy, _ = j.status()
	}
	switch {
	case j != nil && j.running():
		return nil
	case len(lacks) == 0:
		l.bringer.forget(r.Spec.UID)
		if r.Status.Copy != nil || r.Status.Pinned {
			l.Log.Info("all layers are on the replica's own disk", "volume", r.Spec.Volume, "replica", r.Name)
			l.mergeWorker.Merge(disk, string(r.Spec.UID), r.Spec.Volume)
		}
		if r.Status.Copy, r.Status.Pinned = nil, false; r.Spec.From != nil {
			if err := l.unpin(r.Spec.UID, disk); err != nil {
				return err
			}
		}
		l.mu.Lock()
		l.whole[r.Spec.UID] = true
		l.mu.Unlock()
		return nil
	case j != nil && j.err != nil && time.Since(j.stopped) < bringRetry:
		r.Status.Message = fmt.Sprintf("layers are not copied yet: %v", j.err)
		return api.Errorf(api.Busy, "%s", r.Status.Message)
	}
	var from api.UID
	if r.Spec.From != nil {
		from = r.Spec.From.Disk
	}
	rate := l.rate(l.bringer.ctx)
	l.bringer.start(r.Spec.UID, from, l.copiesAtOnce(ctx), l.tellReplica(r.Name),
		func(ctx context.Context, j *bringing) error { return l.bringHome(ctx, disk, lacks, rate, j) })
	return nil
}

// bringHome copies layers to a disk from those that have them.
func (d *Data) bringHome(ctx context.Context, disk *stack.Disk, layers []string, rate func() int64, j *bringing) error {
	sources := make([]*stack.Disk, len(layers))
	sizes := make([]int64, len(layers))
	var total, before int64
	for i, uid := range layers {
		for _, other := range d.otherDisks(disk) {
			if _, used, err := other.LayerSize(uid); err == nil {
				sources[i], sizes[i] = other, used
				total += used
				break
			}
		}
		if sources[i] == nil {
			return api.Errorf(api.Unavailable, "layer %s is on no disk of this node: the volume reads it where it was lost", uid)
		}
	}
	j.at(0, total)
	for i, uid := range layers {
		for {
			err := disk.Bring(ctx, sources[i], uid, stack.BringOptions{BytesPerSecond: rate,
				Progress: func(done, _ int64) { j.at(before+min(done, sizes[i]), total) }})
			if err == nil {
				break
			}
			if !api.Is(err, api.Busy) {
				return err
			}
			pause := time.NewTimer(200 * time.Millisecond) // its digests are being made
			select {
			case <-pause.C:
			case <-ctx.Done():
				pause.Stop()
				return ctx.Err()
			}
		}
		before += sizes[i]
		j.at(before, total)
	}
	return nil
}

// dropStale takes pins off a disk whose replica went while the disk was not there.
func (d *Data) dropStale(ctx context.Context, disk *stack.Disk) error {
	pins, err := disk.Pins()
	if err != nil || len(pins) == 0 {
		return err
	}
	var all api.ReplicaList
	if err := d.reader.List(ctx, &all); err != nil {
		return err
	}
	for _, p := range pins {
		if p.Image || slices.ContainsFunc(all.Items, func(r api.Replica) bool { return string(r.Spec.UID) == p.UID }) {
			continue
		}
		// Objects can be lost; what is on a disk counts, and one that is not there may have it.
		on, err := d.disk(ctx, api.UID(p.Disk))
		if err != nil {
			continue
		}
		if there, err := on.Holds(p.UID); err != nil || there {
			continue
		}
		d.Log.Info("layers are not kept any more for a replica that is gone", "disk", disk.Path(), "volume", p.For)
		if err := disk.Unpin(p.UID); err != nil {
			return err
		}
		d.mergeWorker.Freed(disk)
	}
	return nil
}
