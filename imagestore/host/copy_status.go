package host

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
)

// maxServerWait is the longest pause that a server can ask for.
const maxServerWait = time.Hour

// showProgress copies the progress of a running transfer into the status. Verifications and digests run beside the use
// of the copy and leave the status alone.
func showProgress(t *transfer, st *api.ImageCopyStatus) {
	if t.source == verificationKind || t.source == digestKind {
		return
	}
	now := t.currentState()
	st.State, st.Progress, st.UploadURL = now.state, now.percent, now.url
	st.ByteProgress = now.bytes
	st.Message, st.Notice = now.problem, t.progress.Notice()
	showReadable(now.readable, st)
	st.NextTry = metav1.Time{}
	if now.waiting { // the transfer continues by itself; the next process tries at once
		st.State, st.Attempts, st.TriedFrom = api.ImageFailed, 0, t.from
		st.NextTry = metav1.NewTime(t.begun.Truncate(time.Second))
	}
}

// showReadable is the status of a copy whose layer volumes can read before its end.
func showReadable(r readableLayer, st *api.ImageCopyStatus) {
	if r.digest != "" {
		st.Readable, st.Digest, st.VirtualSize = true, r.digest, r.size
	}
}

// setReady is the status of a complete copy.
func setReady(st *api.ImageCopyStatus, g importer.Result) {
	st.State, st.Message, st.Progress, st.UploadURL, st.NextTry = api.ImageReady, "", 100, "", metav1.Time{}
	st.Attempts, st.TriedFrom, st.Readable, st.EstimatedEnd = 0, "", false, nil
	st.Format, st.Size, st.VirtualSize, st.Checksum, st.Digest = g.Format, g.Allocated, g.VirtualSize, g.Checksum, g.Digest
}

// setDamaged is the status of a copy with damaged content.
func (n *copyReconciler) setDamaged(c *api.ImageCopy, t api.SourceType, st *api.ImageCopyStatus,
	err error) time.Duration {
	err = api.Errorf(api.KindOf(err), "the copy on disk %s is damaged: %w", c.Spec.Disk, err)
	n.events.Eventf(c, nil, corev1.EventTypeWarning, "Damaged", "Transfer", "%s", api.ClipMessage(err.Error()))
	if t == api.SourceUpload && c.Spec.From == "" {
		err = api.Errorf(api.KindOf(err), "%w; an upload cannot be asked for again: delete the image and "+
			"upload the image again", err)
	}
	return n.setFailed(c, st, err, t != api.SourceUpload)
}

// setFailed is the status of a failed copy; setFailed returns the time until the next try.
func (n *copyReconciler) setFailed(c *api.ImageCopy, st *api.ImageCopyStatus, err error, retry bool) time.Duration {
	st.State, st.Message, st.Notice, st.Progress, st.UploadURL = api.ImageFailed, err.Error(), "", 0, ""
	st.Format, st.Size, st.Checksum, st.EstimatedEnd = "", 0, "", nil
	if st.Readable = st.Readable && c.Spec.From == ""; !st.Readable { // a readable copy is still served: serveFailed
		st.VirtualSize, st.Digest = 0, ""
	}
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
	// The API keeps whole seconds.
	st.NextTry = metav1.NewTime(time.Now().Add(pause + time.Second - 1).Truncate(time.Second))
	return time.Until(st.NextTry.Time)
}

func retryDue(st *api.ImageCopyStatus) bool {
	return !st.NextTry.IsZero() && !time.Now().Before(st.NextTry.Time)
}

// mayRetry reports whether a failed copy may be tried again now. A copy that failed for good may, once another copy can
// supply the content.
func mayRetry(c *api.ImageCopy, st *api.ImageCopyStatus) bool {
	return retryDue(st) || st.NextTry.IsZero() && c.Spec.From != ""
}

// untilRetry is the time until the next try; 0 after a failure for good.
func untilRetry(st *api.ImageCopyStatus) time.Duration { return max(time.Until(st.NextTry.Time), 0) }

// isRetryable reports whether a new try can succeed. An upload cannot be requested again, and a wrong image stays wrong
// until its user changes the image.
func isRetryable(t api.SourceType, err error) bool {
	if t == api.SourceUpload {
		return false
	}
	switch api.KindOf(err) {
	case api.Invalid, api.Corrupt, api.Unsupported, api.OutOfRange:
		return false
	}
	return true
}
