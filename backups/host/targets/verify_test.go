package targets

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/driver/kubeapi/apitest"
)

// packs are the paths of the store's packs.
func (s *shelf) packs() []string {
	s.Helper()
	all, err := filepath.Glob(filepath.Join(s.dir, "data", "*", "*"))
	must(s, err)
	return all
}

// damageData changes a byte in each pack with data of 50,000 bytes or more, except some packs.
func (s *shelf) damageData(except map[string]bool) {
	s.Helper()
	for _, path := range s.packs() {
		b, err := os.ReadFile(path)
		must(s, err)
		if len(b) > 50_000 && !except[path] {
			b[1000] ^= 1
			must(s, os.Remove(path))
			must(s, os.WriteFile(path, b, 0o600))
		}
	}
}

// verify asks for a verification and waits for its end.
func (w *world) verify(name string) *api.BackupTarget {
	w.T.Helper()
	w.clock.advance(time.Second)
	at := metav1.NewTime(w.clock.now())
	w.askVerification(name, at)
	return w.awaitTarget(name, "verified", func(t *api.BackupTarget) bool {
		v := t.Status.Verification
		return v != nil && at.Equal(v.Request) && !v.Asked
	})
}

func (w *world) askVerification(name string, at metav1.Time) {
	w.T.Helper()
	apitest.Edit(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named(name)}, func(t *api.BackupTarget) {
		t.Spec.VerifyRequestedAt = &at
	})
}

// TestVerificationNamesDamagedBackups: a requested verification reads all packs. After damage of one backup, the target
// has the condition, the names of blob and backup, and an event; the Backup is marked, another one is not. When the
// damaged backup is deleted, the next verification clears all.
func TestVerificationNamesDamagedBackups(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	good := factsOf("good")
	good.Object = uid(8)
	s.save(50_000, good.Tags()...)
	before := s.packs()
	bad := factsOf("bad")
	bad.Object = uid(9)
	s.save(60_000, bad.Tags()...)
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	if v := w.verify("default").Status.Verification; v.Packs != int64(len(s.packs())) || v.DamagedBlobs != 0 ||
		v.EndedAt == nil || v.Bytes == 0 {
		t.Errorf("verification of a whole repository: %+v", v)
	}
	known := map[string]bool{}
	for _, path := range before {
		known[path] = true
	}
	s.damageData(known)
	target := w.verify("default")
	v := target.Status.Verification
	if !meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionDamaged) || v.DamagedBlobs != 1 ||
		len(v.BlobNames) != 1 || v.DamagedBackups != 1 || len(v.BackupNames) != 1 || v.BackupNames[0] != "bad" {
		t.Errorf("verification of a damaged repository: %+v", target.Status)
	}
	w.awaitEvent("BackupsDamaged")
	w.awaitBackup("bad", "damaged", func(b *api.Backup) bool { return b.Status.Damaged })
	if w.backups()["good"].Status.Damaged {
		t.Error("a whole backup counts as damaged")
	}
	w.Delete(w.backups()["bad"])
	w.awaitTarget("default", "deleted", func(t *api.BackupTarget) bool { return t.Status.Backups < 2 })
	target = w.verify("default")
	if meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionDamaged) ||
		target.Status.Verification.DamagedBlobs != 0 {
		t.Errorf("after the deletion of the damaged backup: %+v", target.Status)
	}
}

// TestDamageThatAnotherClusterFound: the next part of the verification marks the backups that lack blobs because of
// another cluster's verification.
func TestDamageThatAnotherClusterFound(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	s.save(50_000, factsOf("good").Tags()...)
	before := map[string]bool{}
	for _, path := range s.packs() {
		before[path] = true
	}
	s.save(60_000, factsOf("bad").Tags()...)
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	s.damageData(before)
	other, err := repo.Open(t.Context(), openFolder(t, s.dir), api.PublishedPassword, repo.Options{Cache: t.TempDir()})
	must(t, err)
	stats, err := other.Verify(t.Context(), repo.VerifyOptions{Until: partEnd(api.VerificationParts - 1),
		Rate: rate.NewLimiter(rate.Inf, 0), Writer: NewMemory(0).maintenanceWriter()})
	if err != nil || len(stats.Damaged) != 1 {
		t.Fatalf("the other cluster's verification: %+v, %v", stats, err)
	}
	w.verifyPart("default")
	w.awaitBackup("bad", "damaged", func(b *api.Backup) bool { return b.Status.Damaged })
	if w.backups()["good"].Status.Damaged {
		t.Error("a whole backup counts as damaged")
	}
}

// TestVerificationReadsAPartEachDay: without a request, a thirtieth of the interval passes before each part, and the last
// part ends the verification.
func TestVerificationReadsAPartEachDay(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	s.save(50_000, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	for _, part := range []int32{1, 2, api.VerificationParts} {
		if part == api.VerificationParts { // the parts between differ in nothing
			apitest.EditStatus(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named("default")}, func(t *api.BackupTarget) {
				t.Status.Verification.Parts = part - 1
			})
		}
		if v := w.verifyPart("default"); v.Parts != part%api.VerificationParts {
			t.Errorf("after part %d: %+v", part, v)
		}
	}
	v := w.awaitTarget("default", "verified", func(t *api.BackupTarget) bool {
		return t.Status.Verification.EndedAt != nil
	}).Status.Verification
	if v.Packs == 0 || v.Position != "" || v.StartedAt != nil {
		t.Errorf("after the last part: %+v", v)
	}
}

// verifyPart lets a day pass on node-1, and waits for the next part of a target's verification.
func (w *world) verifyPart(target string) *api.VerificationFact {
	w.clock.advance(25 * time.Hour) // the API server's clock, which dates the target, is ahead
	node := &api.Node{ObjectMeta: apitest.Named("node-1")}
	apitest.EditStatus(w.Server, node, func(n *api.Node) { n.Status.Heartbeat = metav1.NewTime(w.clock.now()) })
	w.wake(target)
	return w.awaitTarget(target, "a part is verified", func(t *api.BackupTarget) bool {
		v := t.Status.Verification
		return v != nil && v.PartEndedAt != nil && v.PartEndedAt.Time.Equal(w.clock.now())
	}).Status.Verification
}

// TestPasswordFollowsTheSecret: a repository gets an own password for the published one, by the Secret alone. The target
// stays available, the published password opens the repository no longer, and a recovery password ends the warning.
func TestPasswordFollowsTheSecret(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	w.addTarget("default", s.url(), "an own password")
	target := w.awaitTarget("default", "available", func(t *api.BackupTarget) bool {
		return t.Status.Available && meta.IsStatusConditionTrue(t.Status.Conditions, api.ConditionNoRecoveryKey)
	})
	if !target.Status.Encrypted {
		t.Error("the repository is not encrypted")
	}
	opens := func(password string) bool {
		_, err := repo.Open(t.Context(), openFolder(t, s.dir), password, repo.Options{})
		return err == nil
	}
	if opens(api.PublishedPassword) || !opens("an own password") {
		t.Error("the published password opens the repository, or the own one does not")
	}
	secret := &corev1.Secret{}
	must(t, w.Client.Get(w.Ctx, client.ObjectKey{Namespace: "default", Name: "default"}, secret))
	secret.Data[api.SecretRecoveryPassword] = []byte("in the safe")
	must(t, w.Client.Update(w.Ctx, secret))
	target = w.sync("default")
	if meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionNoRecoveryKey) || !opens("in the safe") {
		t.Errorf("with a recovery password: %+v", target.Status.Conditions)
	}
}
