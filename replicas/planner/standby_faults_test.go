package planner

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/driver/kubeapi/apitest"
)

// fallback drives the pure decisions of a standby volume that holds backup 1.
type fallback struct {
	v       *api.Volume
	backups []*api.Backup // the newest first
	images  map[string]*api.BackingImage
	now     time.Time
	away    bool
	late    bool
	full    int64 // no disk has room for this size; 0: each has
}

func newFallback(backups ...int) *fallback {
	f := &fallback{v: &api.Volume{Spec: api.VolumeSpec{FromBackup: followedOfTest, Standby: true}},
		images: map[string]*api.BackingImage{}, now: time.Date(2026, 2, 1, 0, 0, 0, 0, time.UTC)}
	f.v.Status.UID, f.v.Status.Standby = "u", &api.StandbyStatus{Held: heldOfTest(1)}
	f.images["b1"] = imageOfTest(api.ImageReady, 1)
	for _, n := range backups {
		f.backups = append(f.backups, backupOfTest(n))
	}
	return f
}

// step decides after a while, and returns the names of the held and the next backup.
func (f *fallback) step(after time.Duration) string {
	f.now = f.now.Add(after)
	view := &standbyView{backups: f.backups, copies: 1, now: f.now, late: f.late}
	if f.full > 0 {
		view.room = func(size int64) error {
			if size < f.full {
				return nil
			}
			return api.Errorf(api.Full, "no disk")
		}
	}
	if f.away {
		view.away = obstacle{api.ReasonTargetUnavailable, "away"}
	}
	st := f.v.Status.Standby
	if st.Held != nil {
		view.held = f.images[st.Held.Backup]
	}
	if st.Next != nil {
		view.next = f.images[st.Next.Backup]
	}
	advanceStandby(f.v, view)
	describeStandby(f.v, view)
	names := ""
	if st.Held != nil {
		names = st.Held.Backup
	}
	if st.Next != nil {
		names += " " + st.Next.Backup
	}
	return names
}

func (f *fallback) expect(t *testing.T, after time.Duration, want string) {
	t.Helper()
	if got := f.step(after); got != want {
		t.Errorf("the volume holds and fetches %q, want %q; the search is %+v", got, want, f.v.Status.Standby.Search)
	}
}

// following returns the reason and message of the condition Following.
func (f *fallback) following() string {
	c := meta.FindStatusCondition(f.v.Status.Conditions, api.ConditionFollowing)
	return fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
}

// TestStandbyFallsBackToAnOlderBackup: when the newest backup cannot be restored for a while, a standby volume takes the
// next older one that is newer than the held one, and tries the newest again later. A newer backup comes next.
func TestStandbyFallsBackToAnOlderBackup(t *testing.T) {
	f := newFallback(4, 3, 2)
	f.images["b4"], f.images["b3"] = imageOfTest(api.ImageFailed, 0), imageOfTest(api.ImageFailed, 0)
	f.expect(t, 0, "b1 b4")
	f.expect(t, 0, "b1 b4") // fails first
	f.images["b4"].Status.State = api.ImageInProgress
	f.expect(t, failurePatience, "b1 b4") // the next try
	f.images["b4"].Status.State = api.ImageFailed
	f.expect(t, time.Second, "b1 b3")
	f.expect(t, 0, "b1 b3")
	f.expect(t, failurePatience, "b1 b2")
	if s := f.following(); !strings.HasPrefix(s, "False RestoreFailed: backup b4") || !strings.Contains(s, "b2 is fetched") {
		t.Errorf("while an older backup is fetched: %s", s)
	}
	f.images["b2"] = imageOfTest(api.ImageReady, 1)
	f.expect(t, 0, "b2 b4") // the newest gets another try
	f.expect(t, 0, "b2 b4")
	f.backups = append([]*api.Backup{backupOfTest(5)}, f.backups...)
	f.expect(t, 0, "b2 b4")
	f.expect(t, failurePatience, "b2 b5")
	f.images["b5"] = imageOfTest(api.ImageReady, 1)
	f.expect(t, 0, "b5")
	if s := f.following(); !strings.HasPrefix(s, "True Following") || f.v.Status.Standby.Search != nil {
		t.Errorf("with the newest backup: %s, search %+v", s, f.v.Status.Standby.Search)
	}
}

// TestMessageSaysWhatArrives: the message of a standby volume names the arriving backup and its progress, and
// the reason why a newer backup does not arrive. Nothing arrives while the next backup fails.
func TestMessageSaysWhatArrives(t *testing.T) {
	f := newFallback(3, 2)
	expect := func(after time.Duration, want string) {
		t.Helper()
		if f.step(after); f.v.Status.Message != want {
			t.Errorf("the message is %q, want %q", f.v.Status.Message, want)
		}
	}
	f.step(0)
	f.images["b3"] = imageOfTest(api.ImageInProgress, 0)
	f.images["b3"].Status.Progress, f.images["b3"].Status.Message = 30, "reads wait"
	expect(0, "backup b3 of 2026-01-03T00:00:00Z arrives, 30 %: reads wait")
	f.images["b3"].Status.State, f.images["b3"].Status.Message = api.ImageFailed, "chunk 7 is damaged"
	expect(0, "backup b3: chunk 7 is damaged; the standby volume holds backup b1")
	f.step(failurePatience)
	f.images["b2"] = imageOfTest(api.ImageInProgress, 0)
	expect(0, "backup b3: chunk 7 is damaged; backup b2 is fetched instead; the standby volume holds backup b1; "+
		"backup b2 of 2026-01-02T00:00:00Z arrives, 0 %")
	f.images["b2"] = imageOfTest(api.ImageReady, 1)
	f.backups = f.backups[1:]
	expect(0, "")
}

// TestSlowRestoresReachAnOlderGoodBackup: when the newest backups fail at the end of restores of almost an hour, a standby
// volume fetches the good one below them, however long this takes, before it tries the others again. The same holds for
// an activation without a held backup.
func TestSlowRestoresReachAnOlderGoodBackup(t *testing.T) {
	const restore = 50 * time.Minute
	for _, activating := range []bool{false, true} {
		f := newFallback(4, 3, 2)
		held := "b1"
		if activating {
			held, f.v.Spec.Standby, f.late, f.v.Status.Standby.Held = "", false, true, nil
		}
		f.expect(t, 0, held+" b4")
		for _, b := range []struct{ bad, then string }{{"b4", "b3"}, {"b3", "b2"}} {
			f.images[b.bad] = imageOfTest(api.ImageInProgress, 0)
			f.expect(t, restore, held+" "+b.bad)
			f.images[b.bad].Status.State = api.ImageFailed
			if !activating {
				f.expect(t, 0, held+" "+b.bad)
			}
			f.expect(t, failurePatience, held+" "+b.then)
		}
		f.images["b2"] = imageOfTest(api.ImageInProgress, 0)
		f.expect(t, 3*searchInterval, held+" b2")
		f.images["b2"].Status.State = api.ImageReady
		f.images["b2"].Status.ReadyCopies = 1
		f.expect(t, 0, "b2 b4")
	}
}

// TestFailedBackupsTakeTurns: when all backups fail, each gets another try in its turn, not before searchInterval.
func TestFailedBackupsTakeTurns(t *testing.T) {
	f := newFallback(4, 3, 2)
	for _, b := range f.backups {
		f.images[b.Name] = imageOfTest(api.ImageFailed, 0)
	}
	f.expect(t, 0, "b1 b4")
	f.expect(t, 0, "b1 b4")
	f.expect(t, failurePatience, "b1 b3") // the search begins
	f.expect(t, 0, "b1 b3")
	f.expect(t, failurePatience, "b1 b2")
	f.expect(t, 0, "b1 b2")
	f.expect(t, searchInterval-failurePatience-time.Second, "b1 b2")
	f.expect(t, time.Second, "b1 b4")
	f.expect(t, 0, "b1 b4")
	f.expect(t, failurePatience, "b1 b3")
}

// TestStoreThatIsAwayIsNoFaultOfABackup: while the target is unavailable, and for a while afterwards, a standby volume
// does not turn to an older backup.
func TestStoreThatIsAwayIsNoFaultOfABackup(t *testing.T) {
	f := newFallback(3, 2)
	f.images["b3"] = imageOfTest(api.ImageFailed, 0)
	f.expect(t, 0, "b1 b3")
	f.expect(t, 0, "b1 b3")
	f.away = true
	f.expect(t, 2*failurePatience, "b1 b3")
	f.away = false
	f.expect(t, time.Second, "b1 b3")
	f.expect(t, failurePatience, "b1 b2")
}

// TestActivationFallsBackToAnOlderBackup: an activation whose newest backup fails for activationPatience fetches the next
// older one, and says so.
func TestActivationFallsBackToAnOlderBackup(t *testing.T) {
	f := newFallback(3, 2)
	f.v.Spec.Standby = false
	f.images["b3"] = imageOfTest(api.ImageFailed, 0)
	f.images["b3"].Status.Message = "chunk 7 is damaged"
	f.expect(t, 0, "b1 b3")
	f.expect(t, 0, "b1 b3")
	f.late = true
	f.expect(t, activationPatience, "b1 b2")
	f.images["b2"] = imageOfTest(api.ImageInProgress, 0)
	f.images["b2"].Status.Readable = true
	view := &standbyView{held: f.images["b1"], next: f.images["b2"], answered: true, late: true}
	chosen, _ := chooseActivated(f.v, view)
	if chosen == nil || chosen.Backup != "b2" {
		t.Fatalf("the activation chooses %+v", chosen)
	}
	kind, _, text := describeChoice(f.v, view, chosen)
	if kind != "Warning" || !strings.Contains(text, "a newer one: backup b3: chunk 7 is damaged") {
		t.Errorf("%s: %s", kind, text)
	}
}

// TestClockOfTheSourceHidesNoBackup: a backup of a source whose clock was a day ahead is as old as its object in the
// store, also when the standby volume holds it already. Later backups of a right clock follow.
func TestClockOfTheSourceHidesNoBackup(t *testing.T) {
	f := newFallback()
	ahead, later := backupOfTest(3), backupOfTest(2)
	f.v.Status.Standby.Held, f.images["b3"] = heldOfTest(3), imageOfTest(api.ImageReady, 1)
	f.backups = []*api.Backup{ahead, later}
	f.expect(t, 0, "b3")
	ahead.Status.StoredAt = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC).Format(time.RFC3339)
	if !later.NewerThan(ahead) {
		t.Error("the backup of the right clock is older")
	}
	f.backups = []*api.Backup{later, ahead}
	f.expect(t, 0, "b3 b2")

	f = newFallback()
	f.v.Status.Standby.Held, f.images["b2"] = heldOfTest(2), imageOfTest(api.ImageReady, 1)
	ahead.Status.StoredAt = ""
	f.backups = []*api.Backup{ahead, later}
	f.expect(t, 0, "b2 b3")
	ahead.Status.StoredAt = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC).Format(time.RFC3339)
	f.backups, f.images["b3"] = []*api.Backup{later, ahead}, imageOfTest(api.ImageReady, 1)
	f.expect(t, 0, "b2") // whole, and older
}

// TestStandbyGrowsWithContentThatFits: a standby volume neither fetches a backup of a size without room on any disk, nor
// holds one whose content is larger than it claims. The condition Following says so, and an older backup comes.
func TestStandbyGrowsWithContentThatFits(t *testing.T) {
	t.Parallel()
	w := newStandbyWorld(t)
	w.backup(1, 32<<20)
	w.sizedImage(w.reconcile().NextImage(), api.ImageReady, 32<<20)
	w.reconcile()
	expect := func(backup string, size int64, text string) {
		t.Helper()
		v := w.reconcile()
		if c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionFollowing); c == nil ||
			c.Reason != api.ReasonNoRoom || !strings.Contains(c.Message, text) || v.Spec.Size != size ||
			v.Status.LastBackup != backup || !w.p.waiting["dr"] {
			t.Errorf("condition %+v, %d bytes, holds %q", c, v.Spec.Size, v.Status.LastBackup)
		}
	}
	w.backup(4, api.MaxVolumeSize)
	expect("b1", 32<<20, "backup b4: no disk")
	if next := w.volume().NextImage(); next != "" {
		t.Errorf("without room the volume fetches %s", next)
	}
	w.backup(2, 32<<20)
	expect("b1", 32<<20, "b2 is fetched instead")
	w.sizedImage(w.volume().NextImage(), api.ImageReady, 48<<20)
	expect("b2", 48<<20, "backup b4: no disk")
	w.backup(3, 48<<20)
	third := w.reconcile().NextImage()
	w.sizedImage(third, api.ImageReady, api.MaxVolumeSize)
	expect("b2", 48<<20, "backup b3: no disk")
	if w.isDeleted(third) {
		t.Error("a whole backup without room is deleted, and no other can take its place")
	}
}

// TestProgressEndsTheFailureOfARestore: a restore that failed at its beginning, and that got further afterwards, has the
// whole patience again for a later failure. Another try that only repeats the same progress counts as the same failure.
func TestProgressEndsTheFailureOfARestore(t *testing.T) {
	f := newFallback(3, 2)
	f.expect(t, 0, "b1 b3")
	f.images["b3"] = imageOfTest(api.ImageFailed, 0)
	image := &f.images["b3"].Status
	f.expect(t, 0, "b1 b3")
	image.State, image.Progress = api.ImageInProgress, 60
	f.expect(t, 2*failurePatience, "b1 b3")
	image.State, image.Progress = api.ImageFailed, 0 // the statuses of the copies are gone
	f.expect(t, time.Second, "b1 b3")
	image.State, image.Progress = api.ImageInProgress, 60
	f.expect(t, failurePatience, "b1 b3")
	image.State = api.ImageFailed
	f.expect(t, time.Second, "b1 b2")
}

// TestBackupWithoutRoomIsKeptForAWhile: a backup whose content has grown beyond all disks keeps its image for
// failurePatience, even if the image is whole, and longer while no other backup fits.
func TestBackupWithoutRoomIsKeptForAWhile(t *testing.T) {
	without := func(backups ...int) *fallback {
		f := newFallback(backups...)
		f.full = 65 << 20
		f.expect(t, 0, "b1 b3")
		f.images["b3"] = imageOfTest(api.ImageReady, 1)
		f.images["b3"].Status.VirtualSize = 128 << 20
		f.expect(t, 0, "b1 b3")
		return f
	}
	f := without(3, 2)
	f.backups = append([]*api.Backup{backupOfTest(4)}, f.backups...)
	f.expect(t, failurePatience-time.Second, "b1 b3")
	f.expect(t, time.Second, "b1 b4")
	f = without(3, 2)
	f.v.Status.Standby.Held = nil // a whole image without room keeps no other backup away
	f.expect(t, failurePatience, " b2")

	f = without(3)
	f.expect(t, 2*searchInterval, "b1 b3")
	if s := f.following(); !strings.HasPrefix(s, "False NoRoom: backup b3") {
		t.Errorf("without room: %s", s)
	}
	f.full = 256 << 20
	f.expect(t, 0, "b3")
}

// TestFirstBackupWithoutRoomIsReported: a standby volume without a disk for its first backup says so in the condition
// Following.
func TestFirstBackupWithoutRoomIsReported(t *testing.T) {
	t.Parallel()
	w := newStandbyWorld(t)
	apitest.Edit(w.Server, w.volume(), func(v *api.Volume) { v.Spec.Size = api.MaxVolumeSize })
	w.backup(1, 32<<20)
	v := w.reconcile()
	if c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionFollowing); c == nil || c.Reason != api.ReasonNoRoom ||
		!strings.Contains(v.Status.Message, "no disk for a replica") {
		t.Errorf("condition %+v, message %q", c, v.Status.Message)
	}
}

// TestActivationGrowsTheVolumeBeforeItBegins: the volume of an activation that takes a backup of an expanded volume, not
// whole yet, has room for the backup.
func TestActivationGrowsTheVolumeBeforeItBegins(t *testing.T) {
	t.Parallel()
	w := newStandbyWorld(t)
	w.backup(1, 32<<20)
	first := w.reconcile().NextImage()
	w.sizedImage(first, api.ImageReady, 32<<20)
	w.reconcile()
	w.backup(2, 64<<20)
	w.image(w.reconcile().NextImage(), api.ImageInProgress)
	apitest.Edit(w.Server, w.volume(), func(v *api.Volume) { v.Spec.Standby = false })
	w.reconcile()
	target := &api.BackupTarget{ObjectMeta: apitest.Named("default")}
	apitest.EditStatus(w.Server, target, func(b *api.BackupTarget) { b.Status.SyncedRequest = b.Spec.SyncRequestedAt })
	v := w.reconcile()
	if v.Status.IsStandby || v.Status.LastBackup != "b2" || v.Spec.Size != 64<<20 {
		t.Errorf("activated: %d bytes, %+v", v.Spec.Size, v.Status.Standby)
	}
	var reps api.ReplicaList
	if err := w.Client.List(w.Ctx, &reps); err != nil {
		t.Fatal(err)
	}
	if mine := reps.OfVolume("dr"); len(mine) != 1 || mine[0].Spec.Size != 64<<20 {
		t.Errorf("the activated volume has the replicas %+v", mine)
	}
}

// TestActivationBeforeTheFirstStatusIsRefused: a standby volume that is activated before the planner has seen it would
// pass for a volume of one backup. Afterwards the activation waits for the first backup.
func TestActivationBeforeTheFirstStatusIsRefused(t *testing.T) {
	t.Parallel()
	w := newStandbyWorld(t)
	activate := func() error {
		v := w.volume()
		v.Spec.Standby = false
		return w.Client.Update(w.Ctx, v)
	}
	if err := activate(); err == nil || !strings.Contains(err.Error(), "when status.isStandby is true") {
		t.Errorf("the activation of a volume that the planner has not seen: %v", err)
	}
	if _, err := w.p.Reconcile(w.Ctx, watch.Request("dr")); err != nil { // the first status
		t.Fatal(err)
	}
	if err := activate(); err != nil {
		t.Fatalf("the activation: %v", err)
	}
	v := w.reconcile()
	if !v.Status.IsStandby || v.Status.State != api.VolumeStandby || !strings.Contains(v.Status.Message, "holds no backup") {
		t.Errorf("activated without a backup: %s: %s", v.Status.State, v.Status.Message)
	}
	target := &api.BackupTarget{ObjectMeta: apitest.Named("default")}
	apitest.EditStatus(w.Server, target, func(b *api.BackupTarget) { b.Status.SyncedRequest = b.Spec.SyncRequestedAt })
	w.backup(1, 64<<20)
	w.image(w.reconcile().NextImage(), api.ImageInProgress)
	if v = w.reconcile(); v.Status.IsStandby || v.Status.LastBackup != "b1" {
		t.Errorf("with the first backup: %s: %s", v.Status.State, v.Status.Message)
	}
}

// TestSnapshotOfAStandbyVolumeIsRefused: the object says why no snapshot is taken.
func TestSnapshotOfAStandbyVolumeIsRefused(t *testing.T) {
	t.Parallel()
	w := newStandbyWorld(t)
	w.reconcile()
	s := api.NewSnapshot(w.volume(), "s")
	w.Create(s)
	if _, err := (&orphanSnapshotReconciler{w.p}).Reconcile(w.Ctx, watch.Request("s")); err != nil {
		t.Fatal(err)
	}
	if err := w.Client.Get(w.Ctx, client.ObjectKeyFromObject(s), s); err != nil ||
		!strings.Contains(s.Status.Error, "drover volume activate dr") {
		t.Errorf("the snapshot says %q, %v", s.Status.Error, err)
	}
}
