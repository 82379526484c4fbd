package host

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// nextStatus decides the next status of a copy from its transfer t, or else from its disk. nextStatus returns the time
// until the next reconcile.
func (n *copyReconciler) nextStatus(ctx context.Context, c *api.ImageCopy, t *transfer, st *api.ImageCopyStatus) (
	time.Duration, error,
) {
	if t != nil && t.isRunning() {
		was := st.Message
		showProgress(t, st)
		if st.Readable && st.Message != "" && st.Message != was {
			n.events.Eventf(c, nil, corev1.EventTypeWarning, "ReadsWait", "Restore", "%s", api.ClipMessage(st.Message))
		}
		return 0, nil
	}
	img := &api.BackingImage{}
	if err := n.Get(ctx, client.ObjectKey{Name: c.Spec.Image}, img); client.IgnoreNotFound(err) != nil {
		return 0, err
	}
	if t != nil {
		defer n.transfers.forgetEnded(c.Name)
		return n.endTransfer(c, img, t, st), nil
	}
	on, err := n.disks(c.Spec.Disk)
	if err != nil {
		st.State, st.Message = api.ImageUnknown, err.Error()
		return n.opts.CheckEvery, nil // the return of the disk wakes the reconciler
	}
	if img.Status.UUID != c.Spec.UUID {
		if st.State != api.ImageReady {
			st.State, st.Message = api.ImagePending, "the image "+c.Spec.Image+" is not there any more"
		}
		return n.opts.RetryMin, nil // the planner deletes this copy, or the cache is behind
	}
	if c.Spec.Export != nil && len(c.Spec.Layers) == 0 {
		return n.holdLayers(ctx, c, on, st), nil
	}
	s := &copyStep{copyReconciler: n, c: c, img: img, on: on, spec: n.specOf(c, img), st: st}
	return s.compareCopy(ctx)
}

// endTransfer decides the status after the end of a transfer.
func (n *copyReconciler) endTransfer(c *api.ImageCopy, img *api.BackingImage, t *transfer, st *api.ImageCopyStatus,
) time.Duration {
	if errors.Is(t.err, context.Canceled) {
		return 0 // the process ends; the next process continues
	}
	if t.err == nil && t.source != digestKind || t.source == verificationKind {
		st.Verified, st.LastVerified = t.token, metav1.NewTime(time.Now().Truncate(time.Second))
	}
	switch {
	case t.err != nil && t.source == verificationKind:
		return n.setDamaged(c, img.Spec.SourceType, st, t.err)
	case t.err != nil:
		showReadable(t.currentState().readable, st) // the restore may fail before its first report
		return n.setFailed(c, st, t.err, isRetryable(img.Spec.SourceType, t.err))
	}
	if _, _, done, total := t.progress.Snapshot(); done > 0 && t.source != verificationKind && t.source != digestKind {
		st.BytesDone, st.BytesTotal = done, max(total, done) // the last bytes came after the last report
	}
	if notice := t.progress.Notice(); notice != "" {
		st.Notice = notice
	}
	setReady(st, t.got)
	n.endRestoring(c)
	if lacksDigest(c, t.got) {
		return time.Millisecond // the next reconcile starts the digests
	}
	return n.opts.CheckEvery
}

// copyStep is one reconcile of a copy without a transfer, on a disk that answers.
type copyStep struct {
	*copyReconciler
	c    *api.ImageCopy
	img  *api.BackingImage
	on   block.Layers
	spec importer.Spec
	st   *api.ImageCopyStatus
}

// compareCopy compares the copy with the disk and starts the transfer that the copy lacks.
func (s *copyStep) compareCopy(ctx context.Context) (time.Duration, error) {
	got, err := importer.Find(s.on, s.spec)
	if err == nil && lacksDigest(s.c, got) {
		return s.startDigests(ctx, got)
	}
	if err == nil {
		known, damage := s.checkContent(ctx, s.c, s.on, got, s.st)
		if !known {
			return s.opts.CheckEvery, damage
		}
		if damage == nil {
			setReady(s.st, got)
			s.endRestoring(s.c)
			return s.opts.CheckEvery, nil
		}
		err = damage
	}
	if api.Is(err, api.Corrupt) && s.st.State == api.ImageFailed && mayRetry(s.c, s.st) {
		repair, err := s.clearDamage(ctx)
		if err != nil {
			return s.setFailed(s.c, s.st, err, true), nil
		}
		return s.makeCopy(ctx, repair)
	}
	if !api.Is(err, api.NotFound) {
		if s.st.State == api.ImageFailed && !mayRetry(s.c, s.st) {
			return untilRetry(s.st), nil
		}
		return s.setDamaged(s.c, s.img.Spec.SourceType, s.st, err), nil
	}
	return s.makeCopy(ctx, false)
}

// startDigests starts the digests of a copy, which volumes can use meanwhile.
func (s *copyStep) startDigests(ctx context.Context, got importer.Result) (time.Duration, error) {
	if s.st.State != api.ImageFailed {
		setReady(s.st, got)
	} else if !mayRetry(s.c, s.st) {
		return untilRetry(s.st), nil
	}
	return 0, s.makeDigests(ctx, s.c, s.on, s.spec, got.Image)
}

// clearDamage removes the damaged content, for a new transfer. Below replicas the content stays, and the transfer
// repairs the content in place.
func (s *copyStep) clearDamage(ctx context.Context) (repair bool, err error) {
	err = importer.Remove(ctx, s.on, s.spec)
	t := s.img.Spec.SourceType
	fromOrigin := t != api.SourceUpload && t != api.SourceExport
	if api.Is(err, api.InUse) && s.spec.Digest != "" && (s.c.Spec.From != "" || fromOrigin) {
		return true, nil
	}
	if err != nil {
		err = api.Errorf(api.KindOf(err), "the damaged copy cannot be replaced: %w", err)
	}
	return false, err
}

// makeCopy starts the transfer of a copy that the disk lacks, or the repair of a damaged copy.
func (s *copyStep) makeCopy(ctx context.Context, repair bool) (time.Duration, error) {
	c, st := s.c, s.st
	if st.State == api.ImageReady || st.State == api.ImageUnknown && st.Digest != "" && !st.Readable {
		s.log.Warn("copy is gone from its disk", "image", c.Spec.Image, "disk", c.Spec.Disk)
		s.events.Eventf(c, nil, corev1.EventTypeWarning, "Lost", "Transfer", "the copy is no longer on disk %s", c.Spec.Disk)
	}
	if st.State == api.ImageFailed && !mayRetry(c, st) {
		s.serveFailed()
		return untilRetry(st), nil
	}
	if st.Digest != "" && c.Spec.From == "" && s.img.Spec.SourceType == api.SourceUpload {
		gone := api.Errorf(api.Unavailable, "the copy is no longer on disk %s, and an upload cannot "+
			"be asked for again: delete the image and upload the image again", c.Spec.Disk)
		return s.setFailed(c, st, errors.Join(gone, importer.Remove(ctx, s.on, s.spec)), false), nil
	}
	if yes, err := s.stillWanted(ctx, c); !yes {
		return 0, err // an event of the cache wakes the reconciler
	}
	if err := s.startTransfer(ctx, c, s.img, s.on, s.spec, st.UploadURL, repair); err != nil {
		return 0, err
	}
	st.State, st.Message, st.Progress, st.ByteProgress, st.UploadURL = api.ImagePending, "", 0, api.ByteProgress{}, ""
	st.NextTry = metav1.Time{}
	return 0, nil
}

// stillWanted asks the API itself whether a copy is still wanted. A transfer for a deleted copy would outlive its
// deletion.
func (n *copyReconciler) stillWanted(ctx context.Context, c *api.ImageCopy) (bool, error) {
	var now api.ImageCopy
	if err := n.live.Get(ctx, client.ObjectKeyFromObject(c), &now); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	return now.UID == c.UID && now.DeletionTimestamp.IsZero(), nil
}
