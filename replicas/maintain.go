package replicas

import (
	"context"
	"strconv"
	"time"

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
func (m maintained) APIReached() bool { return m.d.api.Load() }

// Setting implements maintain.Node.
func (m maintained) Setting(ctx context.Context, name string) int64 { return m.d.number(ctx, name) }

// GuestRequests implements maintain.Node.
func (m maintained) GuestRequests() (n uint64) {
	for _, s := range m.d.all() {
		for _, c := range s.engine.Stats() {
			n += c.Ops
		}
	}
	return n
}

// Opened implements maintain.Node.
func (m maintained) Opened(disk *stack.Disk) (all []*stack.Replica) {
	for _, s := range m.d.all() {
		if r := s.member(); r != nil && r.Disk() == disk {
			all = append(all, r)
		}
	}
	return all
}

// SnapshotsChanged implements maintain.Node.
func (m maintained) SnapshotsChanged(replica api.UID, names ...string) {
	m.d.changed(replica, names...)
}

// digestsReported is when the digests of finished layers are reported: by then most of the snapshots are looked at
// anyway.
const digestsReported = 2 * time.Second

// DigestsMade implements maintain.Node.
func (m maintained) DigestsMade(names []string) {
	q := m.d.snapshots.Load()
	if q == nil {
		return
	}
	for _, name := range names {
		(*q).AddAfter(watch.Request(name), digestsReported)
	}
}

// MergeReported implements maintain.Node. Where the API does not answer, the next look at the replica reports.
func (m maintained) MergeReported(ctx context.Context, replica, volume string) {
	var list api.ReplicaList
	if err := m.d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}); err != nil {
		return
	}
	for i := range list.Items {
		if r := &list.Items[i]; string(r.Spec.UID) == replica {
			m.d.tellReplica(r.Name)()
		}
	}
}

// WithReplica implements maintain.Node. A replica that no engine has is opened with the volume's lock, and given up as
// soon as somebody wants that.
func (m maintained) WithReplica(ctx context.Context, disk *stack.Disk, uid, volume string,
	work func(ctx context.Context, r *stack.Replica) error) error {
	d := m.d
	if s := d.session(volume); s != nil {
		if open := s.local(api.UID(uid)); open != nil {
			return work(ctx, open)
		}
	}
	if served := d.remote.Opened(uid); served != nil {
		return work(ctx, served.Replica)
	}
	ctx, unlock, ok := d.locks.LockYielding(ctx, volume)
	if !ok {
		return api.Errorf(api.Busy, "volume %s: something takes long with it", volume)
	}
	defer unlock()
	if d.session(volume) != nil {
		return api.Errorf(api.Busy, "volume %s is attached", volume)
	}
	for _, held := range d.Host.Held() {
		if held.Name == volume {
			return api.Errorf(api.Busy, "volume %s: its device is being taken over", volume)
		}
	}
	loop, err := d.threads.Pick()
	if err != nil {
		return err
	}
	defer d.threads.PutBack(loop)
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

// mergeLook is when the end of a merge is looked for.
const mergeLook = time.Second

// merging tells of a merge under way in the stack that a revert, or a move, has to find at rest. It is asked before
// the volume's lock is taken: whoever takes that ends the merge, and with a try after another it would never come to
// its end.
func (l *replicaLoop) merging(ctx context.Context, r *api.Replica) error {
	on, uid := r.Spec.Disk, r.Spec.UID
	switch from := r.Spec.From; {
	case r.DeletionTimestamp != nil:
		return nil
	case r.RevertPending() != nil:
	case from != nil && from.Whole && (r.Status.Mode == "" || r.Status.Mode == api.ReplicaCreating):
		uid = from.Replica
		if from.Disk != "" {
			on = from.Disk
		}
	default:
		return nil
	}
	disk, err := l.disk(ctx, on)
	if err != nil {
		return nil // told by who needs it
	}
	m, err := disk.Stack(string(uid))
	if err != nil || m.Merge == nil {
		return nil
	}
	if uid == r.Spec.UID {
		l.mergeWorker.Report(r, disk)
		if l.mergeWorker.Fails(string(uid)) != "" { // for how long, nobody knows: the revert is told so, and ends
			return nil
		}
	}
	l.mergeWorker.Merge(disk, string(uid), r.Spec.Volume) // should nobody be at it
	return api.Errorf(api.Busy, "two layers of volume %s are being merged: it goes on when that is done", r.Spec.Volume)
}

// number is a setting that is a number.
func (d *Data) number(ctx context.Context, name string) int64 {
	var s api.Setting
	text := api.Settings[name]
	if err := d.client.Get(ctx, client.ObjectKey{Name: name}, &s); err == nil {
		text = s.Value
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		n, _ = strconv.ParseInt(api.Settings[name], 10, 64)
	}
	return n
}
