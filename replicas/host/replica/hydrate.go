package replica

import (
	"context"
	"fmt"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// hydrate copies the layers to a replica's disk that the replica reads on other disks of the node. The room imagestore
// copies the layers of images.
func (rs *Replicas) hydrate(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	rs.mu.Lock()
	complete := rs.complete[r.Spec.UID]
	rs.mu.Unlock()
	if complete {
		r.Status.Copy, r.Status.Pinned = nil, false // the first write of this status may have lost a race
		return nil
	}
	lacks, err := disk.Lacking(string(r.Spec.UID))
	if err != nil {
		return err
	}
	if r.Labels[api.LabelImage] != "" {
		lacks = slices.DeleteFunc(lacks, func(uid string) bool { return slices.Contains(r.Spec.Layers, api.UID(uid)) })
	}
	j := rs.jobs.get(r.Spec.UID)
	if j != nil {
		r.Status.Copy, _ = j.status()
	}
	switch {
	case j != nil && j.isRunning():
		return nil
	case len(lacks) == 0:
		rs.jobs.forgetJob(r.Spec.UID)
		if r.Status.Copy != nil || r.Status.Pinned {
			rs.Log.Info("all layers are on the replica's own disk", "volume", r.Spec.Volume, "replica", r.Name)
			rs.merges.Merge(disk, string(r.Spec.UID), r.Spec.Volume)
		}
		if r.Status.Copy, r.Status.Pinned = nil, false; r.Spec.From != nil {
			if err := rs.unpin(r.Spec.UID, disk); err != nil {
				return err
			}
		}
		rs.mu.Lock()
		rs.complete[r.Spec.UID] = true
		rs.mu.Unlock()
		return nil
	case j != nil && j.err != nil && time.Since(j.stopped) < copyRetry:
		r.Status.Message = fmt.Sprintf("layers are not copied yet: %v", j.err)
		return api.Errorf(api.Busy, "%s", r.Status.Message)
	}
	var from api.UID
	if r.Spec.From != nil {
		from = r.Spec.From.Disk
	}
	rate, name := rs.copyRate(rs.jobs.ctx), r.Name
	rs.jobs.startJob(r.Spec.UID, from, rs.CopiesAtOnce(ctx), func() { rs.Wake(name) },
		func(ctx context.Context, j *copyJob) error { return rs.copyLayers(ctx, disk, lacks, rate, j) })
	return nil
}

// copyLayers copies layers to a disk from the other disks of the node.
func (rs *Replicas) copyLayers(ctx context.Context, disk *stack.Disk, layers []string, rate func() int64,
	j *copyJob) error {
	sources := make([]*stack.Disk, len(layers))
	sizes := make([]int64, len(layers))
	var total, before int64
	for i, uid := range layers {
		for _, other := range rs.layers.Beside(disk) {
			if _, used, err := other.LayerSize(uid); err == nil {
				sources[i], sizes[i] = other, used
				total += used
				break
			}
		}
		if sources[i] == nil {
			return api.Errorf(api.Unavailable, "layer %s is on no disk of this node", uid)
		}
	}
	j.noteProgress(0, total)
	for i, uid := range layers {
		for {
			err := disk.CopyLayer(ctx, sources[i], uid, stack.CopyOptions{BytesPerSecond: rate,
				Progress: func(done, _ int64) { j.noteProgress(before+min(done, sizes[i]), total) }})
			if err == nil {
				break
			}
			if !api.Is(err, api.Busy) {
				return err
			}
			pause := time.NewTimer(200 * time.Millisecond) // the digests of the layer are being made
			select {
			case <-pause.C:
			case <-ctx.Done():
				pause.Stop()
				return ctx.Err()
			}
		}
		before += sizes[i]
		j.noteProgress(before, total)
	}
	return nil
}

// readsElsewhere reports whether the replica is open and reads layers from sources, or may.
func (rs *Replicas) readsElsewhere(r *api.Replica) bool {
	open, recording := rs.findOpen(r)
	return open != nil && (recording || open.Hydrates())
}

// findOpen finds a replica that an engine of this node or of another node has open; nil: no engine has. While
// recording, a call of the replica would wait for the disk.
func (rs *Replicas) findOpen(r *api.Replica) (open *stack.Replica, recording bool) {
	if open, recording = rs.attachments.Opened(r.Spec.Volume, r.Spec.UID); open != nil {
		return open, recording
	}
	if served := rs.remote.Opened(string(r.Spec.UID)); served != nil {
		return served.Replica, false
	}
	return nil, false
}

// localize makes an open replica read copied layers from its own disk; the layers can be merged from then on.
func (rs *Replicas) localize(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	open, recording := rs.findOpen(r)
	if open == nil || recording || !open.Hydrates() {
		return nil
	}
	err := open.Localize(ctx)
	rs.merges.Merge(disk, string(r.Spec.UID), r.Spec.Volume)
	if api.Is(err, api.Busy) { // the next reconciliation tries again
		return api.Errorf(api.InUse, "%v", err)
	}
	if err != nil {
		return err
	}
	if text := rs.sourceText(ctx, open.Remote()); text != "" {
		r.Status.Message = text
	}
	return nil
}
