package host

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/recorder"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/host/restoring"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin/upload"
)

// copyReconciler compares the ImageCopies of one node with its disks.
type copyReconciler struct {
	client.Client
	live      client.Reader // without a cache: for Secrets, and before a transfer starts
	node      string
	disks     func(api.UID) (block.Layers, error)
	opts      Options
	events    recorder.EventRecorder
	log       *slog.Logger
	transfers *transferSet
	uploads   *upload.Server
	restoring *restoring.Set

	mu            sync.Mutex // guards the maps, whose keys are names of ImageCopies
	records       map[string]*statusRecord
	verifications map[string]verification
	suspects      map[string]bool // copies to verify, because a copy made from them was damaged
}

// statusRecord is the status of an ImageCopy as this process, its only writer, wrote the status last. The cache may lag
// behind the record.
type statusRecord struct {
	object types.UID
	status api.ImageCopyStatus
}

// Reconcile compares one copy with its disk and writes the status.
func (n *copyReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	c := &api.ImageCopy{}
	err := n.Get(ctx, req.NamespacedName, c)
	if apierrors.IsNotFound(err) || err == nil && c.Spec.Node != n.node {
		n.forgetCopy(req.Name)
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	record := n.recordOf(c)
	t := n.transfers.get(c.Name)
	if t != nil && (t.object != c.UID || t.from != c.Spec.From || !c.DeletionTimestamp.IsZero()) {
		if t.cancel(); t.isRunning() {
			return ctrl.Result{}, nil // the end of the transfer wakes the reconciler
		}
		n.transfers.forgetEnded(c.Name)
		t = nil
	}
	st := record.status
	var wait time.Duration
	if !c.DeletionTimestamp.IsZero() {
		var done bool
		if wait, done = n.removeCopy(ctx, c, &st); done {
			n.forgetCopy(c.Name)
			if controllerutil.RemoveFinalizer(c, api.Finalizer) {
				return ctrl.Result{}, client.IgnoreNotFound(watch.IgnoreConflict(n.Update(ctx, c)))
			}
			return ctrl.Result{}, nil
		}
	} else if wait, err = n.nextStatus(ctx, c, t, &st); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: wait}, n.writeStatus(ctx, c, record, st)
}

// recordOf returns the record of a copy, and begins with the status in the API.
func (n *copyReconciler) recordOf(c *api.ImageCopy) *statusRecord {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.records[c.Name]
	if r == nil || r.object != c.UID {
		r = &statusRecord{object: c.UID, status: c.Status}
		n.records[c.Name] = r
	}
	return r
}

// forgetCopy cancels the transfer of a deleted copy and drops all records of the copy.
func (n *copyReconciler) forgetCopy(name string) {
	if t := n.transfers.get(name); t != nil {
		t.cancel()
		n.transfers.forgetEnded(name)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.records, name)
	delete(n.verifications, name)
	delete(n.suspects, name)
}

// writeStatus writes the status to the API and then into the record.
func (n *copyReconciler) writeStatus(ctx context.Context, c *api.ImageCopy, record *statusRecord,
	st api.ImageCopyStatus,
) error {
	st.UploadCA = ""
	if st.UploadURL != "" {
		st.UploadCA = string(n.opts.UploadCA)
	}
	if st.State != record.status.State {
		st.LastTransition = metav1.NewTime(time.Now().Truncate(time.Second))
	}
	if equality.Semantic.DeepEqual(st, c.Status) {
		record.status = st
		return nil
	}
	// The patch has no version: no other writer exists, and the cached object may be stale.
	base := c.DeepCopy()
	base.Status = api.ImageCopyStatus{}
	next := base.DeepCopy()
	next.Status = st
	if err := n.Status().Patch(ctx, next, statusPatch{st}); err != nil {
		return client.IgnoreNotFound(err)
	}
	if st.State != record.status.State {
		n.log.Info("copy", "image", c.Spec.Image, "disk", c.Spec.Disk, "state", st.State, "message", st.Message)
		if st.State == api.ImageFailed {
			n.events.Eventf(c, nil, corev1.EventTypeWarning, "Failed", "Transfer", "%s", api.ClipMessage(st.Message))
		}
	}
	record.status = st
	return nil
}

// specOf collects the facts about an image that a transfer needs.
func (n *copyReconciler) specOf(c *api.ImageCopy, img *api.BackingImage) importer.Spec {
	s := importer.Spec{UID: c.Spec.UUID, Name: c.Spec.Image, Layers: c.Spec.Layers, Checksum: img.Spec.Checksum,
		Export: c.Spec.Export != nil}
	if img.Name != "" {
		if object, err := img.Record(); err == nil {
			s.Object = object
		}
	}
	if img.Status.UUID == c.Spec.UUID && img.Status.Digest != "" {
		s.Checksum, s.Digest = cmp.Or(img.Status.Checksum, img.Spec.Checksum), img.Status.Digest
		s.Format, s.VirtualSize = img.Status.Format, img.Status.VirtualSize
	}
	return s
}

// startTransfer starts the transfer of a copy, or with repair the repair of a copy below replicas. address is where an
// earlier process expected the upload, or empty.
func (n *copyReconciler) startTransfer(ctx context.Context, c *api.ImageCopy, img *api.BackingImage, on block.Layers,
	spec importer.Spec, address string, repair bool) error {
	n.mu.Lock()
	delete(n.verifications, c.Name) // they belong to the earlier content
	delete(n.suspects, c.Name)
	n.mu.Unlock()
	if c.Spec.From != "" {
		return n.transfers.startTransfer(ctx, c, "disk",
			func(ctx context.Context, t *transfer, _ slotFunc) (importer.Result, error) {
				return n.copyFromDisk(ctx, t, c.DeepCopy(), on, spec, repair)
			})
	}
	img = img.DeepCopy()
	image, size := &img.Spec, img.Status.VirtualSize
	return n.transfers.startTransfer(ctx, c, string(image.SourceType),
		func(ctx context.Context, t *transfer, slot slotFunc) (importer.Result, error) {
			switch image.SourceType {
			case api.SourceExport:
				return n.recordExport(ctx, t, slot, on, spec, size)
			case api.SourceRestore:
				return n.restoreBackup(ctx, t, slot, img, on, spec, repair)
			case api.SourceClone:
				return n.copyClone(ctx, t, slot, image, on, spec, repair)
			}
			job := &imageImport{copyReconciler: n, t: t, slot: slot, image: image, on: on, spec: spec, address: address}
			if repair {
				return job.repairCopy(ctx)
			}
			return job.importImage(ctx)
		})
}

// removeCopy removes the copy from its disk.
func (n *copyReconciler) removeCopy(ctx context.Context, c *api.ImageCopy, st *api.ImageCopyStatus) (
	time.Duration, bool) {
	n.endRestoring(c)
	on, err := n.disks(c.Spec.Disk)
	if err == nil {
		want := importer.Spec{UID: c.Spec.UUID, Name: c.Spec.Image, Layers: c.Spec.Layers, Export: c.Spec.Export != nil,
			Left: c.Labels[api.LabelHidden] != ""}
		if err = importer.Remove(ctx, on, want); err == nil {
			err = importer.RemoveRepairData(ctx, on, want)
		}
	}
	if err == nil {
		n.log.Info("copy removed", "image", c.Spec.Image, "disk", c.Spec.Disk)
		return 0, true
	}
	st.Message = api.CopyNotRemoved + err.Error()
	if on == nil {
		st.State = api.ImageUnknown
		return n.opts.CheckEvery, false // the return of the disk wakes the reconciler
	}
	return n.opts.RetryMin, false
}
