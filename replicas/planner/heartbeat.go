package planner

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// heartbeatReconciler watches heartbeats. Without a heartbeat the statuses from a node are out of date.
type heartbeatReconciler struct {
	*volumeReconciler
	began time.Time
	limit time.Duration // 0: the node's limit
}

func (p *volumeReconciler) setupHeartbeats(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("heartbeat").For(&api.Node{}).
		WithOptions(controller.Options{NewQueue: backlog.New}).
		Complete(&heartbeatReconciler{volumeReconciler: p, began: time.Now()})
}

// Reconcile checks the heartbeat of a node, and requeues the node for the time when the heartbeat will be too old.
func (s *heartbeatReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var n api.Node
	err := s.client.Get(ctx, req.NamespacedName, &n)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	if apierrors.IsNotFound(err) {
		s.setSilent(ctx, req.Name, true)
		return reconcile.Result{}, nil
	}
	// A heartbeat may have been missed while the controller was down.
	age := min(time.Since(n.Status.Heartbeat.Time), time.Since(s.began))
	limit := s.limit
	if limit == 0 {
		limit = n.SilentAfter()
	}
	if age < limit {
		s.setSilent(ctx, n.Name, false)
		return reconcile.Result{RequeueAfter: limit - age + time.Second}, nil
	}
	if s.setSilent(ctx, n.Name, true) {
		s.events.Eventf(&n, nil, "Warning", "NodeSilent", "Watch", "node %s gave no sign of life since %s", n.Name,
			n.Status.Heartbeat.UTC().Format(time.RFC3339))
	}
	return reconcile.Result{}, nil
}

// setSilent records whether a node is silent, and wakes the volumes of the node after a change.
func (p *volumeReconciler) setSilent(ctx context.Context, node string, is bool) bool {
	p.mu.Lock()
	news := p.silent[node] != is
	if is {
		p.silent[node] = true
	} else {
		delete(p.silent, node)
	}
	q := p.queue
	p.mu.Unlock()
	if !news || q == nil {
		return news
	}
	var list api.ReplicaList
	if err := p.client.List(ctx, &list, client.MatchingFields{watch.ByNode: node},
		client.UnsafeDisableDeepCopy); err != nil {
		p.log.Error("replicas of a node cannot be listed", "node", node, "err", err)
		return news
	}
	for i := range list.Items {
		q.Add(watch.Request(list.Items[i].Spec.Volume))
	}
	for _, name := range p.attachedTo(ctx, node) {
		q.Add(watch.Request(name))
	}
	if !is { // the node takes replicas again
		for _, r := range append(p.unplacedVolumes(), p.balancedVolumes(ctx, nil)...) {
			q.Add(r)
		}
	}
	return news
}

func (p *volumeReconciler) isSilent(node string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silent[node]
}
