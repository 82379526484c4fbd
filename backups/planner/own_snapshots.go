package planner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// snapshotReconciler deletes the snapshots of a volume that the planner took and no backup needs. A request names the
// volume.
type snapshotReconciler struct {
	client.Client
	live client.Reader // without the cache
	log  *slog.Logger
}

func setupSnapshots(mgr ctrl.Manager, log *slog.Logger) error {
	r := &snapshotReconciler{Client: mgr.GetClient(), live: mgr.GetAPIReader(), log: log.With("loop", "backup-snapshots")}
	of := func(volume func(client.Object) string) handler.EventHandler {
		return handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			if name := volume(o); name != "" {
				return watch.Requests(name)
			}
			return nil
		})
	}
	return ctrl.NewControllerManagedBy(mgr).Named("backup-snapshots").
		Watches(&api.Backup{}, of(func(o client.Object) string { return o.(*api.Backup).Spec.Volume }),
			watch.Updates(func(old, now client.Object) bool {
				a, b := old.(*api.Backup), now.(*api.Backup)
				return a.Ended() != b.Ended() || a.Status.State != b.Status.State ||
					!a.DeletionTimestamp.Equal(b.DeletionTimestamp)
			})).
		Watches(&api.Snapshot{}, of(func(o client.Object) string {
			if s := o.(*api.Snapshot); s.OfBackup() != "" {
				return s.Spec.Volume
			}
			return ""
		})).
		Watches(&api.Volume{}, of(func(o client.Object) string {
			if o.GetDeletionTimestamp() != nil {
				return o.GetName()
			}
			return ""
		}), watch.Updates(watch.WishChanged)).
		WithOptions(controller.Options{RateLimiter: backlog.RateLimiter(), NewQueue: backlog.New}).
		Complete(r)
}

// Reconcile deletes the disposable snapshots of a volume.
func (r *snapshotReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var backups api.BackupList
	var snapshots api.SnapshotList
	of := client.MatchingFields{watch.ByVolume: req.Name}
	if err := errors.Join(r.List(ctx, &backups, of, client.UnsafeDisableDeepCopy),
		r.List(ctx, &snapshots, of, client.UnsafeDisableDeepCopy)); err != nil {
		return ctrl.Result{}, err
	}
	var v api.Volume
	err := r.Get(ctx, req.NamespacedName, &v)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	stays := err == nil && v.DeletionTimestamp == nil
	for _, s := range disposableSnapshots(stays, backups.Items, snapshots.Items) {
		if err := r.deleteSnapshot(ctx, s); err != nil {
			return ctrl.Result{}, fmt.Errorf("snapshot %s of volume %s: %w", s.Name, req.Name, err)
		}
	}
	return ctrl.Result{}, nil
}

// deleteSnapshot deletes a snapshot, unless the cache is late and the snapshot's backup has not ended.
func (r *snapshotReconciler) deleteSnapshot(ctx context.Context, s *api.Snapshot) error {
	b := &api.Backup{}
	err := r.live.Get(ctx, client.ObjectKey{Name: s.Spec.Labels[api.LabelBackup]}, b)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if err == nil && b.UID == s.OfBackup() && !b.Ended() {
		return nil // the event of the backup continues
	}
	if err := r.Delete(ctx, s.DeepCopy(), client.Preconditions{UID: &s.UID}); err != nil {
		return ignoreRace(err)
	}
	r.log.Info("snapshot of a backup deleted", "snapshot", s.Name, "volume", s.Spec.Volume,
		"backup", s.Spec.Labels[api.LabelBackup])
	return nil
}

// disposableSnapshots returns the snapshots of a volume that were taken for backups and that no backup needs. A backup
// needs its snapshot until its end, also one that was taken for another backup. The snapshot of the newest completed
// backup in each target is needed as the base of the next backup, as long as the volume stays: the snapshots of a
// deleted volume would keep the volume's data for ever.
func disposableSnapshots(volumeStays bool, backups []api.Backup, snapshots []api.Snapshot) (
	disposable []*api.Snapshot) {
	unfinished, named := map[types.UID]bool{}, map[string]bool{}
	for i := range backups {
		b := &backups[i]
		if unfinished[b.UID] = !b.Ended(); !b.Ended() {
			named[b.Spec.SnapshotName] = true
		}
	}
	var bases map[string]bool
	if volumeStays {
		bases = findBases(backups, snapshots)
	}
	for i := range snapshots {
		s := &snapshots[i]
		if of := s.OfBackup(); of != "" && s.DeletionTimestamp == nil && !unfinished[of] && !named[s.Name] && !bases[s.Name] {
			disposable = append(disposable, s)
		}
	}
	return disposable
}

// findBases returns the names of the snapshots that the next backups of a volume build on: in each target that of the
// newest backup in the store with a snapshot here. Backups of an earlier volume of the same name, or of another
// cluster, have none here.
func findBases(backups []api.Backup, snapshots []api.Snapshot) map[string]bool {
	volumes := map[string]api.UID{} // by snapshot
	for i := range snapshots {
		volumes[snapshots[i].Name] = snapshots[i].Status.VolumeUID
	}
	newest := map[string]*api.Backup{} // by target
	for i := range backups {
		b := &backups[i]
		uid, exists := volumes[b.Status.SnapshotName]
		stored := b.Spec.SnapshotID+b.Status.SnapshotID != ""
		if !stored || b.Spec.CopyOf != "" || b.DeletionTimestamp != nil || !exists || uid != b.Status.VolumeUID {
			continue
		}
		if last := newest[b.Target()]; last == nil || b.CutAt().After(last.CutAt()) {
			newest[b.Target()] = b
		}
	}
	bases := map[string]bool{}
	for _, b := range newest {
		bases[b.Status.SnapshotName] = true
	}
	return bases
}
