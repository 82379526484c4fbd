package replicas

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/host/maintain"
	"drover.io/drover/replicas/stack"
)

// maintained is this node for the workers of package maintain.
type maintained struct{ d *Data }

var _ maintain.Node = maintained{}

// APIReached implements maintain.Node.
func (m maintained) APIReached() bool { return m.d.APIReached() }

// Setting implements maintain.Node.
func (m maintained) Setting(ctx context.Context, name string) int64 { return m.d.Setting(ctx, name) }

// GuestRequests implements maintain.Node.
func (m maintained) GuestRequests() uint64 {
	return m.d.attachments.GuestRequests()
}

// Opened implements maintain.Node.
func (m maintained) Opened(disk *stack.Disk) []*stack.Replica {
	return m.d.attachments.OpenedOn(disk)
}

// SnapshotsChanged implements maintain.Node.
func (m maintained) SnapshotsChanged(replica api.UID, names ...string) {
	m.d.snapshots.Changed(replica, names...)
}

// DigestsMade implements maintain.Node.
func (m maintained) DigestsMade(names []string) { m.d.snapshots.DigestsMade(names) }

// MergeReported implements maintain.Node. While the API does not answer, the next reconcile of the replica reports.
func (m maintained) MergeReported(ctx context.Context, replica, volume string) {
	var list api.ReplicaList
	if err := m.d.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}); err != nil {
		return
	}
	for i := range list.Items {
		if r := &list.Items[i]; string(r.Spec.UID) == replica {
			m.d.replicas.Wake(r.Name)
		}
	}
}

// WithReplica implements maintain.Node. It opens a replica that no engine has open, with the volume's lock, and closes
// the replica as soon as an owner waits for the lock.
func (m maintained) WithReplica(ctx context.Context, disk *stack.Disk, uid, volume string,
	work func(ctx context.Context, r *stack.Replica) error) error {
	d := m.d
	if open, _ := d.attachments.Opened(volume, api.UID(uid)); open != nil {
		return work(ctx, open)
	}
	if served := d.remote.Opened(uid); served != nil {
		return work(ctx, served.Replica)
	}
	ctx, unlock, ok := d.Locks.LockYielding(ctx, volume)
	if !ok {
		return api.Errorf(api.Busy, "volume %s: another operation takes long", volume)
	}
	defer unlock()
	if d.attachments.HasDevice(volume) {
		return api.Errorf(api.Busy, "volume %s is attached", volume)
	}
	loop, err := d.Threads.Pick()
	if err != nil {
		return err
	}
	defer d.Threads.PutBack(loop)
	r, err := disk.OpenReplica(ctx, uid, loop.Loop)
	if err != nil {
		return err
	}
	err = work(ctx, r)
	if cerr := r.Close(); err == nil {
		err = cerr
	}
	return err
}
