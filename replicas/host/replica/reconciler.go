package replica

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/volumelock"
)

// rebuildAgain is when a replica is requeued whose volume an offline engine of this node rebuilds.
const rebuildAgain = 3 * time.Second

// Reconcile reconciles one replica.
func (rs *Replicas) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var r api.Replica
	if err := rs.Client.Get(ctx, req.NamespacedName, &r); err != nil {
		if apierrors.IsNotFound(err) {
			rs.waiting.Set(req.Name, false)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if at := r.Status.Mode; r.DeletionTimestamp == nil && (at == api.ReplicaCurrent || at == api.ReplicaStale) &&
		r.Status.Size >= r.Spec.Size && r.Spec.Revert == nil && rs.attachments.Rebuilding(r.Spec.Volume) {
		return reconcile.Result{RequeueAfter: rebuildAgain}, nil // the reconciliation would interrupt the rebuild
	}
	if rs.attachments.Resuming(r.Spec.Volume) {
		return reconcile.Result{RequeueAfter: localnode.ResumePause}, nil
	}
	old := r.DeepCopy()
	if err := rs.awaitMerge(ctx, &r); err != nil {
		if r.Status.Message = err.Error(); r.Status.Mode == "" {
			r.Status.Mode = api.ReplicaCreating
		}
		if again, err := rs.writeStatus(ctx, old, &r); again > 0 || err != nil {
			return reconcile.Result{RequeueAfter: again}, err
		}
		return reconcile.Result{RequeueAfter: mergeLook}, nil
	}
	unlock, ok := rs.Locks.LockSoon(r.Spec.Volume)
	if !ok {
		return reconcile.Result{RequeueAfter: volumelock.Again}, nil
	}
	defer unlock()
	rs.waiting.Set(r.Name, true) // before the reconcile, which may miss a later change
	err := rs.reconcile(ctx, &r)
	waits := api.Is(err, api.Unavailable) || api.Is(err, api.NotFound)
	rs.waiting.Set(r.Name, waits || rs.readsElsewhere(&r) || r.Status.Fetching != "")
	if err != nil {
		r.Status.Message = err.Error()
		if r.Status.Mode == "" {
			r.Status.Mode = api.ReplicaCreating
		}
	}
	if len(r.Finalizers) == 0 {
		return reconcile.Result{}, err
	}
	if again, err := rs.writeStatus(ctx, old, &r); again > 0 || err != nil {
		return reconcile.Result{RequeueAfter: again}, err
	}
	switch {
	case err == nil || waits || r.Status.Mode == api.ReplicaFailed:
		return reconcile.Result{}, nil
	case api.Is(err, api.Busy) && r.Status.Copy != nil: // a copy is tried again
		return reconcile.Result{RequeueAfter: copyRetry}, nil
	case api.Is(err, api.Busy) && r.Spec.From != nil: // a layer is being cut or merged
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	case api.KindOf(err) != api.Other: // the cause may change without an event
		return reconcile.Result{RequeueAfter: 5 * time.Second}, nil
	}
	return reconcile.Result{}, err
}

// writeStatus writes the changed status of a replica; again is the time to the next try, because another writer was
// faster.
func (rs *Replicas) writeStatus(ctx context.Context, old, r *api.Replica) (again time.Duration, err error) {
	if equality.Semantic.DeepEqual(old.Status, r.Status) {
		return 0, nil
	}
	err = rs.Client.Status().Update(ctx, r)
	switch {
	case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
		return 50 * time.Millisecond, nil
	case err != nil:
		return 0, fmt.Errorf("status of replica %s: %w", r.Name, err)
	}
	return 0, nil
}

// reconcile creates, changes or removes a replica as its spec asks. The caller has the volume's lock.
func (rs *Replicas) reconcile(ctx context.Context, r *api.Replica) error {
	if r.DeletionTimestamp != nil {
		return rs.remove(ctx, r)
	}
	disk, err := rs.Disk(ctx, r.Spec.Disk)
	if err != nil {
		return err
	}
	switch r.Status.Mode {
	case "", api.ReplicaCreating:
		return rs.create(ctx, r, disk)
	case api.ReplicaFailed:
		return nil
	}
	if exists, err := rs.holds(disk, r.Spec.UID); err != nil {
		return rs.failUnlessMember(ctx, r, err)
	} else if !exists {
		r.Status.Mode = api.ReplicaFailed
		err := api.Errorf(api.NotFound, "the replica's folder is gone from disk %s", disk.Path())
		rs.Events.Eventf(r, nil, "Warning", "ReplicaLost", "Look", "%s", err)
		return err
	}
	if r.Status.Size < r.Spec.Size {
		if err := rs.expand(ctx, r, disk); err != nil {
			return fmt.Errorf("expand to %s: %w", api.SizeText(r.Spec.Size), err)
		}
	}
	r.Status.Message = ""
	if err := rs.reportMode(ctx, r); err != nil {
		return err
	}
	if err := rs.openDoubted(ctx, r, disk); err != nil {
		return err
	}
	if open, _ := rs.findOpen(r); open == nil {
		if m, err := disk.Stack(string(r.Spec.UID)); err == nil {
			r.Status.Epoch, r.Status.Joined = m.Epoch, m.Joined
		}
		if at, err := disk.LastWrite(string(r.Spec.UID)); err == nil {
			r.Status.LastWrite = &metav1.Time{Time: at.Truncate(time.Second)}
		}
	}
	if err := rs.revert(ctx, r, disk); err != nil {
		return err
	}
	if err := rs.snapshots.CreateObjects(ctx, r, disk); err != nil {
		return err
	}
	if used, shared, err := disk.Space(string(r.Spec.UID)); err == nil {
		r.Status.Used, r.Status.UsedText, r.Status.Shared = used, api.SizeText(used), shared
	}
	rs.merges.Report(r, disk)
	rs.scrubs.Reconcile(ctx, r, disk)
	err = errors.Join(rs.hydrate(ctx, r, disk), rs.localize(ctx, r, disk))
	return errors.Join(err, rs.reportFetch(ctx, r, disk))
}

// reportMode reports whether a replica is one of the volume's members.
func (rs *Replicas) reportMode(ctx context.Context, r *api.Replica) error {
	var v api.Volume
	if err := rs.Client.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != r.Spec.VolumeUID || len(v.Status.Members) == 0 {
		return nil
	}
	if slices.Contains(v.Status.Members, r.Name) {
		r.Status.Mode = api.ReplicaCurrent
		return nil
	}
	r.Status.Mode, r.Status.Message = api.ReplicaStale, "the replica lacks the writes since the volume dropped it"
	return nil
}

// mergeLook is when a replica that waits for the end of a merge is requeued.
const mergeLook = time.Second

// awaitMerge returns an error while the stack is merged that a revert or a move needs at rest. The caller does not have
// the volume's lock, because the lock's owner ends the merge: with one try after another the merge would never end.
func (rs *Replicas) awaitMerge(ctx context.Context, r *api.Replica) error {
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
	disk, err := rs.Disk(ctx, on)
	if err != nil {
		return nil // the revert or the move reports the error
	}
	m, err := disk.Stack(string(uid))
	if err != nil || m.Merge == nil {
		return nil
	}
	if uid == r.Spec.UID {
		rs.merges.Report(r, disk)
		if rs.merges.Fails(string(uid)) != "" { // the failure may last: the revert ends with the failure
			return nil
		}
	}
	rs.merges.Merge(disk, string(uid), r.Spec.Volume) // unless a worker merges already
	return api.Errorf(api.Busy, "two layers of volume %s are being merged: the replica waits for the end of the merge",
		r.Spec.Volume)
}
