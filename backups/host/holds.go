package host

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/holders"
	"drover.io/drover/backups/host/targets"
)

// hold is the hold of a work.
func (w *work) hold() holders.Hold { return holders.Hold{Disk: w.disk, Holder: string(w.object)} }

// releaseUnused releases a hold that no work uses.
func (m *maker) releaseUnused(h holders.Hold) error {
	disk, err := m.disks(h.Disk)
	if err != nil {
		return err
	}
	return m.holders.Release(h, func() error { return disk.ReleaseSnapshot(h.Holder) })
}

// releaseHold releases what a work held. The collector tries again.
func (m *maker) releaseHold(w *work) {
	if err := m.releaseUnused(w.hold()); err != nil {
		m.log.Warn("the layers of a backup cannot be released yet", "backup", w.backup.Name, "disk", w.disk, "err", err)
	}
}

// releaseSoon is releaseHold in the background, for the reconciler: a disk may hang.
func (m *maker) releaseSoon(w *work) { m.works.runBehind(func() { m.releaseHold(w) }) }

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
		all, err := targets.ListBackups(ctx, c.live) // after the holds: the backup of each of them existed before
		if err != nil {
			return err
		}
		for holder := range c.staleHolds(d.UID, held, all) {
			if err := c.releaseUnused(holders.Hold{Disk: d.UID, Holder: holder}); err != nil {
				c.log.Warn("the hold of a backup cannot be released", "disk", d.UID, "holder", holder, "err", err)
			}
		}
	}
	return nil
}

// staleHolds are the holds on a disk that no unfinished backup needs. A work of this process may need them.
func (c collector) staleHolds(disk api.UID, held map[string]string, backups []api.StoredBackup) map[string]string {
	for _, b := range backups {
		if _, of := b.SourceDisk(); isMine(b, c.node) && of == disk {
			delete(held, string(b.GetUID()))
		}
	}
	return held
}
