package replicas

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/volumelock"
	"drover.io/drover/replicas/stack"
)

// snapshotLoop reconciles the Snapshots of volumes for which this node is responsible. The loop reads the members'
// records before each cut, so that a cut whose answer was lost is not made twice.
type snapshotLoop struct{ *Data }

// setupSnapshots adds the loop to mgr.
func (d *Data) setupSnapshots(mgr ctrl.Manager, opts controller.Options) error {
	unfinished := func(of func(client.Object) string) handler.EventHandler {
		return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return d.unfinished(ctx, of(o))
		})
	}
	mine := predicate.NewPredicateFuncs(func(o client.Object) bool { return o.(*api.Replica).Spec.Node == d.Name })
	if err := d.setupGroups(mgr, opts); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(mgr).Named("snapshot").
		For(&api.Snapshot{}, watch.Updates(func(old, now client.Object) bool {
			return watch.WishChanged(old, now) || now.(*api.Snapshot).Bare()
		})).
		Watches(&api.Replica{}, unfinished(func(o client.Object) string { return o.(*api.Replica).Spec.Volume }),
			builder.WithPredicates(mine)).
		Watches(&api.Attachment{}, unfinished(func(o client.Object) string { return o.(*api.Attachment).Spec.Volume })).
		Watches(&api.Volume{}, unfinished(client.Object.GetName), watch.Updates(localnode.MembersChanged)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
			return d.snapWaits.Requests()
		}), builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool {
			return o.GetName() == d.Name
		})), watch.Updates(watch.DisksChanged)).
		WatchesRawSource(source.Func(func(_ context.Context, q backlog.Queue) error {
			d.ReachedAPI()
			d.snapshots.Store(&q)
			return nil
		})).
		WithOptions(opts).Complete(&snapshotLoop{d})
}

// unfinished are the snapshots of a volume that differ from the wish of their object, or lack a digest.
func (d *Data) unfinished(ctx context.Context, volume string) []reconcile.Request {
	var list api.SnapshotList
	err := d.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}, client.UnsafeDisableDeepCopy)
	if err != nil {
		d.Log.Error("snapshots of a volume cannot be listed", "volume", volume, "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if s := &list.Items[i]; !s.Status.ReadyToUse || s.DeletionTimestamp != nil || s.Status.Checksum == "" {
			all = append(all, watch.Requests(s.Name)...)
		}
	}
	return all
}

// Reconcile reconciles one snapshot.
func (l *snapshotLoop) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var s api.Snapshot
	if err := l.Client.Get(ctx, req.NamespacedName, &s); err != nil {
		if apierrors.IsNotFound(err) {
			l.snapWaits.Set(req.Name, false)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if l.beingResumed(s.Spec.Volume) {
		return reconcile.Result{RequeueAfter: localnode.ResumePause}, nil
	}
	unlock, ok := l.Locks.LockSoon(s.Spec.Volume)
	if !ok {
		return reconcile.Result{RequeueAfter: volumelock.Again}, nil
	}
	defer unlock()
	v, mine, err := l.volumeOf(ctx, &s)
	if err != nil {
		return reconcile.Result{}, err
	}
	if !mine { // another node's, or the controller's
		if v != nil && (!s.Status.ReadyToUse || s.DeletionTimestamp != nil) && l.MayBecomeResponsible(ctx, v) {
			return reconcile.Result{RequeueAfter: l.SilentAfter(ctx) / 2}, nil // no event reports a silent node
		}
		return reconcile.Result{}, nil
	}
	old := s.DeepCopy()
	l.snapWaits.Set(s.Name, true) // before the look, which may miss a later change
	if s.DeletionTimestamp != nil {
		err = l.remove(ctx, &s, v)
	} else {
		err = l.ensure(ctx, &s, v)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
	}
	l.snapWaits.Set(s.Name, api.Is(err, api.Unavailable))
	s.Status.Error = ""
	switch {
	case api.Is(err, api.Busy) && old.Status.ReadyToUse && s.DeletionTimestamp == nil: // the status stays for the moment
		s.Status = *old.Status.DeepCopy()
	case err != nil:
		s.Status.ReadyToUse, s.Status.Error = false, err.Error()
	}
	if len(s.Finalizers) > 0 && !equality.Semantic.DeepEqual(old.Status, s.Status) {
		if serr := l.Client.Status().Update(ctx, &s); serr != nil {
			if apierrors.IsConflict(serr) || apierrors.IsNotFound(serr) {
				return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
			}
			return reconcile.Result{}, fmt.Errorf("status of snapshot %s: %w", s.Name, serr)
		}
	}
	switch api.KindOf(err) {
	case api.Other:
		if err != nil {
			l.Log.Warn("snapshot", "snapshot", s.Name, "volume", s.Spec.Volume, "err", err)
		}
		return reconcile.Result{}, err
	case api.Busy: // for a moment
		return reconcile.Result{RequeueAfter: busyAgain(err)}, nil
	case api.Unavailable, api.Denied: // no event reports a replica that answers again
		return reconcile.Result{RequeueAfter: 2 * time.Second}, nil
	case api.Full: // no event reports room
		return reconcile.Result{RequeueAfter: 5 * time.Second}, nil
	}
	return reconcile.Result{}, nil
}

// busyAgain is the pause before the next try of a busy volume: longer after a try that held I/O back, or would have.
func busyAgain(err error) time.Duration {
	if errors.Is(err, stack.ErrUnderWay) {
		return 5 * time.Second
	}
	return 100 * time.Millisecond
}

// volumeOf is the snapshot's volume, and whether this node looks after its snapshots. Nil: there is no such volume.
func (l *snapshotLoop) volumeOf(ctx context.Context, s *api.Snapshot) (_ *api.Volume, mine bool, err error) {
	var v api.Volume
	if err := l.Client.Get(ctx, client.ObjectKey{Name: s.Spec.Volume}, &v); err != nil {
		return nil, false, client.IgnoreNotFound(err)
	}
	if v.Status.UID == "" || s.Status.VolumeUID != "" && s.Status.VolumeUID != v.Status.UID ||
		len(v.Status.Members) == 0 {
		return nil, false, nil
	}
	node, _, err := l.ResponsibleNode(ctx, &v)
	return &v, err == nil && node == l.Name, err
}

// ensure takes the snapshot unless the members have it, and reports it.
func (l *snapshotLoop) ensure(ctx context.Context, s *api.Snapshot, v *api.Volume) (err error) {
	if s.Adorn(v) { // before the snapshot exists
		st := s.Status.DeepCopy()
		if err := l.Client.Update(ctx, s); err != nil {
			return err
		}
		s.Status = *st
	}
	local, err := l.MemberOn(ctx, v, l.Name)
	if err != nil {
		return err
	}
	if s.Status.CreationTime != "" { // the API reported the snapshot, so every member has it
		if local == nil && l.session(v.Name) == nil {
			return nil
		}
		if err := l.reportFrom(ctx, s, v, local, s.Status.CreationTime); !api.Is(err, api.Busy) {
			return err
		}
	}
	h, err := l.engineOf(ctx, v)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.end()) }()
	lin, err := h.tree(ctx)
	if err != nil {
		return err
	}
	k, err := l.find(s, lin)
	if err != nil {
		return err
	}
	if s.Spec.Group != "" && s.Spec.CreateSnapshot && s.Status.CreationTime == "" {
		if waits, err := l.ofGroup(ctx, s, k); waits || err != nil {
			return err
		}
	}
	if k == nil {
		if k, err = l.cut(ctx, s, v, h, lin); err != nil {
			return err
		}
	}
	if local != nil && h.local == local.Spec.UID {
		if err := l.reportFrom(ctx, s, v, local, instant(k.Created)); !api.Is(err, api.Busy) {
			return err
		}
	}
	sizes, err := h.Sizes(ctx)
	if err != nil {
		return err
	}
	l.tell(s, v, k, sizes[k.UID])
	s.Status.ReadyToUse = true
	if h.local == "" { // the owner is the node of a member
		if r, err := l.MemberOn(ctx, v, ""); err == nil && r != nil {
			s.Status.OwnerID = r.Spec.Node
		}
	}
	return nil
}

// reportFrom writes the snapshot of an instant into the status, as the member r on this node, which may be nil, has the
// snapshot. Busy: the member lacks the snapshot, or may lack it.
func (l *snapshotLoop) reportFrom(ctx context.Context, s *api.Snapshot, v *api.Volume, r *api.Replica,
	created string) error {
	if r == nil || r.Status.Mode != api.ReplicaCurrent {
		return api.Errorf(api.Busy, "snapshot %s: the other members have to be asked", s.Name)
	}
	disk, err := l.replicas.Disk(ctx, r.Spec.Disk)
	if err != nil {
		return err
	}
	for was := ""; ; {
		lin, err := l.treeOf(r, disk)
		if err != nil {
			return err
		}
		k, err := l.find(s, lin)
		if err != nil {
			return err
		}
		if k == nil || instant(k.Created) != created || k.Layer == was {
			l.forgetTree(r.Spec.UID)
			return api.Errorf(api.Busy, "snapshot %s: the members have to be asked", s.Name)
		}
		size, used, err := disk.LayerSize(k.Layer)
		if api.Is(err, api.NotFound) { // merged a moment ago: the record tells into which
			was = k.Layer
			l.forgetTree(r.Spec.UID)
			continue
		}
		if err != nil {
			return err
		}
		l.tell(s, v, k, stack.LayerSize{Size: size, Used: used, Root: disk.LayerRoot(k.Layer)})
		s.Status.ReadyToUse = true
		return nil
	}
}

// uidOf is the snapshot's uid on the disk: the uid of the object, which exists before the first write and is never used
// twice, except for a snapshot that was found on a disk.
func uidOf(s *api.Snapshot) api.UID {
	if s.Status.UID != "" {
		return s.Status.UID
	}
	return api.UID(s.UID)
}

// find looks for the snapshot in the stack. An object that was made for an existing snapshot finds the snapshot by
// name.
func (l *snapshotLoop) find(s *api.Snapshot, lin *snapshotTree) (*snapshotNode, error) {
	if k := lin.all[string(uidOf(s))]; k != nil {
		return k, nil
	}
	if s.Status.UID != "" {
		return nil, nil
	}
	for _, k := range lin.all {
		if k.Name != s.Name {
			continue
		}
		if s.Spec.CreateSnapshot {
			return nil, api.Errorf(api.Exists, "there is another snapshot of this name in the volume, of %s: choose another "+
				"name", instant(k.Created))
		}
		return k, nil
	}
	return nil, nil
}

// cut takes the snapshot of all members at one instant. lin is of before.
func (l *snapshotLoop) cut(ctx context.Context, s *api.Snapshot, v *api.Volume, h *engineHandle,
	lin *snapshotTree) (*snapshotNode, error) {
	switch {
	case s.Status.CreationTime != "" || !s.Spec.CreateSnapshot:
		// The engine's members have every snapshot of the volume, and the source member lacks this snapshot.
		return nil, l.lost(ctx, s, v)
	case v.DeletionTimestamp != nil:
		return nil, api.Errorf(api.InUse, "volume %s is being deleted", v.Name)
	}
	if err := h.Settled(ctx); err != nil { // before the freeze, too
		return nil, err
	}
	_, thaw := l.freeze(ctx, []*api.Volume{v}, []*api.Snapshot{s})
	err := h.Cut(ctx, stack.Snapshot{UID: string(uidOf(s)), Name: s.Name, Created: momentNow()})
	thaw()
	l.wasCut(ctx, v, h.local, lin)
	if err != nil {
		return nil, err
	}
	if lin, err = h.tree(ctx); err != nil {
		return nil, err
	}
	k := lin.all[string(uidOf(s))]
	if k == nil {
		return nil, api.Errorf(api.Corrupt, "it was cut and is not in the stack")
	}
	if s.Spec.Labels[api.LabelClone] == "" {
		l.Events.Eventf(v, s, "Normal", "SnapshotCreated", "Snapshot", "snapshot %s", s.Name)
	}
	if open := l.session(v.Name); open != nil {
		open.mates.compareSoon(k, lin)
	}
	return k, nil
}

// momentNow is the instant of a cut, as exact as the clock: two tries differ in the instant.
func momentNow() time.Time { return time.Now().UTC() }

// wasCut wakes the snapshots that a cut may have changed; lin is of before.
func (d *Data) wasCut(ctx context.Context, v *api.Volume, local api.UID, lin *snapshotTree) {
	var names []string
	for _, k := range lin.all {
		if k.children[api.VolumeHead] {
			names = append(names, k.Name)
		}
	}
	d.changed(local, names...) // after an error too: the snapshot may exist
	d.tidyLocal(ctx, v, local)
}

// tidyLocal has the layers of the member on this node finished and merged.
func (d *Data) tidyLocal(ctx context.Context, v *api.Volume, local api.UID) {
	if local == "" {
		return
	}
	var list api.ReplicaList
	if err := d.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return // the next look at the disk finds it
	}
	for i := range list.Items {
		if r := &list.Items[i]; r.Spec.UID == local {
			if disk, err := d.Disks.Get(r.Spec.Disk); err == nil {
				d.mergeWorker.Merge(disk, string(local), v.Name)
			}
		}
	}
}

// tell writes the facts of a snapshot into its status.
func (l *snapshotLoop) tell(s *api.Snapshot, v *api.Volume, k *snapshotNode, is stack.LayerSize) {
	st := &s.Status
	if st.RestoreSize == 0 {
		st.RestoreSize = is.Size
	}
	st.UID, st.Layer, st.VolumeUID = api.UID(k.UID), api.UID(k.Layer), v.Status.UID
	st.Parent, st.Children, st.Labels = k.parent, k.children, s.Spec.Labels
	st.CreationTime, st.Size, st.OwnerID = instant(k.Created), is.Used, l.Name
	st.UserCreated = s.Spec.CreateSnapshot && s.Spec.Labels[api.LabelClone] == ""
	st.MarkRemoved = false
	st.SizeText, st.RestoreSizeText = api.SizeText(is.Used), api.SizeText(st.RestoreSize)
	if st.Checksum = ""; is.Root != "" {
		st.Checksum = "sha256:" + is.Root
	}
}

// remove takes the snapshot out of all members, then the finalizer from the object.
func (l *snapshotLoop) remove(ctx context.Context, s *api.Snapshot, v *api.Volume) (err error) {
	if len(s.Finalizers) == 0 {
		return nil
	}
	s.Status.MarkRemoved, s.Status.ReadyToUse = true, false
	if err := l.beingCloned(ctx, s); err != nil {
		return err
	}
	h, err := l.engineOf(ctx, v)
	if err != nil {
		if gone, gerr := l.diskOfLastMemberForgotten(ctx, v); gerr != nil || !gone {
			return err // the disk may come back with the snapshot
		}
		return l.letObjectGo(ctx, s)
	}
	defer func() {
		if herr := h.end(); err == nil && herr != nil {
			l.Log.Warn("the end of an engine without a device", "volume", v.Name, "err", herr)
		}
	}()
	lin, err := h.tree(ctx)
	if err != nil {
		return err
	}
	if err := h.DropSnapshot(ctx, string(uidOf(s))); err != nil {
		return err
	}
	if k := lin.all[string(uidOf(s))]; k != nil {
		l.Log.Info("snapshot removed", "snapshot", s.Name, "volume", s.Spec.Volume)
		if k.children[api.VolumeHead] && v.DeletionTimestamp == nil {
			// The layer is the newest, and merges with another layer only: SealAll cuts the head off.
			if err := h.SealAll(ctx); err != nil {
				l.Log.Info("the space of the newest snapshot comes back with the next one", "volume", v.Name, "why", err)
			}
		}
		l.changed(h.local, k.neighbours()...)
		l.tidyLocal(ctx, v, h.local)
	}
	return l.letObjectGo(ctx, s)
}

// diskOfLastMemberForgotten reports whether the disk of a volume's only member, on this node, was taken out of the
// node.
func (l *snapshotLoop) diskOfLastMemberForgotten(ctx context.Context, v *api.Volume) (bool, error) {
	if len(v.Status.Members) != 1 || l.session(v.Name) != nil {
		return false, nil
	}
	r, err := l.MemberOn(ctx, v, l.Name)
	if err != nil || r == nil {
		return false, err
	}
	if _, err := l.replicas.Disk(ctx, r.Spec.Disk); !api.Is(err, api.Unavailable) {
		return false, nil
	}
	return l.DiskForgotten(ctx, r.Spec.Disk)
}

func (l *snapshotLoop) letObjectGo(ctx context.Context, s *api.Snapshot) error {
	if controllerutil.RemoveFinalizer(s, api.Finalizer) {
		return client.IgnoreNotFound(l.Client.Update(ctx, s))
	}
	return nil
}

// beingCloned returns an error while a clone is being made from a snapshot.
func (l *snapshotLoop) beingCloned(ctx context.Context, s *api.Snapshot) error {
	var clones api.ReplicaList
	if err := l.Client.List(ctx, &clones, client.MatchingFields{watch.BySource: string(uidOf(s))}); err != nil {
		return err
	}
	for _, c := range clones.Items {
		if c.DeletionTimestamp == nil && !c.Status.Pinned && (c.Status.Mode == "" || c.Status.Mode == api.ReplicaCreating) {
			return api.Errorf(api.Busy, "volume %s is being made from it", c.Spec.Volume)
		}
	}
	return nil
}

// adopt makes objects for the snapshots of a stack that have none, such as after the objects were lost.
func (d *Data) adopt(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	d.mu.Lock()
	look := d.unseen[r.Spec.UID]
	d.mu.Unlock()
	if !look {
		return nil
	}
	var v api.Volume
	if err := d.Client.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != r.Spec.VolumeUID || !slices.Contains(v.Status.Members, r.Name) {
		return nil // not yet the volume's
	}
	lin, err := d.treeOf(r, disk)
	if err != nil {
		return err
	}
	var have api.SnapshotList
	if err := d.Reader.List(ctx, &have); err != nil {
		return err
	}
	named := map[string]bool{}
	for _, s := range have.Items {
		if s.Spec.Volume == v.Name {
			delete(lin.all, string(uidOf(&s)))
		}
		named[s.Name] = s.Spec.Volume != v.Name || s.Spec.CreateSnapshot
	}
	for _, k := range lin.all {
		s := api.NewSnapshot(&v, k.Name)
		if s.Spec.CreateSnapshot = false; named[k.Name] {
			d.Log.Warn("a snapshot on the disk has no object, and its name is taken", "volume", v.Name, "snapshot", k.Name)
			continue
		}
		if err := d.Client.Create(ctx, s); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("snapshot %s: %w", k.Name, err)
		}
		d.Log.Info("a snapshot that was found on the disk has an object again", "volume", v.Name, "snapshot", k.Name)
	}
	d.changed(r.Spec.UID)
	d.mu.Lock()
	delete(d.unseen, r.Spec.UID)
	d.mu.Unlock()
	return nil
}
