package host

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/recorder"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/backups/host/holders"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/block"
	"drover.io/drover/block/pace"
	"drover.io/drover/block/semaphore"
)

// maker reconciles the Backups and BackupBackingImages of one node.
type maker struct {
	client.Client
	live         client.Reader // without a cache
	node         string
	disks        func(api.UID) (block.SnapshotDisk, error)
	repositories *targets.Repositories
	opts         Options
	events       recorder.EventRecorder
	log          *slog.Logger
	holders      *holders.Set // of works
	works        *workSet
	pacer        *pace.Pacer
	places       semaphore.Set[struct{}]
}

// isMine reports whether the node makes the Backup.
func isMine(b api.StoredBackup, node string) bool {
	at, _ := b.SourceDisk()
	return at == node && !b.Ended()
}

// Reconcile compares one Backup with its work.
func (m *maker) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	b, err := findBackup(ctx, m, req.NamespacedName)
	if err != nil {
		return ctrl.Result{}, err
	}
	w := m.works.get(req.NamespacedName)
	if w != nil && !w.serves(b, m.node) {
		if w.cancel(); w.isRunning() {
			return ctrl.Result{}, nil // the end of the work wakes the reconciler
		}
		m.releaseSoon(w)
		m.works.forget(w)
		w = nil
	}
	if w != nil && !w.isRunning() && w.canceled { // the source changed, and changed back
		m.works.forget(w)
		w = nil
	}
	switch {
	case b == nil || !isMine(b, m.node):
		return ctrl.Result{}, nil
	case w != nil && w.isRunning():
		return m.showProgress(ctx, b, w)
	case w != nil && w.removal:
		return m.endRemoval(ctx, b, w)
	case w != nil:
		return m.endAttempt(ctx, b, w)
	case !b.GetDeletionTimestamp().IsZero():
		return m.beginRemoval(ctx, b)
	}
	return m.beginAttempt(ctx, b)
}

// putStatus writes the status of b if b differs from old. Nil with ok false says that the Backup changed meanwhile: its
// event wakes the reconciler.
func (m *maker) putStatus(ctx context.Context, b api.StoredBackup, old runtime.Object) (ok bool, err error) {
	if equality.Semantic.DeepEqual(old, b) {
		return true, nil
	}
	if err := m.Status().Update(ctx, b); err != nil {
		return false, client.IgnoreNotFound(watch.IgnoreConflict(err))
	}
	return true, nil
}

// untilRetry is the time until the next try of this node.
func (m *maker) untilRetry(b api.StoredBackup) time.Duration {
	st := b.Common()
	if st.NextTry == nil || st.OwnerID != m.node {
		return 0
	}
	return time.Until(st.NextTry.Time)
}

// placeCount is how many backups the node makes at once.
func (m *maker) placeCount(ctx context.Context) int {
	return max(int(min(watch.SettingNumber(ctx, m.Client, settingPlaces, m.log), 1000)), 1)
}

// beginAttempt starts an attempt to make the backup, if the node has a free place.
func (m *maker) beginAttempt(ctx context.Context, b api.StoredBackup) (ctrl.Result, error) {
	if pause := m.untilRetry(b); pause > 0 {
		return ctrl.Result{RequeueAfter: pause}, nil
	}
	st, old := b.Common(), copyOf(b)
	count := m.placeCount(ctx)
	release, free := m.places.TryAcquire(struct{}{}, count)
	if !free {
		// The end of a work wakes the reconciler. A place may also become free without a work, by a lost race.
		wait := ctrl.Result{RequeueAfter: m.opts.RetryMax}
		if st.State == api.BackupInProgress { // of a former process; the state tells the next attempt to look
			return wait, nil
		}
		st.State, st.OwnerID = api.BackupPending, m.node
		st.Message = "waits until node " + m.node + " has made another backup"
		_, err := m.putStatus(ctx, b, old)
		return wait, err
	}
	begun := api.HasBegun(b)
	st.State, st.Message, st.OwnerID, st.NextTry = api.BackupInProgress, "", m.node, nil
	st.EstimatedEnd = nil // of a former process
	// Without a change, too: the write finds out whether the cache is behind, and the backup has ended.
	if err := m.Status().Update(ctx, b); err != nil {
		release()
		return ctrl.Result{}, client.IgnoreNotFound(watch.IgnoreConflict(err))
	}
	w := newWork(b)
	w.begun, w.reached = begun, old.Common().BytesDone
	job := &attempt{maker: m, b: copyOf(b), places: count}
	backupsRunning.Inc()
	err := m.works.startWork(w, job.run, func() { backupsRunning.Dec(); release() })
	if err != nil {
		backupsRunning.Dec()
		release()
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: m.opts.ProgressEvery}, nil
}

// beginRemoval removes what an unfinished backup left, and then the finalizer.
func (m *maker) beginRemoval(ctx context.Context, b api.StoredBackup) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(b, api.Finalizer) {
		return ctrl.Result{}, nil
	}
	st, old := b.Common(), copyOf(b)
	if pause := m.untilRetry(b); pause > 0 && st.State == api.BackupDeleting {
		return ctrl.Result{RequeueAfter: pause}, nil
	}
	begun := api.HasBegun(b)
	st.State, st.OwnerID, st.NextTry = api.BackupDeleting, m.node, nil
	if st.State != old.Common().State {
		st.Message, st.Attempts = "", 0
	}
	if ok, err := m.putStatus(ctx, b, old); !ok {
		return ctrl.Result{}, err
	}
	w := newWork(b)
	w.removal = true
	job := &removal{maker: m, b: copyOf(b), begun: begun}
	return ctrl.Result{}, m.works.startWork(w, job.run, func() {})
}

// endRemoval removes the finalizer, or plans the next try.
func (m *maker) endRemoval(ctx context.Context, b api.StoredBackup, w *work) (ctrl.Result, error) {
	if w.err == nil { // the work stays until the object is deleted
		if controllerutil.RemoveFinalizer(b, api.Finalizer) {
			return ctrl.Result{}, client.IgnoreNotFound(watch.IgnoreConflict(m.Update(ctx, b)))
		}
		return ctrl.Result{}, nil
	}
	m.log.Warn("an unfinished backup cannot be deleted yet", "backup", b.GetName(), "err", w.err)
	st, old := b.Common(), copyOf(b)
	st.State, st.OwnerID, st.Message = api.BackupDeleting, m.node, api.ClipMessage(w.err.Error())
	st.Attempts++
	pause := m.pauseAfter(st.Attempts, w.err)
	setNextTry(st, pause)
	ok, err := m.putStatus(ctx, b, old)
	if ok {
		m.works.forget(w)
	}
	return ctrl.Result{RequeueAfter: pause}, err
}

// showProgress copies the progress of a running attempt into the status.
func (m *maker) showProgress(ctx context.Context, b api.StoredBackup, w *work) (ctrl.Result, error) {
	if w.removal {
		return ctrl.Result{}, nil // the end of the work wakes the reconciler
	}
	st, old := b.Common(), copyOf(b)
	st.Message = w.currentPhase()
	st.ByteProgress = w.progress.At(time.Now())
	st.Progress = st.Percent()
	_, err := m.putStatus(ctx, b, old)
	return ctrl.Result{RequeueAfter: m.opts.ProgressEvery}, err
}

// endAttempt writes the outcome of an attempt into the status.
func (m *maker) endAttempt(ctx context.Context, b api.StoredBackup, w *work) (ctrl.Result, error) {
	if w.err == nil {
		if again, err := targets.IsBegunElsewhere(ctx, m.live, b, m.node); err != nil {
			return ctrl.Result{}, err
		} else if again {
			m.works.forget(w)
			return m.beginAttempt(ctx, b)
		}
	}
	old := copyOf(b)
	if w.err == nil {
		setCompleted(b, w)
	} else {
		m.setFailed(b, w)
	}
	b.Common().OwnerID = m.node
	if ok, err := m.putStatus(ctx, b, old); !ok {
		return ctrl.Result{}, err
	}
	m.works.forget(w)
	m.reportEnd(b, w.err)
	if b.Ended() {
		m.releaseSoon(w)
		return ctrl.Result{}, nil
	}
	return ctrl.Result{RequeueAfter: max(m.untilRetry(b), time.Millisecond)}, nil
}

// waiting requests the backups of this node without a work, the oldest first.
func (m *maker) waiting(ctx context.Context, ended client.Object) (requests []reconcile.Request) {
	all, err := targets.ListBackups(ctx, m, client.UnsafeDisableDeepCopy)
	if err != nil {
		m.log.Warn("backups cannot be listed; the waiting ones start later", "err", err)
		return nil
	}
	found := slices.DeleteFunc(all, func(b api.StoredBackup) bool {
		return !isMine(b, m.node) || m.works.get(keyOf(b)) != nil
	})
	slices.SortFunc(found, func(x, y api.StoredBackup) int {
		a, b := x.GetCreationTimestamp(), y.GetCreationTimestamp()
		return cmp.Or(a.Compare(b.Time), cmp.Compare(x.GetName(), y.GetName()))
	})
	for _, b := range found {
		requests = append(requests, reconcile.Request{NamespacedName: keyOf(b)})
	}
	return requests
}

// endedAndWaiting requests the backup of an ended work, and the backups that wait for its place.
func (m *maker) endedAndWaiting(ctx context.Context, o client.Object) []reconcile.Request {
	ended := reconcile.Request{NamespacedName: client.ObjectKeyFromObject(o)}
	return append([]reconcile.Request{ended}, m.waiting(ctx, o)...)
}

// pauseAfter is the pause after a number of failures, the last one with err.
func (m *maker) pauseAfter(failures int32, err error) time.Duration {
	return targets.PauseAfter(failures, err, m.opts.RetryMin, m.opts.RetryMax)
}

// setNextTry records the time of the next try. The API keeps whole seconds.
func setNextTry(st *api.CommonBackupStatus, pause time.Duration) {
	next := metav1.NewTime(time.Now().Add(pause + time.Second - 1).Truncate(time.Second))
	st.NextTry = &next
}
