package targets

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/driver/kubeapi/apitest"
)

// request changes the spec of a target with the time of a new request.
func (w *world) request(name string, change func(*api.BackupTargetSpec, metav1.Time)) metav1.Time {
	w.T.Helper()
	w.clock.advance(time.Second)
	at := metav1.NewTime(w.clock.now())
	apitest.Edit(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named(name)}, func(t *api.BackupTarget) {
		change(&t.Spec, at)
	})
	return at
}

// requestLocks returns the answer to a LocksRequest.
func (w *world) requestLocks(name string, removeStale bool) *api.LocksFact {
	w.T.Helper()
	at := w.request(name, func(s *api.BackupTargetSpec, at metav1.Time) {
		s.LocksRequest = &api.LocksRequest{At: at, RemoveStale: removeStale}
	})
	return w.awaitTarget(name, "its locks are listed", func(t *api.BackupTarget) bool {
		return t.Status.Locks != nil && t.Status.Locks.Request.At.Equal(&at)
	}).Status.Locks
}

// TestLocksOfATarget: a request lists the locks with their holders, and removes stale ones only if asked to, and in no
// read-only target.
func TestLocksOfATarget(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	hold := func(user string) string {
		r, err := repo.Open(t.Context(), openFolder(t, s.dir), api.PublishedPassword, repo.Options{Username: user,
			Hostname: strings.Repeat("far", 100)})
		must(t, err)
		lock, err := r.Lock(t.Context(), repo.Shared)
		must(t, err)
		t.Cleanup(func() { _ = lock.Close(t.Context()) })
		all, err := filepath.Glob(filepath.Join(s.dir, "locks", "*"))
		must(t, err)
		return all[len(all)-1]
	}
	stale := hold("dead")
	old := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(stale, old, old))
	got := w.requestLocks("default", false)
	if got.Message != "" || got.Total != 1 || len(got.Locks) != 1 {
		t.Fatalf("the locks are %+v", got)
	}
	if l := got.Locks[0]; l.Name != filepath.Base(stale) || l.Program != "drover" || l.Username != "dead" || !l.Stale ||
		len(l.Hostname) != lockTextLimit || l.Since == nil {
		t.Errorf("the lock is %+v", l)
	}
	setReadOnly := func(to bool) {
		w.request("default", func(s *api.BackupTargetSpec, _ metav1.Time) { s.ReadOnly = to })
	}
	setReadOnly(true)
	if got := w.requestLocks("default", true); !strings.Contains(got.Message, "read-only") || got.Total != 1 {
		t.Errorf("in a read-only target: %+v", got)
	}
	setReadOnly(false)
	if got := w.requestLocks("default", true); got.Message != "" || got.Removed != 1 || got.Total != 0 {
		t.Errorf("the removal: %+v", got)
	}
}

// TestTimesOfAStoreAreBounded: times that no object can have, of the store's clock and of a snapshot, neither end the
// visits nor hide a backup.
func TestTimesOfAStoreAreBounded(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, api.PublishedPassword)
	s.now = time.Date(9999, 12, 31, 23, 59, 59, 0, time.FixedZone("", -23*3600))
	s.saveMany(100, factsOf("late").Tags())
	lock, err := s.r.Lock(t.Context(), repo.Shared)
	must(t, err)
	t.Cleanup(func() { _ = lock.Close(context.WithoutCancel(t.Context())) })
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	if b := w.backups()["late"]; b == nil || b.Status.BackupCreatedAt != "9999-12-31T23:59:59Z" {
		t.Errorf("the backup is %+v", b)
	}
	for _, at := range []time.Time{time.Unix(1<<40, 0), time.Unix(-1<<40, 0)} {
		w.hooks.skew(at)
		if got := w.requestLocks("default", false); got.Message != "" || len(got.Locks) != 1 {
			t.Errorf("with objects of %v: %+v", at, got)
		}
	}
}

// TestKeyFileIsShownForAShortTime: the key file leaves the status although the command that asked has died, and comes
// back with no visit.
func TestKeyFileIsShownForAShortTime(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "an own password")
	w.addTarget("default", s.url(), "an own password")
	w.awaitReason("default", api.ReasonAvailable, "")
	secret := w.secret("default")
	secret.Data[api.SecretRecoveryPassword] = []byte("in the safe")
	must(t, w.Client.Update(w.Ctx, secret))
	w.request("default", func(s *api.BackupTargetSpec, at metav1.Time) { s.KeyRequestedAt = &at })
	w.awaitTarget("default", "its key file is read", func(t *api.BackupTarget) bool {
		return t.Status.KeyFile != nil && len(t.Status.KeyFile.Content) > 0
	})
	w.clock.advance(keyFileTime)
	w.wake("default")
	w.awaitTarget("default", "the key file is hidden", func(t *api.BackupTarget) bool {
		k := t.Status.KeyFile
		return k != nil && k.Content == nil && k.Name == "" && strings.Contains(k.Message, "ask again")
	})
	if now := w.sync("default"); now.Spec.KeyRequestedAt == nil || now.Status.KeyFile.Content != nil {
		t.Errorf("after a visit: %+v", now.Status.KeyFile)
	}
}

// TestKeyFileOfATarget: the key file of the recovery password is in the status while it is requested, and no longer. It
// ends the warning that one password opens the repository.
func TestKeyFileOfATarget(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "an own password")
	w.addTarget("default", s.url(), "an own password")
	w.awaitReason("default", api.ReasonAvailable, "")
	ask := func() *api.KeyFileFact {
		at := w.request("default", func(s *api.BackupTargetSpec, at metav1.Time) { s.KeyRequestedAt = &at })
		return w.awaitTarget("default", "its key file is read", func(t *api.BackupTarget) bool {
			return t.Status.KeyFile != nil && t.Status.KeyFile.Request.Equal(&at)
		}).Status.KeyFile
	}
	if got := ask(); !strings.Contains(got.Message, api.SecretRecoveryPassword) || got.Content != nil {
		t.Errorf("without a recovery password: %+v", got)
	}
	secret := &corev1.Secret{}
	must(t, w.Client.Get(w.Ctx, client.ObjectKey{Namespace: "default", Name: "default"}, secret))
	secret.Data[api.SecretRecoveryPassword] = []byte("in the safe")
	must(t, w.Client.Update(w.Ctx, secret))
	got := ask()
	if got.Message != "" || got.Name != blob.Sum(got.Content).String() {
		t.Errorf("the key file: %+v", got)
	}
	w.request("default", func(s *api.BackupTargetSpec, _ metav1.Time) { s.KeyRequestedAt = nil })
	target := w.awaitTarget("default", "the key file is forgotten", func(t *api.BackupTarget) bool {
		return t.Status.KeyFile == nil
	})
	if meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionNoRecoveryKey) {
		t.Errorf("after the export: %+v", target.Status.Conditions)
	}
}
