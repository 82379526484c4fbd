package planner

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

const (
	// activationPatience is how long an activation waits for an unavailable target, or for a backup that fails, before it
	// takes an older one.
	activationPatience = time.Minute
	// failurePatience is how long a backup may fail, or find no room, before another one takes its place: a store or
	// a disk that was away gets another try.
	failurePatience = 10 * time.Minute
	// searchInterval is the least time from the begin of a search for a good backup to that of the next.
	searchInterval = time.Hour
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
// backup that is newer than the held one and has room. A backup that fails has its time, whatever else arrives.
// Afterwards a search goes from the newest backup to older ones, and ends with the next backup that the volume holds.
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
		st.Held, view.held, st.Search = st.Next, view.next, nil
		view.dropNext(st)
	}
	newer := view.newerBackups(st.Held)
	view.judgeNewest(v, newer)
	var choice *api.Backup
	newest := view.newestUntried(v, newer)
	switch next := st.Next; {
	case next == nil:
		choice = view.choose(v, newer)
	case !v.Spec.Standby && !view.late && newest != nil && nextBackup(v, newest).IsNewerThan(next):
		choice = newest // what the store lists for the activation comes first
		view.dropNext(st)
	case view.fault.exists():
		listed := slices.ContainsFunc(newer, func(b *api.Backup) bool { return isNamed(next, b) })
		if listed && !view.mayGiveWay(v) {
			break
		}
		view.noteFailure(st)
		if choice = view.choose(v, newer); choice != nil {
			told = append(told, standbyEvent{"Warning", "StandbyFailed",
				fmt.Sprintf("backup %s gives way to backup %s%s", next.Backup, choice.Name, colonText(view.fault.why))})
		}
		if choice != nil || !listed {
			view.dropNext(st)
		}
	}
	if choice != nil {
		st.Next = nextBackup(v, choice)
	}
	return told
}

// choose returns the backup to fetch when there is no next one, or in place of one that failed; nil: none yet. Arrivals
// and older backups take turns, so neither a flood of bad backups nor old ones keep the volume from a good one. After
// the oldest backup another search begins, because the search did not try each arrival, and damage may be healed.
func (view *standbyView) choose(v *api.Volume, newer []*api.Backup) *api.Backup {
	st := v.Status.Standby
	older := view.olderUntried(v, newer)
	if s := st.Search; s != nil && older == nil && view.now.Sub(s.Since.Time) >= searchInterval {
		st.Search = nil
	}
	newest := view.newestUntried(v, newer)
	if s := st.Search; s != nil && st.Next != nil && st.Next.URL == s.Newest.URL && s.Newest.URL != s.Oldest.URL {
		return cmp.Or(older, newest)
	}
	return cmp.Or(newest, older)
}

// newestUntried is the newest backup other than the next one, if it is newer than those that failed; nil: none.
func (view *standbyView) newestUntried(v *api.Volume, newer []*api.Backup) *api.Backup {
	st := v.Status.Standby
	return view.firstThatFits(v, newer, func(b *api.Backup) bool {
		return !isNamed(st.Next, b) && (st.Search == nil || nextBackup(v, b).IsNewerThan(&st.Search.Newest))
	})
}

// olderUntried is the newest backup that is older than those that failed; nil: none. The search leaves out backups that
// the cluster found later: who writes them without end must not keep the search from the oldest ones.
func (view *standbyView) olderUntried(v *api.Volume, newer []*api.Backup) *api.Backup {
	s := v.Status.Standby.Search
	if s == nil {
		return nil
	}
	return view.firstThatFits(v, newer, func(b *api.Backup) bool {
		return s.Oldest.IsNewerThan(nextBackup(v, b)) && !b.CreationTimestamp.After(s.Since.Time)
	})
}

// firstThatFits is the first backup that is asked for and has room; nil: none.
func (view *standbyView) firstThatFits(v *api.Volume, backups []*api.Backup, asked func(*api.Backup) bool) *api.Backup {
	for _, b := range backups {
		if asked(b) && view.roomFor(v, api.RoundSize(b.Status.VolumeSize)) == nil {
			return b
		}
	}
	return nil
}

// noteFailure notes in the search that the next backup failed.
func (view *standbyView) noteFailure(st *api.StandbyStatus) {
	next, s := *st.Next, st.Search
	if s == nil {
		s = &api.StandbySearch{Since: metav1.NewTime(view.now), Newest: next, Oldest: next}
		st.Search = s
	}
	if s.Oldest.IsNewerThan(&next) {
		s.Oldest = next
	}
	if !s.Newest.IsNewerThan(&next) {
		s.Newest, s.Message = next, api.ClipMessage(view.fault.why)
	}
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

// mayGiveWay reports whether another backup can take the place of one that fails. A store without an answer is no fault
// of the backup.
func (view *standbyView) mayGiveWay(v *api.Volume) bool {
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

// judgeNewest decides why the newest backup cannot be fetched.
func (view *standbyView) judgeNewest(v *api.Volume, newer []*api.Backup) {
	if len(newer) == 0 || isNamed(v.Status.Standby.Next, newer[0]) {
		return
	}
	if err := view.roomFor(v, api.RoundSize(newer[0].Status.VolumeSize)); err != nil {
		view.unfit = obstacle{api.ReasonNoRoom, fmt.Sprintf("backup %s: %v", newer[0].Name, err)}
	}
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
	} else if s := st.Search; s != nil && s.Newest.IsNewerThan(chosen) {
		failed = fmt.Sprintf("backup %s%s", s.Newest.Backup, colonText(s.Message))
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
	case st.Standby.Search != nil:
		s := st.Standby.Search
		reason, text = api.ReasonRestoreFailed, fmt.Sprintf("backup %s: %s%s", s.Newest.Backup, s.Message, insteadText(next))
	}
	if view.next != nil {
		st.Standby.Progress = view.next.Status.Progress
	}
	if reason != "" && st.LastBackup != "" {
		text += fmt.Sprintf("; the standby volume holds backup %s", st.LastBackup)
	}
	setCondition(v, api.ConditionFollowing, reason == "", cmp.Or(reason, api.ReasonFollowing), text)
	st.Message = text
	if next := st.Standby.Next; next != nil && !view.fault.exists() {
		coming := fmt.Sprintf("backup %s of %s arrives, %d %%%s", next.Backup, next.SnapshotCreatedAt, st.Standby.Progress,
			colonText(view.nextMessage()))
		st.Message = strings.TrimPrefix(text+"; "+coming, "; ")
	}
}

// insteadText names the backup that is fetched in place of one that the volume cannot take.
func insteadText(next *api.StandbyBackup) string {
	if next == nil {
		return ""
	}
	return fmt.Sprintf("; backup %s is fetched instead", next.Backup)
}
