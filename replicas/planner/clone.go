package planner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// A linked clone is a head over the layers of a snapshot. On the disk of the snapshot's replica a clone copies
// nothing, and from then on clone and source are independent. If the disk has no room or may not be used, the clone is
// on another disk of the node and the layers follow; if no disk of the node may be used, rebuilds create the replicas
// on other nodes from a transient replica. A full copy shares no layer from the start. A clone of the present state of
// a volume takes a snapshot, and deletes the snapshot when the clone is ready or has pinned the layers.

// cloneSource is the snapshot and the replica from which a clone starts.
type cloneSource struct {
	snapshot *api.Snapshot
	replica  *api.Replica
	others   []api.Replica // members of the source that hold the snapshot too
	image    string        // the base image
	whole    bool          // the volume's own replica moves
	alone    bool          // the clone stands on no image, although the source still has a hidden one
}

// findSource finds the data source of a volume; nil: the volume has none. A clone waits after an Unavailable error;
// any other kind fails the clone until the user changes something.
func (p *volumeReconciler) findSource(ctx context.Context, v *api.Volume) (_ *cloneSource, err error) {
	if v.Spec.DataSource == "" {
		return nil, nil
	}
	if v.Status.CloneStatus == nil {
		v.Status.CloneStatus = &api.CloneStatus{}
	}
	st := v.Status.CloneStatus
	defer func() {
		kind := api.KindOf(err)
		if err != nil && kind == api.Other {
			return
		}
		was := st.State
		st.State, st.Message = api.CloneInitiated, ""
		if kind != api.Unavailable || err == nil {
			st.WaitingSince = nil
		}
		if err == nil {
			return
		}
		if kind != api.Unavailable {
			st.State = api.CloneFailed
		} else if errors.Is(err, errRestoring) {
			st.WaitingSince = nil // a restore may take longer than the limit
		} else if stalled := p.stalledFor(ctx, v); stalled > 0 {
			st.State, err = api.CloneFailed, api.Errorf(kind, "for %s its source could not be used: %v", stalled, err)
		}
		if st.Message = err.Error(); st.State == api.CloneFailed && was != st.State {
			p.events.Eventf(v, nil, "Warning", "CloneFailed", "Clone", "%s", err)
		}
	}()
	from, err := api.ParseDataSource(v.Spec.DataSource)
	if err != nil {
		return nil, err
	}
	st.Source, st.Snapshot = from.Volume, from.Snapshot
	p.awaitSource(from.Volume, v.Name) // before the search, so that no change in between is missed
	var src api.Volume
	if err := p.getFresh(ctx, types.NamespacedName{Name: from.Volume}, &src); apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.NotFound, "volume %s, which is to be cloned, does not exist", from.Volume)
	} else if err != nil {
		return nil, err
	}
	if err := p.refuseCycle(ctx, v, &src); err != nil {
		return nil, err
	}
	if err := src.RefuseStandby(); err != nil {
		return nil, err
	}
	if src.UsesHiddenImage() { // a snapshot of a volume without members would let the clone stall
		if _, err := p.restoredReplicas(ctx, &src); err != nil {
			return nil, err
		}
	}
	snap, err := p.snapshotToClone(ctx, v, &src, from)
	if err != nil {
		return nil, err
	}
	st.Snapshot = snap.Name
	if snap.Status.RestoreSize > v.Spec.Size {
		return nil, api.Errorf(api.OutOfRange, "the volume's %s are less than the %s of snapshot %s of volume %s: expand "+
			"the volume", api.SizeText(v.Spec.Size), api.SizeText(snap.Status.RestoreSize), snap.Name, src.Name)
	}
	usable, err := p.restoredReplicas(ctx, &src)
	if err != nil {
		return nil, err
	}
	if len(usable) == 0 {
		return nil, api.Errorf(api.Unavailable, "volume %s, which is to be cloned, has no usable replica", src.Name)
	}
	slices.SortStableFunc(usable, func(a, b api.Replica) int { // where the clone may be come first
		in := func(r api.Replica) int {
			if r.Spec.Node == v.Annotations[api.AnnotationPrefer] {
				return -1
			}
			if i := slices.Index(v.Spec.Nodes, r.Spec.Node); i >= 0 {
				return i
			}
			return len(v.Spec.Nodes)
		}
		return in(a) - in(b)
	})
	r := &usable[0]
	o := &cloneSource{snapshot: snap, replica: r, others: usable[1:], image: src.Spec.BackingImage}
	if o.image == "" {
		o.image = r.Labels[api.LabelImage] // of a clone whose spec does not name it
	}
	if o.image != "" && o.image == src.RestoreImage() {
		o.image, o.alone = "", true
	}
	if of := v.Spec.BackingImage; of != "" && api.LabelValue(of) != api.LabelValue(o.image) {
		return nil, api.Errorf(api.Invalid, "the volume names backing image %s, but its data source, volume %s, stands on "+
			"%q: leave backingImage out", of, src.Name, o.image)
	}
	return o, nil
}

// stalledFor returns how long a clone has waited for its source, once the wait exceeds the limit. Before, it requeues
// the clone for the end of the limit.
func (p *volumeReconciler) stalledFor(ctx context.Context, v *api.Volume) time.Duration {
	st := v.Status.CloneStatus
	if st.WaitingSince == nil {
		now := metav1.Now()
		st.WaitingSince = &now
	}
	limit := time.Duration(p.settingNumber(ctx, "clone-stall-timeout")) * time.Minute
	if left := limit - time.Since(st.WaitingSince.Time); limit == 0 || left > 0 {
		p.requeueAfter(v.Name, left)
		return 0
	}
	return limit
}

// refuseCycle refuses a clone whose source waits for the clone.
func (p *volumeReconciler) refuseCycle(ctx context.Context, v, src *api.Volume) error {
	seen := map[string]bool{}
	for at := src; len(at.Status.Members) == 0 && !seen[at.Name]; {
		if at.UID == v.UID {
			return api.Errorf(api.Invalid, "volume %s, which is to be cloned, is to be made from this volume itself", src.Name)
		}
		seen[at.Name] = true
		from, err := api.ParseDataSource(at.Spec.DataSource)
		if err != nil || from.Volume == "" {
			return nil
		}
		at = &api.Volume{}
		if err := p.client.Get(ctx, types.NamespacedName{Name: from.Volume}, at); err != nil {
			return client.IgnoreNotFound(err)
		}
	}
	return nil
}

// usableReplicas lists the members of a volume from which a clone can start.
func (p *volumeReconciler) usableReplicas(ctx context.Context, v *api.Volume) ([]api.Replica, error) {
	var list api.ReplicaList
	if err := p.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(r api.Replica) bool {
		return r.Spec.VolumeUID != v.Status.UID || !slices.Contains(v.Status.Members, r.Name) ||
			r.Status.Mode != api.ReplicaCurrent ||
			len(v.Status.Members) > 1 && (p.isSilent(r.Spec.Node) || p.deadDisk(ctx)(&r) != "")
	}), nil
}

// placeClone places the replicas of a clone: each on the disk of a member of the source, to share its layers. If no
// such disk takes a replica, the clone gets a single replica near a member, and rebuilds add the others.
func (p *volumeReconciler) placeClone(ctx context.Context, v *api.Volume, from *cloneSource) ([]api.Replica, error) {
	var mine []api.Replica
	all := append([]api.Replica{*from.replica}, from.others...)
	if v.Spec.CloneMode != api.CloneFull {
		for i := range all {
			if len(mine) >= int(v.Spec.NumberOfReplicas) {
				break
			}
			o := *from
			o.replica = &all[i]
			r, err := p.placeOne(ctx, v, nil, &o, mine, func(t *clusterView) { t.strict = true })
			if api.Is(err, api.Full) {
				continue
			}
			if err != nil {
				return mine, err
			}
			mine = append(mine, *r)
		}
	}
	var last error
	for i := 0; len(mine) == 0 && i < len(all); i++ {
		o := *from
		o.replica = &all[i]
		r, err := p.placeOne(ctx, v, nil, &o, nil)
		if err == nil {
			return []api.Replica{*r}, nil
		}
		if last == nil || !api.Is(err, api.Full) {
			last = err
		}
		if !api.Is(err, api.Full) {
			break
		}
	}
	if len(mine) == 0 && api.Is(last, api.Full) {
		r, err := p.placeAway(ctx, v, from, all)
		if err != nil {
			return nil, err
		}
		if r != nil {
			return []api.Replica{*r}, nil
		}
	}
	return mine, last
}

// placeAway places a transient replica over the source's layers, for a clone that may not stay near its source. Every
// node can use the clone at once; the planner replaces the replica as on a drained node. Nil: no other disk would
// take the clone.
func (p *volumeReconciler) placeAway(ctx context.Context, v *api.Volume, from *cloneSource,
	all []api.Replica) (*api.Replica, error) {
	if v.Spec.DataLocality == api.LocalityStrict {
		return nil, nil // a strict-local clone stays with its source
	}
	t, failed, err := p.viewCluster(ctx, v, baseImage(v, from, nil), nil)
	if err != nil {
		return nil, err
	}
	spots, _ := t.candidates(v)
	if *failed != nil || len(spots) == 0 {
		return nil, *failed
	}
	for i := range all {
		o := *from
		o.replica = &all[i]
		r, err := p.placeOne(ctx, v, nil, &o, nil, func(t *clusterView) { t.transient, t.strict = true, true })
		if err == nil {
			p.events.Eventf(v, r, "Normal", "CloneGoesFar", "Clone", "the clone cannot stay on node %s of its source: the "+
				"node serves the clone until other nodes have its replicas", r.Spec.Node)
		}
		if !api.Is(err, api.Full) {
			return r, err
		}
	}
	return nil, nil
}

// awaitSource makes the next reconcile of a source wake the clone: the cache may lack the source's replica.
func (p *volumeReconciler) awaitSource(source, clone string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.clones[source] == nil {
		p.clones[source] = map[string]bool{}
	}
	p.clones[source][clone] = true
}

// wakeClones wakes the clones that wait for a source, each once.
func (p *volumeReconciler) wakeClones(source string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for clone := range p.clones[source] {
		if p.queue != nil {
			p.queue.Add(watch.Request(clone))
		}
	}
	delete(p.clones, source)
}

// snapshotToClone returns the snapshot from which a clone starts.
func (p *volumeReconciler) snapshotToClone(ctx context.Context, v, src *api.Volume,
	from api.DataSource) (*api.Snapshot, error) {
	name := from.Snapshot
	if name == "" {
		name = cloneSnapshot(v)
	}
	var snap api.Snapshot
	err := p.getFresh(ctx, types.NamespacedName{Name: name}, &snap)
	switch {
	case apierrors.IsNotFound(err) && from.Snapshot == "":
		if src.DeletionTimestamp != nil {
			return nil, api.Errorf(api.NotFound, "volume %s, which is to be cloned, is being deleted", src.Name)
		}
		if src.Spec.Size > v.Spec.Size {
			return nil, api.Errorf(api.OutOfRange, "the volume's %s are less than the %s of volume %s, which is to be cloned: "+
				"expand the volume", api.SizeText(v.Spec.Size), api.SizeText(src.Spec.Size), src.Name)
		}
		made := api.NewSnapshot(src, name)
		made.Spec.Labels = map[string]string{api.LabelClone: v.Name}
		if err := p.client.Create(ctx, made); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("snapshot %s: %w", name, err)
		}
		return nil, errSoon
	case apierrors.IsNotFound(err) || (err == nil || errors.Is(err, errSoon)) && snap.Spec.Volume != src.Name:
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s does not exist", name, src.Name)
	case err != nil:
		return nil, err
	case snap.DeletionTimestamp != nil && from.Snapshot == "":
		return nil, errSoon // of a try before
	case snap.DeletionTimestamp != nil:
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s is being deleted", name, src.Name)
	case snap.Status.ReadyToUse && snap.Status.VolumeUID == src.Status.UID:
		return &snap, nil
	case snap.Status.CreationTime != "" && strings.HasPrefix(snap.Status.Error, "lost"):
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s: %s", name, src.Name, snap.Status.Error)
	case snap.Status.Error != "":
		return nil, api.Errorf(api.Unavailable, "snapshot %s of volume %s is not ready: %s", name, src.Name,
			snap.Status.Error)
	}
	return nil, errSoon
}

// getFresh reads an object. If the cache lacks the object, getFresh asks the API, because a clone must not fail for
// an old cache. Unavailable: the object exists, and an event follows when the cache has it.
func (p *volumeReconciler) getFresh(ctx context.Context, key types.NamespacedName, o client.Object) error {
	err := p.client.Get(ctx, key, o)
	if !apierrors.IsNotFound(err) {
		return err
	}
	if err := p.reader.Get(ctx, key, o); err != nil {
		return err
	}
	return errSoon
}

// errSoon means that a snapshot is in progress; no status shows the error.
var errSoon = api.Errorf(api.Unavailable, "waits for the snapshot")

// cloneSnapshot names the snapshot that a clone of a volume takes; each clone has another name.
func cloneSnapshot(v *api.Volume) string { return "clone-" + string(v.Status.UID) }

// handleFailedReplica fails the clone of a failed replica, until the user asks for a retry.
func (p *volumeReconciler) handleFailedReplica(ctx context.Context, v *api.Volume, r *api.Replica) error {
	c := v.Status.CloneStatus
	why := api.Errorf(api.Corrupt, "replica %s: %s", r.Name, r.Status.Message)
	if c == nil {
		return why
	}
	if token := v.Annotations[api.AnnotationRetry]; token != "" && token != c.Retried || r.DeletionTimestamp != nil {
		if err := p.client.Delete(ctx, r); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("replica %s: %w", r.Name, err)
		}
		c.Retried, c.State, c.Message, c.Progress = token, api.CloneInitiated, "", 0
		v.Status.State, v.Status.Robustness, v.Status.Message = api.VolumeCreating, api.RobustUnknown, ""
		return errSoon
	}
	if c.State != api.CloneFailed {
		p.events.Eventf(v, r, "Warning", "CloneFailed", "Clone", "%s", r.Status.Message)
	}
	c.State, c.Message = api.CloneFailed, r.Status.Message
	return why
}

// reportCopyProgress copies the progress of a layer copy into the clone's status.
func reportCopyProgress(v *api.Volume, mine []api.Replica) {
	c := v.Status.CloneStatus
	if c == nil {
		return
	}
	if c.State == api.CloneCompleted {
		c.Progress = 100
	}
	for i := range mine {
		if st := mine[i].Status.Copy; st != nil {
			c.Progress = st.Progress
		}
	}
}

// deleteCloneSnapshot deletes the snapshot that a clone took.
func (p *volumeReconciler) deleteCloneSnapshot(ctx context.Context, v *api.Volume) error {
	if !strings.HasPrefix(v.Spec.DataSource, "vol://") || v.Status.UID == "" {
		return nil
	}
	var snap api.Snapshot
	err := p.client.Get(ctx, types.NamespacedName{Name: cloneSnapshot(v)}, &snap)
	if err != nil || snap.DeletionTimestamp != nil {
		return client.IgnoreNotFound(err)
	}
	if err := p.client.Delete(ctx, &snap); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("snapshot %s: %w", snap.Name, err)
	}
	return nil
}

// volumesOfSnapshot requeues the volume of a snapshot and the clones that wait for the snapshot.
func (p *volumeReconciler) volumesOfSnapshot(ctx context.Context, o client.Object) []reconcile.Request {
	s := o.(*api.Snapshot)
	all := watch.Requests(s.Spec.Volume)
	if clone := s.Spec.Labels[api.LabelClone]; clone != "" {
		return append(all, watch.Requests(clone)...)
	}
	return append(all, p.clonesOf(ctx, api.DataSource{Volume: s.Spec.Volume, Snapshot: s.Name})...)
}

// clonesOf requeues volumes without members whose data source is from.
func (p *volumeReconciler) clonesOf(ctx context.Context, from api.DataSource) []reconcile.Request {
	var vols api.VolumeList
	if err := p.client.List(ctx, &vols, client.MatchingFields{watch.BySource: from.String()},
		client.UnsafeDisableDeepCopy); err != nil {
		p.log.Error("clones cannot be listed", "source", from.String(), "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range vols.Items {
		if len(vols.Items[i].Status.Members) == 0 {
			all = append(all, watch.Requests(vols.Items[i].Name)...)
		}
	}
	return all
}

// keptSnapshots names the snapshots that keep the replicas of a deleted volume.
func (p *volumeReconciler) keptSnapshots(ctx context.Context, v *api.Volume) ([]string, error) {
	var list api.SnapshotList
	if err := p.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return nil, err
	}
	var names []string
	for i := range list.Items {
		st := &list.Items[i].Status
		if st.VolumeUID == v.Status.UID || st.VolumeUID == "" && st.Error == "" {
			names = append(names, list.Items[i].Name)
		}
	}
	return names, nil
}
