package maintain

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// MergeWorker finishes the layers that snapshots froze, and merges layers that no snapshot names any more.
type MergeWorker struct {
	node    Node
	log     *slog.Logger
	workers *Workers
	pause   func(ctx context.Context, t time.Duration)

	mu       sync.Mutex
	again    map[*stack.Disk]bool // disks that have a worker; true: the worker looks once more
	due      map[string]due       // replicas in which layers may be merged, by uid
	fewer    map[*stack.Disk]bool // disks where something names fewer layers than before
	failures map[string]failure   // by replica
}

// due is a replica in which layers may be merged.
type due struct {
	disk   *stack.Disk
	volume string
}

// NewMergeWorker has nothing to do yet. The workers stay the caller's to close.
func NewMergeWorker(node Node, workers *Workers, log *slog.Logger) *MergeWorker {
	return &MergeWorker{node: node, log: log, workers: workers, pause: pause, again: map[*stack.Disk]bool{},
		due: map[string]due{}, fewer: map[*stack.Disk]bool{}, failures: map[string]failure{}}
}

// mergeRetry is the pause before a worker tries failed work again.
const mergeRetry = 10 * time.Second

// Due notes that layers of a replica may be merged; Wake starts the worker.
func (w *MergeWorker) Due(disk *stack.Disk, uid, volume string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.due[uid] = due{disk, volume}
}

// Merge has layers of a replica finished and merged.
func (w *MergeWorker) Merge(disk *stack.Disk, uid, volume string) {
	w.Due(disk, uid, volume)
	w.Wake(disk)
}

// Freed has the worker find replicas with mergeable layers, because a clone, an image or a copy on the disk names fewer
// layers than before.
func (w *MergeWorker) Freed(disk *stack.Disk) {
	w.mu.Lock()
	w.fewer[disk] = true
	w.mu.Unlock()
	w.Wake(disk)
}

// Wake starts the worker of a disk. Before the node has reached the API, Wake does nothing: the first look at the disk
// follows.
func (w *MergeWorker) Wake(disk *stack.Disk) {
	if !w.node.APIReached() {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, works := w.again[disk]; works {
		w.again[disk] = true
		return
	}
	if w.workers.Go(func(ctx context.Context) { w.finishAndMerge(ctx, disk) }) {
		w.again[disk] = false
	}
}

// finishAndMerge finishes and merges the layers of a disk until no work is left.
func (w *MergeWorker) finishAndMerge(ctx context.Context, disk *stack.Disk) {
	lowestPriority()
	for {
		wait, failed := w.finishAll(ctx, disk)
		w.markFailedDue(disk, failed)
		w.findMergeable(disk)
		merged := make(chan bool)
		go func() { merged <- w.mergeAll(ctx, disk, failed) }() // at normal priority: a merge holds I/O back for moments
		wait = <-merged || wait
		w.mu.Lock()
		if ctx.Err() != nil || !wait && !w.again[disk] {
			delete(w.again, disk)
			w.mu.Unlock()
			return
		}
		w.again[disk] = false
		w.mu.Unlock()
		if wait {
			pause(ctx, mergeRetry)
		}
	}
}

// findMergeable finds replicas with mergeable layers on a disk for which Freed was called.
func (w *MergeWorker) findMergeable(disk *stack.Disk) {
	w.mu.Lock()
	look := w.fewer[disk]
	delete(w.fewer, disk)
	w.mu.Unlock()
	if !look {
		return
	}
	found, err := disk.Mergeable()
	if err != nil {
		w.log.Warn("the merge worker cannot list the disk's mergeable replicas", "disk", disk.Path(), "err", err)
	}
	for uid, volume := range found {
		w.Due(disk, uid, volume)
	}
}

// mergeAll merges layers of the disk's replicas, and reports whether work is left. failed has the layers that could not
// be finished.
func (w *MergeWorker) mergeAll(ctx context.Context, disk *stack.Disk, failed map[string]error) (left bool) {
	w.mu.Lock()
	all := map[string]string{}
	for uid, u := range w.due {
		if u.disk == disk {
			all[uid] = u.volume
			delete(w.due, uid)
		}
	}
	w.mu.Unlock()
	for uid, volume := range all {
		if ctx.Err() != nil {
			return false
		}
		before := snapshotLayers(disk, uid)
		did, err := w.mergeReplica(ctx, disk, uid, volume)
		if did {
			w.node.SnapshotsChanged(api.UID(uid), otherLayers(before, snapshotLayers(disk, uid))...)
		}
		if err == nil {
			err = unfinishedError(disk, uid, failed)
		}
		switch {
		case err == nil:
			w.mergeEnded(ctx, uid, volume, nil)
			// A layer that was cut off meanwhile has to be finished before it can be merged.
			if rest, err := disk.Unfinished(); err == nil && len(rest) > 0 {
				w.Merge(disk, uid, volume)
			}
			continue
		case ctx.Err() != nil:
			continue
		case api.Is(err, api.NotFound) && replicaGone(disk, uid):
			w.Forget(uid)
			continue
		case errors.Is(err, context.Canceled): // an owner waited for the lock of the volume
			w.Merge(disk, uid, volume)
			continue
		case !api.Is(err, api.Busy) && !api.Is(err, api.Unavailable): // else the replica was closed in between
			w.log.Warn("layers cannot be merged yet", "volume", volume, "disk", disk.Path(), "err", err)
			w.mergeEnded(ctx, uid, volume, err)
		}
		w.Due(disk, uid, volume)
		left = true
	}
	return left
}

func replicaGone(disk *stack.Disk, uid string) bool {
	_, err := disk.Stack(uid)
	return api.Is(err, api.NotFound)
}

// snapshotLayers are the layers of a replica's snapshots, by their names.
func snapshotLayers(disk *stack.Disk, uid string) map[string]string {
	layers := map[string]string{}
	if m, err := disk.Stack(uid); err == nil {
		for _, s := range m.Snapshots {
			layers[s.Name] = s.Layer
		}
	}
	return layers
}

// otherLayers are the snapshots that have another layer now, and so another size.
func otherLayers(before, now map[string]string) (names []string) {
	for name, layer := range now {
		if before[name] != layer {
			names = append(names, name)
		}
	}
	return names
}

// mergeReplica merges all mergeable layers of a replica.
func (w *MergeWorker) mergeReplica(ctx context.Context, disk *stack.Disk, uid, volume string) (did bool, err error) {
	err = w.node.WithReplica(ctx, disk, uid, volume, func(ctx context.Context, r *stack.Replica) error {
		for {
			more, err := r.Merge(ctx, stack.MergeOptions{BytesPerSecond: w.node.Setting(ctx, "merge-rate-limit") << 20})
			if did = did || more; err != nil || !more {
				return err
			}
		}
	})
	return did, err
}
