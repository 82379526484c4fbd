package planner

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// A standby volume holds the newest backup of a volume in a hidden image, with a copy for each replica of later. For a
// newer backup the planner makes the next hidden image. The restore into the next image takes the chunks of the held
// one from the disk. Once the next image is ready, it becomes the held one, and the planner deletes the former image:
// the volume holds a whole backup at each moment after the first.
//
// The activation asks the target for its newest backup, and chooses the image of this one, or after a bounded time
// without an answer the held image. The write of the choice into the status is the commit point. The volume then begins
// on the chosen image as every volume of a backup does (restore.go). The decisions are in standby_choice.go.

// standbyPlanner is the part of the volumeReconciler that looks after standby volumes.
type standbyPlanner struct{ *volumeReconciler }

// planStandby follows the backups, and chooses the backup that an activated volume begins with.
func (p *standbyPlanner) planStandby(ctx context.Context, v *api.Volume) error {
	st := &v.Status
	if st.Standby == nil {
		st.Standby = &api.StandbyStatus{}
	}
	st.IsStandby, st.State, st.Robustness, st.Message = true, api.VolumeStandby, api.RobustUnknown, ""
	if api.BackupVolumeURL(v.Spec.FromBackup) == "" {
		st.Message = "fromBackup is no URL of a backup: copy status.url of a Backup of the volume to follow"
		return api.Errorf(api.Invalid, "volume %s: %s", v.Name, st.Message)
	}
	if err := p.deleteFormerImages(ctx, v); err != nil {
		return err
	}
	target, err := p.standbyTarget(ctx, v)
	if err != nil {
		return err
	}
	if !v.Spec.Standby {
		if err := p.askForBackups(ctx, v, target); err != nil {
			return err
		}
	}
	p.setWaiting(v.Name, true) // before the search for room, so that no change in between is missed
	view, err := p.viewStandby(ctx, v, target)
	if err != nil {
		return err
	}
	told := advanceStandby(v, view)
	if view.failed != nil && *view.failed != nil {
		return *view.failed
	}
	p.reportStandby(v, told)
	if err := p.growStandby(ctx, v, v.Status.Standby.Held); err != nil {
		return err
	}
	if err := p.ensureStandbyImages(ctx, v, view); api.Is(err, api.Full) {
		view.fault = obstacle{api.ReasonNoRoom, err.Error()}
	} else if err != nil {
		return err
	}
	p.setWaiting(v.Name, view.fault.reason == api.ReasonNoRoom || view.unfit.exists())
	describeStandby(v, view)
	if since := v.Status.Standby.FailingSince; since != nil {
		p.requeueAfter(v.Name, since.Add(failurePatience).Sub(view.now))
	}
	if s := v.Status.Standby.Search; s != nil {
		p.requeueAfter(v.Name, s.Since.Add(searchInterval).Sub(view.now))
	}
	if !v.Spec.Standby {
		return p.activate(ctx, v, view)
	}
	return nil
}

// activate commits the choice of the backup that the volume begins with, once there is one.
func (p *standbyPlanner) activate(ctx context.Context, v *api.Volume, view *standbyView) error {
	chosen, waits := chooseActivated(v, view)
	if chosen == nil {
		v.Status.Message = waits
		since := v.Status.Standby.ActivatingSince
		p.requeueAfter(v.Name, since.Add(activationPatience).Sub(view.now)+time.Second)
		return nil
	}
	kind, reason, text := describeChoice(v, view, chosen)
	if err := p.growStandby(ctx, v, chosen); err != nil {
		return err
	}
	v.Status.Standby = &api.StandbyStatus{Held: chosen, Message: text}
	v.Status.LastBackup, v.Status.LastBackupAt, v.Status.Message = chosen.Backup, chosen.SnapshotCreatedAt, ""
	meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionFollowing)
	v.Status.IsStandby, v.Status.State, v.Status.RestoreStatus = false, api.VolumeCreating, beginRestore(v)
	p.events.Eventf(v, nil, kind, reason, "Activate", "%s", text)
	return nil
}

// standbyTarget finds the target with the store of the backups; nil: none.
func (p *standbyPlanner) standbyTarget(ctx context.Context, v *api.Volume) (*api.BackupTarget, error) {
	var list api.BackupTargetList
	if err := p.client.List(ctx, &list); err != nil {
		return nil, err
	}
	of := api.VolumeOfURL(v.Spec.FromBackup)
	for i := range list.Items {
		url := api.BackupURL(list.Items[i].Spec.BackupTargetURL, "any", of)
		if api.BackupVolumeURL(url) == api.BackupVolumeURL(v.Spec.FromBackup) {
			return &list.Items[i], nil
		}
	}
	return nil, nil
}

// askForBackups asks the target, once for an activation, for a list of the backups in the store.
func (p *standbyPlanner) askForBackups(ctx context.Context, v *api.Volume, t *api.BackupTarget) error {
	st := v.Status.Standby
	if st.ActivatingSince != nil {
		return nil
	}
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	st.ActivatingSince = &now
	if t == nil {
		return nil
	}
	asked := api.NewRequest(t.Spec.SyncRequestedAt)
	old := t.DeepCopy()
	t.Spec.SyncRequestedAt, st.SyncRequestedAt = &asked, &asked
	err := p.client.Patch(ctx, t, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("backup target %s: %w", t.Name, err)
	}
	return nil
}

// isAnswered reports whether the target has listed the store since the activation asked.
func isAnswered(st *api.StandbyStatus, t *api.BackupTarget) bool {
	return t != nil && st.SyncRequestedAt != nil && t.Status.SyncedRequest != nil &&
		!t.Status.SyncedRequest.Before(st.SyncRequestedAt)
}

// viewStandby collects what the decisions read.
func (p *standbyPlanner) viewStandby(ctx context.Context, v *api.Volume, t *api.BackupTarget) (
	view *standbyView, err error) {
	st := v.Status.Standby
	view = &standbyView{copies: max(v.Spec.NumberOfReplicas, 1), now: time.Now().Truncate(time.Second),
		answered: isAnswered(st, t)}
	view.late = st.ActivatingSince != nil && view.now.Sub(st.ActivatingSince.Time) >= activationPatience
	switch {
	case t == nil:
		view.away = obstacle{api.ReasonTargetMissing, "no backup target has the store of fromBackup"}
	case meta.IsStatusConditionTrue(t.Status.Conditions, api.ConditionUnavailable):
		view.away = obstacle{api.ReasonTargetUnavailable,
			fmt.Sprintf("backup target %s is unavailable: %s", t.Name, t.Status.Message)}
	}
	if view.backups, err = p.followedBackups(ctx, v); err != nil {
		return nil, err
	}
	if view.held, err = p.standbyImage(ctx, st.Held); err != nil {
		return nil, err
	}
	if view.next, err = p.standbyImage(ctx, st.Next); err != nil {
		return nil, err
	}
	if !view.mayGrow(v) {
		return view, nil
	}
	cluster, failed, err := p.viewCluster(ctx, v, "", nil)
	view.failed = failed
	view.room = func(size int64) error {
		sized := v.DeepCopy()
		sized.Spec.Size = size
		_, err := choosePlacement(sized, cluster)
		return err
	}
	return view, err
}

// standbyImage reads the hidden image of a backup; nil: none, or a deleted one. The cache may lack a new image.
func (p *standbyPlanner) standbyImage(ctx context.Context, of *api.StandbyBackup) (*api.BackingImage, error) {
	if of == nil {
		return nil, nil
	}
	img := &api.BackingImage{}
	key := client.ObjectKey{Name: of.BackingImage}
	err := p.client.Get(ctx, key, img)
	if apierrors.IsNotFound(err) {
		err = p.reader.Get(ctx, key, img)
	}
	if apierrors.IsNotFound(err) || err == nil && img.DeletionTimestamp != nil {
		return nil, nil
	}
	return img, err
}

// followedBackups lists the backups that v can begin with, the newest first. During an activation the cache is not
// enough: the target may just have listed a newer one.
func (p *standbyPlanner) followedBackups(ctx context.Context, v *api.Volume) (backups []*api.Backup, err error) {
	var list api.BackupList
	if v.Spec.Standby {
		of := api.VolumeOfURL(v.Spec.FromBackup)
		err = p.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: of}, client.UnsafeDisableDeepCopy)
	} else {
		err = p.reader.List(ctx, &list)
	}
	url := api.BackupVolumeURL(v.Spec.FromBackup)
	for i := range list.Items {
		b := &list.Items[i]
		if api.RestorableBackup(b) == nil && b.Status.SnapshotID != "" && api.BackupVolumeURL(b.Status.URL) == url {
			backups = append(backups, b)
		}
	}
	slices.SortFunc(backups, func(x, y *api.Backup) int {
		if x.NewerThan(y) {
			return -1
		}
		return 1
	})
	return backups, err
}

// growStandby gives the volume at least the size of a backup that it holds, or begins with.
func (p *standbyPlanner) growStandby(ctx context.Context, v *api.Volume, b *api.StandbyBackup) error {
	if b == nil || b.Size <= v.Spec.Size {
		return nil
	}
	return growSpec(ctx, p.client, v, b.Size)
}

// ensureStandbyImages makes the next image, and keeps the number of copies of both.
func (p *standbyPlanner) ensureStandbyImages(ctx context.Context, v *api.Volume, view *standbyView) error {
	for _, img := range []*api.BackingImage{view.held, view.next} {
		if img == nil || img.Spec.MinNumberOfCopies == view.copies {
			continue
		}
		old := img.DeepCopy()
		img.Spec.MinNumberOfCopies = view.copies
		if err := p.client.Patch(ctx, img, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("backing image %s: %w", img.Name, err)
		}
	}
	next := v.Status.Standby.Next
	if next == nil || view.next != nil {
		return nil
	}
	node := readyNode(view.held)
	if node == "" {
		var err error
		if node, err = restoreNode(ctx, p.volumeReconciler, v, next.URL); err != nil {
			return err
		}
	}
	img := newHiddenImage(v, next.BackingImage, next.URL, node)
	img.Spec.MinNumberOfCopies = view.copies
	// A former image of the same backup may still be being deleted: the event of its end continues.
	if err := p.client.Create(ctx, img); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("backing image %s: %w", img.Name, err)
	}
	return nil
}

// readyNode is a node with a ready copy of an image, which has most chunks of the next one.
func readyNode(img *api.BackingImage) string {
	if img != nil {
		for _, c := range img.Status.Copies {
			if c.State == api.ImageReady {
				return c.Node
			}
		}
	}
	return ""
}

func (p *standbyPlanner) reportStandby(v *api.Volume, all []standbyEvent) {
	for _, e := range all {
		p.events.Eventf(v, nil, e.kind, e.reason, "Follow", "%s", e.text)
	}
}

// deleteFormerImages deletes the hidden images of a volume that is or was a standby volume, other than those in its
// status. A cache that is behind may lack an image of the status: only a status that the API has, too, counts. An
// activated volume may need the data of a newer backup yet: until then a whole image stays, as the source of chunks on
// the disk, and as the last whole backup if the store is lost.
func (p *standbyPlanner) deleteFormerImages(ctx context.Context, v *api.Volume) error {
	st := v.Status.Standby
	if st == nil {
		return nil
	}
	restoring := !v.FollowsBackups() && (v.Status.RestoreStatus == nil ||
		v.Status.RestoreStatus.State != api.CloneCompleted)
	return p.deleteStandbyImages(ctx, v, func(i *api.BackingImage) bool {
		return restoring && i.Status.State == api.ImageReady || st.Held != nil && st.Held.BackingImage == i.Name ||
			st.Next != nil && st.Next.BackingImage == i.Name
	})
}

// deleteStandbyImages deletes the hidden images of a standby volume, except those that keep returns true for.
func (p *standbyPlanner) deleteStandbyImages(ctx context.Context, v *api.Volume,
	keep func(*api.BackingImage) bool) error {
	if v.Status.Standby == nil {
		return nil
	}
	deleting := v.DeletionTimestamp != nil
	var reader client.Reader = p.client
	if deleting { // no later reconcile deletes an image that the cache lacks
		reader = p.reader
	}
	var list api.BackingImageList
	if err := reader.List(ctx, &list, client.MatchingLabels{api.LabelHidden: api.LabelValue(v.Name)}); err != nil {
		return err
	}
	former := slices.DeleteFunc(list.Items, func(i api.BackingImage) bool {
		return i.DeletionTimestamp != nil || keep(&i) || !v.OwnsStandbyImage(i.Name)
	})
	if len(former) == 0 {
		return nil
	}
	if !deleting {
		var now api.Volume
		err := p.reader.Get(ctx, client.ObjectKeyFromObject(v), &now)
		if err != nil || now.ResourceVersion != v.ResourceVersion {
			return client.IgnoreNotFound(err) // the event of the other version continues
		}
	}
	for i := range former {
		img := &former[i]
		err := p.client.Delete(ctx, &api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: img.Name}},
			client.Preconditions{UID: &img.UID})
		if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			return fmt.Errorf("backing image %s: %w", img.Name, err)
		}
	}
	return nil
}

// standbys requeues all standby volumes.
func (p *standbyPlanner) standbys(ctx context.Context, _ client.Object) []reconcile.Request {
	return p.standbysOf(ctx, "")
}

// standbysOfBackup requeues the standby volumes that follow the volume of a backup.
func (p *standbyPlanner) standbysOfBackup(ctx context.Context, o client.Object) []reconcile.Request {
	return p.standbysOf(ctx, o.(*api.Backup).Spec.Volume)
}

// standbysOf requeues the standby volumes that follow a volume; empty: any.
func (p *standbyPlanner) standbysOf(ctx context.Context, volume string) (all []reconcile.Request) {
	var list api.VolumeList
	if err := p.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		p.log.Error("standby volumes cannot be listed", "err", err)
	}
	for i := range list.Items {
		v := &list.Items[i]
		if v.FollowsBackups() && (volume == "" || api.VolumeOfURL(v.Spec.FromBackup) == volume) {
			all = append(all, watch.Request(v.Name))
		}
	}
	return all
}

// backupChanged reports whether a backup has another state or place in the order, or is being deleted.
func backupChanged(old, now client.Object) bool {
	x, y := old.(*api.Backup), now.(*api.Backup)
	return x.Status.State != y.Status.State || x.Status.Damaged != y.Status.Damaged ||
		x.Status.StoredAt != y.Status.StoredAt || (x.DeletionTimestamp == nil) != (y.DeletionTimestamp == nil)
}

// targetAnswered reports whether a target answered a request, or became available or unavailable.
func targetAnswered(old, now client.Object) bool {
	x, y := old.(*api.BackupTarget), now.(*api.BackupTarget)
	return !x.Status.SyncedRequest.Equal(y.Status.SyncedRequest) || x.Status.Message != y.Status.Message ||
		meta.IsStatusConditionTrue(x.Status.Conditions, api.ConditionUnavailable) !=
			meta.IsStatusConditionTrue(y.Status.Conditions, api.ConditionUnavailable)
}
