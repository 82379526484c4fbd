package targets

import (
	"context"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/recorder"

	"drover.io/drover/api"
)

// conflictPause is the pause after a conflict with another writer of an object.
const conflictPause = time.Second

// targetReconciler looks after the BackupTargets that the node owns.
type targetReconciler struct {
	client.Client
	live         client.Reader // without a cache
	node         string
	opts         Options
	repositories *Repositories
	jobs         *jobSet
	events       recorder.EventRecorder
	log          *slog.Logger
	owner        func(types.UID, []api.Node, time.Time) string // ownerOf; tests make two owners

	mu      sync.Mutex
	records map[string]*targetRecord // by name of the target
}

// Reconcile brings the results of ended jobs into the objects and starts the jobs that are due.
func (r *targetReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	t := &api.BackupTarget{}
	if err := r.Get(ctx, req.NamespacedName, t); apierrors.IsNotFound(err) {
		r.forgetTarget(req.Name, true)
		return ctrl.Result{}, nil
	} else if err != nil {
		return ctrl.Result{}, err
	}
	r.repositories.ratesOf(t) // of work in progress on this node, whoever the owner is
	now := r.opts.Now()
	owner, next, err := r.findOwner(ctx, t, now)
	if err != nil {
		return ctrl.Result{}, err
	}
	if owner != r.node {
		r.forgetTarget(t.Name, false)
		return r.requeueAt(next, now), nil
	}
	// The cache may be behind the last status, and would start work twice.
	if err := r.live.Get(ctx, req.NamespacedName, t); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err) // the deletion brings an event
	}
	backups, err := backupsOf(ctx, r.Client, t.Name)
	if err != nil {
		return ctrl.Result{}, err
	}
	rec := r.recordOf(t)
	again, err := r.writeResults(ctx, t, rec, backups, now)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !again {
		setWriteFailed(t)
		due, err := r.startJobs(ctx, t, rec, backups, now)
		if err != nil {
			return ctrl.Result{}, err
		}
		next = earlier(earlier(next, due), hideKeyFile(t, now))
		if again, err = r.releaseBackups(ctx, rec, backups); err != nil {
			return ctrl.Result{}, err
		}
	}
	if again {
		return ctrl.Result{RequeueAfter: conflictPause}, nil
	}
	return r.requeueAt(next, now), nil
}

// requeueAt is the result that asks for a reconcile at a time; zero: none.
func (r *targetReconciler) requeueAt(next, now time.Time) ctrl.Result {
	if next.IsZero() {
		return ctrl.Result{}
	}
	return ctrl.Result{RequeueAfter: max(next.Sub(now), 10*time.Millisecond)}
}

// findOwner returns the owner of a target, and when that may change without an event; zero: never.
func (r *targetReconciler) findOwner(ctx context.Context, t *api.BackupTarget, now time.Time) (
	owner string, next time.Time, err error) {
	var list api.NodeList
	if err := r.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return "", time.Time{}, api.Explain(err, "list nodes")
	}
	return r.owner(t.UID, list.Items, now), nextSilence(list.Items, now), nil
}

// recordOf returns the record of a target.
func (r *targetReconciler) recordOf(t *api.BackupTarget) *targetRecord {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec := r.records[t.Name]
	if rec != nil && rec.uid != t.UID {
		rec.stop()
		rec = nil
	}
	if rec == nil {
		rec = &targetRecord{uid: t.UID, memory: newVisitMemory(), deleted: map[types.UID]bool{}}
		r.records[t.Name] = rec
	}
	return rec
}

// forgetTarget cancels the jobs of a target that is deleted or has another owner.
func (r *targetReconciler) forgetTarget(name string, deleted bool) {
	r.mu.Lock()
	rec := r.records[name]
	delete(r.records, name)
	r.mu.Unlock()
	targetAvailable.DeleteLabelValues(name)
	writeFailed.DeleteLabelValues(name)
	damagedBlobs.DeleteLabelValues(name)
	damagedBackups.DeleteLabelValues(name)
	usedBytes.DeleteLabelValues(name)
	uniqueBytes.DeleteLabelValues(name)
	if rec != nil {
		rec.stop()
	}
	if deleted { // the work of a node that is not the owner opens repositories, too
		r.repositories.forget(name)
	}
}

// writeResults brings the results of ended jobs into the status of the target. It keeps the results until the status is
// written; again says that another writer was faster.
func (r *targetReconciler) writeResults(ctx context.Context, t *api.BackupTarget, rec *targetRecord,
	backups []api.StoredBackup, now time.Time) (again bool, err error) {
	before := t.Status.DeepCopy()
	visited, deleted, swept := rec.visit.hasEnded(), rec.deletion.hasEnded(), rec.sweep.hasEnded()
	verified := rec.verification.hasEnded()
	var progress *storeFacts // of a running visit, which the status lacks
	switch {
	case visited:
		rec.applyVisit(t, r.node, now)
	case rec.visit.isRunning():
		if progress = rec.progress.last(); progress != nil && progress != rec.shown {
			rec.applyProgress(t, r.node, progress)
		} else {
			progress = nil
		}
	}
	if deleted {
		rec.applyDeletion(t, backups, r.opts.Retry, now)
	}
	waits := !swept && rec.sweep.isRunning() && rec.sweepWait.reason() != nil
	switch {
	case swept:
		rec.applySweep(t, now)
	case waits:
		applyLock(t, api.ReasonSweepWaits, rec.sweepWait.reason())
	}
	if verified {
		rec.applyVerification(t, backups, &r.opts, now)
		rec.noteDigests(r.node)
	}
	again, err = r.markDamaged(ctx, rec, backups) // before the target tells the end of the verification
	if again || err != nil {
		rec.claimed = nil // the status does not have it
		return again, err
	}
	if v := t.Status.Verification; rec.marked && v != nil && v.DamageFoundAt != nil {
		at := metav1.NewMicroTime(now) // nodes that have looked already did not know these backups
		v.DamageFoundAt = &at
	}
	rec.addTraceless(t, backups)
	rec.requestSweep(t, now)
	hideKeyFile(t, now)
	if !equality.Semantic.DeepEqual(*before, t.Status) {
		if err := r.Status().Update(ctx, t); err != nil {
			rec.claimed = nil
			return true, ignoreRace(api.Explain(err, "write the status"), err)
		}
	}
	rec.deletedCount, rec.wantsSweep, rec.marked = 0, false, false
	if progress != nil {
		rec.shown = progress
		r.reportAvailable(t, before)
	}
	if visited {
		r.reportVisit(t, before, &rec.visit.result)
		rec.visit = nil
	}
	if deleted || swept || waits {
		r.reportConditions(t, before)
	}
	if deleted {
		rec.deletion = nil
	}
	if swept {
		r.reportSweep(t, &rec.sweep.result)
		rec.sweep = nil
	}
	if verified {
		r.reportVerification(t, before, &rec.verification.result)
		rec.verification = nil
	}
	return false, nil
}

// reportVisit reports a visit whose result is in the status.
func (r *targetReconciler) reportVisit(t *api.BackupTarget, before *api.BackupTargetStatus, v *visitResult) {
	if v.reason == "" {
		r.log.Warn("the visit of a backup target says nothing", "target", t.Name, "err", v.err)
		return
	}
	r.reportAvailable(t, before)
	setUsage(t)
	setDamage(t) // that of the former owner, too
	if v.keysErr != nil {
		r.events.Eventf(t, nil, corev1.EventTypeWarning, "PasswordNotChanged", "Visit", "%s",
			api.ClipMessage(v.keysErr.Error()))
	}
	if v.shortErr != nil {
		r.events.Eventf(t, nil, corev1.EventTypeWarning, "ListIncomplete", "Visit", "%s; no sweep runs before",
			api.ClipMessage(v.shortErr.Error()))
	}
	if v.found > 0 {
		r.events.Eventf(t, nil, corev1.EventTypeNormal, "BackupFound", "Visit", "%s found in the store",
			api.CountText(v.found, "backup"))
	}
	if v.lost > 0 {
		r.events.Eventf(t, nil, corev1.EventTypeWarning, "BackupLost", "Visit",
			"the store lacks %s: the Backups were deleted", api.CountText(v.lost, "backup"))
	}
}

// reportAvailable reports whether a target can be used, after each change.
func (r *targetReconciler) reportAvailable(t *api.BackupTarget, before *api.BackupTargetStatus) {
	available := 0.0
	if t.Status.Available {
		available = 1
	}
	targetAvailable.WithLabelValues(t.Name).Set(available)
	reason := unavailableReason(&t.Status)
	if reason == unavailableReason(before) {
		return
	}
	r.log.Info("backup target", "target", t.Name, "reason", reason, "message", t.Status.Message)
	switch {
	case reason == api.ReasonNotInitialized:
	case t.Status.Available:
		r.events.Eventf(t, nil, corev1.EventTypeNormal, "BackupTargetAvailable", "Visit", "%s in the store",
			api.CountText(int(t.Status.Backups), "backup"))
	default:
		r.events.Eventf(t, nil, corev1.EventTypeWarning, "BackupTargetUnavailable", "Visit", "%s: %s", reason,
			t.Status.Message)
	}
}

// unavailableReason is the reason of ConditionUnavailable; empty: no visit has ended.
func unavailableReason(st *api.BackupTargetStatus) string {
	if c := meta.FindStatusCondition(st.Conditions, api.ConditionUnavailable); c != nil {
		return c.Reason
	}
	return ""
}

// reportConditions emits an event for each condition of sweeps and deletions that became True or has another reason.
func (r *targetReconciler) reportConditions(t *api.BackupTarget, before *api.BackupTargetStatus) {
	for _, of := range []struct{ condition, event string }{{api.ConditionSweepFailed, "SweepFailed"},
		{api.ConditionLocked, "RepositoryLocked"}} {
		was := meta.FindStatusCondition(before.Conditions, of.condition)
		is := meta.FindStatusCondition(t.Status.Conditions, of.condition)
		if is != nil && is.Status == metav1.ConditionTrue && (was == nil || was.Reason != is.Reason) {
			r.events.Eventf(t, nil, corev1.EventTypeWarning, of.event, "Sweep", "%s: %s", is.Reason, is.Message)
		}
	}
}

// reportSweep reports a sweep whose result is in the status.
func (r *targetReconciler) reportSweep(t *api.BackupTarget, s *sweepResult) {
	sweptBytes.WithLabelValues(t.Name).Add(float64(s.stats.FreedBytes))
	setUsage(t)
	if s.err != nil {
		r.log.Warn("the sweep of a backup target failed", "target", t.Name, "err", s.err)
		return
	}
	r.log.Info("backup target swept", "target", t.Name, "freed", s.stats.FreedBytes, "packs", s.stats.DeletedPacks)
}

// startJobs starts the jobs that are due, and returns when the next one is; zero: none. A job that ended meanwhile has
// a result that no status has yet, and its end wakes the reconciler.
func (r *targetReconciler) startJobs(ctx context.Context, t *api.BackupTarget, rec *targetRecord,
	backups []api.StoredBackup, now time.Time) (next time.Time, err error) {
	if rec.visit.isRunning() && !hasSameStore(t, rec.visitedSpec) {
		rec.visit.stop() // the end wakes the reconciler
	}
	if rec.visit == nil {
		if due := rec.nextVisit(t, backups, r.opts.Retry, now); isDue(due, now) {
			r.startVisit(ctx, t, rec, backups, now)
		} else {
			next = due
		}
	}
	if rec.sweep == nil {
		if due := rec.nextSweep(t, r.opts.SweepDelay); isDue(due, now) {
			target := t.DeepCopy()
			wait := &sweepWait{now: r.opts.Now, wake: func() { r.jobs.wakeTarget(target.Name) }}
			rec.sweepWait = wait
			rec.sweep = startJob(ctx, r.jobs, t.Name, "sweep", func(ctx context.Context) sweepResult {
				return r.repositories.sweep(ctx, target, wait, r.opts)
			})
		} else {
			next = earlier(next, due)
		}
	}
	if rec.verification == nil {
		if due := rec.nextVerification(t, r.opts.RecheckDelay, now); isDue(due, now) {
			target, wish := t.DeepCopy(), nextWish(t)
			wish.check = wish.check || rec.owesCheck
			rec.verification = startJob(ctx, r.jobs, t.Name, "verification", func(ctx context.Context) verifyResult {
				return r.repositories.verify(ctx, target, wish, r.opts)
			})
		} else {
			next = earlier(next, due)
		}
	}
	due, err := r.startDeletion(ctx, t, rec, backups, now)
	return earlier(next, due), err
}

func isDue(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// startVisit starts a visit.
func (r *targetReconciler) startVisit(ctx context.Context, t *api.BackupTarget, rec *targetRecord,
	backups []api.StoredBackup, now time.Time) {
	name := t.Name
	progress := &visitProgress{wake: func() { r.jobs.wakeTarget(name) }}
	v := &visit{Client: r.Client, repositories: r.repositories, target: t.DeepCopy(), claim: rec.claimed,
		memory: rec.memory, progress: progress, opts: r.opts, log: r.log}
	rec.visit = startJob(ctx, r.jobs, t.Name, "visit", v.run)
	if rec.visit != nil {
		rec.visited, rec.generation, rec.visitedSpec, rec.claimed = now, t.Generation, v.target.Spec, nil
		rec.failures, rec.progress, rec.shown = failuresOf(backups), progress, nil
	}
}
