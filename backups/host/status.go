package host

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
)

// completed is a backup in the repository.
type completed struct {
	snapshot blob.ID
	facts    tags.Facts
	target   string // URL
	adopted  bool   // an earlier attempt made the backup
	added    int64  // bytes of chunks and fragments that the repository lacked
	note     string // for the user, of a backup that is complete
}

// setCompleted is the status of a backup that the repository has.
func setCompleted(b api.StoredBackup, w *work) {
	c, now := &w.made, time.Now()
	switch b := b.(type) {
	case *api.Backup:
		b.Status = c.facts.Status(c.target, c.snapshot.String(), now, now)
	case *api.BackupBackingImage:
		b.Status = c.facts.ImageStatus(c.target, c.snapshot.String(), now, now)
	}
	st := b.Common()
	st.Message = c.note
	if !c.adopted {
		st.BytesDone, st.BytesTotal = w.progress.Bytes()
		st.SkippedBytes = max(st.BytesDone-c.added, 0)
	}
}

// setFailed is the status after an attempt that failed.
func (m *maker) setFailed(b api.StoredBackup, w *work) {
	st := b.Common()
	done, total := w.progress.Bytes()
	last := targets.CountAttempt(st, w.err, done > w.reached, w.begun)
	st.ByteProgress = api.ByteProgress{BytesDone: max(done, w.reached), BytesTotal: max(total, done, w.reached)}
	st.Message, st.NextTry = api.ClipMessage(w.err.Error()), nil
	if last {
		st.State, st.BackupCreatedAt = api.BackupError, time.Now().UTC().Format(time.RFC3339)
		return
	}
	st.State = api.BackupPending
	setNextTry(st, m.pauseAfter(st.Attempts, w.err))
}

// reportEnd logs the end of an attempt, and emits an event at the end of a backup.
func (m *maker) reportEnd(b api.StoredBackup, err error) {
	st, mode := b.Common(), ""
	if v, is := b.(*api.Backup); is {
		mode = v.Status.BackupMode + " "
	}
	switch {
	case err == nil:
		m.log.Info("backup completed", "backup", b.GetName(), "of", b.Subject(), "target", b.Target(),
			"mode", strings.TrimSpace(mode), "uploaded", st.NewlyUploadDataSize)
		m.events.Eventf(b, nil, corev1.EventTypeNormal, "BackupCompleted", "Backup", "%s: %sbackup, %s uploaded",
			b.Subject(), mode, st.UploadedText)
	case st.State == api.BackupError:
		m.log.Warn("backup failed", "backup", b.GetName(), "of", b.Subject(), "target", b.Target(), "err", err)
		m.events.Eventf(b, nil, corev1.EventTypeWarning, "BackupFailed", "Backup", "%s", st.Message)
	case repo.IsLocked(err):
		m.log.Info("backup waits for a lock", "backup", b.GetName(), "of", b.Subject(), "target", b.Target(), "err", err)
	default:
		m.log.Warn("attempt of a backup failed", "backup", b.GetName(), "of", b.Subject(), "target", b.Target(),
			"attempts", st.Attempts, "err", err)
	}
}
