package replicas

import (
	"context"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// lost deals with what is left of a volume's devices when both the data process and its holder died, for example when
// everything was killed: their I/O fails for good. Devices that nobody uses go; of others the user is told. now is the
// volume's device of today, if it has one. The caller has the volume's lock and its member, or knows it detached.
func (l *attachmentLoop) lost(ctx context.Context, a *api.Attachment, now string) {
	var v api.Volume
	if err := l.Client.Get(ctx, client.ObjectKey{Name: a.Spec.Volume}, &v); err != nil || v.Status.UID == "" {
		return
	}
	next := "unmount it"
	if now != "" {
		next = "unmount it, and mount the volume again: it is " + now + " now"
	}
	for _, d := range l.Host.TakeLost(string(v.Status.UID), v.Name) {
		where := "is open in some process"
		if len(d.Mounts) > 0 {
			where = "is mounted at " + strings.Join(d.Mounts, ", ")
		}
		l.Events.Eventf(a, nil, "Warning", "DeviceLost", "Attach", "%s of volume %s was lost with the processes that served "+
			"it, and %s: its I/O fails; %s", d.Path, v.Name, where, next)
		l.Log.Warn("a device was lost with the processes that served it, and is still in use", "volume", v.Name,
			"device", d.Path, "mounts", d.Mounts)
	}
}
