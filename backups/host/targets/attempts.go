package targets

import (
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
)

// mostAttempts is how many attempts without progress fail before a backup or copy has an Error.
const mostAttempts = 10

// lockedPause is the pause between two attempts while the lock of another session delays the work.
const lockedPause = time.Minute

// CountAttempt counts a failed attempt in the status of a backup or copy, and reports whether it was the last one. An
// attempt that came further than the one before counts as the first. An attempt that met the lock of another session
// does not count: restic holds a repository exclusively for hours. begun: the repository may have a snapshot of an
// earlier attempt, and the status keeps that.
func CountAttempt(st *api.CommonBackupStatus, err error, progressed, begun bool) (last bool) {
	if progressed {
		st.Attempts = 0
	}
	if repo.IsLocked(err) {
		if begun {
			st.Attempts = max(st.Attempts, 1)
		}
		return false
	}
	st.Attempts++
	return IsPermanent(err) || st.Attempts >= mostAttempts
}

// PauseAfter is the pause after a failed attempt: least at first, twice as long after each further failure, and most at
// last.
func PauseAfter(attempts int32, err error, least, most time.Duration) time.Duration {
	pause := least << min(max(attempts-1, 0), 20)
	switch {
	case repo.IsLocked(err):
		return min(lockedPause, most)
	case pause > most || pause <= 0:
		return most
	}
	return pause
}
