package planner

import (
	"context"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/recorder"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

const settingFailedTTL = "failed-backup-ttl" // minutes; 0: never

// sourceRetry is the interval between two looks at a backup without a source.
const sourceRetry = 30 * time.Second

type backupReconciler struct {
	client.Client
	live   client.Reader // without the cache
	events recorder.EventRecorder
	log    *slog.Logger
	// began is the start of the controller, which may have missed heartbeats before.
	began time.Time
}

// Setup adds the reconcilers of the planner to a manager whose cache has both sets of indexes of api/watch.
func Setup(mgr ctrl.Manager, log *slog.Logger) error { return setupSince(mgr, log, time.Now()) }

func setupSince(mgr ctrl.Manager, log *slog.Logger, began time.Time) error {
	r := &backupReconciler{Client: mgr.GetClient(), live: mgr.GetAPIReader(),
		events: mgr.GetEventRecorder("drover-backups"), log: log.With("loop", "backup-plans"), began: began}
	if err := setupMetrics(mgr.GetClient()); err != nil {
		return err
	}
	for _, setup := range []func(ctrl.Manager, *slog.Logger) error{setupSnapshots, setupBackupVolumes,
		setupImageRestores} {
		if err := setup(mgr, log); err != nil {
			return err
		}
	}
	if err := setupImages(mgr, r); err != nil {
		return err
	}
	waiting := func(b *api.Backup) bool { return !b.Ended() }
	ofVolume := func(volume func(client.Object) string) handler.EventHandler {
		return r.backupsBy(watch.ByVolume, volume, waiting)
	}
	// One worker, so that each choice of a node counts the choices before.
	return ctrl.NewControllerManagedBy(mgr).Named("backup-plans").For(&api.Backup{}).
		Watches(&api.Volume{}, ofVolume(client.Object.GetName)).
		Watches(&api.Snapshot{}, ofVolume(func(o client.Object) string { return o.(*api.Snapshot).Spec.Volume })).
		Watches(&api.Replica{}, ofVolume(func(o client.Object) string { return o.(*api.Replica).Spec.Volume })).
		Watches(&api.BackupBackingImage{}, r.backupsBy(watch.ByTarget,
			func(o client.Object) string { return o.(*api.BackupBackingImage).Target() }, waiting)).
		Watches(&api.BackupTarget{}, r.backupsBy(watch.ByTarget, client.Object.GetName,
			func(b *api.Backup) bool { return !b.Ended() || b.DeletionTimestamp != nil })).
		Watches(&api.Node{}, r.backupsBy("", nil, waiting), watch.Updates(nodeChanged)).
		Watches(&api.Setting{}, r.backupsBy("", nil,
			func(b *api.Backup) bool { return b.Status.State == api.BackupError }), watch.Named(settingFailedTTL)).
		WithOptions(controller.Options{RateLimiter: backlog.RateLimiter(), NewQueue: backlog.New}).
		Complete(r)
}

// backupsBy requests the Backups with the value of an object in an index, as far as matters accepts them; with index ""
// all Backups.
func (r *backupReconciler) backupsBy(index string, value func(client.Object) string,
	matters func(*api.Backup) bool) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		options := []client.ListOption{client.UnsafeDisableDeepCopy}
		if index != "" {
			options = append(options, client.MatchingFields{index: value(o)})
		}
		var list api.BackupList
		if err := r.List(ctx, &list, options...); err != nil {
			r.log.Error("backups cannot be listed", "index", index, "error", err)
		}
		var all []reconcile.Request
		for i := range list.Items {
			if b := &list.Items[i]; matters(b) {
				all = append(all, watch.Request(b.Name))
			}
		}
		return all
	})
}

// nodeChanged reports whether a change of a Node can affect the choice of a replica: a disk became ready or unready, or
// the node was silent before.
func nodeChanged(old, now client.Object) bool {
	a, b := old.(*api.Node).Status, now.(*api.Node).Status
	if b.Heartbeat.Sub(a.Heartbeat.Time) >= old.(*api.Node).SilentAfter() || len(a.Disks) != len(b.Disks) {
		return true
	}
	for i := range a.Disks {
		if a.Disks[i].UID != b.Disks[i].UID || a.Disks[i].Ready != b.Disks[i].Ready {
			return true
		}
	}
	return false
}

// Reconcile takes the next step of one backup.
func (r *backupReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	b := &api.Backup{}
	if err := r.Get(ctx, req.NamespacedName, b); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if b.DeletionTimestamp != nil {
		return r.planDeletion(ctx, b)
	}
	named, err := r.nameTarget(ctx, b)
	if err != nil {
		return r.postpone(ctx, b, err)
	}
	switch {
	case addMetadata(b, map[string]string{api.LabelVolume: b.Spec.Volume, api.LabelBackupTarget: b.Target()}) || named:
		return ctrl.Result{}, ignoreRace(r.Update(ctx, b)) // the event of the update continues
	case b.Status.State == api.BackupError:
		return r.deleteExpired(ctx, b)
	case b.Ended():
		return ctrl.Result{}, nil
	case api.IsCopy(b):
		return r.planCopy(ctx, b)
	case b.Spec.Source != nil:
		return r.checkSource(ctx, b)
	}
	return r.planSource(ctx, b)
}

// nameTarget gives a backup that names no target the target of its volume's backups, and reports whether it did.
func (r *backupReconciler) nameTarget(ctx context.Context, b *api.Backup) (bool, error) {
	if b.Spec.BackupTargetName != "" || b.Ended() {
		return false, nil
	}
	v := &api.Volume{}
	if !api.IsCopy(b) {
		if err := validateNames([2]string{"volume", b.Spec.Volume}); err != nil {
			return false, err
		}
		// The cache may be late, and the choice is for good.
		if err := r.live.Get(ctx, client.ObjectKey{Name: b.Spec.Volume}, v); client.IgnoreNotFound(err) != nil {
			return false, err
		}
	}
	if err := validateTarget(v.BackupTarget()); err != nil {
		return false, err
	}
	b.Spec.BackupTargetName = v.BackupTarget()
	return true, nil
}

// ignoreRace drops the error of a lost race: the event of the newer object starts the next reconcile.
func ignoreRace(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// addMetadata adds the finalizer, and the names as labels, of a backup, and reports whether any was missing. A name
// that is no value of a label gets no label: no volume, image or target has such a name.
func addMetadata(b client.Object, names map[string]string) bool {
	changed := controllerutil.AddFinalizer(b, api.Finalizer)
	labels := b.GetLabels()
	for label, name := range names {
		value := api.LabelValue(name)
		if labels[label] == value || len(validation.IsValidLabelValue(value)) > 0 {
			continue
		}
		if labels == nil {
			labels = map[string]string{}
		}
		labels[label], changed = value, true
	}
	b.SetLabels(labels)
	return changed
}

// planSource finds a replica for a backup, or says in the status why the backup waits or cannot be made.
func (r *backupReconciler) planSource(ctx context.Context, b *api.Backup) (ctrl.Result, error) {
	source, err := r.findSource(ctx, r.Client, b)
	if err != nil && !retryable(err) {
		source, err = r.findSource(ctx, r.live, b) // the cache may be late, and an Error is for good
	}
	if err == nil {
		err = r.checkImageBackup(ctx, b)
	}
	if err == nil {
		base := b.DeepCopy()
		b.Spec.Source = source
		if err = r.patchSource(ctx, b, base); err == nil {
			r.log.Info("backup has a source", "backup", b.Name, "volume", source.Volume, "node", source.Node)
		}
		return ctrl.Result{}, ignoreRace(err)
	}
	return r.postpone(ctx, b, err)
}

// planCopy leaves a copy to the owner of its target, and says in the status that a copy without a target waits.
func (r *backupReconciler) planCopy(ctx context.Context, b api.StoredBackup) (ctrl.Result, error) {
	err := validateNames([2]string{"backup", b.Origin()}, [2]string{"backup target", b.Target()})
	if err != nil {
		return r.postpone(ctx, b, err)
	}
	err = r.live.Get(ctx, client.ObjectKey{Name: b.Target()}, &api.BackupTarget{})
	if apierrors.IsNotFound(err) {
		return r.postpone(ctx, b, api.Errorf(api.Unavailable, "backup target %s does not exist: the copy waits until the "+
			"target is created", b.Target()))
	}
	return ctrl.Result{}, err
}

// postpone says in the status why a backup waits for its source, or cannot be made.
func (r *backupReconciler) postpone(ctx context.Context, b api.StoredBackup, err error) (ctrl.Result, error) {
	if api.KindOf(err) == api.Other {
		return ctrl.Result{}, err
	}
	s := b.Common()
	before := s.DeepCopy()
	if s.State == api.BackupInProgress {
		s.Attempts = max(s.Attempts, 1) // the next node looks whether the silent node stored the backup
	}
	s.State, s.Message, s.OwnerID, s.NextTry = api.BackupPending, err.Error(), "", nil
	if !retryable(err) {
		s.State, s.BackupCreatedAt = api.BackupError, time.Now().UTC().Format(time.RFC3339)
	}
	wait := ctrl.Result{RequeueAfter: sourceRetry} // no event reports a node that becomes silent
	if equality.Semantic.DeepEqual(before, s) {
		return wait, nil
	}
	if err := r.Status().Update(ctx, b); err != nil {
		return ctrl.Result{}, ignoreRace(err)
	}
	r.log.Info("backup", "backup", b.GetName(), "state", s.State, "message", s.Message)
	if s.State == api.BackupError {
		r.events.Eventf(b, nil, corev1.EventTypeWarning, "BackupFailed", "Backup", "%s", api.ClipMessage(s.Message))
	}
	return wait, nil
}

// retryable reports whether a later try can succeed: the backup waits.
func retryable(err error) bool {
	kind := api.KindOf(err)
	return kind == api.Other || kind == api.Unavailable || kind == api.Busy
}

// patchSource writes spec.source, unless the Backup has changed: the node may have completed the backup.
func (r *backupReconciler) patchSource(ctx context.Context, b, base api.StoredBackup) error {
	return r.Patch(ctx, b, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}))
}

// checkSource takes a backup from a node that cannot make the backup any more. The next reconcile finds another
// replica.
func (r *backupReconciler) checkSource(ctx context.Context, b *api.Backup) (ctrl.Result, error) {
	source := b.Spec.Source
	v := &api.Volume{}
	if err := r.Get(ctx, client.ObjectKey{Name: source.Volume}, v); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	replicas, nodes, err := r.listReplicas(ctx, source.Volume)
	if err != nil {
		return ctrl.Result{}, err
	}
	now := time.Now()
	why := explainLoss(source, v, replicas, nodes, func(n *api.Node) bool { return r.silentIn(n, now) <= 0 })
	if why == "" {
		return r.requeueAtSilence(nodes, source.Node, now), nil
	}
	return ctrl.Result{}, r.clearSource(ctx, b, why)
}

func (r *backupReconciler) clearSource(ctx context.Context, b api.StoredBackup, why string) error {
	base := b.DeepCopyObject().(api.StoredBackup)
	switch b := b.(type) {
	case *api.Backup:
		b.Spec.Source = nil
	case *api.BackupBackingImage:
		b.Spec.Source = nil
	}
	if err := r.patchSource(ctx, b, base); err != nil {
		return ignoreRace(err)
	}
	node, _ := base.SourceDisk()
	r.log.Warn("backup loses its source", "backup", b.GetName(), "node", node, "reason", why)
	return nil
}

// silentIn is the time until the node is silent without another heartbeat. A heartbeat may have been missed while the
// controller was down.
func (r *backupReconciler) silentIn(n *api.Node, now time.Time) time.Duration {
	last := n.Status.Heartbeat.Time
	if r.began.After(last) {
		last = r.began
	}
	return n.SilentAfter() - now.Sub(last)
}

// requeueAtSilence reconciles again when the node would be silent: no event reports silence.
func (r *backupReconciler) requeueAtSilence(nodes []api.Node, name string, now time.Time) ctrl.Result {
	if n := findNode(nodes, name); n != nil {
		return ctrl.Result{RequeueAfter: r.silentIn(n, now) + time.Second}
	}
	return ctrl.Result{}
}

// deleteExpired deletes a failed backup some time after its end.
func (r *backupReconciler) deleteExpired(ctx context.Context, b api.StoredBackup) (ctrl.Result, error) {
	minutes := watch.SettingNumber(ctx, r.Client, settingFailedTTL, r.log)
	if minutes == 0 {
		return ctrl.Result{}, nil // the event of the setting continues
	}
	end, err := time.Parse(time.RFC3339, b.Common().BackupCreatedAt)
	if err != nil {
		return ctrl.Result{}, nil // without a known end the backup stays, so that a user sees the failure
	}
	left := time.Until(end.Add(time.Duration(min(minutes, maxMinutes)) * time.Minute))
	if left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	return ctrl.Result{}, r.deleteSeen(ctx, b)
}

// deleteSeen deletes a backup unless it has changed.
func (r *backupReconciler) deleteSeen(ctx context.Context, b client.Object) error {
	uid, version := b.GetUID(), b.GetResourceVersion()
	return ignoreRace(r.Delete(ctx, b, client.Preconditions{UID: &uid, ResourceVersion: &version}))
}

// maxMinutes, about a hundred years, is the longest time that counts: more would not fit into a time.Duration.
const maxMinutes = 50 << 20

// planDeletion removes the finalizer of a deleted backup for which no node is responsible. The snapshotReconciler
// deletes the backup's snapshot.
func (r *backupReconciler) planDeletion(ctx context.Context, b api.StoredBackup) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(b, api.Finalizer) {
		return ctrl.Result{}, nil
	}
	node, _ := b.SourceDisk()
	switch {
	case !api.IsCopy(b) && node == "" && b.FoundSnapshot() == "" && b.Common().SnapshotID == "" && !api.HasBegun(b):
		// the store has no trace
	case !api.IsCopy(b) && node != "" && !b.Ended():
		return r.checkNode(ctx, b)
	default:
		// The node role of the target's owner deletes the backup, or the copy, in the store, and what a lost node left of the
		// backup. Without the target, the store keeps the backup.
		err := r.live.Get(ctx, client.ObjectKey{Name: b.Target()}, &api.BackupTarget{})
		if err == nil || !apierrors.IsNotFound(err) {
			return ctrl.Result{}, err
		}
		r.log.Info("backup stays in the store: its target does not exist", "backup", b.GetName(), "target", b.Target())
	}
	controllerutil.RemoveFinalizer(b, api.Finalizer)
	return ctrl.Result{}, ignoreRace(r.Update(ctx, b))
}

// checkNode takes a deleted backup from a silent node, for the owner of the target. A node that answers cancels the
// backup, and removes the finalizer.
func (r *backupReconciler) checkNode(ctx context.Context, b api.StoredBackup) (ctrl.Result, error) {
	var nodes api.NodeList
	if err := r.List(ctx, &nodes); err != nil {
		return ctrl.Result{}, err
	}
	now := time.Now()
	name, _ := b.SourceDisk()
	if n := findNode(nodes.Items, name); n != nil && r.silentIn(n, now) > 0 {
		return r.requeueAtSilence(nodes.Items, name, now), nil
	}
	return ctrl.Result{}, r.clearSource(ctx, b, "the backup is deleted, and the node gives no sign of life")
}
