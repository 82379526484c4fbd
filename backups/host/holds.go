package host

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// releaseHold releases what a work held. The collector tries again.
func (m *maker) releaseHold(w *work) {
	disk, err := m.disks(w.disk)
	if err == nil {
		err = disk.ReleaseSnapshot(string(w.object))
	}
	if err != nil {
		m.log.Warn("the layers of a backup cannot be released yet", "backup", w.backup.Name, "disk", w.disk, "err", err)
	}
}

// collector releases the holds that a process left, at the start and then from time to time.
type collector struct{ *maker }

// NeedLeaderElection is false: every node looks at its own disks.
func (c collector) NeedLeaderElection() bool { return false }

// Start runs until ctx ends.
func (c collector) Start(ctx context.Context) error {
	tick := time.NewTicker(c.opts.CollectEvery)
	defer tick.Stop()
	for {
		if err := c.collectHolds(ctx); err != nil && ctx.Err() == nil {
			c.log.Warn("the holds of backups cannot be compared with the backups", "err", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// collectHolds looks at each disk of the node.
func (c collector) collectHolds(ctx context.Context) error {
	var node api.Node
	if err := c.live.Get(ctx, client.ObjectKey{Name: c.node}, &node); err != nil {
		return client.IgnoreNotFound(err)
	}
	for _, d := range node.Status.Disks {
		disk, err := c.disks(d.UID)
		if err != nil {
			continue // a later look finds the disk
		}
		held, err := disk.HeldSnapshots()
		if err != nil {
			c.log.Warn("the holds of backups cannot be read", "disk", d.UID, "err", err)
			continue
		}
		if len(held) == 0 {
			continue
		}
		all, err := listBackups(ctx, c.live) // after the holds: the backup of each of them existed before
		if err != nil {
			return err
		}
		for holder := range c.staleHolds(d.UID, held, all) {
			if err := c.releaseStale(disk, holder); err != nil {
				c.log.Warn("the hold of a backup cannot be released", "disk", d.UID, "holder", holder, "err", err)
			}
		}
	}
	return nil
}

// releaseStale releases a hold unless a work for its holder began since the look: such a work has the hold, or takes it
// afterwards. Without the hold, a merge could change the layers below a backup.
func (c collector) releaseStale(disk block.SnapshotDisk, holder string) error {
	c.holding.Lock()
	defer c.holding.Unlock()
	if c.works.hasHolder(holder) {
		return nil
	}
	return disk.ReleaseSnapshot(holder)
}

// staleHolds are the holds on a disk that neither an unfinished backup nor a work needs.
func (c collector) staleHolds(disk api.UID, held map[string]string, backups []api.StoredBackup) map[string]string {
	for _, b := range backups {
		if _, of := b.SourceDisk(); isMine(b, c.node) && of == disk {
			delete(held, string(b.GetUID()))
		}
		if w := c.works.get(keyOf(b)); w != nil {
			delete(held, string(w.object))
		}
	}
	return held
}
