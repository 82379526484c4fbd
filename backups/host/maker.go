package host

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/recorder"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/block"
	"drover.io/drover/block/semaphore"
)

// maker reconciles the Backups of one node.
type maker struct {
	client.Client
	live         client.Reader // without a cache
	node         string
	disks        func(api.UID) (block.SnapshotDisk, error)
	repositories *targets.Repositories
	opts         Options
	events       recorder.EventRecorder
	log          *slog.Logger
	works        *workSet
	places       semaphore.Set[struct{}]

	// holding is held by the collector while it releases a hold, and for reading by a work that takes its hold.
	holding sync.RWMutex
}

// isMine reports whether the node makes the Backup.
func isMine(b *api.Backup, node string) bool {
	return b.Spec.Source != nil && b.Spec.Source.Node == node && !b.Ended()
}

// isBegun reports whether the repository may have a snapshot of an unfinished Backup.
func isBegun(b *api.Backup) bool {
	s := &b.Status
	return s.Attempts > 0 || s.State == api.BackupInProgress || s.State == api.BackupDeleting
}

// Reconcile compares one Backup with its work.
func (m *maker) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	b := &api.Backup{}
	err := m.Get(ctx, req.NamespacedName, b)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if err != nil {
		b = nil
	}
	w := m.works.get(req.Name)
	if w != nil && !w.serves(b, m.node) {
		if w.cancel(); w.isRunning() {
			return ctrl.Result{}, nil // the end of the work wakes the reconciler
		}
		m.releaseHold(w)
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
	case !b.DeletionTimestamp.IsZero():
		return m.beginRemoval(ctx, b)
	}
	return m.beginAttempt(ctx, b)
}

// putStatus writes a status if the status differs from old. Nil with ok false says that the Backup changed meanwhile:
// its event wakes the reconciler.
func (m *maker) putStatus(ctx context.Context, b *api.Backup, old *api.BackupStatus) (ok bool, err error) {
	if equality.Semantic.DeepEqual(*old, b.Status) {
		return true, nil
	}
	if err := m.Status().Update(ctx, b); err != nil {
		return false, client.IgnoreNotFound(watch.IgnoreConflict(err))
	}
	return true, nil
}

// untilRetry is the time until the next try of this node.
func (m *maker) untilRetry(b *api.Backup) time.Duration {
	if b.Status.NextTry == nil || b.Status.OwnerID != m.node {
		return 0
	}
	return time.Until(b.Status.NextTry.Time)
}

// placeCount is how many backups the node makes at once.
func (m *maker) placeCount(ctx context.Context) int {
	return max(int(min(watch.SettingNumber(ctx, m.Client, settingPlaces, m.log), 1000)), 1)
}

// beginAttempt starts an attempt to make the backup, if the node has a free place.
func (m *maker) beginAttempt(ctx context.Context, b *api.Backup) (ctrl.Result, error) {
	if pause := m.untilRetry(b); pause > 0 {
		return ctrl.Result{RequeueAfter: pause}, nil
	}
	st, old := &b.Status, b.Status.DeepCopy()
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
	again := isBegun(b)
	st.State, st.Message, st.OwnerID, st.NextTry = api.BackupInProgress, "", m.node, nil
	// Without a change, too: the write finds out whether the cache is behind, and the backup has ended.
	if err := m.Status().Update(ctx, b); err != nil {
		release()
		return ctrl.Result{}, client.IgnoreNotFound(watch.IgnoreConflict(err))
	}
	w := &work{backup: b.Name, object: b.UID, source: *b.Spec.Source, reached: old.BytesDone}
	job := &attempt{maker: m, b: b.DeepCopy(), again: again, places: count}
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
func (m *maker) beginRemoval(ctx context.Context, b *api.Backup) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(b, api.Finalizer) {
		return ctrl.Result{}, nil
	}
	if pause := m.untilRetry(b); pause > 0 && b.Status.State == api.BackupDeleting {
		return ctrl.Result{RequeueAfter: pause}, nil
	}
	begun, old := isBegun(b), b.Status.DeepCopy()
	b.Status.State, b.Status.OwnerID, b.Status.NextTry = api.BackupDeleting, m.node, nil
	if b.Status.State != old.State {
		b.Status.Message, b.Status.Attempts = "", 0
	}
	if ok, err := m.putStatus(ctx, b, old); !ok {
		return ctrl.Result{}, err
	}
	w := &work{backup: b.Name, object: b.UID, source: *b.Spec.Source, removal: true}
	job := &removal{maker: m, b: b.DeepCopy(), begun: begun}
	return ctrl.Result{}, m.works.startWork(w, job.run, func() {})
}

// endRemoval removes the finalizer, or plans the next try.
func (m *maker) endRemoval(ctx context.Context, b *api.Backup, w *work) (ctrl.Result, error) {
	if w.err == nil { // the work stays until the object is deleted
		if controllerutil.RemoveFinalizer(b, api.Finalizer) {
			return ctrl.Result{}, client.IgnoreNotFound(watch.IgnoreConflict(m.Update(ctx, b)))
		}
		return ctrl.Result{}, nil
	}
	m.log.Warn("an unfinished backup cannot be deleted yet", "backup", b.Name, "err", w.err)
	old := b.Status.DeepCopy()
	b.Status.State, b.Status.OwnerID, b.Status.Message = api.BackupDeleting, m.node, api.ClipMessage(w.err.Error())
	b.Status.Attempts++
	pause := m.pauseAfter(b.Status.Attempts)
	setNextTry(&b.Status, pause)
	ok, err := m.putStatus(ctx, b, old)
	if ok {
		m.works.forget(w)
	}
	return ctrl.Result{RequeueAfter: pause}, err
}

// showProgress copies the progress of a running attempt into the status.
func (m *maker) showProgress(ctx context.Context, b *api.Backup, w *work) (ctrl.Result, error) {
	if w.removal {
		return ctrl.Result{}, nil // the end of the work wakes the reconciler
	}
	old := b.Status.DeepCopy()
	st := &b.Status
	st.Message = w.currentPhase()
	st.BytesDone, st.BytesTotal = w.progress.Bytes()
	st.Progress = 0
	if st.BytesTotal > 0 {
		st.Progress = int32(100 * min(st.BytesDone, st.BytesTotal) / st.BytesTotal)
	}
	_, err := m.putStatus(ctx, b, old)
	return ctrl.Result{RequeueAfter: m.opts.ProgressEvery}, err
}

// endAttempt writes the outcome of an attempt into the status.
func (m *maker) endAttempt(ctx context.Context, b *api.Backup, w *work) (ctrl.Result, error) {
	old := b.Status.DeepCopy()
	if w.err == nil {
		setCompleted(b, w)
	} else {
		m.setFailed(b, w)
	}
	b.Status.OwnerID = m.node
	if ok, err := m.putStatus(ctx, b, old); !ok {
		return ctrl.Result{}, err
	}
	m.works.forget(w)
	m.reportEnd(b, w.err)
	if b.Ended() {
		m.releaseHold(w)
		return ctrl.Result{}, nil
	}
	return ctrl.Result{RequeueAfter: max(m.untilRetry(b), time.Millisecond)}, nil
}

// waiting requests the Backups of this node without a work, the oldest first.
func (m *maker) waiting(ctx context.Context, ended client.Object) (requests []reconcile.Request) {
	var list api.BackupList
	if err := m.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		m.log.Warn("backups cannot be listed; the waiting ones start later", "err", err)
		return nil
	}
	var found []*api.Backup
	for i := range list.Items {
		if b := &list.Items[i]; isMine(b, m.node) && m.works.get(b.Name) == nil {
			found = append(found, b)
		}
	}
	slices.SortFunc(found, func(x, y *api.Backup) int {
		return cmp.Or(x.CreationTimestamp.Compare(y.CreationTimestamp.Time), cmp.Compare(x.Name, y.Name))
	})
	for _, b := range found {
		requests = append(requests, watch.Request(b.Name))
	}
	return requests
}

// endedAndWaiting requests the Backup of an ended work, and the Backups that wait for its place.
func (m *maker) endedAndWaiting(ctx context.Context, o client.Object) []reconcile.Request {
	return append(watch.Requests(o.GetName()), m.waiting(ctx, o)...)
}

// pauseAfter is the pause after a number of failures.
func (m *maker) pauseAfter(failures int32) time.Duration {
	pause := m.opts.RetryMin << min(max(failures-1, 0), 20)
	if pause > m.opts.RetryMax || pause <= 0 {
		return m.opts.RetryMax
	}
	return pause
}

// setNextTry records the time of the next try. The API keeps whole seconds.
func setNextTry(st *api.BackupStatus, pause time.Duration) {
	next := metav1.NewTime(time.Now().Add(pause + time.Second - 1).Truncate(time.Second))
	st.NextTry = &next
}
