package targets

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// flipBytes changes a byte of each file.
func (s *shelf) flipBytes(paths ...string) {
	s.Helper()
	for _, path := range paths {
		b, err := os.ReadFile(path)
		must(s, err)
		b[len(b)/2] ^= 1
		must(s, os.Remove(path))
		must(s, os.WriteFile(path, b, 0o600))
	}
}

// objects are the paths of the objects in a folder of the store.
func (s *shelf) objects(folder string) []string {
	s.Helper()
	all, err := filepath.Glob(filepath.Join(s.dir, folder, "*"))
	must(s, err)
	return all
}

// TestDamagedIndexFileIsRepaired: all index files of a store are damaged, and a pack is, too. One verification repairs
// the index, finds the pack, and ends; then a new node finds all blobs of the whole backup.
func TestDamagedIndexFileIsRepaired(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	good := s.save(50_000, factsOf("good").Tags()...)
	known := map[string]bool{}
	for _, path := range s.packs() {
		known[path] = true
	}
	bad := factsOf("bad")
	bad.Object = uid(9)
	s.save(60_000, bad.Tags()...)
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	damaged := s.objects("index")
	s.flipBytes(damaged...)
	s.damageData(known)
	target := w.verify("default")
	v := target.Status.Verification
	if !meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionDamaged) || v.DamagedBlobs != 1 ||
		len(v.BackupNames) != 1 || v.BackupNames[0] != "bad" || len(v.ObjectNames) > 0 || v.Message != "" {
		t.Errorf("the verification: %+v", target.Status)
	}
	w.awaitEvent("IndexRepaired")
	for _, path := range damaged {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("damaged index file %s is still there: %v", path, err)
		}
	}
	fresh := openShelf(t, s.dir, api.PublishedPassword).r
	blobs, err := fresh.LoadIndex(t.Context())
	must(t, err)
	file, err := fresh.FindSnapshot(t.Context(), good)
	must(t, err)
	snapshot, err := fresh.LoadSnapshot(t.Context(), file)
	must(t, err)
	nodes, err := blobs.ReadTree(t.Context(), *snapshot.Tree)
	must(t, err)
	if plain, err := blobs.Read(t.Context(), nodes[0].Content[0], blob.Data, nil); err != nil || len(plain) != 50_000 {
		t.Errorf("a new node reads %d bytes: %v", len(plain), err)
	}
	must(t, blobs.Close())
}

// TestMissingPartOfAStoreDamagesNoBackup: half of the packs are away for the time of a verification, as on a disk of
// several. The condition names the cause and no backup is damaged; when the packs are back, the next verification ends
// the condition.
func TestMissingPartOfAStoreDamagesNoBackup(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	s.save(50_000, factsOf("a").Tags()...)
	other := factsOf("b")
	other.Object = uid(9)
	s.save(60_000, other.Tags()...)
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	data, away := filepath.Join(s.dir, "data"), filepath.Join(t.TempDir(), "away")
	must(t, os.Rename(data, away))
	must(t, os.Mkdir(data, 0o700))
	w.clock.advance(time.Second)
	at := metav1.NewTime(w.clock.now())
	w.askVerification("default", at)
	target := w.awaitTarget("default", "a part is missing", func(t *api.BackupTarget) bool {
		c := meta.FindStatusCondition(t.Status.Conditions, api.ConditionDamaged)
		return c != nil && c.Status == metav1.ConditionTrue && c.Reason == api.ReasonPartMissing
	})
	if target.Status.Verification.Message == "" || target.Status.Verification.DamagedBackups > 0 {
		t.Errorf("a part of the store is missing: %+v", target.Status.Verification)
	}
	w.awaitEvent("BackupsDamaged")
	must(t, os.Remove(data))
	must(t, os.Rename(away, data))
	target = w.verify("default")
	if meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionDamaged) {
		t.Errorf("the store is whole again: %+v", target.Status.Conditions)
	}
	for name, b := range w.backups() {
		if b.Status.Damaged {
			t.Errorf("backup %s is damaged", name)
		}
	}
}

// TestLostSnapshotObjectCounts: the snapshot object of a backup is damaged. The gauge counts the backup, and the message
// says that nothing repairs it.
func TestLostSnapshotObjectCounts(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	id := s.save(50_000, factsOf("bad").Tags()...)
	w.addTarget("lost-snapshot", s.url(), "")
	w.awaitReason("lost-snapshot", api.ReasonAvailable, "")
	s.flipBytes(filepath.Join(s.dir, "snapshots", id.String()))
	target := w.verify("lost-snapshot")
	c := meta.FindStatusCondition(target.Status.Conditions, api.ConditionDamaged)
	if c.Status != metav1.ConditionTrue || !bytes.Contains([]byte(c.Message), []byte("nothing repairs")) {
		t.Errorf("condition %+v", c)
	}
	w.awaitEvent("BackupsDamaged")
	if n := testutil.ToFloat64(damagedBackups.WithLabelValues("lost-snapshot")); n != 1 {
		t.Errorf("the gauge of damaged backups is %v, want 1", n)
	}
}

// TestFailedStepKeepsItsPacks: a step that read its packs and could not look for damage is not repeated, does not end
// the verification, and follows after a pause that grows. A new request does not wait for the pause.
func TestFailedStepKeepsItsPacks(t *testing.T) {
	now, o := time.Unix(1_700_000_000, 0), &Options{Retry: time.Minute}
	asked := metav1.NewTime(now)
	b := &api.BackupTarget{Spec: api.BackupTargetSpec{VerifyRequestedAt: &asked},
		Status: api.BackupTargetStatus{Available: true}}
	rec := &targetRecord{}
	end := partEnd(api.VerificationParts - 1)
	var last time.Duration
	for i := range 12 {
		wish := nextWish(b)
		result := verifyResult{wish: wish, stats: repo.VerifyStats{Last: end, Done: true}, err: errors.New("no look")}
		if i == 0 {
			result.stats.Packs, result.stats.Bytes = 512, 8<<30
		} else if wish.after != end || wish.parts != api.VerificationParts-1 {
			t.Fatalf("the next step: %+v", wish)
		}
		rec.verification = &job[verifyResult]{result: result}
		rec.applyVerification(b, nil, o, now)
		pause := rec.nextVerification(b, 0, now).Sub(now)
		if pause < last || pause < o.Retry || pause > longestPause {
			t.Errorf("pause %v after %v", pause, last)
		}
		last = pause
	}
	v := b.Status.Verification
	if v.Packs != 512 || !v.Asked || v.EndedAt != nil || v.Message == "" || last != longestPause {
		t.Errorf("%+v, pause %v", v, last)
	}
	again := metav1.NewTime(now.Add(time.Second))
	b.Spec.VerifyRequestedAt = &again
	if due := rec.nextVerification(b, 0, now); due.After(now) {
		t.Errorf("a new request waits until %v", due)
	}
	rec.verification = &job[verifyResult]{result: verifyResult{wish: nextWish(b), stats: repo.VerifyStats{Last: end, Done: true}}}
	rec.applyVerification(b, nil, o, now)
	if v := b.Status.Verification; v.EndedAt == nil || v.Asked || rec.verifyFailed != 0 {
		t.Errorf("after a step without an error: %+v", v)
	}
}
