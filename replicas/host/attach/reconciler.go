package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/volumelock"
	"drover.io/drover/replicas/stack"
)

// reconciler reconciles the Attachments of this node.
type reconciler struct{ *Attachments }

// Reconcile attaches or detaches one volume.
func (as *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var a api.Attachment
	err := as.Client.Get(ctx, req.NamespacedName, &a)
	if err != nil && !apierrors.IsNotFound(err) {
		return reconcile.Result{}, err
	}
	if err != nil || a.Spec.Node != as.Name {
		return as.detachOrphan(ctx, req.Name)
	}
	if as.Resuming(a.Spec.Volume) {
		return reconcile.Result{RequeueAfter: localnode.ResumePause}, nil
	}
	if s := as.Session(a.Spec.Volume); s != nil && a.DeletionTimestamp != nil && a.Annotations[api.AnnotationForce] != "" {
		if err := s.dev.Abort(); err != nil { // before the lock, whose owner may wait for a disk that hangs
			as.Log.Warn("a device cannot be taken away by force yet", "volume", s.Volume, "err", err)
		}
	}
	unlock, ok := as.Locks.LockSoon(a.Spec.Volume)
	if !ok {
		return reconcile.Result{RequeueAfter: volumelock.Again}, nil
	}
	defer unlock()
	old := a.DeepCopy()
	if a.DeletionTimestamp != nil {
		if !controllerutil.ContainsFinalizer(&a, api.Finalizer) {
			return reconcile.Result{}, nil
		}
		err = as.detach(ctx, &a)
	} else {
		err = as.attach(ctx, &a)
	}
	if apierrors.IsConflict(err) { // another writer was faster; no user need know
		return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
	}
	if err != nil {
		a.Status.Message = err.Error()
	}
	if len(a.Finalizers) > 0 && !equality.Semantic.DeepEqual(old.Status, a.Status) {
		if serr := as.Client.Status().Update(ctx, &a); serr != nil {
			if apierrors.IsConflict(serr) || apierrors.IsNotFound(serr) {
				return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
			}
			return reconcile.Result{}, fmt.Errorf("status of attachment %s: %w", a.Name, serr)
		}
	}
	switch {
	case err == nil || ctx.Err() != nil:
		return reconcile.Result{}, nil
	case api.Is(err, api.NotFound) || api.Is(err, api.Unsupported) || api.Is(err, api.Denied):
		return reconcile.Result{}, nil // a change of the volume, a replica or the node's disks wakes the loop
	case api.Is(err, api.Full): // each try takes an epoch, and no event reports room
		return reconcile.Result{RequeueAfter: 5 * time.Second}, nil
	case api.KindOf(err) == api.InUse || api.KindOf(err) == api.Busy:
		return reconcile.Result{RequeueAfter: time.Second}, nil // no event reports a free device
	}
	as.Log.Warn("attachment", "volume", a.Spec.Volume, "err", err)
	return reconcile.Result{}, err
}

// detachOrphan detaches a volume whose Attachment disappeared without this node's finalizer.
func (as *reconciler) detachOrphan(ctx context.Context, volume string) (reconcile.Result, error) {
	if as.Resuming(volume) {
		return reconcile.Result{RequeueAfter: localnode.ResumePause}, nil
	}
	unlock, ok := as.Locks.LockSoon(volume)
	if !ok {
		return reconcile.Result{RequeueAfter: volumelock.Again}, nil
	}
	defer unlock()
	s := as.Session(volume)
	if s == nil {
		return reconcile.Result{}, nil
	}
	// The cache may be behind.
	var a api.Attachment
	err := as.Reader.Get(ctx, client.ObjectKey{Name: volume}, &a)
	if err == nil && a.Spec.Node == as.Name {
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	if err := as.detachSession(ctx, s); err != nil {
		as.Log.Warn("a device that no attachment wants cannot be detached yet", "volume", volume, "err", err)
		return reconcile.Result{RequeueAfter: 5 * time.Second}, nil
	}
	return reconcile.Result{}, nil
}

// attach makes the device, or reports the existing one.
func (as *reconciler) attach(ctx context.Context, a *api.Attachment) error {
	if controllerutil.AddFinalizer(a, api.Finalizer) {
		st := a.Status.DeepCopy()
		if err := as.Client.Update(ctx, a); err != nil {
			return err
		}
		a.Status = *st
	}
	s := as.Session(a.Spec.Volume)
	if s != nil {
		other, err := as.isReplaced(ctx, s.Volume, s.VolumeUID)
		if err == nil && other {
			s, err = nil, as.detachSession(ctx, s)
		}
		if err != nil {
			return notReady(a, err)
		}
	}
	if s != nil && (s.fence.Load() != nil || s.ReadOnly != a.Spec.ReadOnly && a.Status.Epoch != s.Epoch) {
		return as.renewSession(ctx, a, s)
	}
	if s == nil {
		var err error
		if s, err = as.createSession(ctx, a); err != nil {
			return notReady(a, err)
		}
		as.Events.Eventf(a, nil, "Normal", "Attached", "Attach", "volume %s is %s on %s", a.Spec.Volume, s.dev.Path(),
			as.Name)
		as.reportLostDevices(ctx, a, s.dev.Path())
	}
	if err := as.checkSuperseded(ctx, s); err != nil {
		return err
	}
	told := a.Status.Ready && a.Status.Epoch == s.Epoch
	if a.Status.Epoch != s.Epoch { // the status is of another device
		a.Status.Blank = s.blank
	}
	a.Status.Ready, a.Status.Device, a.Status.Size = true, s.dev.Path(), s.dev.Spec().Size
	a.Status.Epoch, a.Status.Message = s.Epoch, as.apiBehind(ctx, s)
	a.Status.Rebuilds = s.listRebuilds()
	api.SetCondition(&a.Status.Conditions, a.Generation, api.ConditionReady, true, "Attached", "")
	as.reportSpace(ctx, a, s)
	as.reportSource(a, s)
	as.startTrim(ctx, a, s)
	if err := as.reportUsed(ctx, s, false); err != nil && !apierrors.IsConflict(err) {
		return err
	}
	if !told { // an expansion may take long, or fail for long: the device can be used meanwhile
		s.wake()
		return nil
	}
	err := as.expandVolume(ctx, s)
	a.Status.Size = s.dev.Spec().Size
	return err
}

// notReady reports why the volume has no device.
func notReady(a *api.Attachment, why error) error {
	a.Status.Ready, a.Status.Device, a.Status.Size = false, "", 0
	api.SetCondition(&a.Status.Conditions, a.Generation, api.ConditionReady, false, "NotAttached", why.Error())
	return why
}

// isReplaced reports whether the API has another volume under the name of the served volume: a user removed the objects
// by force, or lost the objects, and created new ones. While the API does not answer, isReplaced reports false.
func (as *reconciler) isReplaced(ctx context.Context, name string, uid api.UID) (bool, error) {
	var v api.Volume
	key := client.ObjectKey{Name: name}
	if as.Client.Get(ctx, key, &v) != nil || v.Status.UID == uid {
		return false, nil
	}
	if err := as.Reader.Get(ctx, key, &v); err != nil || v.Status.UID == uid { // the cache may be behind
		return false, nil
	}
	if v.Status.UID == "" {
		return false, api.Errorf(api.Unavailable, "volume %s is not ready yet", name)
	}
	return true, nil
}

// reportSpace reports whether writes wait for room.
func (as *reconciler) reportSpace(ctx context.Context, a *api.Attachment, s *Session) {
	if !s.full.Load() {
		if api.SetCondition(&a.Status.Conditions, a.Generation, api.ConditionSpace, true, "Room", "") &&
			s.wasFull {
			as.Events.Eventf(a, nil, "Normal", "SpaceAvailable", "Write", "a disk of volume %s has room again, writes "+
				"continue", s.Volume)
		}
		s.wasFull = false
		return
	}
	msg := as.fullDisks(ctx, s) + ": writes to the volume wait; make room there"
	a.Status.Message = msg
	if api.SetCondition(&a.Status.Conditions, a.Generation, api.ConditionSpace, false, "DiskFull", msg) {
		as.Events.Eventf(a, nil, "Warning", "DiskFull", "Write", "%s", msg)
	}
	s.wasFull = true
}

// reportSource reports whether reads wait for the sources of layers.
func (as *reconciler) reportSource(a *api.Attachment, s *Session) {
	m, r := s.memberHere()
	var layers []stack.RemoteLayer
	if r != nil {
		if s.noting.Load() == r {
			return
		}
		layers = r.Remote()
	}
	lost := slices.IndexFunc(layers, func(l stack.RemoteLayer) bool { return l.Why != nil })
	if lost < 0 {
		if meta.RemoveStatusCondition(&a.Status.Conditions, api.ConditionSourceLost) {
			as.Events.Eventf(a, nil, "Normal", "SourceBack", "Read", "all layers can be read, reads continue")
		}
		return
	}
	msg := fmt.Sprintf("reads of the image wait, which is not on node %s yet: %v", as.Name, layers[lost].Why)
	if path := layers[lost].From.Path; path != "" {
		msg = fmt.Sprintf("disk %s of node %s fails: reads of its layers wait until they are copied to disk %s",
			path, as.Name, m.Path)
	}
	a.Status.Message = msg
	if api.SetCondition(&a.Status.Conditions, a.Generation, api.ConditionSourceLost, true, "DiskFailed", msg) {
		as.Events.Eventf(a, nil, "Warning", "SourceLost", "Read", "%s", msg)
	}
}

// checkSuperseded returns an error if the API names a newer epoch than a resumed session. While the API does not
// answer, the Session counts as current.
func (as *reconciler) checkSuperseded(ctx context.Context, s *Session) error {
	var v api.Volume
	if err := as.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID == s.VolumeUID && v.Status.Epoch > s.askedEpoch() {
		err := api.Errorf(api.Denied, "the volume is at epoch %d, this engine at %d: it was taken over from node %s",
			v.Status.Epoch, s.askedEpoch(), v.Status.EngineNode)
		s.fence.CompareAndSwap(nil, &err)
		s.wake()
		return err
	}
	if v.Status.UID == s.VolumeUID {
		as.writeRecord(s, &v)
	}
	return nil
}

// apiBehind explains to users that the API went back in time: the API has an older epoch than the engine.
func (as *reconciler) apiBehind(ctx context.Context, s *Session) string {
	var v api.Volume
	key := client.ObjectKey{Name: s.Volume}
	if as.Client.Get(ctx, key, &v) != nil || v.Status.Epoch >= s.askedEpoch() ||
		as.Reader.Get(ctx, key, &v) != nil || v.Status.Epoch >= s.askedEpoch() {
		return ""
	}
	return fmt.Sprintf("the volume is served in epoch %d and the API says %d: the API went back in time. It cannot be "+
		"attached again after a detach until a newer state of the API is restored", s.askedEpoch(), v.Status.Epoch)
}

// renewSession ends a session that cannot continue; the next reconciliation makes a new session.
func (as *reconciler) renewSession(ctx context.Context, a *api.Attachment, s *Session) error {
	a.Status.Ready, a.Status.Device, a.Status.Size = false, "", 0
	if why := s.fence.Load(); why != nil {
		as.Events.Eventf(a, nil, "Warning", "Fenced", "Attach", "%s", *why)
		if err := s.dev.Abort(); err != nil {
			return err
		}
	}
	if err := as.detachSession(ctx, s); err != nil {
		return err
	}
	as.Wake(s.Volume)
	return nil
}

// createSession claims the volume for this node and makes its device, or resumes a held device.
func (as *reconciler) createSession(ctx context.Context, a *api.Attachment) (*Session, error) {
	for _, held := range as.host.Held() { // a device of the process before, not resumed yet
		if held.Name != a.Spec.Volume {
			continue
		}
		other, err := as.isReplaced(ctx, held.Name, api.UID(held.Key))
		if err != nil {
			return nil, err
		}
		s, err := as.resumeLocked(ctx, held)
		if !other {
			return s, err
		}
		if err == nil {
			err = as.detachSession(ctx, s)
		}
		if err != nil {
			return nil, fmt.Errorf("volume %s: a former volume of the same name: %w", held.Name, err)
		}
	}
	var v api.Volume
	if err := as.Reader.Get(ctx, client.ObjectKey{Name: a.Spec.Volume}, &v); apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.NotFound, "volume %s does not exist", a.Spec.Volume)
	} else if err != nil {
		return nil, err
	}
	switch {
	case v.DeletionTimestamp != nil:
		return nil, api.Errorf(api.NotFound, "volume %s is being deleted", v.Name)
	case v.RefuseStandby() != nil:
		return nil, v.RefuseStandby()
	case len(v.Status.Members) == 0:
		return nil, api.Errorf(api.NotFound, "volume %s is not ready yet: %s", v.Name, v.Status.Message)
	}
	if err := as.stillWanted(ctx, a); err != nil {
		return nil, err
	}
	if err := as.memberReverting(ctx, &v); err != nil {
		return nil, err
	}
	if err := as.checkLocality(ctx, &v); err != nil {
		return nil, err
	}
	return as.claimDevice(ctx, a, &v)
}

// claimDevice claims a volume for this node and makes its device.
func (as *reconciler) claimDevice(ctx context.Context, a *api.Attachment, v *api.Volume) (*Session, error) {
	list, err := as.probeMembers(ctx, v)
	if err != nil {
		return nil, err
	}
	// The engine of a node that only the API does not reach may keep its own member open without end.
	for i := range list {
		f := &list[i]
		if !api.Is(f.err, api.Busy) || f.spec.Node == as.Name {
			continue
		}
		if quiet, err := as.Silent(ctx, f.spec.Node); err != nil {
			return nil, err
		} else if quiet {
			f.held, f.err = true, api.Errorf(api.Unavailable, "node %s gives no sign of life: %v", f.spec.Node, f.err)
		}
	}
	take, err := selectMembers(v, list)
	if err != nil {
		return nil, err
	}
	was := v.Status.Members
	b, size, err := as.claimVolume(ctx, v, take)
	if err != nil {
		return nil, err
	}
	for _, f := range list {
		if slices.Contains(was, f.spec.Name) && !slices.Contains(v.Status.Members, f.spec.Name) {
			as.Events.Eventf(v, nil, "Warning", "ReplicaDropped", "Attach", "replica %s is not current any more: %v",
				f.spec.Name, orRestarted(f.err))
		}
	}
	b.ReadOnly = a.Spec.ReadOnly
	s, err := as.openSession(ctx, b, size, true)
	if err != nil {
		return nil, errors.Join(err, as.releaseClaim(ctx, v.Name, b.Epoch))
	}
	as.startRebuilds(s)
	s.blank = !slices.ContainsFunc(take, func(f memberProbe) bool { return !f.info.Empty })
	spec, err := s.deviceSpec()
	if err == nil {
		s.dev, err = as.host.Attach(ctx, spec, s.loop.Loop, s.engine)
	}
	if err != nil {
		return nil, errors.Join(err, as.closeSession(s), as.releaseClaim(ctx, s.Volume, s.askedEpoch()))
	}
	if err := as.writeBlob(s); err != nil { // the members may have changed since the blob was read
		as.Log.Error("the device record is stale", "volume", s.Volume, "err", err)
	}
	as.writeRecord(s, v)
	as.addSession(s)
	as.Log.Info("volume attached", "volume", s.Volume, "device", s.dev.Path(), "epoch", s.Epoch,
		"members", v.Status.Members)
	return s, nil
}

// stillWanted asks the API itself whether a volume is still to be attached here. A node that was cut off may learn from
// the members that the engine has ended before the cache has the new attachment elsewhere: the node would claim the
// volume again. The caller has read the volume before: each later attach changes the volume, so that the claim fails.
func (as *reconciler) stillWanted(ctx context.Context, a *api.Attachment) error {
	var now api.Attachment
	err := as.Reader.Get(ctx, client.ObjectKeyFromObject(a), &now)
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	if err != nil || now.UID != a.UID || now.Spec.Node != as.Name || now.DeletionTimestamp != nil {
		return api.Errorf(api.Busy, "volume %s is not to be attached to node %s any more", a.Spec.Volume, as.Name)
	}
	return nil
}

// expandVolume expands the members and the device once the spec of every replica allows the new size.
func (as *reconciler) expandVolume(ctx context.Context, s *Session) error {
	var list api.ReplicaList
	if err := as.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: s.Volume}); err != nil {
		return err
	}
	_, members, err := s.engine.Epoch(ctx)
	if err != nil {
		return err
	}
	size, n := int64(0), 0
	for i := range list.Items {
		if r := &list.Items[i]; slices.Contains(members, string(r.Spec.UID)) {
			n++
			if size == 0 || r.Spec.Size < size {
				size = r.Spec.Size
			}
		}
	}
	if n < len(members) || size <= s.dev.Spec().Size {
		return nil
	}
	return s.expand(ctx, size)
}
