package planner

import (
	"context"
	"fmt"

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

// setupGroups adds the reconciler that deletes the Snapshots of a deleted group.
func (p *volumeReconciler) setupGroups(mgr ctrl.Manager) error {
	of := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		if g := o.(*api.Snapshot).Spec.Group; g != "" {
			return watch.Requests(g)
		}
		return nil
	})
	reader := mgr.GetAPIReader()
	return ctrl.NewControllerManagedBy(mgr).Named("snapshotgroup-end").
		For(&api.SnapshotGroup{}, watch.Updates(watch.WishChanged)).Watches(&api.Snapshot{}, of).
		WithOptions(controller.Options{RateLimiter: backlog.RateLimiter(), NewQueue: backlog.New}).
		Complete(reconcile.Func(func(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
			return reconcile.Result{}, p.endGroup(ctx, reader, req.Name)
		}))
}

func (p *volumeReconciler) endGroup(ctx context.Context, reader client.Reader, name string) error {
	var g api.SnapshotGroup
	if err := p.client.Get(ctx, client.ObjectKey{Name: name}, &g); err != nil || g.DeletionTimestamp == nil {
		return client.IgnoreNotFound(err)
	}
	left := 0
	for _, volume := range g.Spec.Volumes {
		var s api.Snapshot
		err := reader.Get(ctx, client.ObjectKey{Name: g.Member(volume)}, &s)
		if apierrors.IsNotFound(err) || err == nil && s.Spec.Group != g.Name {
			continue
		}
		if err != nil {
			return err
		}
		if left++; s.DeletionTimestamp == nil {
			if err := p.client.Delete(ctx, &s); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("snapshot %s: %w", s.Name, err)
			}
		}
	}
	if left == 0 && controllerutil.RemoveFinalizer(&g, api.Finalizer) {
		return client.IgnoreNotFound(p.client.Update(ctx, &g))
	}
	return nil
}
