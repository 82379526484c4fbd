package host

import (
	"context"
	"errors"
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
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
	"drover.io/drover/imagestore/origin/upload"
)

// copyReconciler makes the ImageCopy objects of one node true.
type copyReconciler struct {
	client.Client
	live    client.Reader // not cached: for Secrets, and for what a transfer is begun for
	node    string
	disks   func(api.UID) (block.Layers, error)
	opts    Options
	events  recorder.EventRecorder
	log     *slog.Logger
	transfers  *transferSet
	uploads *upload.Server

	mu       sync.Mutex
	records     map[string]*statusRecord
	verifications map[string]verification // by name of the ImageCopy
	suspects   map[string]bool    // ImageCopies that are to be verified: what was copied from them was damaged
}

// statusRecord is what this process, the only writer, holds to be the status of an ImageCopy. The cache may lag behind it.
type statusRecord struct {
	object types.UID
	status api.ImageCopyStatus
}

// Reconcile moves one copy a step on.
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
	p := n.recordOf(c)
	j := n.transfers.get(c.Name)
	if j != nil && (j.object != c.UID || !c.DeletionTimestamp.IsZero()) {
		if j.cancel(); j.running() {
			return ctrl.Result{}, nil // its end wakes us
		}
		n.transfers.forget(c.Name)
		j = nil
	}
	st := p.status
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
	} else if wait, err = n.nextStatus(ctx, c, j, &st); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: wait}, n.writeStatus(ctx, c, p, st)
}

// statusRecord finds or begins what we know of a copy.
func (n *copyReconciler) recordOf(c *api.ImageCopy) *statusRecord {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.records[c.Name]
	if p == nil || p.object != c.UID {
		p = &statusRecord{object: c.UID, status: c.Status}
		n.records[c.Name] = p
	}
	return p
}

// forgetCopy forgets a copy that is no more.
func (n *copyReconciler) forgetCopy(name string) {
	if j := n.transfers.get(name); j != nil {
		j.cancel()
		n.transfers.forget(name)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.records, name)
	delete(n.verifications, name)
	delete(n.suspects, name)
}

// writeStatus brings the status to the API, and to the pen once it is there.
func (n *copyReconciler) writeStatus(ctx context.Context, c *api.ImageCopy, p *statusRecord, st api.ImageCopyStatus) error {
	st.UploadCA = ""
	if st.UploadURL != "" {
		st.UploadCA = string(n.opts.UploadCA)
	}
	if st.State != p.status.State {
		st.LastTransition = metav1.NewTime(time.Now().Truncate(time.Second))
	}
	if equality.Semantic.DeepEqual(st, c.Status) {
		p.status = st
		return nil
	}
	// A patch without a version: there is no other writer, and the cached object may be old.
	base := c.DeepCopy()
	base.Status = api.ImageCopyStatus{}
	next := base.DeepCopy()
	next.Status = st
	if err := n.Status().Patch(ctx, next, statusPatch{c.Status, st}); err != nil {
		return client.IgnoreNotFound(err)
	}
	if st.State != p.status.State {
		n.log.Info("copy", "image", c.Spec.Image, "disk", c.Spec.Disk, "state", st.State, "message", st.Message)
		if st.State == api.ImageFailed {
			n.events.Eventf(c, nil, corev1.EventTypeWarning, "Failed", "Transfer", "%s", api.ClipMessage(st.Message))
		}
	}
	p.status = st
	return nil
}

// nextStatus decides what the state of a copy becomes, given what its transfer did.
func (n *copyReconciler) nextStatus(ctx context.Context, c *api.ImageCopy, j *transfer, st *api.ImageCopyStatus) (time.Duration, error) {
	if j != nil && j.running() {
		if j.source == verificationKind || j.source == digestKind {
			return 0, nil
		}
		g := j.snapshot()
		st.State, st.Progress, st.BytesDone, st.BytesTotal, st.UploadURL = g.state, g.percent, g.done, g.total, g.url
		st.Message, st.Notice = "", j.progress.Notice()
		return 0, nil
	}
	img := &api.BackingImage{}
	if err := n.Get(ctx, client.ObjectKey{Name: c.Spec.Image}, img); client.IgnoreNotFound(err) != nil {
		return 0, err
	}
	if j != nil {
		defer n.transfers.forget(c.Name)
		if errors.Is(j.err, context.Canceled) {
			return 0, nil // the process ends; the next one goes on
		}
		if j.err == nil && j.source != digestKind || j.source == verificationKind {
			st.Verified, st.LastVerified = j.token, metav1.NewTime(time.Now().Truncate(time.Second))
		}
		if j.err == nil {
			if _, _, n, total := j.progress.Snapshot(); n > 0 && j.source != verificationKind && j.source != digestKind {
				st.BytesDone, st.BytesTotal = n, max(total, n) // the last bytes came after the last tick
			}
			if notice := j.progress.Notice(); notice != "" {
				st.Notice = notice
			}
			setReady(st, j.got)
			if lacksDigest(c, j.got) {
				return time.Millisecond, nil // to have it made
			}
			return n.opts.CheckEvery, nil
		}
		if j.source == verificationKind {
			return n.setDamaged(c, img.Spec.SourceType, st, j.err), nil
		}
		return n.setFailed(c, st, j.err, retryable(img.Spec.SourceType, j.err)), nil
	}
	on, err := n.disks(c.Spec.Disk)
	if err != nil {
		st.State, st.Message = api.ImageUnknown, err.Error()
		return n.opts.CheckEvery, nil // its disk's return wakes us
	}
	if img.Status.UUID != c.Spec.UUID {
		if st.State != api.ImageReady {
			st.State, st.Message = api.ImagePending, "the image "+c.Spec.Image+" is not there any more"
		}
		return n.opts.RetryMin, nil // the controller deletes this copy, or the cache is behind
	}
	if c.Spec.Export != nil && len(c.Spec.Layers) == 0 {
		return n.holdLayers(ctx, c, on, st), nil
	}
	want, mend := n.specOf(c, img), false
	got, err := importer.Find(on, want)
	switch {
	case err == nil && lacksDigest(c, got):
		if st.State != api.ImageFailed {
			setReady(st, got) // it can be used
		} else if !mayRetry(c, st) {
			return max(time.Until(st.NextTry.Time), 0), nil
		}
		return 0, n.makeDigests(ctx, c, on, want, got.Image)
	case err == nil:
		var known bool
		if known, err = n.checkContent(ctx, c, on, got, st); !known {
			return n.opts.CheckEvery, err
		}
		if err == nil {
			setReady(st, got)
			return n.opts.CheckEvery, nil
		}
	}
	if api.Is(err, api.Corrupt) && st.State == api.ImageFailed && mayRetry(c, st) {
		// What is there is worth nothing. It goes, and the image is brought again; below replicas it is repaired in place.
		err = importer.Remove(ctx, on, want)
		if mend = api.Is(err, api.InUse) && want.Digest != "" && (c.Spec.From != "" ||
			img.Spec.SourceType != api.SourceUpload && img.Spec.SourceType != api.SourceExport); mend {
			err = nil
		}
		if err != nil {
			err = api.Errorf(api.KindOf(err), "the damaged copy cannot be replaced: %w", err)
			return n.setFailed(c, st, err, true), nil
		}
		err = api.Errorf(api.NotFound, "removed")
	}
	if !api.Is(err, api.NotFound) {
		if st.State == api.ImageFailed && !mayRetry(c, st) {
			return max(time.Until(st.NextTry.Time), 0), nil
		}
		return n.setDamaged(c, img.Spec.SourceType, st, err), nil
	}
	if lost := st.State == api.ImageReady || st.State == api.ImageUnknown && st.Digest != ""; lost {
		n.log.Warn("copy is gone from its disk", "image", c.Spec.Image, "disk", c.Spec.Disk)
		n.events.Eventf(c, nil, corev1.EventTypeWarning, "Lost", "Transfer", "the copy is gone from disk %s", c.Spec.Disk)
	}
	if st.State == api.ImageFailed && !mayRetry(c, st) {
		return max(time.Until(st.NextTry.Time), 0), nil // 0: for good
	}
	if st.Digest != "" && c.Spec.From == "" && img.Spec.SourceType == api.SourceUpload {
		return n.setFailed(c, st, errors.Join(api.Errorf(api.Unavailable, "the copy is gone from disk %s, and an upload cannot "+
			"be asked for again: delete the image and upload it anew", c.Spec.Disk), importer.Remove(ctx, on, want)), false), nil
	}
	if yes, err := n.stillWanted(ctx, c); !yes {
		return 0, err // the cache's news wakes us
	}
	if err := n.startTransfer(ctx, c, img, on, want, st.UploadURL, mend); err != nil {
		return 0, err
	}
	st.State, st.Message, st.Progress, st.BytesDone, st.BytesTotal, st.UploadURL = api.ImagePending, "", 0, 0, 0, ""
	st.NextTry = metav1.Time{}
	return 0, nil
}

// stillWanted asks the API itself whether a copy is still to be made. Nothing is begun for one that is on its way out: its
// end would not wait for that.
func (n *copyReconciler) stillWanted(ctx context.Context, c *api.ImageCopy) (bool, error) {
	var now api.ImageCopy
	if err := n.live.Get(ctx, client.ObjectKeyFromObject(c), &now); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	return now.UID == c.UID && now.DeletionTimestamp.IsZero(), nil
}

func retryDue(st *api.ImageCopyStatus) bool {
	return !st.NextTry.IsZero() && !time.Now().Before(st.NextTry.Time)
}

// mayRetry reports whether a failed copy is to be tried again now. What failed for good is, once another copy is there to
// take it from.
func mayRetry(c *api.ImageCopy, st *api.ImageCopyStatus) bool {
	return retryDue(st) || st.NextTry.IsZero() && c.Spec.From != ""
}

// setReady is the status of a copy that is there.
func setReady(st *api.ImageCopyStatus, g importer.Result) {
	st.State, st.Message, st.Progress, st.UploadURL, st.NextTry = api.ImageReady, "", 100, "", metav1.Time{}
	st.Attempts, st.TriedFrom = 0, ""
	st.Format, st.Size, st.VirtualSize, st.Checksum, st.Digest = g.Format, g.Allocated, g.VirtualSize, g.Checksum, g.Digest
}

// setDamaged is the status of a copy that is on the disk and not whole.
func (n *copyReconciler) setDamaged(c *api.ImageCopy, t api.SourceType, st *api.ImageCopyStatus, err error) time.Duration {
	err = api.Errorf(api.KindOf(err), "the copy on disk %s is damaged: %w", c.Spec.Disk, err)
	n.events.Eventf(c, nil, corev1.EventTypeWarning, "Damaged", "Transfer", "%s", api.ClipMessage(err.Error()))
	if t == api.SourceUpload && c.Spec.From == "" {
		err = api.Errorf(api.KindOf(err), "%w; an upload cannot be asked for again: delete the image and upload it anew", err)
	}
	return n.setFailed(c, st, err, t != api.SourceUpload)
}

// maxServerWait is the longest time that a server which asks to be left alone gets.
const maxServerWait = time.Hour

// setFailed is the status of a copy that could not be made, and the time until it is tried again.
func (n *copyReconciler) setFailed(c *api.ImageCopy, st *api.ImageCopyStatus, err error, retry bool) time.Duration {
	st.State, st.Message, st.Notice, st.Progress, st.UploadURL = api.ImageFailed, err.Error(), "", 0, ""
	st.Format, st.Size, st.VirtualSize, st.Checksum, st.Digest = "", 0, 0, "", ""
	st.Attempts++
	st.TriedFrom = c.Spec.From
	st.NextTry = metav1.Time{}
	if c.Spec.From == "" && !retry {
		return 0
	}
	pause := n.opts.RetryMin << min(st.Attempts-1, 20)
	if pause > n.opts.RetryMax || pause <= 0 {
		pause = n.opts.RetryMax
	}
	pause = max(pause, min(origin.Wait(err), maxServerWait))
	// Whole seconds, because that is what the API keeps.
	st.NextTry = metav1.NewTime(time.Now().Add(pause + time.Second - 1).Truncate(time.Second))
	return time.Until(st.NextTry.Time)
}

// retryable reports whether the same again may come out better. What the user sent cannot be asked for again, and an
// image that is wrong stays wrong until the user changes it.
func retryable(t api.SourceType, err error) bool {
	if t == api.SourceUpload {
		return false
	}
	switch api.KindOf(err) {
	case api.Invalid, api.Corrupt, api.Unsupported, api.OutOfRange:
		return false
	}
	return true
}

func (n *copyReconciler) specOf(c *api.ImageCopy, img *api.BackingImage) importer.Spec {
	w := importer.Spec{UID: c.Spec.UUID, Name: c.Spec.Image, Layers: c.Spec.Layers, Checksum: img.Spec.Checksum,
		Export: c.Spec.Export != nil}
	if img.Name != "" {
		if object, err := img.Record(); err == nil {
			w.Object = object
		}
	}
	if img.Status.UUID == c.Spec.UUID && img.Status.Digest != "" {
		w.Checksum, w.Digest = img.Status.Checksum, img.Status.Digest
		w.Format, w.VirtualSize = img.Status.Format, img.Status.VirtualSize
	}
	return w
}

// startTransfer starts the transfer of a copy, or with mend its repair. address is where an upload was expected before, or
// empty.
func (n *copyReconciler) startTransfer(ctx context.Context, c *api.ImageCopy, img *api.BackingImage, on block.Layers,
	want importer.Spec, address string, mend bool) error {
	n.mu.Lock()
	delete(n.verifications, c.Name) // they are of what was there before
	delete(n.suspects, c.Name)
	n.mu.Unlock()
	if c.Spec.From != "" {
		_, err := n.transfers.start(ctx, c, "disk",
			func(ctx context.Context, j *transfer, _ func(context.Context) error) (importer.Result, error) {
				return n.copyFromDisk(ctx, j, c.DeepCopy(), on, want, mend)
			})
		return err
	}
	spec, size := img.Spec.DeepCopy(), img.Status.VirtualSize
	_, err := n.transfers.start(ctx, c, string(spec.SourceType),
		func(ctx context.Context, j *transfer, slot func(context.Context) error) (importer.Result, error) {
			if spec.SourceType == api.SourceExport {
				return n.recordExport(ctx, j, slot, on, want, size)
			}
			return n.importImage(ctx, j, slot, spec, on, want, address, mend)
		})
	return err
}

// removeCopy takes the copy from its disk.
func (n *copyReconciler) removeCopy(ctx context.Context, c *api.ImageCopy, st *api.ImageCopyStatus) (time.Duration, bool) {
	on, err := n.disks(c.Spec.Disk)
	if err == nil {
		want := importer.Spec{UID: c.Spec.UUID, Name: c.Spec.Image, Layers: c.Spec.Layers, Export: c.Spec.Export != nil}
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
		return n.opts.CheckEvery, false // its disk's return wakes us
	}
	return n.opts.RetryMin, false
}
