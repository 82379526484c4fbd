package targets

import (
	"context"
	"log/slog"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/recorder"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// healReconciler heals targets that other nodes look after. The owner of a target heals from its own disks, and writes
// the damage that is left into the status. Then each other node heals once, as far as its disks have the blobs, and
// adds the number to the status, so that the owner looks again. Nodes need no turns: a blob that two nodes write is one
// blob for all readers, and a sweep deletes the second.
type healReconciler struct {
	client.Client
	live         client.Reader // without a cache
	node         string
	opts         Options
	repositories *Repositories
	jobs         *jobSet
	events       recorder.EventRecorder
	log          *slog.Logger

	mu    sync.Mutex
	heals map[string]*nodeHeal // by name of the target
}

// nodeHeal is the heal of this node after one look for damage.
type nodeHeal struct {
	target types.UID
	found  metav1.MicroTime // DamageFoundAt
	job    *job[healResult]
	done   bool
}

// healResult is the number of blobs that a heal wrote again.
type healResult struct {
	healed int64
	err    error
}

func (r *healReconciler) setup(mgr ctrl.Manager) error {
	if err := mgr.Add(r.jobs); err != nil {
		return err
	}
	everyNode := false
	return ctrl.NewControllerManagedBy(mgr).Named("backup-heals").For(&api.BackupTarget{}).
		WatchesRawSource(source.Channel(r.jobs.wake, &handler.EnqueueRequestForObject{})).
		WithOptions(controller.Options{NeedLeaderElection: &everyNode, NewQueue: backlog.New}).
		Complete(r)
}

// Reconcile heals a damaged target once after each look for damage.
func (r *healReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	t := &api.BackupTarget{}
	if err := r.Get(ctx, req.NamespacedName, t); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	} else if err != nil || !r.isConcerned(t) {
		r.forget(req.Name)
		return ctrl.Result{}, nil
	}
	h := r.healOf(t)
	switch {
	case h.done, h.job.isRunning():
		return ctrl.Result{}, nil
	case h.job == nil: // no job either while one of an earlier look runs, whose end wakes the reconciler
		target := t.DeepCopy()
		h.job = startJob(ctx, r.jobs, t.Name, "heal", func(ctx context.Context) healResult {
			return r.repositories.heal(ctx, target, r.node, r.opts)
		})
		return ctrl.Result{}, nil
	}
	if err := h.job.result.err; err != nil {
		r.log.Warn("a damaged backup target cannot be healed yet", "target", t.Name, "err", err)
		h.job = nil
		return ctrl.Result{RequeueAfter: r.opts.Retry}, nil
	}
	if n := h.job.result.healed; n > 0 {
		again, err := r.addHealed(ctx, t, n)
		if again || err != nil {
			return ctrl.Result{RequeueAfter: conflictPause}, err
		}
		reportHeal(r.events, t, n, r.node)
	}
	h.done = true
	return ctrl.Result{}, nil
}

// isConcerned reports whether a target has damage that other nodes than its owner may heal.
func (r *healReconciler) isConcerned(t *api.BackupTarget) bool {
	v := t.Status.Verification
	return v != nil && v.DamageFoundAt != nil && t.Status.OwnerID != r.node && t.Status.Available &&
		t.ExplainReadOnly() == ""
}

// healOf is the heal after the last look for damage. It cancels that of an earlier one.
func (r *healReconciler) healOf(t *api.BackupTarget) *nodeHeal {
	r.mu.Lock()
	defer r.mu.Unlock()
	found := *t.Status.Verification.DamageFoundAt
	h := r.heals[t.Name]
	if h != nil && (h.target != t.UID || !h.found.Equal(&found)) {
		h.job.stop()
		h = nil
	}
	if h == nil {
		h = &nodeHeal{target: t.UID, found: found}
		r.heals[t.Name] = h
	}
	return h
}

func (r *healReconciler) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if h := r.heals[name]; h != nil {
		h.job.stop()
		delete(r.heals, name)
	}
}

// addHealed adds blobs to the status, which the owner writes, too; again says that the owner was faster.
func (r *healReconciler) addHealed(ctx context.Context, cached *api.BackupTarget, blobs int64) (again bool, err error) {
	t := &api.BackupTarget{}
	if err := r.live.Get(ctx, client.ObjectKeyFromObject(cached), t); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	v := t.Status.Verification
	if t.UID != cached.UID || v == nil {
		return false, nil
	}
	v.HealedBlobs, v.UncheckedBlobs = v.HealedBlobs+blobs, v.UncheckedBlobs+blobs
	if err := r.Status().Update(ctx, t); err != nil {
		return apierrors.IsConflict(err), ignoreRace(api.Explain(err, "write the status"), err)
	}
	return false, nil
}

// heal writes the damaged blobs again that disks of the node have: of backups of volumes with a replica here, and of
// images with a copy here.
func (r *Repositories) heal(ctx context.Context, t *api.BackupTarget, node string, o Options) (result healResult) {
	damaged, err := r.damagedHere(ctx, t.Name, node)
	if err != nil || len(damaged) == 0 {
		return healResult{err: err}
	}
	result.err = r.withRepository(ctx, t, func(opened *repo.Repository) (err error) {
		result.healed, err = o.Heal(ctx, opened, damaged, smallWriter)
		return err
	})
	return result
}

// damagedHere are the snapshots of damaged backups whose volume has a replica, or whose image has a copy, on the node.
func (r *Repositories) damagedHere(ctx context.Context, target, node string) (damaged []blob.ID, err error) {
	backups, err := backupsOf(ctx, r.live, target)
	if err != nil {
		return nil, err
	}
	var replicas api.ReplicaList
	if err := r.live.List(ctx, &replicas); err != nil {
		return nil, api.Explain(err, "list replicas")
	}
	var copies api.ImageCopyList
	if err := r.live.List(ctx, &copies); err != nil {
		return nil, api.Explain(err, "list image copies")
	}
	volumes, images := map[string]bool{}, map[string]bool{}
	for i := range replicas.Items {
		s := &replicas.Items[i].Spec
		volumes[s.Volume] = volumes[s.Volume] || s.Node == node
	}
	for i := range copies.Items {
		s := &copies.Items[i].Spec
		images[s.Image] = images[s.Image] || s.Node == node
	}
	for _, b := range backups {
		here := false
		switch b := b.(type) {
		case *api.Backup:
			here = volumes[b.Spec.Volume]
		case *api.BackupBackingImage:
			here = images[b.Spec.BackingImageName]
		}
		if id, ok := snapshotOf(b); ok && here && b.Common().Damaged {
			damaged = append(damaged, id)
		}
	}
	return damaged, nil
}
