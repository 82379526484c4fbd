package targets

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// targetRecord is what the owner of a target remembers of it, for the reconcile of the target alone.
type targetRecord struct {
	uid types.UID // of the BackupTarget

	visit       *job[visitResult]
	visited     time.Time            // begin of the last visit; zero: none
	generation  int64                // of the target at the last visit
	failures    failures             // at the last visit
	visitedSpec api.BackupTargetSpec // at the last visit
	missingAt   time.Time            // visitResult.missingAt
	progress    *visitProgress       // of the visit
	shown       *storeFacts          // the last of progress that the status has
	unfinished  bool                 // the last visit did not compare all backups
	claimed     *api.TargetClaim     // of this process; the next visit may make the repository
	memory      *visitMemory

	deletion      *job[deletionResult]
	deleteAgain   time.Time          // no deletion begins before
	deleteMessage string             // why the last deletion failed
	kept          map[blob.ID]string // snapshots that another cluster restores, and who, by the last deletion
	keptUntil     time.Time          // the next deletion asks again
	deleted       map[types.UID]bool // Backups whose trace in the store is deleted; true: without a finalizer, too
	deletedCount  int32              // snapshots that were deleted since the last status
	wantsSweep    bool               // a trace was deleted since the last status

	sweep      *job[sweepResult]
	sweepWait  *sweepWait // of the last sweep; nil: none
	sweepAgain time.Time  // no sweep begins before
	requested  time.Time  // first request of the next sweep; zero: none
	// leftRequest is the request of a sweep that left packs of running sessions, and is repeated at leftAgain; zero: none.
	leftRequest metav1.Time
	leftAgain   time.Time
	leftPause   time.Duration // doubles, because a target may have sessions all the time

	verification *job[verifyResult]
	verifyAgain  time.Time                    // no step begins before, unless a user asks again
	verifyFailed int                          // steps in a row that failed
	owesCheck    bool                         // a step failed after its look for damage was due
	failedAsked  *metav1.Time                 // VerifyRequestedAt when the last step failed
	healSeen     time.Time                    // when UncheckedBlobs of the status became more than 0; zero: 0
	damaged      map[blob.ID]bool             // snapshots of the last check; nil: none in this process
	digests      map[blob.ID]*api.DigestsFact // of backups of Longhorn that this process verified
	marked       bool                         // a backup got the mark that it is damaged since the last status
}

// stop cancels the jobs.
func (rec *targetRecord) stop() {
	rec.visit.stop()
	rec.deletion.stop()
	rec.sweep.stop()
	rec.verification.stop()
}

// nextVisit is when the next visit begins; zero: never.
func (rec *targetRecord) nextVisit(t *api.BackupTarget, backups []api.StoredBackup, retry time.Duration,
	now time.Time) time.Time {
	if rec.visited.IsZero() || rec.generation != t.Generation || rec.claimed != nil {
		return now
	}
	next := rec.missingAt
	if poll := t.Spec.Poll(); poll > 0 {
		next = earlier(next, rec.visited.Add(max(poll, time.Second)))
	}
	if !t.Status.Available || rec.unfinished || rec.failures.hasNew(backups) { // the store may be why an attempt failed
		next = earlier(next, rec.visited.Add(retry))
	}
	if asked := t.Spec.SyncRequestedAt; asked != nil && !asked.Equal(t.Status.SyncedRequest) {
		next = earlier(next, rec.visited.Add(retry)) // the visit failed at the API server
	}
	return next
}

// failures are the backups whose last attempt failed, each with the time of the next attempt, which changes with each
// failure. The pauses between attempts grow, and so do those between the visits that follow them.
type failures map[types.UID]metav1.Time

func failuresOf(backups []api.StoredBackup) failures {
	all := failures{}
	for _, b := range backups {
		if next := nextTry(b); next != nil {
			all[b.GetUID()] = *next
		}
	}
	return all
}

// nextTry is the time of the next attempt after one that failed, or nil.
func nextTry(b api.StoredBackup) *metav1.Time {
	if b.Ended() {
		return nil
	}
	return b.Common().NextTry
}

// hasNew reports whether an attempt of a backup failed that f does not have.
func (f failures) hasNew(backups []api.StoredBackup) bool {
	for uid, next := range failuresOf(backups) {
		if seen, is := f[uid]; !is || !seen.Equal(&next) {
			return true
		}
	}
	return false
}

// nextSweep is when the next sweep begins; zero: never.
func (rec *targetRecord) nextSweep(t *api.BackupTarget, delay time.Duration) time.Time {
	if t.Status.SweepRequested == nil {
		rec.requested = time.Time{}
		return time.Time{}
	}
	left := !rec.leftAgain.IsZero() && t.Status.SweepRequested.Equal(&rec.leftRequest)
	if rec.requested.IsZero() && !left {
		rec.requested = t.Status.SweepRequested.Time
	}
	if t.ExplainReadOnly() != "" || !t.Status.Available {
		return time.Time{}
	}
	if left {
		return rec.leftAgain
	}
	if due := rec.requested.Add(delay); due.After(rec.sweepAgain) {
		return due
	}
	return rec.sweepAgain
}

// hasSameStore reports whether a visit with spec was one of the store that the target has now.
func hasSameStore(t *api.BackupTarget, spec api.BackupTargetSpec) bool {
	return t.Spec.BackupTargetURL == spec.BackupTargetURL &&
		equality.Semantic.DeepEqual(t.Spec.CredentialSecret, spec.CredentialSecret)
}

// earlier is the earlier of two times; a zero time is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// applyVisit brings the result of a visit into the status. The result of a visit of another store is dropped; the next
// visit follows.
func (rec *targetRecord) applyVisit(t *api.BackupTarget, node string, now time.Time) {
	v, st := &rec.visit.result, &t.Status
	if !hasSameStore(t, rec.visitedSpec) {
		v.reason = ""
		return
	}
	st.OwnerID = node
	if v.reason != "" { // else the next visit answers
		st.SyncedRequest = v.request
	}
	if t.ExplainReadOnly() != "" { // no sweep and no backup comes that could say so
		meta.RemoveStatusCondition(&st.Conditions, api.ConditionSweepFailed)
		meta.RemoveStatusCondition(&st.Conditions, api.ConditionWriteFailed)
		applyLock(t, api.ReasonSweepWaits, nil)
	}
	rec.missingAt, rec.unfinished = v.missingAt, !v.listed
	applyFacts(st, &v.storeFacts)
	if v.keyFiles > 0 {
		applyKeys(t, v)
	}
	if v.locks != nil {
		st.Locks = v.locks
	}
	if v.keyFile != nil {
		until := metav1.NewTime(now.Add(keyFileTime).Truncate(time.Second))
		st.KeyFile, v.keyFile.ShownUntil = v.keyFile, &until
	}
	if v.usage != nil {
		st.Usage = v.usage
	}
	if v.listed {
		applyTooMany(t, v)
		synced := metav1.NewTime(v.listedAt)
		st.LastSyncedAt = &synced
	}
	if v.reason == "" {
		return // nothing is known about the target
	}
	st.Message = ""
	if v.err != nil {
		st.Message = api.ClipMessage(v.err.Error())
	}
	if v.reason == api.ReasonNotInitialized {
		rec.claimRepository(st, node, now)
	}
	rec.applyAvailable(t, v.reason)
}

// applyProgress brings what a running visit knows into the status: the store can be used.
func (rec *targetRecord) applyProgress(t *api.BackupTarget, node string, facts *storeFacts) {
	if !hasSameStore(t, rec.visitedSpec) {
		return
	}
	t.Status.OwnerID, t.Status.Message = node, ""
	applyFacts(&t.Status, facts)
	rec.applyAvailable(t, api.ReasonAvailable)
}

// applyFacts says what the store has.
func applyFacts(st *api.BackupTargetStatus, f *storeFacts) {
	if f.format != "" {
		st.Format = f.format
	}
	if f.format == api.FormatLonghorn {
		st.Initializing = nil
	}
	if f.repositoryID != "" {
		st.RepositoryID, st.Encrypted, st.Initializing = f.repositoryID, f.encrypted, nil
	}
	if f.counted {
		st.Backups, st.Unlisted = int32(f.backups), int32(f.unlisted) //nolint:gosec // a store lists at most 2^18 snapshots
	}
}

// applyAvailable says whether the target can be used, or why not: a reason of ConditionUnavailable.
func (rec *targetRecord) applyAvailable(t *api.BackupTarget, reason string) {
	st := &t.Status
	if st.Available = reason == api.ReasonAvailable; st.Available {
		rec.deleteAgain = time.Time{}
	}
	api.SetCondition(&st.Conditions, t.Generation, api.ConditionUnavailable, !st.Available, reason, st.Message)
}

// applyTooMany says whether backups in the store get no Backup.
func applyTooMany(t *api.BackupTarget, v *visitResult) {
	reason, message := api.ReasonCountBounded, ""
	if v.tooMany > 0 {
		reason = api.ReasonTooManyBackups
		message = fmt.Sprintf("the store has %s more than the target may have objects for found backups: the newest of each "+
			"volume and image come first, then the second newest of each, and so on; delete backups, or use another repository",
			api.CountText(v.tooMany, "backup"))
	}
	api.SetCondition(&t.Status.Conditions, t.Generation, api.ConditionTooManyBackups, v.tooMany > 0, reason, message)
}

// applyKeys says whether the loss of one password is the loss of the repository.
func applyKeys(t *api.BackupTarget, v *visitResult) {
	reason, message := api.ReasonKeysSuffice, ""
	if v.encrypted && v.keyFiles == 1 {
		reason = api.ReasonOneKey
		message = fmt.Sprintf("one password opens the repository, and without it the backups are lost; run `drover backup "+
			"key export --target %s`, or add %s to the Secret, and keep it outside of the cluster", t.Name,
			api.SecretRecoveryPassword)
	}
	api.SetCondition(&t.Status.Conditions, t.Generation, api.ConditionNoRecoveryKey, message != "", reason, message)
}

// claimRepository claims the making of the repository, unless another process has the claim. Another process of this
// node, which ended meanwhile, may have left a store that still works at its requests.
func (rec *targetRecord) claimRepository(st *api.BackupTargetStatus, node string, now time.Time) {
	if c := st.Initializing; c != nil && now.Before(c.Since.Add(claimTime)) {
		st.Message = fmt.Sprintf("the store has no repository; node %s makes one since %s, until %s at most", c.Node,
			c.Since.UTC().Format(time.RFC3339), c.Since.Add(claimTime).UTC().Format(time.RFC3339))
		return
	}
	st.Initializing = &api.TargetClaim{Node: node, Since: metav1.NewTime(now.Truncate(time.Second))}
	rec.claimed = st.Initializing
}

// applyDeletion records the result of a deletion.
func (rec *targetRecord) applyDeletion(t *api.BackupTarget, backups []api.StoredBackup, retry time.Duration,
	now time.Time) {
	d := &rec.deletion.result
	applyLock(t, api.ReasonDeletionWaits, d.err)
	if d.err != nil {
		rec.deleteAgain, rec.deleteMessage = now.Add(retry), d.err.Error()
		if isRefusedDeletion(d.err) {
			applyRefusedDeletion(t, d.err)
		}
		return
	}
	rec.deleteAgain, rec.deleteMessage = time.Time{}, ""
	rec.kept, rec.keptUntil = d.kept, now.Add(keptTime)
	for _, b := range backups {
		if _, before := rec.deleted[b.GetUID()]; !before && b.GetDeletionTimestamp() != nil && d.has(b) {
			rec.deleted[b.GetUID()] = false
			if _, ok := snapshotOf(b); ok {
				rec.deletedCount++
			}
			rec.wantsSweep = true
		}
	}
}

// requestSweep brings the deletions since the last status into the status.
func (rec *targetRecord) requestSweep(t *api.BackupTarget, now time.Time) {
	t.Status.Backups = max(0, t.Status.Backups-rec.deletedCount)
	if rec.wantsSweep {
		at := metav1.NewTime(now.Truncate(time.Second))
		t.Status.SweepRequested = &at
	}
}

// applySweep brings the result of a sweep into the status.
func (rec *targetRecord) applySweep(t *api.BackupTarget, now time.Time) {
	s, st := &rec.sweep.result, &t.Status
	fact := &api.SweepFact{EndedAt: metav1.NewTime(now), FreedBytes: s.stats.FreedBytes}
	rec.leftRequest, rec.leftAgain = metav1.Time{}, time.Time{}
	switch {
	case s.err == nil:
		rec.sweepAgain, rec.requested = time.Time{}, time.Time{}
		if s.stats.SessionPacks > 0 {
			rec.leftPause = min(max(2*rec.leftPause, leftTime), mostLeftTime)
			rec.leftRequest, rec.leftAgain = s.request, now.Add(rec.leftPause)
		} else {
			rec.leftPause = 0
			if st.SweepRequested.Equal(&s.request) {
				st.SweepRequested = nil
			}
		}
	case api.Is(s.err, api.Busy) && st.LastSweep != nil: // the sweep waits
		fact = st.LastSweep.DeepCopy()
	}
	if s.err != nil {
		rec.sweepAgain = now.Add(sweepRetry)
		if isPassing(s.err) {
			rec.sweepAgain = now.Add(time.Minute)
		}
		if api.Is(s.err, api.Unavailable) {
			rec.missingAt = now // others may have deleted the snapshot of a Backup: visit the store
		}
		fact.Message = api.ClipMessage(s.err.Error())
	}
	st.LastSweep = fact
	if s.usage != nil {
		st.Usage = s.usage
	}
	applyLock(t, api.ReasonSweepWaits, s.err)
	switch {
	case s.err == nil:
		api.SetCondition(&st.Conditions, t.Generation, api.ConditionSweepFailed, false, api.ReasonSwept, "")
	case isRefusedDeletion(s.err):
		applyRefusedDeletion(t, s.err)
	case !isPassing(s.err):
		api.SetCondition(&st.Conditions, t.Generation, api.ConditionSweepFailed, true, api.ReasonSweepFailed, fact.Message)
	}
}

// applyRefusedDeletion says that the store permits no deletion. The next sweep without an error ends the condition.
func applyRefusedDeletion(t *api.BackupTarget, err error) {
	api.SetCondition(&t.Status.Conditions, t.Generation, api.ConditionSweepFailed, true, api.ReasonSweepNotPermitted,
		api.ClipMessage(err.Error())+"; permit deletions, or set readOnly to true")
}

// applyLock says whether the lock of another session delays a sweep or a deletion. An end of the one says nothing about
// the other.
func applyLock(t *api.BackupTarget, reason string, err error) {
	all := &t.Status.Conditions
	c := meta.FindStatusCondition(*all, api.ConditionLocked)
	switch {
	case repo.IsLocked(err):
		api.SetCondition(all, t.Generation, api.ConditionLocked, true, reason, api.ClipMessage(err.Error()))
	case c == nil, c.Status == metav1.ConditionTrue && c.Reason != reason:
	default:
		api.SetCondition(all, t.Generation, api.ConditionLocked, false, api.ReasonNotLocked, "")
	}
}
