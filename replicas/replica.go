package replicas

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/host/volumelock"
	"drover.io/drover/replicas/stack"
)

// replicaLoop reconciles the Replicas of this node.
type replicaLoop struct{ *Data }

// Reconcile reconciles one replica.
func (l *replicaLoop) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var r api.Replica
	if err := l.client.Get(ctx, req.NamespacedName, &r); err != nil {
		if apierrors.IsNotFound(err) {
			l.pending.set(req.Name, false)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if at := r.Status.Mode; r.DeletionTimestamp == nil && (at == api.ReplicaCurrent || at == api.ReplicaStale) &&
		r.Status.Size >= r.Spec.Size && r.Spec.Revert == nil && l.isRebuilding(r.Spec.Volume) {
		return reconcile.Result{RequeueAfter: upkeepEvery}, nil // the reconciliation would interrupt the rebuild
	}
	if l.beingResumed(r.Spec.Volume) {
		return reconcile.Result{RequeueAfter: resumePause}, nil
	}
	old := r.DeepCopy()
	if err := l.merging(ctx, &r); err != nil {
		if r.Status.Message = err.Error(); r.Status.Mode == "" {
			r.Status.Mode = api.ReplicaCreating
		}
		if again, err := l.told(ctx, old, &r); again > 0 || err != nil {
			return reconcile.Result{RequeueAfter: again}, err
		}
		return reconcile.Result{RequeueAfter: mergeLook}, nil
	}
	unlock, ok := l.locks.LockSoon(r.Spec.Volume)
	if !ok {
		return reconcile.Result{RequeueAfter: volumelock.Again}, nil
	}
	defer unlock()
	l.pending.set(r.Name, true) // before the look, which may miss a later change
	err := l.bring(ctx, &r)
	waits := api.Is(err, api.Unavailable) || api.Is(err, api.NotFound)
	l.pending.set(r.Name, waits || l.hydrates(&r) || r.Status.Fetching != "")
	if err != nil {
		r.Status.Message = err.Error()
		if r.Status.Mode == "" {
			r.Status.Mode = api.ReplicaCreating
		}
	}
	if len(r.Finalizers) == 0 {
		return reconcile.Result{}, err
	}
	if again, err := l.told(ctx, old, &r); again > 0 || err != nil {
		return reconcile.Result{RequeueAfter: again}, err
	}
	switch {
	case err == nil || waits || r.Status.Mode == api.ReplicaFailed:
		return reconcile.Result{}, nil
	case api.Is(err, api.Busy) && r.Status.Copy != nil: // a copy is tried again
		return reconcile.Result{RequeueAfter: bringRetry}, nil
	case api.Is(err, api.Busy) && r.Spec.From != nil: // a layer is being cut or merged
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	case api.KindOf(err) != api.Other: // the cause may change without an event
		return reconcile.Result{RequeueAfter: 5 * time.Second}, nil
	}
	return reconcile.Result{}, err
}

// told writes the changed status of a replica; again is when to look once more, because another writer was faster.
func (l *replicaLoop) told(ctx context.Context, old, r *api.Replica) (again time.Duration, err error) {
	if equality.Semantic.DeepEqual(old.Status, r.Status) {
		return 0, nil
	}
	err = l.client.Status().Update(ctx, r)
	switch {
	case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
		return 50 * time.Millisecond, nil
	case err != nil:
		return 0, fmt.Errorf("status of replica %s: %w", r.Name, err)
	}
	return 0, nil
}

func (l *replicaLoop) bring(ctx context.Context, r *api.Replica) error {
	if r.DeletionTimestamp != nil {
		return l.remove(ctx, r)
	}
	disk, err := l.disk(ctx, r.Spec.Disk)
	if err != nil {
		return err
	}
	switch r.Status.Mode {
	case "", api.ReplicaCreating:
		return l.create(ctx, r, disk)
	case api.ReplicaFailed:
		return nil
	}
	if there, err := l.holds(disk, r.Spec.UID); err != nil {
		return l.unusable(ctx, r, err) // the member may exist: the volume does not give it up
	} else if !there {
		r.Status.Mode = api.ReplicaFailed
		err := api.Errorf(api.NotFound, "the replica's folder is gone from disk %s", disk.Path())
		l.events.Eventf(r, nil, "Warning", "ReplicaLost", "Look", "%s", err)
		return err
	}
	if r.Status.Size < r.Spec.Size {
		if err := l.expand(ctx, r, disk); err != nil {
			return fmt.Errorf("expand to %s: %w", api.SizeText(r.Spec.Size), err)
		}
	}
	r.Status.Message = ""
	if err := l.reportMode(ctx, r); err != nil {
		return err
	}
	if err := l.tryOut(ctx, r, disk); err != nil {
		return err
	}
	if l.opened(r) == nil {
		if m, err := disk.Stack(string(r.Spec.UID)); err == nil {
			r.Status.Epoch, r.Status.Joined = m.Epoch, m.Joined
		}
		if at, err := disk.LastWrite(string(r.Spec.UID)); err == nil {
			r.Status.LastWrite = &metav1.Time{Time: at.Truncate(time.Second)}
		}
	}
	if err := l.revert(ctx, r, disk); err != nil {
		return err
	}
	if err := l.adopt(ctx, r, disk); err != nil {
		return err
	}
	if used, shared, err := disk.Space(string(r.Spec.UID)); err == nil {
		r.Status.Used, r.Status.UsedText, r.Status.Shared = used, api.SizeText(used), shared
	}
	l.mergeWorker.Report(r, disk)
	l.scrubber.Reconcile(ctx, r, disk)
	err = errors.Join(l.hydrate(ctx, r, disk), l.home(ctx, r, disk))
	return errors.Join(err, l.describeFetch(ctx, r, disk))
}

// share makes a replica over the layers of a snapshot on the same disk: a clone.
func (l *replicaLoop) share(ctx context.Context, r *api.Replica, disk *stack.Disk, s stack.Spec) error {
	from := r.Spec.From
	for tries := 0; ; tries++ {
		m, err := disk.Stack(string(from.Replica))
		if err != nil {
			return err
		}
		i := slices.IndexFunc(m.Snapshots, func(s stack.Snapshot) bool { return s.UID == string(from.Snapshot) })
		if i < 0 {
			return api.Errorf(api.NotFound, "snapshot %s of volume %s is gone", from.Name, from.Volume)
		}
		if s.Layers, err = m.Chain(m.Snapshots[i].Layer); err != nil {
			return err
		}
		if err = l.pinElsewhere(ctx, r, disk, s.Layers); err != nil {
			return err
		}
		err = disk.CreateReplica(ctx, s)
		if !api.Is(err, api.NotFound) || tries == 3 { // else a merge was faster
			return err
		}
	}
}

// hydrates reports whether the replica is open and reads layers from sources, or may.
func (l *replicaLoop) hydrates(r *api.Replica) bool {
	open := l.opened(r)
	return open != nil && (l.beingNoted(r, open) || open.Hydrates())
}

// beingNoted reports whether the record of an open replica is being written: a call of the replica waits for the disk
// then.
func (l *replicaLoop) beingNoted(r *api.Replica, open *stack.Replica) bool {
	s := l.session(r.Spec.Volume)
	return s != nil && s.noting.Load() && s.member() == open
}

// opened is a replica that an engine of this node or of another one has open, or nil.
func (l *replicaLoop) opened(r *api.Replica) *stack.Replica {
	if s := l.session(r.Spec.Volume); s != nil {
		if open := s.local(r.Spec.UID); open != nil {
			return open
		}
	}
	if served := l.remote.Opened(string(r.Spec.UID)); served != nil {
		return served.Replica
	}
	return nil
}

// home makes an open replica read copied layers from its own disk, after which they can be merged.
func (l *replicaLoop) home(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	open := l.opened(r)
	if open == nil || l.beingNoted(r, open) || !open.Hydrates() {
		return nil
	}
	err := open.Home(ctx)
	l.mergeWorker.Merge(disk, string(r.Spec.UID), r.Spec.Volume)
	if api.Is(err, api.Busy) { // the next reconciliation tries again
		return api.Errorf(api.InUse, "%v", err)
	}
	if err != nil {
		return err
	}
	if text := l.remoteText(ctx, open.Remote()); text != "" {
		r.Status.Message = text
	}
	return nil
}

// disk is the open disk of a uid, at the path that the node role wrote into the Node.
func (d *Data) disk(ctx context.Context, uid api.UID) (*stack.Disk, error) {
	var n api.Node
	if err := d.client.Get(ctx, client.ObjectKey{Name: d.Node}, &n); apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.Unavailable, "node %s does not exist", d.Node)
	} else if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.UID == uid })
	if i < 0 {
		return nil, api.Errorf(api.Unavailable, "disk %s is not on node %s", uid, d.Node)
	}
	if st := n.Status.Disks[i]; !st.Ready {
		return nil, api.Errorf(api.Unavailable, "disk %s is not ready: %s", st.Path, st.Message)
	}
	path := n.Status.Disks[i].Path
	disk, err := d.disks.Get(uid)
	if err != nil || disk.Path() != path { // the disk is unknown, or mounted elsewhere now
		if disk, err = d.disks.Open(ctx, path, uid, false); err != nil {
			return nil, err
		}
		d.disks.ForgetOtherPaths(disk)
	}
	d.mu.Lock()
	fresh := !d.listed[uid]
	d.mu.Unlock()
	if err := d.list(disk); err != nil || !fresh {
		return disk, err
	}
	if err := d.dropStale(ctx, disk); err != nil {
		d.Log.Warn("pins of a disk cannot be looked at", "disk", disk.Path(), "err", err)
	}
	return disk, nil
}

// list notes the replicas of a disk once; this process makes all later ones.
func (d *Data) list(disk *stack.Disk) error {
	uid := api.UID(disk.UID())
	d.mu.Lock()
	done := d.listed[uid]
	d.mu.Unlock()
	if done {
		return nil
	}
	have, err := disk.Replicas()
	if err != nil {
		d.Log.Error("some replicas cannot be read", "disk", disk.Path(), "err", err)
	}
	d.mu.Lock()
	for _, m := range have {
		d.made[api.UID(m.UID)] = true
		if len(m.Snapshots) > 0 {
			d.unseen[api.UID(m.UID)] = true
		}
	}
	d.listed[uid] = true
	d.mu.Unlock()
	for _, m := range have { // a former process may have left something to merge
		if m.Merge != nil || len(m.Layers) > 1 || len(m.Branches) > 1 {
			d.mergeWorker.Due(disk, m.UID, m.Volume)
		}
	}
	d.mergeWorker.Wake(disk)
	return nil
}

func (d *Data) onDisk(uid api.UID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.made[uid]
}

// holds reports whether a replica is on its disk.
func (d *Data) holds(disk *stack.Disk, uid api.UID) (bool, error) {
	if d.onDisk(uid) {
		return true, nil
	}
	there, err := disk.Holds(string(uid))
	if there {
		d.setOnDisk(uid, true)
	}
	return there, err
}

func (d *Data) setOnDisk(uid api.UID, is bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if is {
		d.made[uid] = true
	} else {
		delete(d.made, uid)
		delete(d.doubts, uid)
		delete(d.whole, uid)
	}
}

// create makes the stack of a new replica, once its base layers are on the disk.
func (l *replicaLoop) create(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	r.Status.Mode = api.ReplicaCreating
	if r.Spec.From == nil && !l.onDisk(r.Spec.UID) { // else its own stack, or that of its source, names the layers
		if err := l.layersReady(ctx, r); err != nil {
			return err
		}
	}
	object, err := l.record(ctx, r.Spec.Volume)
	if err != nil {
		return err
	}
	layers := make([]string, len(r.Spec.Layers))
	for i, uid := range r.Spec.Layers {
		layers[i] = string(uid)
	}
	s := stack.Spec{UID: string(r.Spec.UID), Volume: r.Spec.Volume, VolumeUID: string(r.Spec.VolumeUID),
		Size: r.Spec.Size, Layers: layers, Object: object}
	if r.Spec.From != nil {
		err = l.begin(ctx, r, disk, s)
	} else {
		err = disk.CreateReplica(ctx, s)
	}
	switch {
	case err == nil:
	case errors.Is(err, syscall.EFBIG):
		r.Status.Mode = api.ReplicaFailed
		return api.Errorf(api.OutOfRange, "the file system of disk %s cannot hold a file of %s: %w", disk.Path(),
			api.SizeText(r.Spec.Size), err)
	case api.Is(err, api.Exists) || api.Is(err, api.Invalid) || api.Is(err, api.NotFound) && r.Spec.From != nil:
		r.Status.Mode = api.ReplicaFailed
		l.events.Eventf(r, nil, "Warning", "ReplicaFailed", "Create", "%s", err)
		return err
	case api.Is(err, api.Full):
		if r.Status.Message != err.Error() {
			l.events.Eventf(r, nil, "Warning", "DiskFull", "Create", "%s", err)
		}
		return err
	default:
		return err
	}
	l.setOnDisk(r.Spec.UID, true)
	r.Status.Mode, r.Status.Message = api.ReplicaCurrent, ""
	r.Status.Size, r.Status.Layers, r.Status.Copy = r.Spec.Size, r.Spec.Layers, nil
	if err := l.describeFetch(ctx, r, disk); err != nil {
		return err
	}
	if r.Spec.From != nil {
		l.wakeSharers(ctx, r.Spec.From.Volume)
	}
	l.tellReplica(r.Name)() // the rest follows in the next step
	return nil
}

// wakeSharers wakes the replicas of a volume whose layers other replicas begin or cease to share.
func (l *replicaLoop) wakeSharers(ctx context.Context, volume string) {
	var list api.ReplicaList
	if err := l.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}); err != nil {
		l.Log.Warn("replicas of a volume cannot be listed", "volume", volume, "err", err)
	}
	for i := range list.Items {
		if list.Items[i].Spec.Node == l.Node {
			l.tellReplica(list.Items[i].Name)()
		}
	}
}

// noteTime is how long a reconciler waits for the record on the disk.
const noteTime = 5 * time.Second

// layersReady waits for the copy of the image that a replica starts from: on its disk, or on a source.
func (l *replicaLoop) layersReady(ctx context.Context, r *api.Replica) error {
	if len(r.Spec.Layers) == 0 {
		return nil
	}
	own, err := l.copyOn(ctx, r.Spec.Disk, r.Spec.Layers)
	switch {
	case err != nil:
		return err
	case own != nil && own.DeletionTimestamp != nil:
		return api.Errorf(api.Unavailable, "the copy of image %s on this disk is being removed", own.Spec.Image)
	case own != nil && own.Status.State == api.ImageReady:
		return nil
	}
	disk, err := l.disks.Get(r.Spec.Disk)
	if err != nil {
		return err
	}
	for _, other := range l.otherDisks(disk) {
		c, err := l.copyOn(ctx, api.UID(other.UID()), r.Spec.Layers)
		if err != nil {
			return err
		}
		if c != nil && c.DeletionTimestamp == nil && c.Status.State == api.ImageReady {
			return nil
		}
	}
	if far, err := l.readFar(ctx, disk, r.Spec.Layers); err != nil || far {
		return err
	}
	switch {
	case own == nil:
		return api.Errorf(api.Unavailable, "waits for a copy of the backing image on this disk")
	case own.Status.Message != "":
		return api.Errorf(api.Unavailable, "waits for image %s on this disk (%s): %s", own.Spec.Image, own.Status.State,
			own.Status.Message)
	}
	return api.Errorf(api.Unavailable, "waits for image %s on this disk (%s)", own.Spec.Image, own.Status.State)
}

// copyOn is the copy on a disk of the image that has these layers, or nil.
func (l *replicaLoop) copyOn(ctx context.Context, disk api.UID, layers []api.UID) (*api.ImageCopy, error) {
	var copies api.ImageCopyList
	if err := l.client.List(ctx, &copies, client.MatchingFields{watch.ByLayer: watch.TopLayer(layers)}); err != nil {
		return nil, err
	}
	for i := range copies.Items {
		if copies.Items[i].Spec.Disk == disk && slices.Equal(copies.Items[i].Spec.Layers, layers) {
			return &copies.Items[i], nil
		}
	}
	return nil, nil
}

// expand makes the replica larger, in its session if the volume is attached.
func (l *replicaLoop) expand(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	size := r.Spec.Size
	if s := l.session(r.Spec.Volume); s != nil && s.local(r.Spec.UID) != nil {
		if err := s.expand(ctx, size); err != nil {
			return err
		}
		r.Status.Size = size
		l.stir(r.Spec.Volume)
		return nil
	}
	if info, is := l.remote.Info(string(r.Spec.UID)); is { // its engine, on another node, expands the replica
		if info.Size < size {
			return api.Errorf(api.Busy, "the volume's engine makes it larger")
		}
		r.Status.Size = size
		return nil
	}
	loop, err := l.threads.Pick()
	if err != nil {
		return err
	}
	defer l.threads.PutBack(loop)
	open, err := disk.OpenReplica(ctx, string(r.Spec.UID), loop.Loop)
	if err != nil {
		return err
	}
	err = open.Expand(ctx, size)
	if cerr := open.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		r.Status.Size = size
	}
	return err
}

// reportMode says in the status whether a replica is one of the volume's members.
func (l *replicaLoop) reportMode(ctx context.Context, r *api.Replica) error {
	var v api.Volume
	if err := l.client.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != r.Spec.VolumeUID || len(v.Status.Members) == 0 {
		return nil
	}
	if slices.Contains(v.Status.Members, r.Name) {
		r.Status.Mode = api.ReplicaCurrent
		return nil
	}
	r.Status.Mode, r.Status.Message = api.ReplicaStale, "it lacks what was written since it was a member"
	return nil
}
