package replicas

import (
	"context"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
)

// freezeTime bounds how long a cut waits for file systems to be frozen.
const freezeTime = 10 * time.Second

// settingFreeze is for volumes that do not say themselves.
const settingFreeze = "freeze-filesystem-for-snapshot"

func (d *Data) wantsFreeze(ctx context.Context, v *api.Volume) bool {
	switch v.Spec.FreezeFilesystemForSnapshot {
	case "enabled":
		return true
	case "disabled":
		return false
	}
	var s api.Setting
	if err := d.Client.Get(ctx, client.ObjectKey{Name: settingFreeze}, &s); err == nil {
		return s.Value == "true"
	}
	return api.Settings[settingFreeze] == "true"
}

// freeze freezes the file systems of volumes that are mounted here and want that, all at once. The cut is made all the
// same where it cannot be done, and the snapshot's event says so. Call thaw right after the cut; it can be called
// again. The caller has the volumes' locks.
func (d *Data) freeze(ctx context.Context, volumes []*api.Volume, snaps []*api.Snapshot) (frozen bool, thaw func()) {
	ctx, cancel := context.WithTimeout(ctx, freezeTime)
	defer cancel()
	list := make([]*device.Frozen, len(volumes))
	var wg sync.WaitGroup
	for i, v := range volumes {
		s := d.session(v.Name)
		if s == nil || s.VolumeUID != v.Status.UID || s.ReadOnly || s.fence.Load() != nil || !d.wantsFreeze(ctx, v) {
			continue
		}
		wg.Go(func() {
			f, err := s.dev.Freeze(ctx)
			if err != nil {
				d.Log.Warn("a file system is not frozen for a snapshot", "volume", v.Name, "snapshot", snaps[i].Name,
					"err", err)
				d.Events.Eventf(v, snaps[i], "Warning", "NotFrozen", "Snapshot", "snapshot %s is made without freezing the "+
					"file system, as if the power had failed: %v", snaps[i].Name, err)
			}
			list[i] = f
		})
	}
	wg.Wait()
	frozen = slices.ContainsFunc(list, func(f *device.Frozen) bool { return f != nil })
	return frozen, sync.OnceFunc(func() {
		for i, f := range list {
			if f == nil {
				continue
			}
			wg.Go(func() {
				if err := f.Thaw(); err != nil {
					d.Log.Error("a file system is not thawed yet", "volume", volumes[i].Name, "err", err)
					d.Events.Eventf(volumes[i], snaps[i], "Warning", "NotThawed", "Snapshot", "%v", err)
				}
			})
		}
		wg.Wait()
	})
}
