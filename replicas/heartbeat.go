package replicas

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// freedEvery is the pause between two searches for mergeable layers that no event announces: another process deletes
// images.
const freedEvery = 5 * time.Minute

// indexMemory is what the indexes of a disk's open replicas take before the node drops unused pages, in bytes. A
// fragmented volume takes some 34 MiB per TiB; docs/performance.md.
const indexMemory = 128 << 20

// beat reports the used bytes of attached replicas, retries reclaims and unpins, and bounds the memory of indexes,
// until ctx ends.
func (d *Data) beat(ctx context.Context) error {
	tick := time.NewTicker(d.Heartbeat)
	defer tick.Stop()
	var beside sync.WaitGroup // of tasks that may wait for a volume or a disk
	defer beside.Wait()
	var reclaims, unpins, drops atomic.Bool
	for looked := time.Now(); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		d.scrubber.WakeDue(ctx)
		look := time.Since(looked) > freedEvery
		if look {
			looked = time.Now()
		}
		for _, disk := range d.Disks.Except(nil) {
			disk.DropHydrating()
			if look {
				d.mergeWorker.Freed(disk)
			}
		}
		if reclaims.CompareAndSwap(false, true) {
			beside.Go(func() {
				defer reclaims.Store(false)
				d.attachments.ReclaimAll(ctx, look)
			})
		}
		if drops.CompareAndSwap(false, true) { // a slow disk keeps its replicas busy
			beside.Go(func() {
				defer drops.Store(false)
				for _, disk := range d.Disks.Except(nil) {
					disk.DropPages(ctx, indexMemory)
				}
			})
		}
		if unpins.CompareAndSwap(false, true) { // the disk failed before, and may hang now
			beside.Go(func() {
				defer unpins.Store(false)
				d.replicas.UnpinLeft()
			})
		}
		d.attachments.ReportUsed(ctx)
	}
}
