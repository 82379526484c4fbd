package snapshot

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/volumelock"
	"drover.io/drover/replicas/stack"
)

// reconciler reconciles the Snapshots of volumes for which this node is responsible.
type reconciler struct{ *Snapshots }

// Reconcile reconciles one snapshot.
func (ss *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var s api.Snapshot
	if err := ss.Client.Get(ctx, req.NamespacedName, &s); err != nil {
		if apierrors.IsNotFound(err) {
			ss.waiting.Set(req.Name, false)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if ss.attachments.Resuming(s.Spec.Volume) {
		return reconcile.Result{RequeueAfter: localnode.ResumePause}, nil
	}
	unlock, ok := ss.Locks.LockSoon(s.Spec.Volume)
	if !ok {
		return reconcile.Result{RequeueAfter: volumelock.Again}, nil
	}
	defer unlock()
	v, mine, err := ss.volumeOf(ctx, &s)
	if err != nil {
		return reconcile.Result{}, err
	}
	if !mine { // another node is responsible, or the controller
		if v != nil && (!s.Status.ReadyToUse || s.DeletionTimestamp != nil) && ss.MayBecomeResponsible(ctx, v) {
			return reconcile.Result{RequeueAfter: ss.SilentAfter(ctx) / 2}, nil // no event reports a silent node
		}
		return reconcile.Result{}, nil
	}
	old := s.DeepCopy()
	ss.waiting.Set(s.Name, true) // before the reconcile, which may miss a later change
	if s.DeletionTimestamp != nil {
		err = ss.removeSnapshot(ctx, &s, v)
	} else {
		err = ss.ensureCut(ctx, &s, v)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
	}
	ss.waiting.Set(s.Name, api.Is(err, api.Unavailable))
	s.Status.Error = ""
	switch {
	case old.Status.ReadyToUse && s.DeletionTimestamp == nil &&
		(api.Is(err, api.Busy) || api.Is(err, api.Unavailable) && len(v.Status.Members) > 1):
		// The status stays for the moment.
		s.Status = *old.Status.DeepCopy()
	case err != nil:
		s.Status.ReadyToUse, s.Status.Error = false, err.Error()
	}
	if len(s.Finalizers) > 0 && !equality.Semantic.DeepEqual(old.Status, s.Status) {
		if serr := ss.Client.Status().Update(ctx, &s); serr != nil {
			if apierrors.IsConflict(serr) || apierrors.IsNotFound(serr) {
				return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
			}
			return reconcile.Result{}, fmt.Errorf("status of snapshot %s: %w", s.Name, serr)
		}
	}
	switch api.KindOf(err) {
	case api.Other:
		if err != nil {
			ss.Log.Warn("snapshot", "snapshot", s.Name, "volume", s.Spec.Volume, "err", err)
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

// busyAgain is the pause before the next try of a busy volume: longer after a try that held I/O, or would have.
func busyAgain(err error) time.Duration {
	if errors.Is(err, stack.ErrUnderWay) {
		return 5 * time.Second
	}
	return 100 * time.Millisecond
}

// volumeOf is the snapshot's volume, and whether this node is responsible for the volume. Nil: the volume does not
// exist.
func (ss *Snapshots) volumeOf(ctx context.Context, s *api.Snapshot) (_ *api.Volume, mine bool, err error) {
	var v api.Volume
	if err := ss.Client.Get(ctx, client.ObjectKey{Name: s.Spec.Volume}, &v); err != nil {
		return nil, false, client.IgnoreNotFound(err)
	}
	if v.Status.UID == "" || s.Status.VolumeUID != "" && s.Status.VolumeUID != v.Status.UID ||
		len(v.Status.Members) == 0 {
		return nil, false, nil
	}
	node, _, err := ss.ResponsibleNode(ctx, &v)
	return &v, err == nil && node == ss.Name, err
}

// ensureCut cuts the snapshot unless the members have the snapshot already, and reports the facts.
func (ss *Snapshots) ensureCut(ctx context.Context, s *api.Snapshot, v *api.Volume) (err error) {
	if s.Adorn(v) { // before the snapshot exists
		st := s.Status.DeepCopy()
		if err := ss.Client.Update(ctx, s); err != nil {
			return err
		}
		s.Status = *st
	}
	local, err := ss.MemberOn(ctx, v, ss.Name)
	if err != nil {
		return err
	}
	if s.Status.CreationTime != "" { // the API reported the snapshot, so every member has it
		if local == nil && !ss.attachments.HasSession(v.Name) {
			return nil
		}
		if err := ss.reportFrom(ctx, s, v, local, s.Status.CreationTime); !api.Is(err, api.Busy) {
			return err
		}
	}
	h, err := ss.openEngine(ctx, v)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.end()) }()
	tree, err := h.readTree(ctx)
	if err != nil {
		return err
	}
	k, err := ss.findSnapshot(s, tree)
	if err != nil {
		return err
	}
	if s.Spec.Group != "" && s.Spec.CreateSnapshot && s.Status.CreationTime == "" {
		if waits, err := ss.awaitsGroup(ctx, s, k); waits || err != nil {
			return err
		}
	}
	if k == nil {
		if k, err = ss.cutMembers(ctx, s, v, h, tree); err != nil {
			return err
		}
	}
	if local != nil && h.local == local.Spec.UID {
		if err := ss.reportFrom(ctx, s, v, local, formatInstant(k.Created)); !api.Is(err, api.Busy) {
			return err
		}
	}
	sizes, err := h.Sizes(ctx)
	if err != nil {
		return err
	}
	ss.reportFacts(s, v, k, sizes[k.UID])
	s.Status.ReadyToUse = true
	if h.local == "" { // the owner is the node of a member
		if r, err := ss.MemberOn(ctx, v, ""); err == nil && r != nil {
			s.Status.OwnerID = r.Spec.Node
		}
	}
	return nil
}

// reportFrom writes the snapshot of an instant into the status, as the member r on this node, which may be nil, has the
// snapshot. Busy: the member lacks the snapshot, or may lack it.
func (ss *Snapshots) reportFrom(ctx context.Context, s *api.Snapshot, v *api.Volume, r *api.Replica,
	created string) error {
	if r == nil || r.Status.Mode != api.ReplicaCurrent {
		return api.Errorf(api.Busy, "snapshot %s: the other members have to be asked", s.Name)
	}
	disk, err := ss.replicas.Disk(ctx, r.Spec.Disk)
	if err != nil {
		return unreadable(v, r, err)
	}
	for was := ""; ; {
		tree, err := ss.TreeOf(r, disk)
		if err != nil {
			return unreadable(v, r, err)
		}
		k, err := ss.findSnapshot(s, tree)
		if err != nil {
			return err
		}
		if k == nil || formatInstant(k.Created) != created || k.Layer == was {
			ss.forgetTree(r.Spec.UID)
			return api.Errorf(api.Busy, "snapshot %s: the members have to be asked", s.Name)
		}
		size, used, err := disk.LayerSize(k.Layer)
		if api.Is(err, api.NotFound) { // merged a moment ago: the stack names the new layer
			was = k.Layer
			ss.forgetTree(r.Spec.UID)
			continue
		}
		if err != nil {
			return unreadable(v, r, err)
		}
		ss.reportFacts(s, v, k, stack.LayerSize{Size: size, Used: used, Root: disk.LayerRoot(k.Layer)})
		s.Status.ReadyToUse = true
		return nil
	}
}

// unreadable is the error for a member whose disk cannot be read. Unavailable: other members have the snapshot.
func unreadable(v *api.Volume, r *api.Replica, why error) error {
	if len(v.Status.Members) < 2 {
		return why
	}
	return api.Errorf(api.Unavailable, "replica %s cannot be read: %w", r.Name, why)
}

// uidOf is the snapshot's uid on the disk: the uid of the object, which exists before the first write and is never used
// twice. A snapshot found on a disk has the uid of its first object.
func uidOf(s *api.Snapshot) api.UID {
	if s.Status.UID != "" {
		return s.Status.UID
	}
	return api.UID(s.UID)
}

// findSnapshot finds the snapshot in the tree; nil: the stack lacks the snapshot. The object of a snapshot found on a
// disk finds the snapshot by name.
func (ss *Snapshots) findSnapshot(s *api.Snapshot, tree *Tree) (*node, error) {
	if k := tree.all[string(uidOf(s))]; k != nil {
		return k, nil
	}
	if s.Status.UID != "" {
		return nil, nil
	}
	for _, k := range tree.all {
		if k.Name != s.Name {
			continue
		}
		if s.Spec.CreateSnapshot {
			return nil, api.Errorf(api.Exists, "volume %s has another snapshot %s, of %s: choose another name",
				s.Spec.Volume, s.Name, formatInstant(k.Created))
		}
		return k, nil
	}
	return nil, nil
}

// reportFacts writes the facts of a snapshot into the status.
func (ss *Snapshots) reportFacts(s *api.Snapshot, v *api.Volume, k *node, is stack.LayerSize) {
	st := &s.Status
	if st.RestoreSize == 0 {
		st.RestoreSize = is.Size
	}
	st.UID, st.Layer, st.VolumeUID = api.UID(k.UID), api.UID(k.Layer), v.Status.UID
	st.Parent, st.Children, st.Labels = k.parent, k.children, s.Spec.Labels
	st.CreationTime, st.Size, st.OwnerID = formatInstant(k.Created), is.Used, ss.Name
	st.UserCreated = s.Spec.CreateSnapshot && s.Spec.Labels[api.LabelClone] == ""
	st.MarkRemoved = false
	st.SizeText, st.RestoreSizeText = api.SizeText(is.Used), api.SizeText(st.RestoreSize)
	if st.Checksum = ""; is.Root != "" {
		st.Checksum = "sha256:" + is.Root
	}
}
