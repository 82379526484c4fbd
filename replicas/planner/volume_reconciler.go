package planner

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// volumeReconciler is the Volume loop of the controller role.
type volumeReconciler struct {
	client client.Client
	reader client.Reader // reads the API, not the cache
	events events.EventRecorder
	log    *slog.Logger

	mu sync.Mutex
	// assumed holds new Replicas that the cache may lack, by name: they count, and must not be created twice.
	assumed map[string]assumedReplica
	// waiting names volumes without enough disks; a change that can help wakes the volumes.
	waiting    map[string]bool
	silent     map[string]bool            // nodes without a heartbeat
	clones     map[string]map[string]bool // by source volume: the waiting clones
	migrations migrationLog               // replicas that move
	snapshots  snapshotCount              // of snapshots
	queue      backlog.Queue              // nil before the reconciler runs
}

// Setup adds the reconcilers of the controller role to mgr, whose cache has both sets of indexes of api/watch.
func Setup(mgr ctrl.Manager, log *slog.Logger) error {
	p := &volumeReconciler{
		client: mgr.GetClient(), reader: mgr.GetAPIReader(), events: mgr.GetEventRecorder("drover-controller"), log: log,
		assumed: map[string]assumedReplica{}, waiting: map[string]bool{},
		silent: map[string]bool{}, clones: map[string]map[string]bool{}, snapshots: snapshotCount{},
		migrations: migrationLog{under: map[string]migration{}, since: map[string]time.Time{}},
	}
	if err := setupMetrics(mgr.GetClient()); err != nil {
		return err
	}
	if err := p.setupHeartbeats(mgr); err != nil {
		return err
	}
	if err := p.setupOrphans(mgr); err != nil {
		return err
	}
	if err := p.setupGroups(mgr); err != nil {
		return err
	}
	standby := &standbyPlanner{p}
	placeable := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return p.unplacedVolumes()
	})
	return ctrl.NewControllerManagedBy(mgr).Named("volume").
		For(&api.Volume{}).
		Watches(&api.Replica{}, handler.Funcs{
			CreateFunc: func(_ context.Context, e event.CreateEvent, q backlog.Queue) { p.replicaEvent(e.Object, q, false) },
			UpdateFunc: func(_ context.Context, e event.UpdateEvent, q backlog.Queue) { p.replicaEvent(e.ObjectNew, q, false) },
			DeleteFunc: func(_ context.Context, e event.DeleteEvent, q backlog.Queue) { p.replicaEvent(e.Object, q, true) },
		}).
		Watches(&api.Attachment{}, handler.EnqueueRequestsFromMapFunc(volumeOfAttachment)).
		Watches(&api.Node{}, placeable, watch.Updates(watch.DisksChanged)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(p.volumesToEvict), watch.Updates(watch.DisksChanged)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(p.volumesOnNode), watch.Updates(diskHealthChanged)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(p.volumesOnMovedDisks), watch.Updates(watch.DisksChanged)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(p.balancedVolumes), watch.Updates(spreadChanged)).
		Watches(&api.Setting{}, placeable).
		Watches(&api.Setting{}, handler.EnqueueRequestsFromMapFunc(p.balancedVolumes),
			watch.Named(settingBalance, settingBalanceWait, settingPressure)).
		Watches(&api.BackingImage{}, handler.EnqueueRequestsFromMapFunc(p.volumesOfImage)).
		Watches(&api.BackingImage{}, placeable, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&api.Backup{}, handler.EnqueueRequestsFromMapFunc(standby.standbysOfBackup), watch.Updates(backupChanged)).
		Watches(&api.Backup{}, handler.EnqueueRequestsFromMapFunc(volumeOfBackup), watch.Updates(backupChanged)).
		Watches(&api.BackupTarget{}, handler.EnqueueRequestsFromMapFunc(standby.standbys), watch.Updates(targetAnswered)).
		Watches(&api.Snapshot{}, p.countSnapshots()).
		Watches(&api.Snapshot{}, handler.EnqueueRequestsFromMapFunc(p.volumesOfSnapshot)).
		Watches(&api.Setting{}, handler.EnqueueRequestsFromMapFunc(p.volumesWithSnapshots),
			watch.Named(settingSnapshotWarning)).
		WatchesRawSource(source.Func(func(_ context.Context, q backlog.Queue) error {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.queue = q
			return nil
		})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, RateLimiter: backlog.RateLimiter(),
			NewQueue: backlog.New}).
		Complete(p)
}

func volumeOfAttachment(_ context.Context, o client.Object) []reconcile.Request {
	return watch.Requests(o.(*api.Attachment).Spec.Volume)
}

func volumeOfBackup(_ context.Context, o client.Object) []reconcile.Request {
	return watch.Requests(o.(*api.Backup).Spec.Volume)
}

// replicaEvent wakes the replica's volume, and after a deletion the volumes that wait for room.
func (p *volumeReconciler) replicaEvent(o client.Object, q backlog.Queue, gone bool) {
	p.mu.Lock()
	delete(p.assumed, o.GetName())
	p.mu.Unlock()
	q.Add(watch.Request(o.(*api.Replica).Spec.Volume))
	if gone {
		for _, r := range p.unplacedVolumes() {
			q.Add(r)
		}
	}
}

func (p *volumeReconciler) unplacedVolumes() []reconcile.Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []reconcile.Request
	for name := range p.waiting {
		all = append(all, watch.Requests(name)...)
	}
	return all
}

func (p *volumeReconciler) setWaiting(name string, on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if on {
		p.waiting[name] = true
	} else {
		delete(p.waiting, name)
	}
}

// volumesOfImage requeues the volumes that wait for an image, and the volume of a hidden image.
func (p *volumeReconciler) volumesOfImage(ctx context.Context, o client.Object) []reconcile.Request {
	var all []reconcile.Request
	for _, index := range []string{watch.ByImage, watch.ByNextImage} {
		var vols api.VolumeList
		if err := p.client.List(ctx, &vols, client.MatchingFields{index: o.GetName()},
			client.UnsafeDisableDeepCopy); err != nil {
			p.log.Error("volumes of an image cannot be listed", "image", o.GetName(), "err", err)
			return nil
		}
		for i := range vols.Items {
			if v := &vols.Items[i]; len(v.Status.Members) == 0 || v.UsesHiddenImage() {
				all = append(all, watch.Requests(v.Name)...)
			}
		}
	}
	return all
}

// Reconcile plans one volume and writes its status.
func (p *volumeReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var v api.Volume
	if err := p.client.Get(ctx, req.NamespacedName, &v); err != nil {
		if apierrors.IsNotFound(err) {
			p.setWaiting(req.Name, false)
			p.improvableSince(req.Name, false)
			p.endMigration(req.Name)
			p.wakeClones(req.Name) // the source was deleted
			return reconcile.Result{}, nil
		}
		return reconcile.Result{}, err
	}
	old := v.DeepCopy()
	err := p.planVolume(ctx, &v)
	defer p.wakeClones(v.Name)
	if err == nil || api.KindOf(err) != api.Other {
		serr := p.writeStatus(ctx, old, &v)
		if serr == nil && v.DeletionTimestamp == nil {
			p.reportChanges(old, &v)
		}
		if serr != nil {
			err = serr
		} else if a, b := old.Status.Robustness, v.Status.Robustness; a != b && a != "" && a != api.RobustUnknown &&
			b != api.RobustUnknown && v.DeletionTimestamp == nil {
			kind, reason := "Normal", "Healthy"
			if b != api.RobustHealthy {
				kind, reason = "Warning", strings.ToUpper(string(b[:1]))+string(b[1:])
			}
			why := ""
			if v.Status.Message != "" {
				why = ": " + v.Status.Message
			}
			p.events.Eventf(&v, nil, kind, reason, "Watch", "the volume was %s and is %s%s", a, b, why)
		} else if len(old.Status.Members) == 0 && len(v.Status.Members) > 0 && v.Status.Epoch == 1 {
			// After the write, because a reconcile that lost a race runs again.
			p.events.Eventf(&v, nil, "Normal", "Created", "Create", "the volume is ready, with the replicas %s",
				strings.Join(v.Status.Members, ", "))
		}
	}
	switch {
	case apierrors.IsConflict(err): // the event of the other write follows
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	case api.KindOf(err) != api.Other: // the status has the fact; an event follows its change
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, err
}

// planVolume computes the status of v, and creates and changes Replicas. An error with a kind is a fact that the status
// reports.
func (p *volumeReconciler) planVolume(ctx context.Context, v *api.Volume) error {
	mine, err := p.replicasOf(ctx, v)
	if err != nil {
		return err
	}
	att, err := p.attachmentOf(ctx, v)
	if err != nil {
		return err
	}
	if err := p.adoptMovedReplicas(ctx, v, mine, att); err != nil {
		return err
	}
	if v.DeletionTimestamp != nil {
		return p.removeVolume(ctx, v, mine, att != nil && !comesTooLate(v, att))
	}
	if err := p.prepareObject(ctx, v); err != nil {
		return err
	}
	if !v.FollowsBackups() {
		if err := describeLastBackup(ctx, p.client, v); err != nil {
			return err
		}
	}
	switch {
	case v.Status.UID == "":
		return beginVolume(v)
	case len(v.Status.Members) == 0 && v.FollowsBackups():
		return (&standbyPlanner{p}).planStandby(ctx, v)
	case len(v.Status.Members) == 0:
		return p.planFirstMembers(ctx, v, mine, att)
	}
	return p.planExisting(ctx, v, mine, att)
}

// attachmentOf returns the attachment of v, or nil. An attachment that a silent node cannot end is released first.
func (p *volumeReconciler) attachmentOf(ctx context.Context, v *api.Volume) (*api.Attachment, error) {
	var att api.Attachment
	if err := p.client.Get(ctx, types.NamespacedName{Name: v.Name}, &att); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	gone, later, err := p.releaseAttachment(ctx, v, &att)
	if err != nil {
		return nil, err
	}
	p.requeueAfter(v.Name, later)
	if gone {
		return nil, nil
	}
	return &att, nil
}

// prepareObject adds the finalizer before anything of the volume exists, and removes the record of a finished recovery.
// The write brings an event, and the event the next reconcile.
func (p *volumeReconciler) prepareObject(ctx context.Context, v *api.Volume) error {
	changed := controllerutil.AddFinalizer(v, api.Finalizer)
	if _, rebuilt := v.Annotations[api.AnnotationRecovered]; rebuilt && v.Status.UID != "" {
		delete(v.Annotations, api.AnnotationRecovered)
		changed = true
	}
	if !changed {
		return nil
	}
	st := v.Status.DeepCopy()
	if err := p.client.Update(ctx, v); err != nil {
		return err
	}
	v.Status = *st
	return nil
}

// beginVolume gives a new volume its UID, or the identity from its recovery record. A recovered volume answers the old
// wishes of its spec as failed: a revert would lose later writes, and a trim can delete snapshots.
func beginVolume(v *api.Volume) error {
	const tooOld = "the volume was rebuilt from its disk: an old wish is not carried out again"
	found, err := v.Recovered()
	if err != nil {
		v.Status.State, v.Status.Robustness, v.Status.Message = api.VolumeFaulted, api.RobustFaulted, err.Error()
		return err
	}
	v.Status.State, v.Status.Robustness = api.VolumeCreating, api.RobustUnknown
	if found == nil {
		v.Status.UID, v.Status.IsStandby = api.NewUID(), v.Spec.Standby
		return nil
	}
	v.Status.UID, v.Status.Epoch, v.Status.Members = found.UID, found.Epoch, found.Members
	v.Status.Size, v.Status.RevertedEpoch = found.Size, found.RevertedEpoch
	if wish := v.Spec.RevertTo; wish != nil {
		v.Status.Reverted = &api.RevertFact{Snapshot: wish.Snapshot, ID: wish.ID, State: api.CloneFailed, Message: tooOld}
	}
	if v.Spec.Trim != "" {
		v.Status.Trimmed = &api.TrimFact{ID: v.Spec.Trim, State: api.CloneFailed, Message: tooOld}
	}
	return nil
}

// planFirstMembers creates the first replicas of a volume and records them as members when they are ready. Further
// replicas wait for that record: a conflict may lose the record, and a replica that needs a resync must not pass for a
// first member then.
func (p *volumeReconciler) planFirstMembers(ctx context.Context, v *api.Volume, mine []api.Replica,
	att *api.Attachment) error {
	if err := (&standbyPlanner{p}).deleteFormerImages(ctx, v); err != nil {
		return err
	}
	p.setWaiting(v.Name, true) // before the search for a disk, so that no change in between is missed
	if err := p.createReplicas(ctx, v, mine); err != nil {
		v.Status.Message = err.Error()
		v.Status.State, v.Status.Robustness = api.VolumeCreating, api.RobustUnknown
		if c := v.Status.CloneStatus; api.Is(err, api.Unsupported) || api.Is(err, api.OutOfRange) ||
			api.Is(err, api.Corrupt) || c != nil && c.State == api.CloneFailed {
			v.Status.State, v.Status.Robustness = api.VolumeFaulted, api.RobustFaulted
		}
		return err
	}
	p.setWaiting(v.Name, false)
	if len(v.Status.Members) > 0 {
		describeVolume(v, mine, att, p.isSilent, p.deadDisk(ctx))
		reportCopyProgress(v, mine)
	}
	return nil
}

// planExisting carries out the wishes for a volume that has members, one after the other.
func (p *volumeReconciler) planExisting(ctx context.Context, v *api.Volume, mine []api.Replica,
	att *api.Attachment) error {
	attached := att != nil
	if attached && wishPending(v) {
		// The cache may lack a detach that the user has seen, and the answer to the wish is final: ask the API.
		if err := p.reader.Get(ctx, types.NamespacedName{Name: v.Name}, &api.Attachment{}); err != nil {
			return client.IgnoreNotFound(err) // the event of the detach brings the next reconcile
		}
	}
	if p.salvageReplica(ctx, v, mine, attached) {
		return nil // the write of the status brings the next reconcile
	}
	if err := p.deleteCloneSnapshot(ctx, v); err != nil {
		return err
	}
	if err := p.finishRestore(ctx, v, mine); err != nil {
		return err
	}
	if err := p.revertVolume(ctx, v, mine, attached); err != nil {
		return err
	}
	if err := p.expandReplicas(ctx, v, mine); err != nil {
		return err
	}
	if err := p.evictReplica(ctx, v, mine, attached); err != nil {
		return err
	}
	if err := p.replenish(ctx, v, mine, att); err != nil {
		return err
	}
	describeVolume(v, mine, att, p.isSilent, p.deadDisk(ctx))
	p.describeSnapshotCount(ctx, v)
	reportCopyProgress(v, mine)
	return nil
}

// wishPending reports whether a salvage or revert waits for its final answer.
func wishPending(v *api.Volume) bool {
	salvage, revert := v.Spec.Salvage, v.Spec.RevertTo
	return salvage != nil && (v.Status.Salvaged == nil || v.Status.Salvaged.ID != salvage.ID) ||
		revert != nil && (v.Status.Reverted == nil || v.Status.Reverted.ID != revert.ID) || v.RevertInProgress() != nil
}

// replicasOf lists the replicas with the UID of v, and Replicas that the planner has just created.
func (p *volumeReconciler) replicasOf(ctx context.Context, v *api.Volume) ([]api.Replica, error) {
	var list api.ReplicaList
	if err := p.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return nil, err
	}
	var mine []api.Replica
	seen := map[string]bool{}
	for _, r := range list.Items {
		seen[r.Name] = true
		if r.Spec.VolumeUID == v.Status.UID {
			mine = append(mine, r)
		}
	}
	return append(mine, p.assumedReplicas(ctx, v, seen)...), nil
}

// settingNumber returns a numeric setting, or its default.
func (p *volumeReconciler) settingNumber(ctx context.Context, name string) int64 {
	var s api.Setting
	text := api.Settings[name]
	if err := p.client.Get(ctx, types.NamespacedName{Name: name}, &s); err == nil {
		text = s.Value
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		p.log.Warn("setting is not a number, the default counts", "setting", name, "value", text)
		n, _ = strconv.ParseInt(api.Settings[name], 10, 64)
	}
	return n
}

// writeStatus writes a changed status.
func (p *volumeReconciler) writeStatus(ctx context.Context, old, v *api.Volume) error {
	v.Status.SizeText, v.Status.UsedText, v.Status.SharedText = "", "", ""
	if v.Status.Size > 0 {
		v.Status.SizeText, v.Status.UsedText = api.SizeText(v.Status.Size), api.SizeText(v.Status.Used)
		v.Status.SharedText = api.SizeText(v.Status.Shared)
	}
	if equalStatus(&old.Status, &v.Status) {
		return nil
	}
	if err := p.client.Status().Update(ctx, v); err != nil {
		if apierrors.IsNotFound(err) { // removing the finalizer deleted the volume
			return nil
		}
		return fmt.Errorf("status of volume %s: %w", v.Name, err)
	}
	return nil
}

// setCondition sets a condition and reports whether its status or reason changed.
func setCondition(v *api.Volume, kind string, is bool, reason, message string) bool {
	return api.SetCondition(&v.Status.Conditions, v.Generation, kind, is, reason, message)
}
