package targets

import (
	"bytes"
	"context"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/backups/tags"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/driver/kubeapi/apitest"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	os.Exit(apitest.Main(m))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// clock is the clock of a world, which only tests advance.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// world is a cluster of nodes that look after targets.
type world struct {
	*apitest.Server
	clock *clock
	hooks *hooks
	nodes map[string]*Repositories
	stops map[string]func()
}

func newWorld(t *testing.T, nodes ...string) *world {
	t.Helper()
	t.Parallel()
	return startWorld(t, nil, nodes...)
}

// startWorld starts a cluster. change, if set, changes the reconciler of each node before its start.
func startWorld(t *testing.T, change func(*targetReconciler), nodes ...string) *world {
	t.Helper()
	w := &world{apitest.Start(t), &clock{at: time.Now().Truncate(time.Second)}, &hooks{}, map[string]*Repositories{},
		map[string]func(){}}
	for _, name := range nodes {
		w.addNode(name, w.clock.now().Add(24*time.Hour))
		mgr := w.Manager(nil)
		r := newReconciler(mgr, name, Options{Log: slog.New(slog.DiscardHandler), Cache: t.TempDir(), Now: w.clock.now,
			SweepPoll: time.Millisecond, OpenStore: w.hooks.open})
		if change != nil {
			change(r)
		}
		must(t, r.setup(mgr))
		w.nodes[name] = r.repositories
		w.stops[name] = w.Run(mgr)
	}
	return w
}

func (w *world) addNode(name string, heartbeat time.Time) {
	w.T.Helper()
	n := &api.Node{ObjectMeta: apitest.Named(name)}
	w.Create(n)
	apitest.EditStatus(w.Server, n, func(n *api.Node) { n.Status.Heartbeat = metav1.NewTime(heartbeat) })
}

// addTarget creates a BackupTarget, with a password if not empty.
func (w *world) addTarget(name, url, password string) *api.BackupTarget {
	w.T.Helper()
	t := &api.BackupTarget{ObjectMeta: apitest.Named(name), Spec: api.BackupTargetSpec{BackupTargetURL: url,
		PollInterval: &metav1.Duration{Duration: 5 * time.Minute}}}
	if password != "" {
		w.Create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
			Data: map[string][]byte{api.SecretBackupPassword: []byte(password)}})
		t.Spec.CredentialSecret = &api.SecretRef{Name: name, Namespace: "default"}
	}
	w.Create(t)
	return t
}

func (w *world) awaitTarget(name, what string, ok func(*api.BackupTarget) bool) *api.BackupTarget {
	w.T.Helper()
	return apitest.Await(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named(name)}, &api.BackupTargetList{}, what, ok)
}

// awaitReason waits for a reason of ConditionUnavailable, whose message says text. An available target was listed.
func (w *world) awaitReason(name, reason, text string) *api.BackupTarget {
	w.T.Helper()
	t := w.awaitTarget(name, "available or not: "+reason, func(t *api.BackupTarget) bool {
		return reasonNow(t) == reason && (!t.Status.Available || t.Status.LastSyncedAt != nil)
	})
	if t.Status.Available != (reason == api.ReasonAvailable) || !strings.Contains(t.Status.Message, text) {
		w.T.Errorf("target %s: %+v, want a message with %q", name, t.Status, text)
	}
	return t
}

func reasonNow(t *api.BackupTarget) string {
	if c := meta.FindStatusCondition(t.Status.Conditions, api.ConditionUnavailable); c != nil {
		return c.Reason
	}
	return ""
}

// sync asks for a visit and waits for its end.
func (w *world) sync(name string) *api.BackupTarget {
	w.T.Helper()
	w.clock.advance(time.Second) // a request has a second
	at := metav1.NewTime(w.clock.now())
	t := &api.BackupTarget{ObjectMeta: apitest.Named(name)}
	apitest.Edit(w.Server, t, func(t *api.BackupTarget) { t.Spec.SyncRequestedAt = &at })
	return w.awaitTarget(name, "synced", func(t *api.BackupTarget) bool { return t.Status.SyncedRequest.Equal(&at) })
}

// syncTo asks for a visit, which must end with a reason whose message says text.
func (w *world) syncTo(name, reason, text string) {
	w.T.Helper()
	if t := w.sync(name); reasonNow(t) != reason || !strings.Contains(t.Status.Message, text) {
		w.T.Fatalf("target %s: %s: %s; want %s: %s", name, reasonNow(t), t.Status.Message, reason, text)
	}
}

// wake makes the reconciler look at the clock again.
func (w *world) wake(name string) {
	w.T.Helper()
	apitest.Edit(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named(name)}, func(t *api.BackupTarget) {
		t.Annotations = map[string]string{"test": string(api.NewUID())}
	})
}

// backups are the Backups by name.
func (w *world) backups() map[string]*api.Backup {
	w.T.Helper()
	var list api.BackupList
	must(w.T, w.Client.List(w.Ctx, &list))
	all := map[string]*api.Backup{}
	for i := range list.Items {
		all[list.Items[i].Name] = &list.Items[i]
	}
	return all
}

func (w *world) awaitBackup(name, what string, ok func(*api.Backup) bool) *api.Backup {
	w.T.Helper()
	return apitest.Await(w.Server, &api.Backup{ObjectMeta: apitest.Named(name)}, &api.BackupList{}, what, ok)
}

// awaitEvent waits for an event with a reason and returns its note.
func (w *world) awaitEvent(reason string) string {
	w.T.Helper()
	return w.AwaitEvent(reason, func(e *eventsv1.Event) bool { return e.Reason == reason }).Note
}

// hooks stand between a world and its stores. An error of before fails the operation.
type hooks struct {
	mu     sync.Mutex
	before func(ctx context.Context, operation, name string) error
	hidden map[string]bool // objects that no list shows
	skewed time.Time       // of all objects in lists; zero: their own times
	opens  int
	closes int
}

func (h *hooks) set(before func(ctx context.Context, operation, name string) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.before = before
}

func (h *hooks) hide(names ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hidden = map[string]bool{}
	for _, n := range names {
		h.hidden[n] = true
	}
}

// skew gives all objects in lists a time.
func (h *hooks) skew(at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.skewed = at
}

func (h *hooks) counts() (opens, closes int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.opens, h.closes
}

func (h *hooks) begin(ctx context.Context, operation, name string) error {
	h.mu.Lock()
	before := h.before
	h.mu.Unlock()
	if before == nil {
		return nil
	}
	return before(ctx, operation, name)
}

func (h *hooks) open(ctx context.Context, url string, secret map[string][]byte) (target.Store, error) {
	if err := h.begin(ctx, "open", url); err != nil {
		return nil, err
	}
	s, err := addressOpener(nil, slog.New(slog.DiscardHandler))(ctx, url, secret)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.opens++
	return &hookedStore{s, h}, nil
}

type hookedStore struct {
	target.Store
	*hooks
}

func (s *hookedStore) Close() error {
	s.mu.Lock()
	s.closes++
	s.mu.Unlock()
	if c, ok := s.Store.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

func (s *hookedStore) Put(ctx context.Context, name string, body []byte) error {
	if err := s.begin(ctx, "put", name); err != nil {
		return err
	}
	return s.Store.Put(ctx, name, body)
}

func (s *hookedStore) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	if err := s.begin(ctx, "get", name); err != nil {
		return nil, err
	}
	return s.Store.Get(ctx, name, off, n)
}

func (s *hookedStore) Stat(ctx context.Context, name string) (target.Object, error) {
	if err := s.begin(ctx, "stat", name); err != nil {
		return target.Object{}, err
	}
	return s.Store.Stat(ctx, name)
}

func (s *hookedStore) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	if err := s.begin(ctx, "list", prefix); err != nil {
		return err
	}
	return s.Store.List(ctx, prefix, func(o target.Object) error {
		s.mu.Lock()
		hidden := s.hidden[o.Name]
		if !s.skewed.IsZero() {
			o = target.NewObject(o.Name, o.Size, s.skewed) // as a store describes what its server tells
		}
		s.mu.Unlock()
		if hidden {
			return nil
		}
		return each(o)
	})
}

func (s *hookedStore) Delete(ctx context.Context, names ...string) error {
	if err := s.begin(ctx, "delete", strings.Join(names, " ")); err != nil {
		return err
	}
	return s.Store.Delete(ctx, names...)
}

// shelf is a folder with a repository, as another cluster sees it.
type shelf struct {
	testing.TB
	dir string
	r   *repo.Repository
	now time.Time // of new snapshots
}

// newShelf makes a folder with a new repository.
func newShelf(t testing.TB, password string) *shelf {
	t.Helper()
	dir := t.TempDir()
	must(t, repo.Init(t.Context(), openFolder(t, dir), password, repo.Options{}))
	return openShelf(t, dir, password)
}

func openShelf(t testing.TB, dir, password string) *shelf {
	t.Helper()
	r, err := repo.Open(t.Context(), openFolder(t, dir), password, repo.Options{Cache: t.TempDir(), Hostname: "elsewhere"})
	must(t, err)
	return &shelf{t, dir, r, time.Unix(1_700_000_000, 0)}
}

func openFolder(t testing.TB, dir string) target.Store {
	t.Helper()
	s, err := folder.Open(t.Context(), dir)
	must(t, err)
	return s
}

func (s *shelf) url() string { return "file://" + s.dir }

// save saves a snapshot with tags of a file of n random bytes.
func (s *shelf) save(n int, tags ...string) blob.ID {
	s.Helper()
	return s.saveMany(n, tags)[0]
}

// saveMany saves a snapshot for each list of tags, all of one file of n random bytes.
func (s *shelf) saveMany(n int, tags ...[]string) (ids []blob.ID) {
	s.Helper()
	lock, err := s.r.Lock(s.Context(), repo.Shared)
	must(s, err)
	blobs, err := s.r.LoadIndex(s.Context())
	must(s, err)
	w, err := repo.NewWriter(s.Context(), blobs, repo.WriterOptions{Lock: lock})
	must(s, err)
	body := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(rand.Int())}).Read(body)
	id, _, err := w.Add(s.Context(), blob.Data, body)
	must(s, err)
	root, err := w.AddTree(s.Context(), []tree.Node{{Name: "data", Type: tree.File, Size: int64(n),
		Content: []blob.ID{id}}})
	must(s, err)
	must(s, w.Flush(s.Context()))
	must(s, w.Close())
	must(s, blobs.Close())
	for _, some := range tags {
		id, err := s.r.SaveSnapshot(s.Context(), repo.Snapshot{Time: s.now, Tree: &root,
			Paths: []string{"/volumes/v"}, Tags: some})
		must(s, err)
		ids = append(ids, id)
	}
	must(s, lock.Close(s.Context()))
	return ids
}

// bytes is the size of all objects of the store.
func (s *shelf) bytes() (n int64) {
	s.Helper()
	must(s, filepath.WalkDir(s.dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			n += info.Size()
		}
		return err
	}))
	return n
}

func (s *shelf) has(id blob.ID) bool {
	s.Helper()
	_, err := s.r.FindSnapshot(s.Context(), id)
	if err != nil && !api.Is(err, api.NotFound) {
		s.Fatal(err)
	}
	return err == nil
}

// uid is the UID with a number.
func uid(n int) api.UID {
	return api.UID(strings.Replace("00000000-0000-4000-8000-000000000000", "00000000",
		string(bytes.Repeat([]byte{"0123456789abcdef"[n%16]}, 8)), 1))
}

// factsOf are the facts of a backup of volume vol.
func factsOf(name string) tags.Facts {
	return tags.Facts{Backup: name, Volume: "vol", Object: uid(1), VolumeUID: uid(2), Snapshot: "snap", SnapshotUID: uid(3),
		SnapshotCreated: "2026-01-02T03:04:05Z", VolumeSize: 10 << 20, Uploaded: 3 << 20, Mode: api.BackupFull,
		Image: "golden", Labels: map[string]string{"a=b%": "c=d,e"}}
}

// makeBackup creates a Backup that the cluster made, as the node role leaves it.
func (w *world) makeBackup(name, target string, id blob.ID) *api.Backup {
	w.T.Helper()
	b := &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{api.Finalizer}},
		Spec: api.BackupSpec{BackupTargetName: target, Volume: "vol"}}
	w.Create(b)
	apitest.EditStatus(w.Server, b, func(b *api.Backup) {
		b.Status = factsOf(name).Status("file:///x", id.String(), time.Unix(0, 0), w.clock.now())
	})
	return b
}
