package snapshot

import (
	"context"
	"slices"
	"sync"
	"time"

	"drover.io/drover/api"
)

// freezeTime bounds how long a cut waits for file systems to be frozen.
const freezeTime = 10 * time.Second

// settingFreeze applies to volumes without a choice of their own.
const settingFreeze = "freeze-filesystem-for-snapshot"

// freeze freezes the mounted file systems of volumes, all at once, where the volume or the setting asks for a freeze. A
// cut without a freeze, after a failure, is an event of the snapshot. The caller has the volumes' locks, and calls thaw
// right after the cut; a second thaw does nothing.
func (ss *Snapshots) freeze(ctx context.Context, volumes []*api.Volume, snaps []*api.Snapshot) (frozen bool,
	thaw func()) {
	ctx, cancel := context.WithTimeout(ctx, freezeTime)
	defer cancel()
	list := make([]func() error, len(volumes))
	var wg sync.WaitGroup
	for i, v := range volumes {
		if !ss.attachments.HasSession(v.Name) || !ss.Enabled(ctx, v.Spec.FreezeFilesystemForSnapshot, settingFreeze) {
			continue
		}
		wg.Go(func() {
			thaw, err := ss.attachments.Freeze(ctx, v)
			if err != nil {
				ss.Log.Warn("a file system is not frozen for a snapshot", "volume", v.Name, "snapshot", snaps[i].Name,
					"err", err)
				ss.Events.Eventf(v, snaps[i], "Warning", "NotFrozen", "Snapshot", "snapshot %s is made without freezing the "+
					"file system, as if the power had failed: %v", snaps[i].Name, err)
			}
			list[i] = thaw
		})
	}
	wg.Wait()
	frozen = slices.ContainsFunc(list, func(thaw func() error) bool { return thaw != nil })
	return frozen, sync.OnceFunc(func() {
		for i, thaw := range list {
			if thaw == nil {
				continue
			}
			wg.Go(func() {
				if err := thaw(); err != nil {
					ss.Log.Error("a file system is not thawed yet", "volume", volumes[i].Name, "err", err)
					ss.Events.Eventf(volumes[i], snaps[i], "Warning", "NotThawed", "Snapshot", "%v", err)
				}
			})
		}
		wg.Wait()
	})
}
