package replica

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A clone's replica begins with a snapshot of a source replica. On the source's disk the two share layers. On another
// disk the new replica reads the source's layers, and a job copies the layers meanwhile; a full copy is complete before
// the replica can be used. A pin keeps the source's layers until then: snapshot and source volume can be deleted at
// once.

// createFromSource creates a replica with the layers of its source.
func (rs *Replicas) createFromSource(ctx context.Context, r *api.Replica, disk *stack.Disk, s stack.Spec) error {
	from := r.Spec.From
	if from.Whole {
		return rs.move(ctx, r, disk, s)
	}
	if exists, err := rs.holds(disk, r.Spec.UID); exists || err != nil {
		return err // even if the source was removed since
	}
	switch {
	case from.Layer != "":
		return rs.createCopied(ctx, r, disk, s)
	case from.Disk == "" || from.Disk == r.Spec.Disk:
		return rs.createShared(ctx, r, disk, s)
	}
	_, pin, err := rs.pinSource(ctx, r)
	if err != nil {
		return err
	}
	s.Layers = pin.Layers
	return disk.CreateReplica(ctx, s)
}

// sourceDisk is the disk of a replica's source.
func (rs *Replicas) sourceDisk(ctx context.Context, r *api.Replica) (*stack.Disk, error) {
	if d := r.Spec.From.Disk; d != "" {
		return rs.Disk(ctx, d)
	}
	return rs.Disk(ctx, r.Spec.Disk)
}

// errCopying reports a copy in progress.
func errCopying(c *api.CopyStatus) error {
	return api.Errorf(api.Unavailable, "the replica is being copied: %d %% of %s", c.Progress, api.SizeText(c.Total))
}

// createCopied creates a replica with one layer of its own, copied from the source. Unavailable: the copy is in
// progress.
func (rs *Replicas) createCopied(ctx context.Context, r *api.Replica, disk *stack.Disk, s stack.Spec) error {
	from := r.Spec.From
	src, pin, err := rs.pinSource(ctx, r)
	if err != nil {
		return err
	}
	own := pin.Layers
	if n := len(s.Layers); n <= len(own) && slices.Equal(own[:n], s.Layers) {
		own = own[n:] // the rest is the image: a disk has one copy for all volumes
	} else {
		s.Layers = nil
	}
	j := rs.jobs.get(r.Spec.UID)
	if j == nil || !j.isRunning() && j.err != nil {
		if j != nil {
			if err := rs.retryCopy(ctx, r, j); err != nil {
				return err
			}
		}
		rate, name := rs.copyRate(rs.jobs.ctx), r.Name
		j = rs.jobs.startJob(r.Spec.UID, api.UID(src.UID()), rs.CopiesAtOnce(ctx), func() { rs.Wake(name) },
			func(ctx context.Context, j *copyJob) error {
				return disk.Flatten(ctx, append([]*stack.Disk{src}, rs.layers.Beside(src)...), own, string(from.Layer),
					stack.CopyOptions{BytesPerSecond: rate, Progress: j.noteProgress})
			})
		if j == nil {
			return api.Errorf(api.Unavailable, "the data role is stopping")
		}
	}
	st, moved := j.status()
	r.Status.Copy = st
	if j.isRunning() {
		if stall := rs.stallTimeout(ctx); stall > 0 && time.Since(moved) > stall {
			rs.jobs.stopJob(r.Spec.UID)
			return rs.failCopy(r, disk, src, api.Errorf(api.Invalid, "the copy has made no progress for %s", stall))
		}
		return errCopying(st)
	}
	if j.err != nil { // it ended a moment ago; its end wakes the reconciler
		return errCopying(st)
	}
	if len(s.Layers) > 0 {
		if err := rs.awaitImage(ctx, r); err != nil {
			return err
		}
	}
	s.Layers = append(slices.Clone(s.Layers), string(from.Layer))
	if err := disk.CreateReplica(ctx, s); err != nil {
		return err
	}
	rs.jobs.forgetJob(r.Spec.UID)
	r.Status.Copy = nil
	rs.Log.Info("full copy finished", "volume", r.Spec.Volume, "source", from.Volume, "bytes", st.Total)
	defer rs.merges.Freed(src)
	return src.Unpin(string(r.Spec.UID))
}

// stallTimeout is how long a full copy may make no progress; 0: without end.
func (rs *Replicas) stallTimeout(ctx context.Context) time.Duration {
	return time.Duration(rs.Setting(ctx, "clone-stall-timeout")) * time.Minute
}

// retryCopy decides about a full copy that ended with an error. Nil: the next try begins now.
func (rs *Replicas) retryCopy(ctx context.Context, r *api.Replica, j *copyJob) error {
	st, moved := j.status()
	r.Status.Copy = st
	err := j.err
	disk, derr := rs.Disk(ctx, r.Spec.Disk)
	src, serr := rs.sourceDisk(ctx, r)
	if e := errors.Join(derr, serr); e != nil {
		return api.Errorf(api.Unavailable, "the copy waits: %w", e)
	}
	switch stall := rs.stallTimeout(ctx); {
	case api.Is(err, api.Corrupt), api.Is(err, api.NotFound), api.Is(err, api.Invalid):
		return rs.failCopy(r, disk, src, err)
	case stall > 0 && time.Since(moved) > stall:
		return rs.failCopy(r, disk, src, api.Errorf(api.Invalid, "the copy has made no progress for %s: %w", stall, err))
	case time.Since(j.stopped) < copyRetry:
		if api.Is(err, api.Full) && !strings.Contains(r.Status.Message, "no room") {
			rs.Events.Eventf(r, nil, "Warning", "DiskFull", "Copy", "%s", err)
		}
		// Busy: no event reports the time of the next try.
		return api.Errorf(api.Busy, "the copy is tried again: %w", err)
	}
	return nil
}

// failCopy fails a full copy for good, and removes its layer and its pin.
func (rs *Replicas) failCopy(r *api.Replica, disk, src *stack.Disk, why error) error {
	rs.jobs.forgetJob(r.Spec.UID)
	err := errors.Join(disk.Drop(string(r.Spec.From.Layer)), src.Unpin(string(r.Spec.UID)))
	rs.merges.Freed(src)
	if err != nil {
		rs.Log.Warn("the layer of a failed copy is not removed", "volume", r.Spec.Volume, "err", err)
	}
	r.Status.Copy, r.Status.Pinned = nil, false
	return api.Errorf(api.Invalid, "volume %s cannot be copied: %w", r.Spec.From.Volume, why)
}

// releaseSource ends the copy job of a removed replica, and removes its pins.
func (rs *Replicas) releaseSource(r *api.Replica, disk *stack.Disk) error {
	rs.jobs.stopJob(r.Spec.UID)
	var errs []error
	if from := r.Spec.From; from != nil && from.Layer != "" {
		errs = append(errs, disk.Drop(string(from.Layer)))
	}
	errs = append(errs, disk.Unpin(string(r.Spec.UID)))
	for _, other := range rs.Disks.Except(disk) {
		rs.unpinOrLater(r.Spec.UID, other)
	}
	return errors.Join(errs...)
}
