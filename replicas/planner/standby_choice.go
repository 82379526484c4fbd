package planner

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

const (
	// activationPatience is how long an activation waits for an unavailable target, or for a backup that fails, before it
	// takes an older one.
	activationPatience = time.Minute
	// failurePatience is how long a backup may fail, or find no room, before an older backup takes its place: a store or
	// a disk that was away gets another try.
	failurePatience = 10 * time.Minute
	// almostWhole is the progress of an image, in percent, that is worth the wait for room.
	almostWhole = 90
	// retryInterval is the pause before a backup that failed gets another try, once no other backup is left.
	retryInterval = time.Hour
	// failureLimit bounds the failures in a status: everybody who writes into the store can add backups.
	failureLimit = 16
)

// standbyView is what the decisions about a standby volume read.
type standbyView struct {
	held, next *api.BackingImage // nil: the image does not exist
	backups    []*api.Backup     // that the volume can begin with, the newest first
	// room returns an error if no disk has room for the volume with a size; nil: each has.
	room     func(size int64) error
	failed   *error   // why room may be wrong; nil, or of nil: right
	away     obstacle // of a target without an answer
	fault    obstacle // of a next backup that cannot be taken
	unfit    obstacle // of the newest backup, if no disk has room for it
	copies   int32    // wanted of each image
	answered bool     // the target has listed the store for the activation
	late     bool     // the activation has waited for activationPatience
	now      time.Time
}

// obstacle is why a standby volume does not follow: reason and message of ConditionFollowing. Zero: nothing is wrong.
type obstacle struct{ reason, why string }

func (o obstacle) exists() bool { return o.reason != "" }

// standbyEvent is a change for an event.
type standbyEvent struct{ kind, reason, text string }

// advanceStandby decides what the volume holds and fetches, and changes the status. The volume fetches the newest
// backup that is newer than the held one, has room and did not fail. A failure counts until the volume holds another
// backup, or the damage of the backup is healed: a restore may take longer than each fixed time, and must not begin
// again on a bad backup before an older good one had its turn.
func advanceStandby(v *api.Volume, view *standbyView) (told []standbyEvent) {
	st := v.Status.Standby
	if st.Held != nil && view.held == nil {
		told = append(told, standbyEvent{"Warning", "StandbyLost",
			fmt.Sprintf("the image with backup %s was deleted: the standby volume fetches the newest backup", st.Held.Backup)})
		st.Held = nil
	}
	view.correctInstants(st)
	if st.Next != nil && st.Held != nil && !st.Next.CutAt().After(st.Held.CutAt()) {
		view.dropNext(st)
	}
	view.judgeNext(v)
	if st.Next != nil && view.next != nil && !view.fault.exists() && isWhole(view.next, view) {
		told = append(told, standbyEvent{"Normal", "StandbyUpdated",
			fmt.Sprintf("the standby volume holds backup %s of %s", st.Next.Backup, st.Next.SnapshotCreatedAt)})
		st.Held, view.held, st.Failed = st.Next, view.next, nil
		view.dropNext(st)
	}
	newer := view.newerBackups(st.Held)
	st.Failed = standingFailures(st.Failed, newer)
	untried, retried := view.untriedBackup(v, newer), view.retriedBackup(v, newer)
	choice := cmp.Or(untried, retried)
	if next := st.Next; next != nil {
		listed := slices.ContainsFunc(newer, func(b *api.Backup) bool { return isNamed(next, b) })
		newest := untried != nil && untried.CutAt().After(next.CutAt())
		switch {
		case newest || !listed:
		case v.Spec.Standby && view.fault.reason == api.ReasonNoRoom && isAlmostWhole(view.next):
			choice = nil // an older backup is no gain
		case len(st.Failed) >= failureLimit:
			choice = retried // no place for another failure
		}
		switch {
		case view.fault.exists() && !listed, newest && !v.Spec.Standby:
			view.dropNext(st)
		case view.fault.exists() && choice != nil && view.mayFallBack(v):
			told = append(told, view.giveWay(st, choice))
		case view.fault.exists() && newest && view.fault.reason != api.ReasonNoRoom:
			view.dropNext(st)
		}
	}
	if st.Next == nil && choice != nil {
		st.Failed = slices.DeleteFunc(st.Failed, func(f api.FailedBackup) bool { return f.URL == choice.Status.URL })
		st.Next = nextBackup(v, choice)
	}
	return told
}

// untriedBackup is the newest backup that has room and did not fail, other than the next one; nil: none.
func (view *standbyView) untriedBackup(v *api.Volume, newer []*api.Backup) *api.Backup {
	st := v.Status.Standby
	for _, b := range newer {
		if !isNamed(st.Next, b) && failureOf(st.Failed, b) == nil && view.fits(v, b) {
			return b
		}
	}
	return nil
}

// retriedBackup is the backup that failed longest ago, at least retryInterval; nil: none. So each backup has its turn.
func (view *standbyView) retriedBackup(v *api.Volume, newer []*api.Backup) (retried *api.Backup) {
	var at time.Time
	for _, b := range newer {
		f := failureOf(v.Status.Standby.Failed, b)
		switch {
		case f == nil, view.now.Sub(f.At.Time) < retryInterval, retried != nil && !f.At.Time.Before(at):
		case view.roomFor(v, api.RoundSize(b.Status.VolumeSize)) == nil:
			retried, at = b, f.At.Time
		}
	}
	return retried
}

// giveWay notes the failure of the next backup, and ends its fetching for another one.
func (view *standbyView) giveWay(st *api.StandbyStatus, to *api.Backup) standbyEvent {
	next := st.Next
	if len(st.Failed) < failureLimit || failureOf(st.Failed, to) != nil { // the failure of to is forgotten
		st.Failed = standingFailures(append(st.Failed, api.FailedBackup{Backup: next.Backup, URL: next.URL,
			At: metav1.NewTime(view.now), Message: api.ClipMessage(view.fault.why)}), view.backups)
	}
	told := standbyEvent{"Warning", "StandbyFailed",
		fmt.Sprintf("backup %s gives way to backup %s%s", next.Backup, to.Name, colonText(view.fault.why))}
	view.dropNext(st)
	return told
}

// judgeNext decides why the next backup cannot be taken, and corrects its size. A backup with damage can become whole:
// the disk may have the damaged chunks. A volume must not begin on it before.
func (view *standbyView) judgeNext(v *api.Volume) {
	st, img := v.Status.Standby, view.next
	next := st.Next
	if view.away.exists() {
		st.FailingSince, st.FailingProgress = nil, 0
	}
	if next == nil || img == nil {
		return
	}
	if img.CanRead() && img.Status.VirtualSize > 0 {
		next.Size = api.RoundSize(img.Status.VirtualSize)
	}
	damaged := slices.ContainsFunc(view.backups, func(b *api.Backup) bool { return isNamed(next, b) && b.Status.Damaged })
	switch {
	case img.Status.State == api.ImageFailed:
		view.fault = obstacle{api.ReasonRestoreFailed, img.Status.Message}
	case view.roomFor(v, next.Size) != nil:
		view.fault = obstacle{api.ReasonNoRoom, view.roomFor(v, next.Size).Error()}
	case damaged && !v.Spec.Standby && !v.Spec.AllowDamaged && img.Status.State != api.ImageReady:
		view.fault = obstacle{api.ReasonRestoreFailed,
			"a verification found bytes of the backup lost or changed in the store"}
	}
	switch progress := max(img.Status.Progress, st.Progress); { // a failed image may have lost its progress
	case view.fault.exists() && !view.away.exists() && st.FailingSince == nil:
		st.FailingSince, st.FailingProgress = &metav1.Time{Time: view.now}, progress
	case !view.fault.exists() && progress > st.FailingProgress:
		st.FailingSince, st.FailingProgress = nil, 0
	}
}

// mayFallBack reports whether an older backup can take the place of one that fails. A store without an answer is no
// fault of the backup.
func (view *standbyView) mayFallBack(v *api.Volume) bool {
	switch {
	case view.away.exists():
		return false
	case !v.Spec.Standby:
		return view.late
	}
	return view.now.Sub(v.Status.Standby.FailingSince.Time) >= failurePatience
}

// dropNext ends the fetching of the next backup.
func (view *standbyView) dropNext(st *api.StandbyStatus) {
	st.Next, st.FailingSince, st.FailingProgress, st.Progress = nil, nil, 0, 0
	view.next, view.fault = nil, obstacle{}
}

// mayGrow reports whether a backup is, or claims to be, larger than the volume.
func (view *standbyView) mayGrow(v *api.Volume) bool {
	return view.next != nil && view.next.Status.VirtualSize > v.Spec.Size ||
		slices.ContainsFunc(view.backups, func(b *api.Backup) bool { return b.Status.VolumeSize > v.Spec.Size })
}

// roomFor returns an error if no disk has room for the volume with a larger size.
func (view *standbyView) roomFor(v *api.Volume, size int64) error {
	if size <= v.Spec.Size || view.room == nil {
		return nil
	}
	return view.room(size)
}

// fits reports whether a disk has room for the volume with the size that a backup claims.
func (view *standbyView) fits(v *api.Volume, b *api.Backup) bool {
	err := view.roomFor(v, api.RoundSize(b.Status.VolumeSize))
	if err != nil && !view.unfit.exists() {
		view.unfit = obstacle{api.ReasonNoRoom, fmt.Sprintf("backup %s: %v", b.Name, err)}
	}
	return err == nil
}

// correctInstants takes over the instants of backups that the store corrected.
func (view *standbyView) correctInstants(st *api.StandbyStatus) {
	for _, b := range view.backups {
		for _, of := range []*api.StandbyBackup{st.Held, st.Next} {
			if isNamed(of, b) {
				of.StoredAt = b.Status.StoredAt
			}
		}
	}
}

// newerBackups lists the backups that are newer than the held one, the newest first.
func (view *standbyView) newerBackups(held *api.StandbyBackup) []*api.Backup {
	n := slices.IndexFunc(view.backups, func(b *api.Backup) bool {
		return held != nil && !b.CutAt().After(held.CutAt())
	})
	if n < 0 {
		return view.backups
	}
	return view.backups[:n]
}

// standingFailures are the failures of listed backups whose damage is not healed, the newest backup first.
func standingFailures(failed []api.FailedBackup, listed []*api.Backup) (standing []api.FailedBackup) {
	for _, b := range listed {
		if f := failureOf(failed, b); f != nil && (b.Status.Damaged || !f.Damaged) {
			f.Damaged = b.Status.Damaged
			standing = append(standing, *f)
		}
	}
	return standing
}

// failureOf is the failure of a backup; nil: none.
func failureOf(failed []api.FailedBackup, b *api.Backup) *api.FailedBackup {
	for i := range failed {
		if failed[i].URL == b.Status.URL {
			return &failed[i]
		}
	}
	return nil
}

// isNamed reports whether a backup of the status is the Backup.
func isNamed(of *api.StandbyBackup, b *api.Backup) bool { return of != nil && of.URL == b.Status.URL }

func nextBackup(v *api.Volume, b *api.Backup) *api.StandbyBackup {
	s := &b.Status
	return &api.StandbyBackup{Backup: b.Name, URL: s.URL, StoredAt: s.StoredAt, Size: api.RoundSize(s.VolumeSize),
		SnapshotCreatedAt: cmp.Or(s.SnapshotCreatedAt, s.BackupCreatedAt), BackingImage: v.StandbyImage(b)}
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

// isAlmostWhole reports whether an image is whole, or soon.
func isAlmostWhole(img *api.BackingImage) bool {
	return img.Status.State == api.ImageReady || img.Status.Progress >= almostWhole
}

// chooseActivated chooses the backup that an activated volume begins with; nil: the activation waits.
func chooseActivated(v *api.Volume, view *standbyView) (*api.StandbyBackup, string) {
	st := v.Status.Standby
	_, now := v.Annotations[api.AnnotationActivateNow] // the user asks for the held backup
	readable := st.Next != nil && view.next != nil && view.next.CanRead() && !view.fault.exists()
	answers := view.answered && !view.away.exists()
	give := fmt.Sprintf("; `drover volume activate %s --now` takes the newest backup that the volume holds", v.Name)
	switch {
	case now && st.Held != nil, view.late && st.Held != nil && (!answers || view.fault.exists()):
		return st.Held, ""
	case view.unfit.exists() && answers && !view.late:
		return nil, "the activation waits for room: " + view.unfit.why + give
	case readable && (now || answers || st.Held == nil && view.late):
		return st.Next, ""
	case answers && st.Next == nil && st.Held != nil:
		return st.Held, ""
	case st.Held == nil && st.Next == nil:
		return nil, "the activation waits: the volume holds no backup yet: " +
			cmp.Or(view.away.why, view.unfit.why, "the store has none")
	case st.Held == nil:
		return nil, fmt.Sprintf("the activation waits for backup %s%s", st.Next.Backup, colonText(view.nextMessage()))
	case st.Next != nil && view.answered:
		return nil, fmt.Sprintf("the activation waits for backup %s%s%s", st.Next.Backup, colonText(view.nextMessage()), give)
	}
	return nil, "the activation waits for the list of the store" + colonText(view.away.why) + give
}

// describeChoice describes the choice of an activation for an event, and why it is not the newest backup.
func describeChoice(v *api.Volume, view *standbyView, chosen *api.StandbyBackup) (kind, reason, text string) {
	st := v.Status.Standby
	kind, reason = "Normal", "Activated"
	text = fmt.Sprintf("the volume begins with backup %s of %s", chosen.Backup, chosen.SnapshotCreatedAt)
	_, now := v.Annotations[api.AnnotationActivateNow]
	if view.away.exists() || now || !view.answered {
		return "Warning", "ActivatedWithoutStore", text +
			", without an answer of the store, which may have a newer backup"
	}
	failed := view.unfit.why
	if st.Next != nil && st.Next != chosen {
		failed = fmt.Sprintf("backup %s%s", st.Next.Backup, colonText(view.fault.why))
	} else if len(st.Failed) > 0 {
		failed = fmt.Sprintf("backup %s%s", st.Failed[0].Backup, colonText(st.Failed[0].Message))
	}
	if failed != "" {
		kind, text = "Warning", text+"; the volume could not begin with a newer one: "+failed
	}
	return kind, reason, text
}

// nextMessage says why the next backup is not there yet; empty: it arrives.
func (view *standbyView) nextMessage() string {
	message := ""
	if view.next != nil {
		message = view.next.Status.Message
	}
	return cmp.Or(view.fault.why, message, view.away.why)
}

func colonText(text string) string {
	if text == "" {
		return ""
	}
	return ": " + text
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
	reason, text := view.away.reason, view.away.why
	switch next := st.Standby.Next; {
	case view.fault.exists() && next != nil:
		reason, text = view.fault.reason, fmt.Sprintf("backup %s: %s", next.Backup, view.fault.why)
	case reason != "":
	case len(view.backups) == 0:
		reason, text = api.ReasonNoBackup, "the store has no backup of volume "+api.VolumeOfURL(v.Spec.FromBackup)
	case view.unfit.exists():
		reason, text = view.unfit.reason, view.unfit.why+insteadText(next)
	case len(st.Standby.Failed) > 0:
		f := st.Standby.Failed[0]
		reason, text = api.ReasonRestoreFailed, fmt.Sprintf("backup %s: %s%s", f.Backup, f.Message, insteadText(next))
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

// insteadText names the backup that is fetched although a newer one exists.
func insteadText(next *api.StandbyBackup) string {
	if next == nil {
		return ""
	}
	return fmt.Sprintf("; backup %s is fetched instead", next.Backup)
}
