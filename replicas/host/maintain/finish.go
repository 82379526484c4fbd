package maintain

import (
	"context"
	"errors"
	"os"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A small layer is mostly syncs, and the syncs of a thousand layers in a row take half of the guests' reads. So the
// worker pauses after each layer for as long as the layer took, longer under guest I/O, with an upper bound, so that
// the worker never starves.
const (
	restLongest = 100 * time.Millisecond
	restsAtMost = 10
)

// yieldToGuests lets guests go first after work that took so long; did is GuestRequests of before.
func (w *MergeWorker) yieldToGuests(ctx context.Context, took time.Duration, did uint64) {
	for range restsAtMost {
		w.pause(ctx, min(took, restLongest))
		now := w.node.GuestRequests()
		if now == did {
			return
		}
		did = now
	}
}

// finishAll finishes the frozen layers of a disk. It reports whether layers are left, and the failures by layer.
func (w *MergeWorker) finishAll(ctx context.Context, disk *stack.Disk) (left bool, failed map[string]error) {
	layers, err := disk.ToFinish()
	if err != nil {
		w.log.Warn("which layers are to be finished is not known", "disk", disk.Path(), "err", err)
		return true, nil
	}
	failed = map[string]error{}
	done, told := map[string]bool{}, time.Now()
	defer func() { w.reportDigests(disk, done) }()
	for _, uid := range layers {
		began, did := time.Now(), w.node.GuestRequests()
		err := disk.Finish(ctx, uid)
		switch {
		case err == nil:
			done[uid] = true
			w.log.Info("layer finished", "disk", disk.Path(), "layer", uid, "took", time.Since(began).Round(time.Millisecond))
		case ctx.Err() != nil:
			return false, nil
		case errors.Is(err, os.ErrNotExist) || api.Is(err, api.NotFound) || api.Is(err, api.Invalid):
			// The layer was removed meanwhile.
		default:
			left = true
			if !api.Is(err, api.Busy) {
				w.log.Warn("a layer cannot be finished yet", "disk", disk.Path(), "layer", uid, "err", err)
				failed[uid] = err
			}
		}
		w.yieldToGuests(ctx, time.Since(began), did)
		if time.Since(told) > digestsSoFar {
			w.reportDigests(disk, done)
			done, told = map[string]bool{}, time.Now()
		}
	}
	return left, failed
}

// digestsSoFar is the longest time between two reports of digests while the worker finishes layers, so that a thousand
// snapshots are not reported at once.
const digestsSoFar = 10 * time.Second

// reportDigests has the snapshots reported whose layers have their digests now.
func (w *MergeWorker) reportDigests(disk *stack.Disk, layers map[string]bool) {
	if len(layers) == 0 {
		return
	}
	var names []string
	left := len(layers)
	look := func(m stack.Meta) {
		for _, s := range m.Snapshots {
			if layers[s.Layer] && s.Name != "" {
				left--
				names = append(names, s.Name)
			}
		}
	}
	for _, r := range w.node.Opened(disk) { // which have most of the layers
		look(r.Meta())
	}
	if left > 0 {
		all, err := disk.Replicas()
		if err != nil {
			w.log.Warn("some replicas cannot be read", "disk", disk.Path(), "err", err)
		}
		for _, m := range all {
			look(m)
		}
	}
	w.node.DigestsMade(names)
}
