package targets

import (
	"context"
	"log/slog"
	"sync"
	"time"

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

// longestPause bounds the pause after failed heals and verifications, which begins with Options.Retry.
const longestPause = time.Hour

// pauseAfter is the pause after a failure that follows others without a success between. It doubles with each.
func (o *Options) pauseAfter(others int) time.Duration {
	return min(o.Retry<<min(others, 10), max(o.Retry, longestPause))
}

// healReconciler heals targets that other nodes look after. The owner of a target heals from its own disks, and writes
// the damage that is left into the status. Then each other node heals once, as far as its disks have the blobs, and
// adds the number to the status, so that the owner looks again. Nodes need no turns: a blob that two nodes write is one
// blob for all readers, and a sweep deletes the second. A heal that another look overtakes ends first, because the
// blobs that it has written count.
type healReconciler struct {
	client.Client
	node         string
	opts         Options
	repositories *Repositories
	jobs         *jobSet
	events       recorder.EventRecorder
	log          *slog.Logger

	mu    sync.Mutex
	heals map[string]*nodeHeal // by name of the target
}

// nodeHeal has the heals of a target by this node, for the reconcile of the target alone.
type nodeHeal struct {
	target   types.UID
	job      *job[healResult]
	found    metav1.MicroTime // DamageFoundAt at the start of the job, or of the last heal without an error
	done     bool             // the heal after found had no error
	healed   int64            // blobs that are not in the status yet
	failures int              // in a row
	again    time.Time        // no job begins before
}

// healResult is the number of blobs that a heal wrote again, with an error, too.
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
	} else if err != nil {
		r.forget(req.Name)
		return ctrl.Result{}, nil
	}
	h, concerned := r.healOf(t), r.isConcerned(t)
	if h.job.isRunning() {
		if t.ExplainReadOnly() != "" {
			h.job.stop() // the end wakes the reconciler
		}
		return ctrl.Result{}, nil
	}
	if h.job != nil {
		r.endJob(t, h)
	}
	if h.healed > 0 {
		if err := AddHealed(ctx, r.Client, t, h.healed); err != nil {
			return ctrl.Result{}, err
		}
		reportHeal(r.events, t, h.healed, r.node)
		h.healed = 0
	}
	if !concerned || h.done && h.found.Equal(t.Status.Verification.DamageFoundAt) {
		return ctrl.Result{}, nil
	}
	if pause := h.again.Sub(r.opts.Now()); pause > 0 {
		return ctrl.Result{RequeueAfter: pause}, nil
	}
	target := t.DeepCopy()
	h.found, h.done = *t.Status.Verification.DamageFoundAt, false
	// None while the job of a deleted target of the name runs, whose end wakes the reconciler.
	h.job = startJob(ctx, r.jobs, t.Name, "heal", func(ctx context.Context) healResult {
		return r.repositories.heal(ctx, target, r.node, r.opts)
	})
	return ctrl.Result{}, nil
}

// endJob takes the result of an ended heal. The pause after a failure doubles with each failure.
func (r *healReconciler) endJob(t *api.BackupTarget, h *nodeHeal) {
	result := h.job.result
	h.job = nil
	h.healed += result.healed
	if h.done = result.err == nil; h.done {
		h.failures, h.again = 0, time.Time{}
		return
	}
	report := r.log.Warn
	if api.Is(result.err, api.Busy) { // no failure: the chunks may be in the results of the merges
		report = r.log.Info
	}
	report("a damaged backup target cannot be healed yet", "target", t.Name, "err", result.err)
	h.again = r.opts.Now().Add(r.opts.pauseAfter(h.failures))
	h.failures++
}

// isConcerned reports whether a target has damage that other nodes than its owner may heal.
func (r *healReconciler) isConcerned(t *api.BackupTarget) bool {
	v := t.Status.Verification
	return v != nil && v.DamageFoundAt != nil && t.Status.OwnerID != r.node && t.Status.Available &&
		t.ExplainReadOnly() == ""
}

// healOf has the heals of a target.
func (r *healReconciler) healOf(t *api.BackupTarget) *nodeHeal {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := r.heals[t.Name]
	if h != nil && h.target != t.UID {
		h.job.stop()
		h = nil
	}
	if h == nil {
		h = &nodeHeal{target: t.UID}
		r.heals[t.Name] = h
	}
	return h
}

// forget cancels the heal of a deleted target.
func (r *healReconciler) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if h := r.heals[name]; h != nil {
		h.job.stop()
		delete(r.heals, name)
	}
}

// heal writes the damaged blobs again that disks of the node have.
func (r *Repositories) heal(ctx context.Context, t *api.BackupTarget, node string, o Options) (result healResult) {
	damaged, err := r.damagedFor(ctx, t.Name, node)
	if err != nil || len(damaged) == 0 {
		return healResult{err: err}
	}
	result.err = r.withRepository(ctx, t, func(opened *repo.Repository) (err error) {
		result.healed, err = o.Heal(ctx, opened, damaged, o.Memory.healWriter())
		return err
	})
	return result
}

// damagedFor are the snapshots of the damaged backups that a node may heal: of all, if the node has disks.
func (r *Repositories) damagedFor(ctx context.Context, target, node string) (damaged []blob.ID, err error) {
	var n api.Node
	if err := r.live.Get(ctx, client.ObjectKey{Name: node}, &n); err != nil {
		return nil, api.Explain(err, "node %s", node)
	}
	if len(n.Status.Disks) == 0 {
		return nil, nil
	}
	backups, err := backupsOf(ctx, r.live, target)
	if err != nil {
		return nil, err
	}
	for _, b := range backups {
		if id, ok := snapshotOf(b); ok && b.Common().Damaged {
			damaged = append(damaged, id)
		}
	}
	return damaged, nil
}
