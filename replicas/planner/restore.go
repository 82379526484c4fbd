package planner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// A volume of a backup begins on a hidden backing image of source restore, which brings the backup's data to one disk
// and from there to the disks of the volume's replicas, as any image does. So does an imported volume, whose hidden
// image has the source of the import. When each replica has the image's layer on
// its own disk, the planner takes the image out of the Replicas and deletes the image: the layer stays, because the
// stacks of the replicas name the layer, and no other volume ever stands on the image. A clone of the volume starts
// from a replica that has the layer, and shares the layer as it shares layers of snapshots.

// errRestoring is in errors of clones whose source still lacks data of its backup.
var errRestoring = errors.New("still being restored from its backup, or imported")

// restoreImage reads the hidden image of a volume, and makes a missing image for a volume without replicas.
// alone: new replicas stand on no image.
func (p *volumeReconciler) restoreImage(ctx context.Context, v *api.Volume, img *api.BackingImage) (
	alone bool, _ error) {
	if v.Status.RestoreStatus == nil {
		v.Status.RestoreStatus = beginRestore(v)
	}
	st := v.Status.RestoreStatus
	began := len(v.Status.Members) > 0
	if st.BackingImage == "" {
		return true, nil
	}
	// The cache may lack the deletion of the image, and a replica on a deleted image would wait for the image for ever.
	err := p.reader.Get(ctx, client.ObjectKey{Name: v.RestoreImage()}, img)
	switch {
	case apierrors.IsNotFound(err) && !began:
		err = p.createRestoreImage(ctx, v, img)
	case apierrors.IsNotFound(err), err == nil && began && img.DeletionTimestamp != nil:
		return true, nil
	}
	if err != nil {
		return false, err
	}
	describeRestore(v, img)
	switch {
	case img.DeletionTimestamp != nil:
		err = api.Errorf(api.Unavailable, "backing image %s was deleted, and is made again when it is gone", img.Name)
	case img.Spec.SourceParameters[api.RestoreBackupURL] != v.RestoredURL():
		err = api.Errorf(api.Unavailable, "backing image %s is not of %s: delete the image", img.Name, contentOf(v))
	}
	if err != nil {
		st.State, st.Message = api.CloneFailed, err.Error()
	}
	return false, err
}

// contentOf names the content that a hidden image brings.
func contentOf(v *api.Volume) string {
	if v.Spec.ImportFrom != nil {
		return "the imported file"
	}
	return "backup " + api.BackupOfURL(v.RestoredURL())
}

func beginRestore(v *api.Volume) *api.RestoreStatus {
	return &api.RestoreStatus{State: api.CloneInitiated, Backup: api.BackupOfURL(v.RestoredURL()),
		BackingImage: v.RestoreImage()}
}

// createRestoreImage makes the hidden image of a volume, with its first copy on the node for the first replica.
func (p *volumeReconciler) createRestoreImage(ctx context.Context, v *api.Volume, img *api.BackingImage) error {
	if err := validateContent(v); err != nil {
		st := v.Status.RestoreStatus
		st.State, st.Message = api.CloneFailed, err.Error()
		return api.Errorf(api.Unsupported, "%w", err)
	}
	node, err := restoreNode(ctx, p, v, v.RestoredURL())
	if err != nil {
		return err
	}
	*img = *newHiddenImage(v, v.RestoreImage(), v.RestoredURL(), node)
	if err := p.client.Create(ctx, img); err != nil {
		return fmt.Errorf("backing image %s: %w", img.Name, err)
	}
	if v.Spec.ImportFrom != nil {
		p.events.Eventf(v, img, "Normal", "ImportBegins", "Import", "a file is imported (%s)", v.Spec.ImportFrom.SourceType)
		return nil
	}
	p.events.Eventf(v, img, "Normal", "RestoreBegins", "Restore", "backup %s is restored", v.Status.RestoreStatus.Backup)
	return nil
}

// validateContent refuses a content that no hidden image can bring.
func validateContent(v *api.Volume) error {
	if v.Spec.ImportFrom != nil {
		spec := newHiddenImage(v, v.RestoreImage(), "", "").Spec
		if err := spec.Validate(); err != nil {
			return fmt.Errorf("importFrom: %w", err)
		}
		return nil
	}
	if err := api.ValidateBackupURL(v.RestoredURL()); err != nil {
		return fmt.Errorf("fromBackup: %w", err)
	}
	return nil
}

// restoreNode chooses the node that restores the backup at url for a volume: the only one that can read the backup on
// demand, else the node for the first replica.
func restoreNode(ctx context.Context, p *volumeReconciler, v *api.Volume, url string) (string, error) {
	var list api.BackupList
	if err := p.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return "", fmt.Errorf("list backups: %w", err)
	}
	if node := api.ReadableOn(list.Items, url); node != "" {
		return node, nil
	}
	return firstNode(ctx, p, v)
}

// firstNode chooses the node for the first replica of a volume.
func firstNode(ctx context.Context, p *volumeReconciler, v *api.Volume) (string, error) {
	t, failed, err := p.viewCluster(ctx, v, "", nil)
	if err != nil {
		return "", err
	}
	preferLocal(v)(&t)
	s, err := choosePlacement(v, t)
	if *failed != nil {
		return "", *failed
	}
	return s.node, err
}

// newHiddenImage is an image that brings the content of a volume, with its first copy on the node: the backup at url,
// or the volume's import.
func newHiddenImage(v *api.Volume, name, url, node string) *api.BackingImage {
	spec := api.BackingImageSpec{MinNumberOfCopies: 1, NodeSelector: v.Spec.NodeSelector,
		DiskSelector: v.Spec.DiskSelector}
	if from := v.Spec.ImportFrom; from != nil {
		spec.SourceType, spec.SourceParameters = from.SourceType, maps.Clone(from.SourceParameters)
		spec.SecretRef, spec.Checksum = from.SecretRef.DeepCopy(), from.Checksum
		spec.Normalize()
	} else {
		spec.SourceType = api.SourceRestore
		spec.SourceParameters = map[string]string{api.RestoreBackupURL: url}
		if v.Spec.AllowDamaged {
			spec.SourceParameters[api.RestoreAllowDamaged] = "true"
		}
		if v.Labels[api.LabelBackupMount] != "" {
			spec.SourceParameters[api.RestoreOnDemand] = "true"
		}
	}
	return &api.BackingImage{Spec: spec,
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{api.Finalizer},
			Labels:      map[string]string{api.LabelHidden: api.LabelValue(v.Name)},
			Annotations: map[string]string{api.AnnotationPrefer: node}},
	}
}

// growImported lets an imported volume grow to the disk inside the file, whose size nobody knew before.
func growImported(ctx context.Context, c client.Client, v *api.Volume, img *api.BackingImage) error {
	size := api.RoundSize(img.Status.VirtualSize)
	if v.Spec.ImportFrom == nil || size <= v.Spec.Size {
		return nil
	}
	return growSpec(ctx, c, v, size)
}

// growSpec enlarges the wanted size of a volume.
func growSpec(ctx context.Context, c client.Client, v *api.Volume, size int64) error {
	old, st := v.DeepCopy(), v.Status.DeepCopy()
	v.Spec.Size = size
	err := c.Patch(ctx, v, client.MergeFromWithOptions(old, client.MergeFromWithOptimisticLock{}))
	v.Status = *st
	if err != nil {
		return fmt.Errorf("size of volume %s: %w", v.Name, err)
	}
	return nil
}

// describeRestore copies the state of the hidden image into the volume's status.
func describeRestore(v *api.Volume, img *api.BackingImage) {
	st, from := v.Status.RestoreStatus, &img.Status
	st.State, st.Progress, st.Message = api.CloneInitiated, from.Progress, from.Message
	if v.Spec.ImportFrom == nil && st.Backup == "" { // the URL names an image, of which the planner chose a backup
		st.Backup = api.BackupOfURL(img.RestoredURL())
	}
	st.ByteProgress = *from.ByteProgress.DeepCopy()
	describeStall(v, from)
	switch from.State {
	case api.ImageFailed:
		st.State = api.CloneFailed
	case api.ImageReady:
		st.Progress, st.Message = 100, ""
	}
}

// describeStall copies the hidden image's condition for waiting reads; without one, nothing waits.
func describeStall(v *api.Volume, from *api.BackingImageStatus) {
	c := meta.FindStatusCondition(from.Conditions, api.ConditionStalled)
	if c == nil {
		meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionStalled)
		return
	}
	setCondition(v, api.ConditionStalled, c.Status == metav1.ConditionTrue, c.Reason, c.Message)
}

// finishRestore deletes the hidden image of a volume when every replica has the image's layer on its own disk.
func (p *volumeReconciler) finishRestore(ctx context.Context, v *api.Volume, mine []api.Replica) error {
	if !v.UsesHiddenImage() {
		return nil
	}
	img, err := p.hiddenImage(ctx, v)
	if err != nil {
		return err
	}
	before := v.Status.RestoreStatus
	v.Status.RestoreStatus = beginRestore(v)
	if img != nil {
		describeRestore(v, img)
	} else {
		describeStall(v, &api.BackingImageStatus{})
	}
	st := v.Status.RestoreStatus
	for i := range mine {
		if r := &mine[i]; !holdsRestored(v, r, img) {
			if st.Message == "" {
				st.Message = fmt.Sprintf("replica %s on node %s lacks data of %s", r.Name, r.Spec.Node, contentOf(v))
			}
			return nil
		}
	}
	for i := range mine {
		if err := p.takeImageOut(ctx, v, &mine[i]); err != nil {
			return err
		}
	}
	done := &api.RestoreStatus{State: api.CloneCompleted, Backup: st.Backup, Progress: 100}
	v.Status.RestoreStatus = done
	if before != nil && before.State == api.CloneCompleted {
		done.Message = before.Message
		return p.deleteRestoreImage(ctx, v)
	}
	if done.Message, err = p.restoreNotice(ctx, v, img); err != nil {
		return err
	}
	p.events.Eventf(v, nil, "Normal", "Restored", "Restore", "every replica has the data of %s", contentOf(v))
	if done.Message != "" {
		p.events.Eventf(v, nil, "Warning", "RestoredWithDamage", "Restore", "%s", done.Message)
	}
	return p.deleteRestoreImage(ctx, v)
}

// restoreNotice returns the list of damaged chunks that are zeros in the volume; empty: none.
func (p *volumeReconciler) restoreNotice(ctx context.Context, v *api.Volume, img *api.BackingImage) (string, error) {
	if !v.Spec.AllowDamaged || img == nil {
		return "", nil
	}
	var copies api.ImageCopyList
	if err := p.client.List(ctx, &copies); err != nil {
		return "", fmt.Errorf("list image copies: %w", err)
	}
	for _, c := range copies.Items {
		if c.Spec.UUID == img.Status.UUID && c.Status.Notice != "" {
			return c.Status.Notice, nil
		}
	}
	return "", nil
}

// hiddenImage reads the hidden image of a volume; nil: there is none. During a restore the cache is not enough: without
// the image, a replica whose layer is not whole yet would pass for whole.
func (p *volumeReconciler) hiddenImage(ctx context.Context, v *api.Volume) (*api.BackingImage, error) {
	name := v.RestoreImage()
	if name == "" {
		return nil, nil
	}
	img := &api.BackingImage{}
	err := p.client.Get(ctx, client.ObjectKey{Name: name}, img)
	if st := v.Status.RestoreStatus; apierrors.IsNotFound(err) && (st == nil || st.State != api.CloneCompleted) {
		err = p.reader.Get(ctx, client.ObjectKey{Name: name}, img)
	}
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return img, nil
}

// holdsRestored reports whether a replica needs the hidden image of its volume no more: its stack names the layer, and
// its disk has the whole layer. A failed replica may return, and holds the image until its deletion.
func holdsRestored(v *api.Volume, r *api.Replica, img *api.BackingImage) bool {
	switch {
	case r.Labels[api.LabelImage] != api.LabelValue(v.RestoreImage()):
		return true
	case r.Status.Mode != api.ReplicaCurrent && r.Status.Mode != api.ReplicaStale, r.Status.Fetching != "":
		return false
	case img == nil: // the image was deleted before its volume's object was read from a disk
		return true
	}
	return slices.ContainsFunc(img.Status.Copies, func(c api.ImageCopySummary) bool {
		return c.Disk == r.Spec.Disk && c.State == api.ImageReady
	})
}

// takeImageOut makes the layer of a hidden image an ordinary layer of a replica.
func (p *volumeReconciler) takeImageOut(ctx context.Context, v *api.Volume, r *api.Replica) error {
	if r.Labels[api.LabelImage] != api.LabelValue(v.RestoreImage()) {
		return nil
	}
	old := r.DeepCopy()
	delete(r.Labels, api.LabelImage)
	r.Spec.Layers = nil
	if err := p.client.Patch(ctx, r, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	return nil
}

// deleteRestoreImage deletes the hidden image of a volume; the deletion ends a transfer, and awaits replicas that stand
// on the image.
func (p *volumeReconciler) deleteRestoreImage(ctx context.Context, v *api.Volume) error {
	if err := (&standbyPlanner{p}).deleteFormerImages(ctx, v); err != nil {
		return err
	}
	img, err := p.hiddenImage(ctx, v)
	if img == nil || err != nil || img.DeletionTimestamp != nil {
		return err
	}
	if err := p.client.Delete(ctx, img, client.Preconditions{UID: &img.UID}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("backing image %s: %w", img.Name, err)
	}
	return nil
}

// restoredReplicas lists the members of a volume from which a clone can start. Members of a volume of a backup need the
// whole layer: the hidden image of their volume does not wait for the clone.
func (p *volumeReconciler) restoredReplicas(ctx context.Context, v *api.Volume) ([]api.Replica, error) {
	usable, err := p.usableReplicas(ctx, v)
	if err != nil || !v.UsesHiddenImage() {
		return usable, err
	}
	img, err := p.hiddenImage(ctx, v)
	if err != nil {
		return nil, err
	}
	whole := slices.DeleteFunc(slices.Clone(usable), func(r api.Replica) bool { return !holdsRestored(v, &r, img) })
	if st := v.Status.RestoreStatus; len(whole) == 0 && (len(usable) > 0 || st == nil || st.State != api.CloneCompleted) {
		return nil, api.Errorf(api.Unavailable, "volume %s, which is to be cloned, is %w", v.Name, errRestoring)
	}
	return whole, nil
}
