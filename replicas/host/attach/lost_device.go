package attach

import (
	"context"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// reportLostDevices removes the unused devices of a volume whose data process and holder both died, and reports the
// devices in use: I/O there fails for good. The volume's device now is now; empty: the volume is detached. The caller
// has the volume's lock, and its member if the volume is attached.
func (as *reconciler) reportLostDevices(ctx context.Context, a *api.Attachment, now string) {
	var v api.Volume
	if err := as.Client.Get(ctx, client.ObjectKey{Name: a.Spec.Volume}, &v); err != nil || v.Status.UID == "" {
		return
	}
	next := "unmount it"
	if now != "" {
		next = "unmount it, and mount the volume again: it is " + now + " now"
	}
	for _, d := range as.host.TakeLost(string(v.Status.UID), v.Name) {
		where := "is open in some process"
		if len(d.Mounts) > 0 {
			where = "is mounted at " + strings.Join(d.Mounts, ", ")
		}
		as.Events.Eventf(a, nil, "Warning", "DeviceLost", "Attach", "%s of volume %s was lost with the processes that "+
			"served it, and %s: its I/O fails; %s", d.Path, v.Name, where, next)
		as.Log.Warn("a device was lost with the processes that served it, and is still in use", "volume", v.Name,
			"device", d.Path, "mounts", d.Mounts)
	}
}
