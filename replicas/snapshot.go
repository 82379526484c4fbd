package replicas

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
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
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// snapshotLoop makes the Snapshots of the volumes true whose replica is on this node. What exists is what the replica's
// stack.json says: it is looked at before anything is cut, so that a cut whose answer was lost is not made twice.
type snapshotLoop struct{ *Data }

// setupSnapshots adds the loop to mgr.
func (d *Data) setupSnapshots(mgr ctrl.Manager, opts controller.Options) error {
	unfinished := func(of func(client.Object) string) handler.EventHandler {
		return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return d.unfinished(ctx, of(o))
		})
	}
	mine := predicate.NewPredicateFuncs(func(o client.Object) bool { return o.(*api.Replica).Spec.Node == d.Node })
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
		Watches(&api.Volume{}, unfinished(client.Object.GetName), watch.Updates(membersMatter)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
			return d.snapWaits.requests()
		}), builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool {
			return o.GetName() == d.Node
		})), watch.Updates(watch.DisksChanged)).
		WatchesRawSource(source.Func(func(_ context.Context, q backlog.Queue) error {
			d.api.Store(true)
			d.snapshots.Store(&q)
			return nil
		})).
		WithOptions(opts).Complete(&snapshotLoop{d})
}

// watch.WishChanged lets changes of an object's wish pass, and its deletion, but not those of its status.
func membersMatter(old, now client.Object) bool {
	a, b := old.(*api.Volume), now.(*api.Volume)
	return !slices.Equal(a.Status.Members, b.Status.Members) || !a.DeletionTimestamp.Equal(b.DeletionTimestamp) ||
		meta.IsStatusConditionTrue(a.Status.Conditions, api.ConditionKept) !=
			meta.IsStatusConditionTrue(b.Status.Conditions, api.ConditionKept)
}

// unfinished are the snapshots of a volume that are not what their object wants, or had no digest yet.
func (d *Data) unfinished(ctx context.Context, volume string) []reconcile.Request {
	var list api.SnapshotList
	err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}, client.UnsafeDisableDeepCopy)
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

// Reconcile brings one snapshot to what its object says.
func (l *snapshotLoop) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var s api.Snapshot
	if err := l.client.Get(ctx, req.NamespacedName, &s); err != nil {
		if apierrors.IsNotFound(err) {
			l.snapWaits.set(req.Name, false)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if l.beingResumed(s.Spec.Volume) {
		return reconcile.Result{RequeueAfter: resumeAgain}, nil
	}
	unlock, ok := l.lockSoon(s.Spec.Volume)
	if !ok {
		return reconcile.Result{RequeueAfter: lockAgain}, nil
	}
	defer unlock()
	v, r, many, err := l.home(ctx, &s)
	if err != nil {
		return reconcile.Result{}, err
	}
	if r == nil && !many { // another node's, or the controller's
		if v != nil && (!s.Status.ReadyToUse || s.DeletionTimestamp != nil) && l.mayKeep(ctx, v) {
			return reconcile.Result{RequeueAfter: l.silentAfter(ctx) / 2}, nil // nobody tells when a node falls silent
		}
		return reconcile.Result{}, nil
	}
	old := s.DeepCopy()
	l.snapWaits.set(s.Name, true) // before it looks: what changes meanwhile is not missed
	if many {
		err = l.bringMany(ctx, &s, v)
	} else {
		err = l.bring(ctx, &s, v, r)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
	}
	l.snapWaits.set(s.Name, api.Is(err, api.Unavailable))
	s.Status.Error = ""
	switch {
	case api.Is(err, api.Busy) && old.Status.ReadyToUse && s.DeletionTimestamp == nil: // it is what it was: for a moment
		s.Status = *old.Status.DeepCopy()
	case err != nil:
		s.Status.ReadyToUse, s.Status.Error = false, err.Error()
	}
	if len(s.Finalizers) > 0 && !equality.Semantic.DeepEqual(old.Status, s.Status) {
		if serr := l.client.Status().Update(ctx, &s); serr != nil {
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
	case api.Unavailable, api.Denied:
		if many { // nobody tells when a replica is reached again
			return reconcile.Result{RequeueAfter: 2 * time.Second}, nil
		}
	case api.Full: // nobody tells of room
		return reconcile.Result{RequeueAfter: 5 * time.Second}, nil
	}
	return reconcile.Result{}, nil
}

// busyAgain is when what is busy is tried again: after a try that held I/O back, or would have, not at once.
func busyAgain(err error) time.Duration {
	if errors.Is(err, stack.ErrUnderWay) {
		return 5 * time.Second
	}
	return 100 * time.Millisecond
}

// home is the snapshot's volume and its member on this node; nil: there is none. many: the volume has several replicas,
// and this node looks after its snapshots.
func (l *snapshotLoop) home(ctx context.Context, s *api.Snapshot) (_ *api.Volume, _ *api.Replica, many bool,
	err error) {
	var v api.Volume
	if err := l.client.Get(ctx, client.ObjectKey{Name: s.Spec.Volume}, &v); err != nil {
		return nil, nil, false, client.IgnoreNotFound(err)
	}
	if v.Status.UID == "" || s.Status.VolumeUID != "" && s.Status.VolumeUID != v.Status.UID {
		return nil, nil, false, nil
	}
	if len(v.Status.Members) == 0 {
		return nil, nil, false, nil
	}
	if node, _, err := l.keeper(ctx, &v); err != nil || node != l.Node {
		return &v, nil, false, err
	}
	if many, err = l.several(ctx, &v); many || err != nil {
		return &v, nil, many, err
	}
	r, err := memberOn(ctx, l.client, &v, l.Node)
	return &v, r, false, err
}

// memberOn is a volume's member on a node; the node "" is any. Nil: there is none.
func memberOn(ctx context.Context, c client.Reader, v *api.Volume, node string) (*api.Replica, error) {
	var list api.ReplicaList
	if err := c.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return nil, err
	}
	for i := range list.Items {
		r := &list.Items[i]
		if r.Spec.VolumeUID == v.Status.UID && (node == "" || r.Spec.Node == node) &&
			slices.Contains(v.Status.Members, r.Name) {
			return r, nil
		}
	}
	return nil, nil
}

func (l *snapshotLoop) bring(ctx context.Context, s *api.Snapshot, v *api.Volume, r *api.Replica) error {
	if s.DeletionTimestamp != nil {
		return l.remove(ctx, s, v, r)
	}
	if s.Adorn(v) { // before anything of it exists
		st := s.Status.DeepCopy()
		if err := l.client.Update(ctx, s); err != nil {
			return err
		}
		s.Status = *st
	}
	disk, err := l.disk(ctx, r.Spec.Disk)
	if err != nil {
		return err
	}
	lin, err := l.lineageOf(r, disk)
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
		switch {
		case s.Status.CreationTime != "" || !s.Spec.CreateSnapshot:
			return l.lostHere(ctx, s, v, r, disk)
		case v.DeletionTimestamp != nil:
			return api.Errorf(api.InUse, "volume %s is being deleted", v.Name)
		}
		if err := l.cut(ctx, s, v, r, disk); err != nil {
			return err
		}
		if lin, err = l.lineageOf(r, disk); err != nil {
			return err
		}
		if k = lin.all[string(uidOf(s))]; k == nil {
			return api.Errorf(api.Corrupt, "it was cut and is not in the stack")
		}
		if s.Spec.Labels[api.LabelClone] == "" {
			l.events.Eventf(v, s, "Normal", "SnapshotCreated", "Snapshot", "snapshot %s", s.Name)
		}
	} else if !s.Status.ReadyToUse { // cut by a process that may have died in it
		if err := disk.Settle(string(r.Spec.UID), k.Layer); err != nil {
			return err
		}
	}
	return l.describe(s, v, r, disk, k)
}

// uidOf is the snapshot's uid on the disk: the object's own, which exists before anything is written and is never used
// twice, but for one that was found on a disk.
func uidOf(s *api.Snapshot) api.UID {
	if s.Status.UID != "" {
		return s.Status.UID
	}
	return api.UID(s.UID)
}

// find looks for the snapshot in the stack. An object that was made for one that is there takes it by its name.
func (l *snapshotLoop) find(s *api.Snapshot, lin *lineage) (*kin, error) {
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

// cut makes the snapshot: through the session of an attached volume, else by a session of its own, without a device.
func (l *snapshotLoop) cut(ctx context.Context, s *api.Snapshot, v *api.Volume, r *api.Replica,
	disk *stack.Disk) error {
	uid := string(uidOf(s))
	cut := stack.Snapshot{UID: uid, Name: s.Name, Layer: uid, Created: time.Now().UTC().Truncate(time.Millisecond)}
	_, thaw := l.freeze(ctx, []*api.Volume{v}, []*api.Snapshot{s})
	err := l.cutNow(ctx, v, r, disk, cut)
	thaw()
	var names []string
	if lin, lerr := l.lineageOf(r, disk); lerr == nil { // of before: what was below the head is its parent
		for _, k := range lin.all {
			if k.children[api.VolumeHead] {
				names = append(names, k.Name)
			}
		}
	}
	l.changed(r.Spec.UID, names...) // after an error too: it may be there
	if err == nil {
		l.tidy(disk)
	}
	return err
}

func (l *snapshotLoop) cutNow(ctx context.Context, v *api.Volume, r *api.Replica, disk *stack.Disk,
	cut stack.Snapshot) error {
	c, done, err := l.prepare(ctx, v, r, disk, cut)
	if err != nil {
		return err
	}
	err = c.Do(ctx)
	if derr := done(); err == nil {
		err = derr
	}
	return err
}

// prepare prepares a cut, in the session of an attached volume, else in one of its own. Call done after the cut.
func (l *snapshotLoop) prepare(ctx context.Context, v *api.Volume, r *api.Replica, disk *stack.Disk,
	cut stack.Snapshot) (_ *stack.Cut, done func() error, err error) {
	if err := r.RevertPending(); err != nil {
		return nil, nil, err
	}
	open := l.session(v.Name)
	if open == nil || open.Replica != r.Spec.UID || open.VolumeUID != v.Status.UID {
		return l.prepareDetached(ctx, v, r, disk, cut)
	}
	if why := open.fence.Load(); why != nil {
		return nil, nil, api.Errorf(api.Unavailable, "the volume is being taken over: %w", *why)
	}
	c, err := open.member().PrepareCut(ctx, cut)
	return c, func() error { return nil }, err
}

// prepareDetached does so for a volume that nobody has attached. The epoch that it claims keeps engines of other nodes
// out, or is lost to one that attaches at the same time, which waits for nobody.
func (l *snapshotLoop) prepareDetached(ctx context.Context, v *api.Volume, r *api.Replica, disk *stack.Disk,
	cut stack.Snapshot) (_ *stack.Cut, done func() error, err error) {
	key := client.ObjectKey{Name: v.Name}
	var now api.Volume
	if err := l.reader.Get(ctx, key, &now); err != nil {
		return nil, nil, err
	}
	// Looked at after the volume: who attaches it from now on changes it, and the claim below fails.
	if err := l.reader.Get(ctx, key, &api.Attachment{}); err == nil {
		return nil, nil, api.Errorf(api.Unavailable, "volume %s is being attached or detached: the snapshot follows", v.Name)
	} else if !apierrors.IsNotFound(err) {
		return nil, nil, err
	}
	for _, held := range l.Host.Held() {
		if held.Key == string(v.Status.UID) {
			return nil, nil, api.Errorf(api.Unavailable, "the device of volume %s is being taken over: the snapshot follows",
				v.Name)
		}
	}
	if now.UID != v.UID || now.Status.UID != v.Status.UID || now.DeletionTimestamp != nil {
		return nil, nil, api.Errorf(api.Busy, "volume %s has changed", v.Name)
	}
	if err := now.RevertInProgress(); err != nil {
		return nil, nil, err
	}
	l.openLendersOf(ctx, disk, r)
	loop, err := l.pick()
	if err != nil {
		return nil, nil, err
	}
	open, err := disk.OpenReplica(ctx, string(r.Spec.UID), loop.Loop)
	if err != nil {
		l.putBack(loop)
		return nil, nil, err
	}
	done = func() error {
		defer l.putBack(loop)
		return open.Close()
	}
	var c *stack.Cut
	epoch, err := l.claim(ctx, &now, open.Meta(), "")
	if err == nil {
		err = open.Adopt(ctx, epoch, l.Host.Incarnation(), []string{string(r.Spec.UID)})
	}
	if err == nil {
		c, err = open.PrepareCut(ctx, cut)
	}
	if err != nil {
		_ = done() // of what was not begun
		return nil, nil, err
	}
	return c, done, nil
}

// describe writes what the stack says of the snapshot into its status.
func (l *snapshotLoop) describe(s *api.Snapshot, v *api.Volume, r *api.Replica, disk *stack.Disk, k *kin) error {
	st := &s.Status
	size, used, err := disk.LayerSize(k.Layer)
	if api.Is(err, api.NotFound) && l.replaced(r, disk, k) {
		return api.Errorf(api.Busy, "its layer was merged a moment ago")
	}
	if err != nil {
		return err
	}
	l.tell(s, v, k, peer.LayerSize{Size: size, Used: used, Root: disk.LayerRoot(k.Layer)})
	st.ReadyToUse = r.Status.Mode == api.ReplicaCurrent
	if !st.ReadyToUse {
		return api.Errorf(api.Unavailable, "replica %s is %s: %s", r.Name, r.Status.Mode, r.Status.Message)
	}
	return nil
}

// replaced reports whether a merge has given a snapshot another layer than was known. It is known from then on.
func (l *snapshotLoop) replaced(r *api.Replica, disk *stack.Disk, k *kin) bool {
	l.mu.Lock()
	delete(l.lineages, r.Spec.UID)
	l.mu.Unlock()
	lin, err := l.lineageOf(r, disk)
	if err != nil {
		return false
	}
	now := lin.all[k.UID]
	return now != nil && now.Layer != k.Layer
}

// tell writes what is known of a snapshot into its status.
func (l *snapshotLoop) tell(s *api.Snapshot, v *api.Volume, k *kin, is peer.LayerSize) {
	st := &s.Status
	if st.RestoreSize == 0 {
		st.RestoreSize = is.Size
	}
	st.UID, st.Layer, st.VolumeUID = api.UID(k.UID), api.UID(k.Layer), v.Status.UID
	st.Parent, st.Children, st.Labels = k.parent, k.children, s.Spec.Labels
	st.CreationTime, st.Size, st.OwnerID = instant(k.Created), is.Used, l.Node
	st.UserCreated = s.Spec.CreateSnapshot && s.Spec.Labels[api.LabelClone] == ""
	st.MarkRemoved = false
	st.SizeText, st.RestoreSizeText = api.SizeText(is.Used), api.SizeText(st.RestoreSize)
	if st.Checksum = ""; is.Root != "" {
		st.Checksum = "sha256:" + is.Root
	}
}

// remove takes the snapshot out of the stack, then the finalizer from the object.
func (l *snapshotLoop) remove(ctx context.Context, s *api.Snapshot, v *api.Volume, r *api.Replica) error {
	if len(s.Finalizers) == 0 {
		return nil
	}
	s.Status.MarkRemoved, s.Status.ReadyToUse = true, false
	uid := uidOf(s)
	if err := l.beingCloned(ctx, s); err != nil {
		return err
	}
	disk, err := l.disk(ctx, r.Spec.Disk)
	switch {
	case err == nil:
		if err := l.drop(ctx, s, v, r, disk, string(uid)); err != nil {
			return err
		}
	case api.Is(err, api.Unavailable):
		if gone, gerr := l.diskForgotten(ctx, r.Spec.Disk); gerr != nil || !gone {
			return err // it comes back, and then the snapshot must go
		}
	default:
		return err
	}
	return l.letObjectGo(ctx, s)
}

func (l *snapshotLoop) letObjectGo(ctx context.Context, s *api.Snapshot) error {
	if controllerutil.RemoveFinalizer(s, api.Finalizer) {
		return client.IgnoreNotFound(l.client.Update(ctx, s))
	}
	return nil
}

// beingCloned tells of a clone that is being made from a snapshot.
func (l *snapshotLoop) beingCloned(ctx context.Context, s *api.Snapshot) error {
	var clones api.ReplicaList
	if err := l.client.List(ctx, &clones, client.MatchingFields{watch.BySource: string(uidOf(s))}); err != nil {
		return err
	}
	for _, c := range clones.Items {
		if c.DeletionTimestamp == nil && !c.Status.Pinned && (c.Status.Mode == "" || c.Status.Mode == api.ReplicaCreating) {
			return api.Errorf(api.Busy, "volume %s is being made from it", c.Spec.Volume)
		}
	}
	return nil
}

func (l *snapshotLoop) drop(ctx context.Context, s *api.Snapshot, v *api.Volume, r *api.Replica, disk *stack.Disk,
	uid string) error {
	lin, err := l.lineageOf(r, disk)
	if api.Is(err, api.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	k := lin.all[uid]
	if k == nil {
		return disk.Settle(string(r.Spec.UID)) // a process that died may have dropped it a moment ago
	}
	if open := l.session(r.Spec.Volume); open != nil && open.Replica == r.Spec.UID {
		err = open.member().DropSnapshot(uid)
	} else {
		err = disk.DropSnapshot(string(r.Spec.UID), uid)
	}
	l.changed(r.Spec.UID, k.neighbours()...)
	if err == nil {
		l.Log.Info("snapshot removed", "snapshot", s.Name, "volume", s.Spec.Volume)
		if k.children[api.VolumeHead] && v.DeletionTimestamp == nil {
			// Its layer is the newest, and merges with a layer alone: what is above it is cut off the head.
			if err := l.cutNow(ctx, v, r, disk, stack.Snapshot{Layer: string(api.NewUID())}); err != nil {
				l.Log.Info("the space of the newest snapshot comes back with the next one", "volume", v.Name, "why", err)
			}
			l.changed(r.Spec.UID)
		}
		l.mergeSoon(disk, string(r.Spec.UID), v.Name)
		l.tidy(disk)
	}
	return err
}

// adopt makes objects for the snapshots of a stack that have none, such as after the objects were lost.
func (l *replicaLoop) adopt(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	l.mu.Lock()
	look := l.unseen[r.Spec.UID]
	l.mu.Unlock()
	if !look {
		return nil
	}
	var v api.Volume
	if err := l.client.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != r.Spec.VolumeUID || !slices.Contains(v.Status.Members, r.Name) {
		return nil // not yet the volume's
	}
	lin, err := l.lineageOf(r, disk)
	if err != nil {
		return err
	}
	var have api.SnapshotList
	if err := l.reader.List(ctx, &have); err != nil {
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
			l.Log.Warn("a snapshot on the disk has no object, and its name is taken", "volume", v.Name, "snapshot", k.Name)
			continue
		}
		if err := l.client.Create(ctx, s); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("snapshot %s: %w", k.Name, err)
		}
		l.Log.Info("a snapshot that was found on the disk has an object again", "volume", v.Name, "snapshot", k.Name)
	}
	l.changed(r.Spec.UID)
	l.mu.Lock()
	delete(l.unseen, r.Spec.UID)
	l.mu.Unlock()
	return nil
}

// unseenOf are the replicas of a volume on this node: its members have changed.
func (d *Data) unseenOf(ctx context.Context, o client.Object) []reconcile.Request {
	var list api.ReplicaList
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: o.GetName()}); err != nil {
		d.Log.Error("replicas of a volume cannot be listed", "volume", o.GetName(), "err", err)
		return nil
	}
	var all []reconcile.Request
	for _, r := range list.Items {
		if r.Spec.Node == d.Node {
			all = append(all, watch.Requests(r.Name)...)
		}
	}
	return all
}
