package planner

import (
	"cmp"
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
// on the chosen image as every volume of a backup does (restore.go).

// activationPatience is how long an activation waits for an unavailable target before it takes the held backup.
const activationPatience = time.Minute

// standbyPlanner is the part of the volumeReconciler that looks after standby volumes.
type standbyPlanner struct{ *volumeReconciler }

// standbyView is what the decisions about a standby volume read.
type standbyView struct {
	held, next *api.BackingImage // nil: the image does not exist
	newest     *api.Backup       // nil: the target has no usable backup of the volume
	away       string            // reason of ConditionFollowing for a target without an answer; empty: the target answers
	why        string            // the message for away
	copies     int32             // wanted of each image
}

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
	view, err := p.viewStandby(ctx, v, target)
	if err != nil {
		return err
	}
	p.reportStandby(v, advanceStandby(v, view))
	if err := p.growStandby(ctx, v); err != nil {
		return err
	}
	if err := p.ensureStandbyImages(ctx, v, view); err != nil {
		return err
	}
	describeStandby(v, view)
	if !v.Spec.Standby {
		p.activate(v, view, target)
	}
	return nil
}

// activate commits the choice of the backup that the volume begins with, once there is one.
func (p *standbyPlanner) activate(v *api.Volume, view *standbyView, target *api.BackupTarget) {
	st := v.Status.Standby
	waited := time.Since(st.ActivatingSince.Time)
	_, now := v.Annotations[api.AnnotationActivateNow]
	chosen, waits := chooseActivated(v, view, now, isAnswered(st, target), waited >= activationPatience)
	if chosen == nil {
		v.Status.Message = waits
		p.requeueAfter(v.Name, activationPatience-waited+time.Second)
		return
	}
	older := view.away != "" || now || !isAnswered(st, target)
	kind, reason := "Normal", "Activated"
	text := fmt.Sprintf("the volume begins with backup %s of %s", chosen.Backup, chosen.SnapshotCreatedAt)
	if older {
		kind, reason = "Warning", "ActivatedWithoutStore"
		text += ", without an answer of the store, which may have a newer backup"
	}
	*st = api.StandbyStatus{Held: chosen, Message: text}
	v.Status.LastBackup, v.Status.LastBackupAt, v.Status.Message = chosen.Backup, chosen.SnapshotCreatedAt, ""
	meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionFollowing)
	v.Status.IsStandby, v.Status.State, v.Status.RestoreStatus = false, api.VolumeCreating, beginRestore(v)
	p.events.Eventf(v, nil, kind, reason, "Activate", "%s", text)
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
	view = &standbyView{copies: max(v.Spec.NumberOfReplicas, 1)}
	switch {
	case t == nil:
		view.away, view.why = api.ReasonTargetMissing, "no backup target has the store of fromBackup"
	case meta.IsStatusConditionTrue(t.Status.Conditions, api.ConditionUnavailable):
		view.away = api.ReasonTargetUnavailable
		view.why = fmt.Sprintf("backup target %s is unavailable: %s", t.Name, t.Status.Message)
	}
	if view.newest, err = p.newestBackup(ctx, v); err != nil {
		return nil, err
	}
	st := v.Status.Standby
	if view.held, err = p.standbyImage(ctx, st.Held); err != nil {
		return nil, err
	}
	view.next, err = p.standbyImage(ctx, st.Next)
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

// newestBackup finds the newest backup of the volume that v follows. During an activation the cache is not enough: the
// target may just have listed a newer one.
func (p *standbyPlanner) newestBackup(ctx context.Context, v *api.Volume) (newest *api.Backup, err error) {
	var list api.BackupList
	of := api.VolumeOfURL(v.Spec.FromBackup)
	if v.Spec.Standby {
		err = p.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: of})
	} else {
		err = p.reader.List(ctx, &list)
	}
	if err != nil {
		return nil, err
	}
	url := api.BackupVolumeURL(v.Spec.FromBackup)
	for i := range list.Items {
		b := &list.Items[i]
		if api.RestorableBackup(b) == nil && b.Status.SnapshotID != "" && api.BackupVolumeURL(b.Status.URL) == url &&
			(newest == nil || b.NewerThan(newest)) {
			newest = b
		}
	}
	return newest, nil
}

// standbyEvent is a change for an event.
type standbyEvent struct{ kind, reason, text string }

// advanceStandby decides what the volume holds and fetches, and changes the status.
func advanceStandby(v *api.Volume, view *standbyView) (told []standbyEvent) {
	st := v.Status.Standby
	if st.Held != nil && view.held == nil {
		told = append(told, standbyEvent{"Warning", "StandbyLost",
			fmt.Sprintf("the image with backup %s was deleted: the standby volume fetches the newest backup", st.Held.Backup)})
		st.Held = nil
	}
	switch next := view.next; {
	case st.Next == nil:
	case next != nil && isWhole(next, view):
		told = append(told, standbyEvent{"Normal", "StandbyUpdated",
			fmt.Sprintf("the standby volume holds backup %s of %s", st.Next.Backup, st.Next.SnapshotCreatedAt)})
		st.Held, view.held = st.Next, next
		st.Next, view.next = nil, nil
	case view.newest != nil && view.newest.Status.URL == st.Next.URL:
	case next != nil && next.Status.State == api.ImageFailed,
		!v.Spec.Standby && view.newest != nil && view.newest.CutAt().After(st.Next.CutAt()):
		st.Next, view.next = nil, nil // a newer backup takes its place, or it was deleted
	}
	if b := view.newest; st.Next == nil && b != nil && (st.Held == nil || b.CutAt().After(st.Held.CutAt())) {
		st.Next = &api.StandbyBackup{Backup: b.Name, URL: b.Status.URL, SnapshotCreatedAt: b.Status.SnapshotCreatedAt,
			Size: api.RoundSize(b.Status.VolumeSize), BackingImage: v.StandbyImage(b)}
	}
	return told
}

// isWhole reports whether the next image can take the place of the held one: it has as many copies as wanted, or as the
// held image has.
func isWhole(next *api.BackingImage, view *standbyView) bool {
	least := view.copies
	if view.held == nil {
		least = 1
	} else {
		least = min(least, max(view.held.Status.ReadyCopies, 1))
	}
	return next.Status.State == api.ImageReady && next.Status.ReadyCopies >= least
}

// chooseActivated chooses the backup that an activated volume begins with; nil: the activation waits. now: the user
// asks for the held backup; answered: the target has listed the store for the activation; late: the time for an answer
// is over.
func chooseActivated(v *api.Volume, view *standbyView, now, answered, late bool) (*api.StandbyBackup, string) {
	st := v.Status.Standby
	readable := st.Next != nil && view.next != nil && view.next.CanRead()
	failed := st.Next != nil && view.next != nil && view.next.Status.State == api.ImageFailed
	give := fmt.Sprintf("; `drover volume activate %s --now` takes the newest backup that the volume holds", v.Name)
	switch {
	case now && st.Held != nil, late && st.Held != nil && (!answered || view.away != "" || failed):
		return st.Held, ""
	case readable && (now || answered && view.away == "" || st.Held == nil && late):
		return st.Next, ""
	case answered && view.away == "" && st.Next == nil && st.Held != nil:
		return st.Held, ""
	case st.Held == nil && st.Next == nil:
		return nil, "the activation waits: the volume holds no backup yet: " + cmp.Or(view.why, "the store has none")
	case st.Held == nil:
		return nil, fmt.Sprintf("the activation waits for backup %s%s", st.Next.Backup, colonText(nextMessage(view)))
	case st.Next != nil && answered:
		return nil, fmt.Sprintf("the activation waits for backup %s%s%s", st.Next.Backup, colonText(nextMessage(view)), give)
	}
	return nil, "the activation waits for the list of the store" + colonText(view.why) + give
}

func nextMessage(view *standbyView) string {
	if view.next == nil {
		return view.why
	}
	return cmp.Or(view.next.Status.Message, view.why)
}

func colonText(text string) string {
	if text == "" {
		return ""
	}
	return ": " + text
}

// growStandby lets the volume grow with the followed one.
func (p *standbyPlanner) growStandby(ctx context.Context, v *api.Volume) error {
	next := v.Status.Standby.Next
	if next == nil || next.Size <= v.Spec.Size {
		return nil
	}
	old, st := v.DeepCopy(), v.Status.DeepCopy()
	v.Spec.Size = next.Size
	err := p.client.Patch(ctx, v, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{}))
	v.Status = *st
	if err != nil {
		return fmt.Errorf("size of volume %s: %w", v.Name, err)
	}
	return nil
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
		if node, err = firstNode(ctx, p.volumeReconciler, v); err != nil {
			p.setWaiting(v.Name, true)
			return err
		}
	}
	p.setWaiting(v.Name, false)
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

// describeStandby describes a standby volume in its status.
func describeStandby(v *api.Volume, view *standbyView) {
	st := &v.Status
	st.LastBackup, st.LastBackupAt, st.Standby.Progress = "", "", 0
	if h := st.Standby.Held; h != nil {
		st.LastBackup, st.LastBackupAt, st.Size = h.Backup, h.SnapshotCreatedAt, h.Size
	}
	if view.held != nil {
		st.Used = view.held.Status.Size
	}
	reason, text := view.away, view.why
	switch img := view.next; {
	case img != nil && img.Status.State == api.ImageFailed:
		reason, text = api.ReasonRestoreFailed, fmt.Sprintf("backup %s: %s", st.Standby.Next.Backup, img.Status.Message)
	case reason == "" && view.newest == nil:
		reason, text = api.ReasonNoBackup, "the store has no backup of volume "+api.VolumeOfURL(v.Spec.FromBackup)
	}
	if view.next != nil {
		st.Standby.Progress = view.next.Status.Progress
	}
	if reason != "" && st.LastBackup != "" {
		text += fmt.Sprintf("; the standby volume holds backup %s", st.LastBackup)
	}
	setCondition(v, api.ConditionFollowing, reason == "", cmp.Or(reason, api.ReasonFollowing), text)
	st.Message = text
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

// backupChanged reports whether a backup has another state, or is being deleted.
func backupChanged(old, now client.Object) bool {
	x, y := old.(*api.Backup), now.(*api.Backup)
	return x.Status.State != y.Status.State || (x.DeletionTimestamp == nil) != (y.DeletionTimestamp == nil)
}

// targetAnswered reports whether a target answered a request, or became available or unavailable.
func targetAnswered(old, now client.Object) bool {
	x, y := old.(*api.BackupTarget), now.(*api.BackupTarget)
	return !x.Status.SyncedRequest.Equal(y.Status.SyncedRequest) || x.Status.Message != y.Status.Message ||
		meta.IsStatusConditionTrue(x.Status.Conditions, api.ConditionUnavailable) !=
			meta.IsStatusConditionTrue(y.Status.Conditions, api.ConditionUnavailable)
}
