package targets

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/driver/kubeapi/apitest"
)

func (w *world) secret(name string) *corev1.Secret {
	w.T.Helper()
	s := &corev1.Secret{}
	must(w.T, w.Client.Get(w.Ctx, client.ObjectKey{Namespace: "default", Name: name}, s))
	return s
}

// TestOpenSharesTheRepository: callers at once share one repository until the Secret changes; its store is closed after
// the last user.
func TestOpenSharesTheRepository(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	rs := w.nodes["node-1"]
	opens, _ := w.hooks.counts()

	all := make([]*Opened, 8)
	var group errgroup.Group
	for i := range all {
		group.Go(func() (err error) {
			all[i], err = rs.Open(w.Ctx, "default")
			return err
		})
	}
	must(t, group.Wait())
	for _, o := range all {
		if o.Repository != all[0].Repository || o.Target.Name != "default" {
			t.Error("callers have different repositories")
		}
	}
	if now, _ := w.hooks.counts(); now != opens+1 {
		t.Errorf("the store was opened %d times", now-opens)
	}

	secret := w.secret("default")
	secret.Data["more"] = []byte("x")
	must(t, w.Client.Update(w.Ctx, secret))
	_, closes := w.hooks.counts()
	other, err := rs.Open(w.Ctx, "default")
	must(t, err)
	if other.Repository == all[0].Repository {
		t.Error("the repository of the old Secret is still used")
	}
	for i, o := range all {
		if _, now := w.hooks.counts(); now != closes {
			t.Errorf("the store was closed below %d users", len(all)-i)
		}
		o.Close()
		o.Close()
	}
	if _, now := w.hooks.counts(); now != closes+1 {
		t.Errorf("the unused store was closed %d times", now-closes)
	}
	other.Close()
	again, err := rs.Open(w.Ctx, "default")
	must(t, err)
	defer again.Close()
	if again.Repository != other.Repository {
		t.Error("an unused repository is not kept")
	}
}

// TestBrokenRepositoryIsTriedAgain: Open fails with the kind of the fault, and the next call tries again. A caller that
// goes away fails nobody else.
func TestBrokenRepositoryIsTriedAgain(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	rs := w.nodes["node-1"]
	first := make(chan struct{})
	w.hooks.set(func(ctx context.Context, operation, _ string) error {
		if operation != "open" {
			return nil
		}
		close(first)
		<-ctx.Done()
		return ctx.Err()
	})
	ctx, cancel := context.WithCancel(w.Ctx)
	var group errgroup.Group
	group.Go(func() error { _, err := rs.Open(ctx, "default"); return err })
	<-first
	w.hooks.set(nil)
	rs.mu.Lock()
	entry := rs.entries["default"]
	rs.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		o, err := rs.Open(w.Ctx, "default")
		if err == nil {
			o.Close()
		}
		done <- err
	}()
	for waits := false; !waits; runtime.Gosched() { // for the first caller
		rs.mu.Lock()
		waits = entry.users == 2
		rs.mu.Unlock()
	}
	cancel()
	if err := group.Wait(); !api.Is(err, api.Unavailable) {
		t.Errorf("the caller that went away: %v", err)
	}
	must(t, <-done)

	rs.forget("default")
	for want, cause := range map[api.Kind]api.Kind{api.Denied: api.Denied, api.Unavailable: api.Unavailable} {
		w.hooks.set(func(context.Context, string, string) error { return api.Errorf(cause, "refused") })
		if _, err := rs.Open(w.Ctx, "default"); !api.Is(err, want) {
			t.Errorf("%v, want kind %v", err, want)
		}
	}
	w.hooks.set(nil)
	o, err := rs.Open(w.Ctx, "default")
	must(t, err)
	o.Close()
}

// TestIndexTablesOfDeletedTargetsAreRemoved: a start removes the index tables of targets that do not exist, and nothing
// else.
func TestIndexTablesOfDeletedTargetsAreRemoved(t *testing.T) {
	w := newWorld(t)
	kept := w.addTarget("default", "file:///nowhere", "")
	cache := t.TempDir()
	for _, name := range []string{string(kept.UID), string(uid(4)), "of-others"} {
		must(t, os.MkdirAll(filepath.Join(cache, name, "x"), 0o700))
	}
	rs := &Repositories{live: w.Client, cache: cache}
	must(t, rs.removeCaches(w.Ctx))
	entries, err := os.ReadDir(cache)
	must(t, err)
	if len(entries) != 2 {
		t.Errorf("left: %v", entries)
	}
	rs.cache = filepath.Join(cache, "missing")
	must(t, rs.removeCaches(w.Ctx))
}

// TestEveryNodeForgetsADeletedTarget: each node closes the store of a deleted target, not only the target's owner.
func TestEveryNodeForgetsADeletedTarget(t *testing.T) {
	w := newWorld(t, "node-1", "node-2")
	s := newShelf(t, "x")
	object := w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	for _, rs := range w.nodes {
		o, err := rs.Open(w.Ctx, "default")
		must(t, err)
		o.Close()
	}
	if opens, closes := w.hooks.counts(); opens < closes+2 {
		t.Errorf("%d stores opened, %d closed", opens, closes)
	}
	w.Delete(object)
	for opens, closes := w.hooks.counts(); opens != closes; opens, closes = w.hooks.counts() {
		if w.Ctx.Err() != nil {
			t.Fatalf("%d stores opened, %d closed", opens, closes)
		}
		runtime.Gosched()
	}
}

// TestLostRepositoryIsNotUsed: a repository that was open is refused while its store has no repository, such as the
// folder below a mount that is gone. A backup there would be complete, and lost.
func TestLostRepositoryIsNotUsed(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	rs := w.nodes["node-1"]
	first, err := rs.Open(w.Ctx, "default")
	must(t, err)
	defer first.Close()
	away := s.dir + "-away"
	must(t, os.Rename(s.dir, away))
	must(t, os.Mkdir(s.dir, 0o700))
	if _, err := rs.Open(w.Ctx, "default"); !api.Is(err, api.Unavailable) {
		t.Errorf("without a repository: %v", err)
	}
	other := newShelf(t, "x")
	must(t, os.Remove(s.dir))
	must(t, os.Rename(other.dir, s.dir))
	if _, err := rs.Open(w.Ctx, "default"); !api.Is(err, api.Unavailable) {
		t.Errorf("with another repository: %v", err)
	}
	must(t, os.RemoveAll(s.dir))
	must(t, os.Rename(away, s.dir))
	again, err := rs.Open(w.Ctx, "default")
	must(t, err)
	again.Close()
	if again.Repository != first.Repository {
		t.Error("the repository was opened twice")
	}
}

// TestPacksFollowTheUploadRate: each Writer of a target makes packs that the rate allows in 4 seconds.
func TestPacksFollowTheUploadRate(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	before := s.bytes()
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	apitest.Edit(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named("default")}, func(b *api.BackupTarget) {
		b.Spec.MaxUploadRate = 5 << 18 // 5 MiB in 4 seconds
	})
	rs := w.nodes["node-1"]
	opened, err := rs.Open(w.Ctx, "default")
	must(t, err)
	defer opened.Close()
	blobs, err := opened.Repository.LoadIndex(w.Ctx)
	must(t, err)
	defer func() { must(t, blobs.Close()) }()
	o := rs.memory.maintenanceWriter()
	writer, err := repo.NewWriter(w.Ctx, blobs, o)
	must(t, err)
	random := rand.NewChaCha8([32]byte{1})
	for range 5 { // one pack without the rate
		body := make([]byte, 1<<20)
		_, _ = random.Read(body)
		_, _, err := writer.Add(w.Ctx, blob.Data, body)
		must(t, err)
	}
	must(t, writer.Flush(w.Ctx))
	stats := writer.Stats()
	must(t, writer.Close())
	if o.PackSize <= 5<<20 || stats.Packs != 2 || s.bytes()-before < 5<<20 {
		t.Errorf("packs of up to %d bytes: %+v, want 4 and 1 MiB", o.PackSize, stats)
	}
}
