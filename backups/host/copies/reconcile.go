package copies

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
)

const originRetry = 30 * time.Second

// work is a job for a copy: an attempt, or the removal of what an unfinished copy left.
type work struct {
	object   types.UID // of the copy
	removal  bool
	canceled bool  // the reconciler's alone
	begun    bool  // an earlier attempt may have a snapshot in the repository
	reached  int64 // bytes that the attempt before was done with
	progress mover.Progress
	job      *targets.Job[outcome]
}

func (r *reconciler) workOf(name string) *work {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.works[name]
}

// setWork replaces the work of a copy; nil: none.
func (r *reconciler) setWork(name string, w *work) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w == nil {
		delete(r.works, name)
		return
	}
	r.works[name] = w
}

// isMine reports whether the node makes the copy, and when that may change without an event; zero: never.
func (r *reconciler) isMine(ctx context.Context, b api.StoredBackup) (mine bool, next time.Time, err error) {
	if !api.IsCopy(b) || b.Ended() {
		return false, next, nil
	}
	t := &api.BackupTarget{}
	if err := r.Get(ctx, client.ObjectKey{Name: b.Target()}, t); err != nil {
		return false, next, client.IgnoreNotFound(err)
	}
	var nodes api.NodeList
	if err := r.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return false, next, api.Explain(err, "list nodes")
	}
	owner, next := targets.OwnerOf(t.UID, nodes.Items, r.opts.Now())
	return owner == r.node, next, nil
}

// Reconcile compares one copy with its work.
func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	b := r.kind.newObject()
	if err := r.Get(ctx, req.NamespacedName, b); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	mine, next, err := r.isMine(ctx, b)
	if err != nil {
		return ctrl.Result{}, err
	}
	w := r.workOf(req.Name)
	if w != nil && (w.canceled || !mine || w.object != b.GetUID() || w.removal == b.GetDeletionTimestamp().IsZero()) {
		w.job.Cancel()
		w.canceled = true
		if _, ended := w.job.Result(); !ended {
			return ctrl.Result{}, nil // the end of the job wakes the reconciler
		}
		r.setWork(req.Name, nil)
		w = nil
	}
	if !mine {
		if next.IsZero() {
			return ctrl.Result{}, nil
		}
		return ctrl.Result{RequeueAfter: max(next.Sub(r.opts.Now()), time.Second)}, nil
	}
	if w != nil {
		return r.followWork(ctx, b, w)
	}
	if pause := r.untilRetry(b); pause > 0 {
		return ctrl.Result{RequeueAfter: pause}, nil
	}
	if !b.GetDeletionTimestamp().IsZero() {
		return r.beginRemoval(ctx, b)
	}
	return r.beginAttempt(ctx, b)
}

// followWork brings the progress or the outcome of a work into the status.
func (r *reconciler) followWork(ctx context.Context, b api.StoredBackup, w *work) (ctrl.Result, error) {
	result, ended := w.job.Result()
	st, old := b.Common(), b.Common().DeepCopy()
	if ended && !w.removal && result.err == nil {
		if again, err := targets.IsBegunElsewhere(ctx, r.live, b, r.node); err != nil {
			return ctrl.Result{}, err
		} else if again {
			r.setWork(b.GetName(), nil)
			return r.beginAttempt(ctx, b)
		}
	}
	if ended {
		st.OwnerID = r.node
	}
	switch {
	case !ended && w.removal:
		return ctrl.Result{}, nil // the end of the job wakes the reconciler
	case !ended:
		st.ByteProgress = w.progress.At(time.Now()) // the clock of Progress
		st.Progress = st.Percent()
		_, err := r.putStatus(ctx, b, old)
		return ctrl.Result{RequeueAfter: r.opts.ProgressEvery}, err
	case w.removal && result.err == nil: // the work stays until the object is deleted
		if controllerutil.RemoveFinalizer(b, api.Finalizer) {
			return ctrl.Result{}, client.IgnoreNotFound(watch.IgnoreConflict(r.Update(ctx, b)))
		}
		return ctrl.Result{}, nil
	case w.removal:
		st.State, st.Message = api.BackupDeleting, api.ClipMessage(result.err.Error())
		st.Attempts++
		r.setNextTry(st, result.err)
	case result.err == nil:
		r.setCompleted(b, &result)
	default:
		r.setFailed(b, w, result.err)
	}
	if ok, err := r.putStatus(ctx, b, old); !ok {
		return ctrl.Result{}, err
	}
	r.setWork(b.GetName(), nil)
	r.reportEnd(b, &result, w.removal)
	if b.Ended() {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{RequeueAfter: max(r.untilRetry(b), time.Millisecond)}, nil
}

// putStatus writes a status if the status differs from old. Nil with ok false says that the copy changed meanwhile:
// its event wakes the reconciler.
func (r *reconciler) putStatus(ctx context.Context, b api.StoredBackup, old *api.CommonBackupStatus) (
	ok bool, err error) {
	if equality.Semantic.DeepEqual(old, b.Common()) {
		return true, nil
	}
	if err := r.Status().Update(ctx, b); err != nil {
		return false, client.IgnoreNotFound(watch.IgnoreConflict(err))
	}
	return true, nil
}

// untilRetry is the time until the next try of this node.
func (r *reconciler) untilRetry(b api.StoredBackup) time.Duration {
	s := b.Common()
	waits := b.GetDeletionTimestamp().IsZero() || s.State == api.BackupDeleting
	if s.NextTry == nil || s.OwnerID != r.node || !waits {
		return 0
	}
	return s.NextTry.Sub(r.opts.Now())
}

// setNextTry records the time of the next try after st.Attempts failures, the last one with err. The API keeps whole
// seconds.
func (r *reconciler) setNextTry(st *api.CommonBackupStatus, err error) {
	pause := targets.PauseAfter(st.Attempts, err, r.opts.RetryMin, r.opts.RetryMax)
	next := metav1.NewTime(r.opts.Now().Add(pause + time.Second - 1).Truncate(time.Second))
	st.NextTry = &next
}

// beginAttempt starts an attempt to make the copy, if the node has a free place and the origin is completed.
func (r *reconciler) beginAttempt(ctx context.Context, b api.StoredBackup) (ctrl.Result, error) {
	st, old := b.Common(), b.Common().DeepCopy()
	st.OwnerID, st.NextTry = r.node, nil
	origin, err := r.findOrigin(ctx, b)
	if api.KindOf(err) == api.Other && err != nil {
		return ctrl.Result{}, err
	}
	release, free := func() {}, false
	if err == nil {
		release, free = r.places.TryAcquire(struct{}{}, copiesAtOnce)
	}
	switch {
	case err != nil && targets.IsPermanent(err):
		r.setError(st, err)
		ok, putErr := r.putStatus(ctx, b, old)
		if ok {
			r.reportEnd(b, &outcome{err: err}, false)
		}
		return ctrl.Result{}, putErr
	case !free && err == nil && st.State == api.BackupInProgress: // of a former process, or of another owner
		return ctrl.Result{RequeueAfter: r.opts.RetryMax}, nil
	case err != nil:
		st.Attempts = max(st.Attempts, begunAttempts(old))
		return r.postpone(ctx, b, old, err.Error())
	case !free:
		return r.postpone(ctx, b, old, "waits until node "+r.node+" has made another copy")
	}
	if err := r.takeImageAlong(ctx, b, origin); err != nil {
		release()
		if api.Is(err, api.Unavailable) {
			return r.postpone(ctx, b, old, err.Error())
		}
		return ctrl.Result{}, err
	}
	begun := api.HasBegun(b)
	st.State, st.Message = api.BackupInProgress, ""
	// Without a change, too: the write finds out whether the cache is behind, and the copy has ended.
	if err := r.Status().Update(ctx, b); err != nil {
		release()
		return ctrl.Result{}, client.IgnoreNotFound(watch.IgnoreConflict(err))
	}
	w := &work{object: b.GetUID(), begun: begun, reached: old.BytesDone}
	a := &attempt{reconciler: r, b: copyOf(b), origin: origin, begun: begun, progress: &w.progress}
	w.job = targets.StartJob(ctx, r.jobs, b.GetName(), "copy", func(ctx context.Context) outcome {
		copiesRunning.Inc()
		defer copiesRunning.Dec()
		defer release()
		return a.run(ctx)
	})
	if w.job == nil { // an earlier job of the name has not ended, and wakes the reconciler
		release()
		return ctrl.Result{RequeueAfter: time.Second}, nil
	}
	r.setWork(b.GetName(), w)
	return ctrl.Result{RequeueAfter: r.opts.ProgressEvery}, nil
}

// postpone writes why a copy waits. The end of a copy, of the origin or of a failed backup wakes the reconciler.
func (r *reconciler) postpone(ctx context.Context, b api.StoredBackup, old *api.CommonBackupStatus, why string) (
	ctrl.Result, error) {
	st := b.Common()
	st.State, st.Message = api.BackupPending, api.ClipMessage(why)
	_, err := r.putStatus(ctx, b, old)
	return ctrl.Result{RequeueAfter: originRetry}, err
}

// begunAttempts keeps api.HasBegun true for a copy that waits again.
func begunAttempts(old *api.CommonBackupStatus) int32 {
	if old.State == api.BackupInProgress {
		return 1
	}
	return 0
}

func copyOf(b api.StoredBackup) api.StoredBackup { return b.DeepCopyObject().(api.StoredBackup) }

// findOrigin finds the backup to copy. An error of kind Unavailable: the copy waits. Other errors with a kind are for
// good.
func (r *reconciler) findOrigin(ctx context.Context, b api.StoredBackup) (api.StoredBackup, error) {
	o := r.kind.newObject()
	err := r.live.Get(ctx, client.ObjectKey{Name: b.Origin()}, o)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return nil, err
	case err != nil || o.GetDeletionTimestamp() != nil:
		return nil, api.Errorf(api.NotFound, "backup %s: does not exist any more, so it cannot be copied", b.Origin())
	case o.Target() == b.Target():
		return nil, api.Errorf(api.Invalid, "backup %s: lies in target %s already", o.GetName(), b.Target())
	case o.Subject() != b.Subject():
		return nil, api.Errorf(api.Invalid, "backup %s: is of %s, not of %s", o.GetName(), o.Subject(), b.Subject())
	}
	switch o.Common().State {
	case api.BackupError:
		return nil, api.Errorf(api.Invalid, "backup %s: has an error, so it cannot be copied", o.GetName())
	case api.BackupCompleted:
		return o, nil
	}
	return nil, api.Errorf(api.Unavailable, "backup %s: is not completed yet; the copy waits", o.GetName())
}

// beginRemoval removes what an unfinished copy left, and then the finalizer.
func (r *reconciler) beginRemoval(ctx context.Context, b api.StoredBackup) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(b, api.Finalizer) {
		return ctrl.Result{}, nil
	}
	begun, st, old := api.HasBegun(b), b.Common(), b.Common().DeepCopy()
	if st.State != api.BackupDeleting {
		st.Message, st.Attempts = "", 0
	}
	if st.OwnerID, st.NextTry = r.node, nil; begun {
		st.State = api.BackupDeleting
	}
	if ok, err := r.putStatus(ctx, b, old); !ok {
		return ctrl.Result{}, err
	}
	w, d := &work{object: b.GetUID(), removal: true}, &removal{r, copyOf(b), begun}
	if w.job = targets.StartJob(ctx, r.jobs, b.GetName(), "copy", d.run); w.job == nil {
		return ctrl.Result{RequeueAfter: time.Second}, nil
	}
	r.setWork(b.GetName(), w)
	return ctrl.Result{}, nil
}

// setCompleted is the status of a copy that the repository has.
func (r *reconciler) setCompleted(b api.StoredBackup, o *outcome) {
	r.kind.setCompleted(b, o.facts, o.url, o.snapshot.String(), r.opts.Now())
	b.Common().OwnerID = r.node
}

// setFailed is the status after an attempt that failed.
func (r *reconciler) setFailed(b api.StoredBackup, w *work, err error) {
	st := b.Common()
	done, total := w.progress.Bytes()
	last := targets.CountAttempt(st, err, done > w.reached, w.begun)
	st.ByteProgress = api.ByteProgress{BytesDone: max(done, w.reached), BytesTotal: max(total, done, w.reached)}
	if last {
		r.setError(st, err)
		return
	}
	st.State, st.Message = api.BackupPending, api.ClipMessage(err.Error())
	r.setNextTry(st, err)
}

func (r *reconciler) setError(st *api.CommonBackupStatus, err error) {
	st.State, st.Message, st.NextTry = api.BackupError, api.ClipMessage(err.Error()), nil
	st.BackupCreatedAt = r.opts.Now().UTC().Format(time.RFC3339)
}

// reportEnd logs the end of a work, and emits an event at the end of a copy.
func (r *reconciler) reportEnd(b api.StoredBackup, o *outcome, removal bool) {
	s := b.Common()
	log := r.log.With("backup", b.GetName(), "origin", b.Origin(), "target", b.Target())
	switch {
	case o.err == nil:
		log.Info("backup copied", "uploaded", s.NewlyUploadDataSize)
		r.events.Eventf(b, nil, corev1.EventTypeNormal, "BackupCompleted", "Copy", "copy of backup %s: %s uploaded",
			b.Origin(), s.UploadedText)
	case s.State == api.BackupError:
		log.Warn("copy failed", "err", o.err)
		r.events.Eventf(b, nil, corev1.EventTypeWarning, "BackupFailed", "Copy", "%s", s.Message)
	case removal:
		log.Warn("an unfinished copy cannot be deleted yet", "err", o.err)
	case repo.IsLocked(o.err):
		log.Info("copy waits for a lock", "err", o.err)
	default:
		log.Warn("attempt of a copy failed", "attempts", s.Attempts, "err", o.err)
	}
}
