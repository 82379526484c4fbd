package snapshot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/volumelock"
	"drover.io/drover/replicas/stack"
)

// A group of snapshots is cut at one instant: the reconciler creates the Snapshots first, then holds, cuts and releases
// all volumes together. Each cut has the instant in its record, so that the reconciler sees a group in which a process
// died half-way: the reconciler drops the group's cuts, and cuts all volumes again.

// groupReconciler cuts the groups whose volumes are on this node.
type groupReconciler struct{ *Snapshots }

func (ss *Snapshots) setupGroups(mgr ctrl.Manager, opts controller.Options) error {
	unfinished := func(of func(client.Object) string) handler.EventHandler {
		return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return ss.unfinishedGroups(ctx, of(o))
		})
	}
	return ctrl.NewControllerManagedBy(mgr).Named("snapshotgroup").
		For(&api.SnapshotGroup{}, watch.Updates(watch.WishChanged)).
		Watches(&api.Replica{}, unfinished(func(o client.Object) string { return o.(*api.Replica).Spec.Volume })).
		Watches(&api.Attachment{}, unfinished(func(o client.Object) string { return o.(*api.Attachment).Spec.Volume })).
		Watches(&api.Volume{}, unfinished(client.Object.GetName), watch.Updates(localnode.MembersChanged)).
		WithOptions(opts).Complete(&groupReconciler{ss})
}

func (ss *Snapshots) unfinishedGroups(ctx context.Context, volume string) []reconcile.Request {
	var list api.SnapshotGroupList
	if err := ss.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		ss.Log.Error("groups of snapshots cannot be listed", "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if g := &list.Items[i]; !g.Status.ReadyToUse && slices.Contains(g.Spec.Volumes, volume) {
			all = append(all, watch.Requests(g.Name)...)
		}
	}
	return all
}

// Reconcile cuts one group, once.
func (ss *groupReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var g api.SnapshotGroup
	if err := ss.Client.Get(ctx, req.NamespacedName, &g); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if g.DeletionTimestamp != nil || g.Status.ReadyToUse {
		return reconcile.Result{}, nil
	}
	if mine, err := ss.cutsGroup(ctx, &g); !mine || err != nil {
		return reconcile.Result{}, err
	}
	volumes := slices.Sorted(slices.Values(g.Spec.Volumes))
	if slices.ContainsFunc(volumes, ss.attachments.Resuming) {
		return reconcile.Result{RequeueAfter: localnode.ResumePause}, nil
	}
	for _, name := range volumes { // in one order, so that two groups do not deadlock
		unlock, ok := ss.Locks.LockSoon(name)
		if !ok {
			return reconcile.Result{RequeueAfter: volumelock.Again}, nil
		}
		defer unlock()
	}
	old := g.DeepCopy()
	err := ss.cutGroup(ctx, &g)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
	}
	if g.Status.Error = ""; err != nil {
		g.Status.Error = err.Error()
	}
	if !equality.Semantic.DeepEqual(old.Status, g.Status) {
		if serr := ss.Client.Status().Update(ctx, &g); serr != nil {
			if apierrors.IsConflict(serr) || apierrors.IsNotFound(serr) {
				return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
			}
			return reconcile.Result{}, fmt.Errorf("status of snapshot group %s: %w", g.Name, serr)
		}
	}
	for _, m := range g.Status.Members {
		ss.wake(m.Snapshot)
	}
	switch api.KindOf(err) {
	case api.Other:
		return reconcile.Result{}, err
	case api.Busy:
		return reconcile.Result{RequeueAfter: busyAgain(err)}, nil
	}
	return reconcile.Result{RequeueAfter: 5 * time.Second}, nil // the cause may change without an event
}

// cutsGroup reports whether this node cuts the group: the node is responsible for the first volume.
func (ss *Snapshots) cutsGroup(ctx context.Context, g *api.SnapshotGroup) (bool, error) {
	for _, name := range g.Spec.Volumes {
		var v api.Volume
		if err := ss.Client.Get(ctx, client.ObjectKey{Name: name}, &v); apierrors.IsNotFound(err) {
			continue
		} else if err != nil {
			return false, err
		}
		if node, _, err := ss.ResponsibleNode(ctx, &v); err != nil || node != "" {
			return node == ss.Name, err
		}
	}
	return false, nil
}

// groupPart is one volume of a group.
type groupPart struct {
	snap   *api.Snapshot
	vol    *api.Volume
	engine *engineHandle
	tree   *Tree
	is     *node // of tree; nil: not cut yet
}

// cutting is an engine.Cut.
type cutting interface {
	Hold(ctx context.Context) error // until LetGo, Release or Abort
	LetGo()                         // after an error; Abort follows
	Commit(ctx context.Context) error
	Release()
	Abort()
}

// cutGroup cuts the group's snapshots, all or none. The caller has the locks of the volumes.
func (ss *Snapshots) cutGroup(ctx context.Context, g *api.SnapshotGroup) error {
	if controllerutil.AddFinalizer(g, api.Finalizer) { // before a snapshot exists
		st := g.Status.DeepCopy()
		if err := ss.Client.Update(ctx, g); err != nil {
			return err
		}
		g.Status = *st
	}
	var parts []*groupPart
	defer func() {
		for _, p := range parts {
			if err := p.engine.end(); err != nil {
				ss.Log.Warn("the end of an offline engine", "volume", p.vol.Name, "err", err)
			}
		}
	}()
	for _, name := range g.Spec.Volumes {
		p, err := ss.preparePart(ctx, g, name)
		if err != nil {
			return err
		}
		parts = append(parts, p)
	}
	whole := parts[0].is != nil
	for _, p := range parts {
		whole = whole && p.is != nil && p.is.Created.Equal(parts[0].is.Created)
	}
	at := cutTime()
	if whole { // an earlier try cut, and its answer was lost
		at = parts[0].is.Created
	} else if err := ss.cutParts(ctx, parts, at); err != nil {
		return err
	} else {
		ss.compareParts(ctx, parts)
	}
	g.Status.CreationTime, g.Status.ReadyToUse, g.Status.Members = formatInstant(at), true, nil
	for _, p := range parts {
		g.Status.Members = append(g.Status.Members, api.SnapshotGroupMember{Volume: p.vol.Name, Snapshot: p.snap.Name})
	}
	ss.Events.Eventf(g, nil, "Normal", "SnapshotsCreated", "Snapshot", "%d volumes were cut at one instant", len(parts))
	return nil
}

// preparePart finds a volume of the group, and finds or creates the Snapshot.
func (ss *Snapshots) preparePart(ctx context.Context, g *api.SnapshotGroup, volume string) (*groupPart, error) {
	p := &groupPart{vol: &api.Volume{}, snap: &api.Snapshot{}}
	if err := ss.Reader.Get(ctx, client.ObjectKey{Name: volume}, p.vol); apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.Unavailable, "volume %s does not exist", volume)
	} else if err != nil {
		return nil, err
	}
	if p.vol.DeletionTimestamp != nil {
		return nil, api.Errorf(api.InUse, "volume %s is being deleted", volume)
	}
	if len(p.vol.Status.Members) == 0 {
		return nil, api.Errorf(api.Unavailable, "volume %s is not ready yet: %s", volume, p.vol.Status.Message)
	}
	node, attached, err := ss.ResponsibleNode(ctx, p.vol)
	if err != nil {
		return nil, err
	}
	if attached && node != ss.Name {
		return nil, api.Errorf(api.Unsupported, "volume %s is attached to node %s, and the first one of the group is looked "+
			"after on %s: a group is cut on one node", volume, node, ss.Name)
	}
	err = ss.Reader.Get(ctx, client.ObjectKey{Name: g.Member(volume)}, p.snap)
	if apierrors.IsNotFound(err) {
		p.snap = api.NewSnapshot(p.vol, g.Member(volume))
		p.snap.Spec.Group, p.snap.Spec.Labels = g.Name, g.Spec.Labels
		err = ss.Client.Create(ctx, p.snap)
	}
	if err != nil {
		return nil, err
	}
	if s := p.snap; s.Spec.Volume != volume || s.Spec.Group != g.Name || s.DeletionTimestamp != nil {
		return nil, api.Errorf(api.Exists, "snapshot %s exists already: delete the snapshot, or give the group another name",
			s.Name)
	}
	if p.engine, err = ss.openEngine(ctx, p.vol); err != nil {
		return nil, err
	}
	if p.tree, err = p.engine.readTree(ctx); err != nil {
		return nil, errors.Join(err, p.engine.end())
	}
	p.is = p.tree.all[string(uidOf(p.snap))]
	return p, nil
}

// compareParts has the members of the volumes compared in their new snapshots.
func (ss *Snapshots) compareParts(ctx context.Context, parts []*groupPart) {
	for _, p := range parts {
		tree, err := p.engine.readTree(ctx)
		if err != nil { // the cut counts all the same
			ss.Log.Warn("the replicas are not compared in a snapshot", "volume", p.vol.Name, "snapshot", p.snap.Name, "err", err)
			continue
		}
		if k := tree.all[string(uidOf(p.snap))]; k != nil {
			ss.attachments.CompareSoon(p.vol.Name, k.Snapshot)
		}
	}
}

// cutParts drops the cuts of an earlier try, and cuts.
func (ss *Snapshots) cutParts(ctx context.Context, parts []*groupPart, at time.Time) error {
	for _, p := range parts {
		if p.is == nil {
			continue
		}
		if err := p.engine.DropSnapshot(ctx, string(uidOf(p.snap))); err != nil {
			return err
		}
	}
	var cuts []cutting
	defer func() {
		for _, c := range cuts {
			c.Abort() // does nothing after a Commit
		}
		for _, p := range parts {
			ss.afterCut(ctx, p.vol, p.engine.local, p.tree)
		}
	}()
	var volumes []*api.Volume
	var snaps []*api.Snapshot
	for _, p := range parts {
		volumes, snaps = append(volumes, p.vol), append(snaps, p.snap)
	}
	for _, p := range parts {
		if err := p.engine.AwaitOperations(ctx); err != nil {
			return fmt.Errorf("volume %s: %w", p.vol.Name, err)
		}
	}
	frozen, thaw := ss.freeze(ctx, volumes, snaps)
	defer thaw()                                // before the function above
	late := time.AfterFunc(longestFrozen, thaw) // if a disk hangs, the other volumes continue
	defer late.Stop()
	for _, p := range parts {
		c, err := p.engine.PrepareCut(ctx, stack.Snapshot{UID: string(uidOf(p.snap)), Name: p.snap.Name, Created: at})
		if err != nil {
			return fmt.Errorf("volume %s: %w", p.vol.Name, err)
		}
		cuts = append(cuts, c)
	}
	return cutTogether(ctx, parts, cuts, func() error {
		if frozen && !late.Stop() {
			return api.Errorf(api.Busy, "file systems were frozen for %v, and could not be cut: a disk does not answer; it is "+
				"tried again", longestFrozen)
		}
		late.Reset(longestFrozen) // a volume that thaws from now on is held until its cut
		return nil
	})
}

const (
	longestHeld   = 10 * time.Second // of a group's volumes, until all have ended their I/O in progress
	longestFrozen = time.Minute      // of their file systems, for others of the group
)

// cutTogether holds the writes of all volumes, cuts all, and releases each volume after its own cut: each snapshot
// holds the instant, whatever the other disks do. If a volume's I/O does not end soon, cutTogether releases all. When
// all volumes are held, ready may return a reason to give up.
func cutTogether(ctx context.Context, parts []*groupPart, cuts []cutting, ready func() error) error {
	err := holdAll(ctx, parts, cuts)
	if err == nil {
		err = ready()
	}
	if err != nil {
		for _, c := range cuts {
			c.LetGo()
		}
		return err
	}
	errs := make([]error, len(cuts))
	var wg sync.WaitGroup
	for i, c := range cuts {
		wg.Go(func() {
			errs[i] = c.Commit(ctx)
			c.Release()
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return errors.Join(api.Errorf(api.Busy, "not all volumes of the group were cut; the node tries again"), err)
	}
	return nil
}

func holdAll(ctx context.Context, parts []*groupPart, cuts []cutting) error {
	ctx, cancel := context.WithTimeout(ctx, longestHeld)
	defer cancel()
	for i, c := range cuts {
		if err := c.Hold(ctx); err != nil {
			return fmt.Errorf("volume %s: %w", parts[i].vol.Name, err)
		}
	}
	return nil
}

// awaitsGroup reports whether an unreported snapshot of a group has to wait for the group.
func (ss *Snapshots) awaitsGroup(ctx context.Context, s *api.Snapshot, k *node) (waits bool, err error) {
	var g api.SnapshotGroup
	if err := ss.Reader.Get(ctx, client.ObjectKey{Name: s.Spec.Group}, &g); apierrors.IsNotFound(err) {
		return false, api.Errorf(api.NotFound, "lost: snapshot group %s does not exist; delete the object", s.Spec.Group)
	} else if err != nil {
		return false, err
	}
	if !g.Status.ReadyToUse {
		return true, nil // the group's reconciler wakes the snapshot
	}
	if k == nil || formatInstant(k.Created) != g.Status.CreationTime {
		return false, api.Errorf(api.NotFound, "lost: the snapshot is older or newer than snapshot group %s; delete "+
			"the object",
			s.Spec.Group)
	}
	return false, nil
}
