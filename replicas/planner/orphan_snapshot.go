package planner

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// orphanSnapshotReconciler handles the Snapshots without a responsible node: the volume does not exist or has no
// replica, as a standby volume has none.
type orphanSnapshotReconciler struct{ *volumeReconciler }

func (p *volumeReconciler) setupOrphans(mgr ctrl.Manager) error {
	ofVolume := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		var list api.SnapshotList
		err := p.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: o.GetName()}, client.UnsafeDisableDeepCopy)
		if err != nil {
			p.log.Error("snapshots of a volume cannot be listed", "volume", o.GetName(), "err", err)
		}
		var all []reconcile.Request
		for i := range list.Items {
			all = append(all, watch.Requests(list.Items[i].Name)...)
		}
		return all
	})
	return ctrl.NewControllerManagedBy(mgr).Named("orphan").
		For(&api.Snapshot{}, watch.Updates(watch.WishChanged)).
		Watches(&api.Volume{}, ofVolume, watch.Updates(func(old, now client.Object) bool {
			return len(old.(*api.Volume).Status.Members) != len(now.(*api.Volume).Status.Members)
		})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 2, RateLimiter: backlog.RateLimiter(),
			NewQueue: backlog.New}).
		Complete(&orphanSnapshotReconciler{p})
}

// Reconcile reports the missing volume or the standby volume, and removes the finalizer of a deleted Snapshot.
func (o *orphanSnapshotReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var s api.Snapshot
	if err := o.client.Get(ctx, req.NamespacedName, &s); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	var v api.Volume
	err := o.client.Get(ctx, client.ObjectKey{Name: s.Spec.Volume}, &v)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	gone := apierrors.IsNotFound(err) ||
		s.Status.VolumeUID != "" && v.Status.UID != "" && v.Status.UID != s.Status.VolumeUID
	switch {
	case !gone && len(v.Status.Members) > 0:
		return reconcile.Result{}, nil // a node is responsible
	case s.DeletionTimestamp != nil:
		if gone || s.Status.CreationTime == "" {
			if controllerutil.RemoveFinalizer(&s, api.Finalizer) {
				err = watch.IgnoreConflict(client.IgnoreNotFound(o.client.Update(ctx, &s)))
				return reconcile.Result{}, err
			}
		}
		return reconcile.Result{}, nil
	case !gone && v.RefuseStandby() == nil:
		return reconcile.Result{}, nil // the volume is in progress
	}
	why := "volume " + s.Spec.Volume + " does not exist"
	if !gone {
		why = v.RefuseStandby().Error()
	} else if s.Status.CreationTime != "" {
		why = "lost: volume " + s.Spec.Volume + " is gone; delete the object"
	}
	if s.Status.Error == why && !s.Status.ReadyToUse {
		return reconcile.Result{}, nil
	}
	s.Status.Error, s.Status.ReadyToUse = why, false
	if err := o.client.Status().Update(ctx, &s); apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	} else if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{}, nil
}
