package backups_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups"
	"drover.io/drover/backups/host"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/replicas/stack"
)

func TestMain(m *testing.M) {
	suite.SystemMain()
	ctrl.SetLogger(logr.Discard())
	code := apitest.Main(m)
	_ = os.RemoveAll(emptyRepository())
	os.Exit(code)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const (
	chunk    = block.ChunkSize
	nodeName = "node-1"
	cutTime  = "2026-01-02T03:04:05Z"
)

// patience is how long an effect may take on a busy machine.
const patience = 2 * time.Minute

// emptyRepository is a folder that the tests copy: to derive a key from a password takes long.
var emptyRepository = sync.OnceValue(func() string {
	path, err := os.MkdirTemp("", "drover-backups-host")
	if err != nil {
		panic(err)
	}
	s, err := folder.Open(context.Background(), path)
	if err == nil {
		err = repo.Init(context.Background(), s, api.PublishedPassword, repo.Options{})
	}
	if err != nil {
		panic(err)
	}
	return path
})

// hookedStore calls before in front of each operation and after behind; their errors fail the operation.
type hookedStore struct {
	target.Store
	mu            sync.Mutex
	before, after hook
}

type hook func(ctx context.Context, operation, name string) error

// set replaces the hooks; nil: none.
func (s *hookedStore) set(before, after hook) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before, s.after = before, after
}

func (s *hookedStore) call(ctx context.Context, operation, name string, do func() error) error {
	s.mu.Lock()
	before, after := s.before, s.after
	s.mu.Unlock()
	if before != nil {
		if err := before(ctx, operation, name); err != nil {
			return err
		}
	}
	if err := do(); err != nil || after == nil {
		return err
	}
	return after(ctx, operation, name)
}

func (s *hookedStore) Put(ctx context.Context, name string, body []byte) error {
	return s.call(ctx, "put", name, func() error { return s.Store.Put(ctx, name, body) })
}

func (s *hookedStore) Get(ctx context.Context, name string, off, n int64) (b []byte, err error) {
	err = s.call(ctx, "get", name, func() error {
		b, err = s.Store.Get(ctx, name, off, n)
		return err
	})
	return b, err
}

func (s *hookedStore) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	return s.call(ctx, "list", prefix, func() error { return s.Store.List(ctx, prefix, each) })
}

func (s *hookedStore) Delete(ctx context.Context, names ...string) error {
	return s.call(ctx, "delete", strings.Join(names, " "), func() error { return s.Store.Delete(ctx, names...) })
}

// gate stops the first operation of a kind until the gate is opened or the operation's context ends.
type gate struct {
	operation, prefix string
	reached, opened   chan struct{}
	once              sync.Once
}

func newGate(operation, prefix string) *gate {
	return &gate{operation: operation, prefix: prefix, reached: make(chan struct{}), opened: make(chan struct{})}
}

func (g *gate) hook(ctx context.Context, operation, name string) error {
	if operation != g.operation || !strings.HasPrefix(name, g.prefix) {
		return nil
	}
	first := false
	g.once.Do(func() { first = true })
	if !first {
		return nil
	}
	close(g.reached)
	select {
	case <-g.opened:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// world is a node with a disk, and a repository in a folder.
type world struct {
	*apitest.Server
	disk   *stack.Disk
	broken atomic.Bool                    // the disk does not answer
	disks  map[api.UID]block.SnapshotDisk // further ones
	folder string
	store  *hookedStore
	opts   host.Options
	target *api.BackupTarget
	stop   func()
	open   func(ctx context.Context, url string) (block.Backup, error) // of the process

	refused chan struct{} // closed when startUntilAllowed refuses the status
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Server: apitest.Start(t), folder: t.TempDir()}
	w.opts = host.Options{Log: w.Log, Version: "0.0.1", RetryMin: time.Second, RetryMax: time.Second,
		ProgressEvery: 50 * time.Millisecond, Targets: targets.Options{Cache: t.TempDir(), SweepDelay: time.Hour,
			OpenStore: func(context.Context, string, map[string][]byte) (target.Store, error) { return w.store, nil }}}
	dir := t.TempDir()
	var err error
	w.disk, err = stack.Add(t.Context(), dir)
	must(t, err)
	t.Cleanup(func() { _ = w.disk.Close() })
	must(t, os.RemoveAll(w.folder))
	must(t, os.CopyFS(w.folder, os.DirFS(emptyRepository())))
	s, err := folder.Open(t.Context(), w.folder)
	must(t, err)
	w.store = &hookedStore{Store: s}
	r, err := repo.Open(t.Context(), s, api.PublishedPassword, repo.Options{Cache: t.TempDir()})
	must(t, err)
	node := &api.Node{ObjectMeta: apitest.Named(nodeName), Spec: api.NodeSpec{Disks: []api.DiskSpec{{Path: dir}}}}
	w.target = &api.BackupTarget{ObjectMeta: apitest.Named(api.DefaultBackupTarget),
		Spec: api.BackupTargetSpec{BackupTargetURL: "file://" + w.folder}}
	w.Create(node, w.target)
	apitest.EditStatus(w.Server, node, func(n *api.Node) {
		n.Status.Heartbeat = metav1.NewTime(time.Now().Add(time.Hour)) // outlives the test
		n.Status.Disks = []api.DiskStatus{{Path: dir, UID: api.UID(w.disk.UID()), Ready: true}}
	})
	apitest.EditStatus(w.Server, w.target, func(t *api.BackupTarget) { t.Status.RepositoryID = r.ID() })
	return w
}

// start starts the node. refuse may refuse writes of a status.
func (w *world) start(refuse func(client.Object) error) {
	w.T.Helper()
	mgr := w.Manager(refuse)
	var err error
	w.open, err = backups.SetupNode(mgr, nodeName, w.findDisk, w.opts)
	must(w.T, err)
	w.stop = w.Run(mgr)
}

// startUntilAllowed starts a process that cannot write that a backup is completed until the caller allows the write.
func (w *world) startUntilAllowed() (allow func()) {
	w.T.Helper()
	w.refused = make(chan struct{})
	var allowed atomic.Bool
	once := sync.OnceFunc(func() { close(w.refused) })
	w.start(func(o client.Object) error {
		if b, ok := o.(*api.Backup); ok && b.Status.State == api.BackupCompleted && !allowed.Load() {
			once()
			return errors.New("no answer")
		}
		return nil
	})
	return func() { allowed.Store(true) }
}

// adoptElsewhere is an attempt of another node that begins a backup, adopts its snapshot, and loses the backup again.
func (w *world) adoptElsewhere(b *api.Backup) {
	w.T.Helper()
	r, err := repo.Open(w.Ctx, w.store.Store, api.PublishedPassword, repo.Options{Cache: w.T.TempDir()})
	must(w.T, err)
	adopted, err := targets.AdoptSnapshot(w.Ctx, r, api.UID(b.UID), func(context.Context) error { return nil },
		mover.Adopt)
	must(w.T, err)
	if adopted == nil {
		w.T.Fatal("the repository has no complete snapshot of the backup")
	}
	apitest.EditStatus(w.Server, b, func(b *api.Backup) { b.Status.OwnerID = "node-2" })
}

// startUntilCompleted starts a process that ends, at killed, before the status says that a backup is completed.
func (w *world) startUntilCompleted() { _ = w.startUntilAllowed() }

// killed ends the process of startUntilCompleted, which has made the backup.
func (w *world) killed(b *api.Backup) {
	w.T.Helper()
	w.receive(w.refused, "the process has made the backup")
	w.stop()
	w.awaitState(b, api.BackupInProgress)
}

func (w *world) findDisk(uid api.UID) (block.SnapshotDisk, error) {
	if disk := w.disks[uid]; disk != nil {
		return disk, nil
	}
	if uid != api.UID(w.disk.UID()) || w.broken.Load() {
		return nil, api.Errorf(api.Unavailable, "disk %s: does not answer", uid)
	}
	return w.disk, nil
}

// volume is a replica with snapshots on the disk of the world.
type volume struct {
	name         string
	uid, replica api.UID
	size         int64
	snapshots    []api.UID
	contents     [][]byte // of the snapshots
}

// randomBytes cannot be compressed.
func randomBytes(seed byte, n int64) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// newVolume makes a volume. Each map of writes, by offset, is a layer with a snapshot of its own.
func (w *world) newVolume(name string, size int64, writes ...map[int64][]byte) *volume {
	w.T.Helper()
	return w.newVolumeOf(apitest.Volume(name, size), writes...)
}

// newVolumeOf is newVolume for an object that is not created yet.
func (w *world) newVolumeOf(object *api.Volume, writes ...map[int64][]byte) *volume {
	w.T.Helper()
	name, size := object.Name, object.Spec.Size
	v := &volume{name: name, uid: api.NewUID(), replica: api.NewUID(), size: size}
	spec := stack.Spec{UID: string(v.replica), Volume: name, VolumeUID: string(v.uid), Size: size}
	w.Create(object)
	apitest.EditStatus(w.Server, object, func(o *api.Volume) { o.Status.UID = v.uid })
	content := make([]byte, size)
	for i, pieces := range writes {
		layer, uid := string(api.NewUID()), api.NewUID()
		l, err := w.disk.Create(w.Ctx, layer, size)
		must(w.T, err)
		for off, b := range pieces {
			copy(content[off:], b)
			_, err := l.WriteAt(b, off)
			must(w.T, err)
		}
		_, _, err = l.Seal(w.Ctx)
		must(w.T, err)
		created, err := time.Parse(time.RFC3339, cutTime)
		must(w.T, err)
		spec.Layers = append(spec.Layers, layer)
		spec.Snapshots = append(spec.Snapshots, stack.Snapshot{UID: string(uid), Name: v.snapshot(i), Layer: layer,
			Created: created.Add(time.Duration(i) * time.Hour)})
		v.snapshots, v.contents = append(v.snapshots, uid), append(v.contents, bytes.Clone(content))
		s := api.NewSnapshot(object, v.snapshot(i))
		w.Create(s)
		apitest.EditStatus(w.Server, s, func(s *api.Snapshot) {
			s.Status = api.SnapshotStatus{UID: uid, VolumeUID: v.uid, ReadyToUse: true}
		})
	}
	must(w.T, w.disk.CreateReplica(w.Ctx, spec))
	return v
}

// snapshot is the name of a snapshot.
func (v *volume) snapshot(i int) string { return fmt.Sprintf("%s-s%d", v.name, i) }

// newBackup creates a Backup of a snapshot, as the controller role hands it to the node.
func (w *world) newBackup(name string, v *volume, snapshot int, change ...func(*api.Backup)) *api.Backup {
	w.T.Helper()
	b := &api.Backup{ObjectMeta: apitest.Named(name), Spec: api.BackupSpec{Volume: v.name,
		BackupTargetName: w.target.Name, SnapshotName: v.snapshot(snapshot),
		Labels: map[string]string{"of": name},
		Source: &api.ExportFact{Volume: v.name, VolumeUID: v.uid, Snapshot: v.snapshot(snapshot),
			SnapshotUID: v.snapshots[snapshot], Replica: v.replica, Node: nodeName, Disk: api.UID(w.disk.UID()),
			CreationTime: strings.Replace(cutTime, "T03", fmt.Sprintf("T%02d", 3+snapshot), 1)}}}
	b.Labels = map[string]string{api.LabelVolume: api.LabelValue(v.name), api.LabelBackupTarget: w.target.Name}
	b.Finalizers = []string{api.Finalizer}
	for _, c := range change {
		c(b)
	}
	w.Create(b)
	return b
}

// await waits until ok accepts the Backup.
func (w *world) await(b *api.Backup, what string, ok func(*api.Backup) bool) {
	w.T.Helper()
	apitest.Await(w.Server, b, &api.BackupList{}, what, ok)
}

// awaitState waits until the Backup has the state.
func (w *world) awaitState(b *api.Backup, state api.BackupState) {
	w.T.Helper()
	w.await(b, string(state), func(b *api.Backup) bool { return b.Status.State == state })
}

// awaitEvent waits for an event about the Backup.
func (w *world) awaitEvent(b *api.Backup, kind, reason string) {
	w.T.Helper()
	w.AwaitEvent(reason+" "+b.Name, func(e *eventsv1.Event) bool {
		return e.Type == kind && e.Reason == reason && e.Regarding.UID == b.UID
	})
}

// receive waits for a channel.
func (w *world) receive(c <-chan struct{}, what string) {
	w.T.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		w.T.Fatalf("not in time: %s", what)
	}
}

// held demands that the disk holds the snapshots of these Backups alone.
func (w *world) held(want ...*api.Backup) {
	w.T.Helper()
	held, err := w.disk.HeldSnapshots()
	must(w.T, err)
	for _, b := range want {
		if _, ok := held[string(b.UID)]; !ok {
			w.T.Errorf("the disk does not hold the snapshot of backup %s", b.Name)
		}
		delete(held, string(b.UID))
	}
	if len(held) > 0 {
		w.T.Errorf("the disk still holds snapshots: %v", held)
	}
}

// awaitReleased waits until the disk holds no snapshot.
func (w *world) awaitReleased() { w.awaitHolds(0) }

// awaitHolds waits until the disk holds a number of snapshots.
func (w *world) awaitHolds(n int) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.Ctx, patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		held, err := w.disk.HeldSnapshots()
		must(w.T, err)
		if len(held) == n {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.T.Fatalf("the disk still holds snapshots: %v", held)
		}
	}
}

// objects counts the objects of a folder of the repository.
func (w *world) objects(prefix string) (n int) {
	w.T.Helper()
	must(w.T, w.store.Store.List(w.Ctx, prefix, func(target.Object) error { n++; return nil }))
	return n
}

// restic runs Debian's restic, the oracle of the format.
func (w *world) restic(args ...string) []byte {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.Ctx, 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "restic", append([]string{"--no-cache", "--repo", w.folder}, args...)...)
	cmd.Env = append(os.Environ(), "RESTIC_PASSWORD="+api.PublishedPassword)
	cmd.WaitDelay = time.Minute // a busy machine reads the output late
	var failure bytes.Buffer
	cmd.Stderr = &failure
	output, err := cmd.Output()
	if err != nil {
		w.T.Fatalf("restic %v: %v\n%.2000s%.2000s", args, err, output, failure.Bytes())
	}
	return output
}

// check demands a repository without errors, with a number of snapshots.
func (w *world) check(snapshots int) {
	w.T.Helper()
	if output := w.restic("check", "--read-data", "--no-lock"); !bytes.Contains(output, []byte("no errors were found")) {
		w.T.Errorf("restic check: %.2000s", output)
	}
	if n := w.objects("snapshots/"); n != snapshots {
		w.T.Errorf("the repository has %d snapshots, want %d", n, snapshots)
	}
	if n := w.objects("locks/"); n != 0 {
		w.T.Errorf("the repository has %d locks", n)
	}
}

// compare demands that a backup has the content of a snapshot.
func (w *world) compare(b *api.Backup, v *volume, snapshot int) {
	w.T.Helper()
	path := filepath.Join("/volumes", v.name, "disk/0000/00/data")
	if got := w.restic("dump", b.Status.SnapshotID, path); !bytes.Equal(got, v.contents[snapshot]) {
		w.T.Errorf("backup %s: restic reads %d bytes that differ from snapshot %d", b.Name, len(got), snapshot)
	}
}

// openBackup opens the completed backup with a URL.
func (w *world) openBackup(url string) block.Backup {
	w.T.Helper()
	open, err := w.openListed(url)
	must(w.T, err)
	return open
}

// openListed opens the backup with a URL, once the cache of the process has the completed Backup; it waits for a minute
// at most.
func (w *world) openListed(url string) (open block.Backup, err error) {
	ctx, cancel := context.WithTimeout(w.Ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		open, err = w.open(w.Ctx, url)
		if !api.Is(err, api.NotFound) || !strings.Contains(err.Error(), "no completed backup has the URL") {
			return open, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, err
		}
	}
}
