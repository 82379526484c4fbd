package imagestore_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/stack"
)

// store has the backups of a test, by URL. The release ends the wait of a restore.
type store struct {
	mu      sync.Mutex
	backups map[string][]byte
	hold    api.ImageState // where a restore waits
	held    chan struct{}
}

// open implements the host's OpenBackup.
func (s *store) open(ctx context.Context, url string) (block.Backup, error) {
	s.mu.Lock()
	body, hold, held := s.backups[url], s.hold, s.held
	s.mu.Unlock()
	if body == nil {
		return nil, api.Errorf(api.NotFound, "no backup has the URL %s", url)
	}
	b := &storedBackup{body: body}
	switch hold {
	case api.ImageStarting:
		return b, wait(ctx, held)
	case api.ImageInProgress:
		b.held = held
	}
	return b, nil
}

func wait(ctx context.Context, held <-chan struct{}) error {
	select {
	case <-held:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// put adds a backup, at which restores wait in a state until the release.
func (s *store) put(t *testing.T, url string, body []byte, in api.ImageState) (release func()) {
	held := make(chan struct{})
	release = sync.OnceFunc(func() { close(held) })
	if in == "" {
		release()
	}
	t.Cleanup(release)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.backups == nil {
		s.backups = map[string][]byte{}
	}
	s.backups[url], s.hold, s.held = body, in, held
	return release
}

// storedBackup is a backup in memory.
type storedBackup struct {
	body []byte
	held <-chan struct{} // before the second half of the data

	mu   sync.Mutex
	done int64
}

func (b *storedBackup) Size() int64      { return int64(len(b.body)) }
func (b *storedBackup) Checksum() string { return "" }
func (b *storedBackup) Close() error     { return nil }

func (b *storedBackup) Restored() (done, total int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.done, stateData
}

func (b *storedBackup) Restore(ctx context.Context, sink block.Sink) error {
	const step = stateData / 2
	for off := int64(0); off < stateData; off += step {
		if off > 0 && b.held != nil {
			if err := wait(ctx, b.held); err != nil {
				return err
			}
		}
		if _, err := sink.WriteAt(b.body[off:off+step], off); err != nil {
			return err
		}
		b.mu.Lock()
		b.done += step
		b.mu.Unlock()
	}
	return sink.Sync(ctx)
}

const backupURL = "file:///store?backup=b&volume=v"

// wayOfRestore is the source restore in TestStates.
var wayOfRestore = way{api.SourceRestore, []api.ImageState{api.ImageStarting, api.ImageInProgress},
	func(s *stand, body []byte, in api.ImageState) func() {
		release := s.store.put(s.t, backupURL, body, in)
		s.golden(api.SourceRestore, map[string]string{api.RestoreBackupURL: backupURL}, body)
		return release
	},
	func(s *stand, body []byte) func() {
		const later = "file:///store?backup=later&volume=v"
		s.golden(api.SourceRestore, map[string]string{api.RestoreBackupURL: later}, body)
		return func() { s.store.put(s.t, later, body, "") }
	}}

// TestRestoredImage: a restored image has the backup's bytes, size and digest. A damaged copy is repaired from the
// backup below its replica. An image with another checksum fails, and leaves nothing on the disk.
func TestRestoredImage(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	w.opts.CheckEvery = 100 * time.Millisecond
	w.start()
	body := stateBody(7)
	w.store.put(t, backupURL, body, "")
	params := map[string]string{api.RestoreBackupURL: backupURL}
	w.image("wrong", api.SourceRestore, params, onDisk0, func(spec *api.BackingImageSpec) {
		spec.Checksum = sum(stateBody(8))
	})
	w.state("wrong", api.ImageFailed)
	w.delete(&api.BackingImage{}, "wrong")
	w.gone("wrong")
	w.clean(0)

	w.image("golden", api.SourceRestore, params, onDisk0)
	img := w.isOn("golden", 0)
	w.holds(0, img, body)
	if st := img.Status; st.VirtualSize != stateSize || st.Format != "raw" || st.Digest == "" {
		t.Errorf("the restored image is %+v", st)
	}

	layer := string(img.Status.Layers[0])
	replica := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: stateSize,
		Layers: []string{layer}}
	if err := w.disks[0].CreateReplica(t.Context(), replica); err != nil {
		t.Fatal(err)
	}
	w.sees("golden", "was known to be damaged", func() error { w.spoil(0, img, body); return nil },
		func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 0 })
	w.holds(0, w.state("golden", api.ImageReady), body)
	if err := w.disks[0].Verify(t.Context(), layer); err != nil {
		t.Error(err)
	}
	if err := w.disks[0].RemoveReplica(replica.UID); err != nil {
		t.Fatal(err)
	}
}

// fileBackup is the backup of the file that an image was made of.
type fileBackup struct {
	storedBackup
	checksum string
}

func (b *fileBackup) File() io.ReaderAt { return bytes.NewReader(b.body) }
func (b *fileBackup) Checksum() string  { return b.checksum }

func (b *fileBackup) Restore(context.Context, block.Sink) error {
	return api.Errorf(api.Unsupported, "a file is imported")
}

// TestRestoredFile: the backup of a file is imported as the file would be: the disk inside is the image's, the checksum
// is the file's, and no volume reads the image before. A damaged copy is repaired from the backup. A file with another
// checksum than the backup tells fails, and leaves nothing on the disk.
func TestRestoredFile(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	body := stateBody(7)
	file := converted(t, body, "qcow2")
	w.opts.CheckEvery = 100 * time.Millisecond
	w.opts.OpenBackup = func(ctx context.Context, url string) (block.Backup, error) {
		b := &fileBackup{storedBackup{body: file}, sum(file)}
		if url != backupURL {
			b.checksum = sum(body)
		}
		return b, nil
	}
	w.start()
	w.image("wrong", api.SourceRestore, map[string]string{api.RestoreBackupURL: backupURL + "2"}, onDisk0)
	w.state("wrong", api.ImageFailed)
	w.delete(&api.BackingImage{}, "wrong")
	w.gone("wrong")
	w.clean(0)

	w.image("golden", api.SourceRestore, map[string]string{api.RestoreBackupURL: backupURL}, onDisk0)
	img := w.isOn("golden", 0)
	w.holds(0, img, body)
	if st := img.Status; st.VirtualSize != stateSize || st.Format != "qcow2" || st.Checksum != sum(file) || st.Readable {
		t.Errorf("the restored image is %+v", st)
	}
	w.sees("golden", "was known to be damaged", func() error { w.spoil(0, img, body); return nil },
		func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 0 })
	w.holds(0, w.state("golden", api.ImageReady), body)
}

// chunkedBackup is a storedBackup that knows its digests. Each chunk is damaged while the store says so.
type chunkedBackup struct {
	storedBackup
	damaged func(chunk int64) bool
}

func (b *chunkedBackup) part(c int64) []byte {
	return b.body[c*block.ChunkSize : min((c+1)*block.ChunkSize, b.Size())]
}

func (b *chunkedBackup) chunks() int64 { return (b.Size() + block.ChunkSize - 1) / block.ChunkSize }

func (b *chunkedBackup) Digests(_ context.Context, each func(int64, [32]byte)) error {
	for c := range b.chunks() {
		if len(bytes.Trim(b.part(c), "\x00")) > 0 {
			each(c, sha256.Sum256(b.part(c)))
		}
	}
	return nil
}

func (b *chunkedBackup) ReadChunk(_ context.Context, c int64, buf []byte) error {
	if b.damaged(c) {
		return api.Errorf(api.Corrupt, "chunk %d is lost", c)
	}
	copy(buf, b.part(c))
	return nil
}

func (b *chunkedBackup) RestoreIntact(ctx context.Context, sink block.Sink, skip func(int64) bool) (
	damaged []int64, err error) {
	for c := range b.chunks() {
		if c == 1 && b.held != nil {
			if err := wait(ctx, b.held); err != nil {
				return nil, err
			}
		}
		switch {
		case len(bytes.Trim(b.part(c), "\x00")) == 0 || skip(c):
			continue
		case b.damaged(c):
			damaged = append(damaged, c)
			continue
		}
		if _, err := sink.WriteAt(b.part(c), c*block.ChunkSize); err != nil {
			return nil, err
		}
	}
	return damaged, sink.Sync(ctx)
}

// openChunked makes open return backups that know their digests.
func (w *world) openChunked(damaged func(chunk int64) bool) {
	w.opts.OpenBackup = func(ctx context.Context, url string) (block.Backup, error) {
		b, err := w.store.open(ctx, url)
		if err != nil {
			return nil, err
		}
		plain := b.(*storedBackup)
		return &chunkedBackup{storedBackup{body: plain.body, held: plain.held}, damaged}, nil
	}
}

// TestImageIsReadableBeforeItIsReady: the status has the digest and the size, and other disks get the map and the bytes
// from the node, while the restore waits, after a restart of the node, too. The finished image has the same digest.
// With a checksum an image is not readable before it is ready.
func TestImageIsReadableBeforeItIsReady(t *testing.T) {
	w := newWorld(t, 2)
	w.stop()
	w.openChunked(func(int64) bool { return false })
	w.serveLayers()
	w.start()
	body := stateBody(7)
	release := w.store.put(t, backupURL, body, api.ImageInProgress)
	params := map[string]string{api.RestoreBackupURL: backupURL}
	w.image("golden", api.SourceRestore, params, onDisk0)
	readable := func(i *api.BackingImage) bool { return i.Status.Readable }
	img := w.await("golden", "is readable", readable)
	st := img.Status
	if st.State != api.ImageInProgress || st.VirtualSize != stateSize || st.Digest == "" || !img.CanRead() {
		t.Errorf("the readable image is %+v", st)
	}
	layer := string(st.Layers[0])
	w.create(&api.Replica{ObjectMeta: metav1.ObjectMeta{Name: "v.1"}, Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: "v",
		VolumeUID: api.NewUID(), Node: w.node, Disk: api.UID(w.disks[1].UID()), Size: stateSize, Layers: st.Layers}})
	w.readServed(layer, st.Digest, body)
	w.stop()
	w.serveLayers()
	w.start()
	w.readServed(layer, st.Digest, body)

	w.image("checked", api.SourceRestore, params, onDisk0, func(spec *api.BackingImageSpec) { spec.Checksum = sum(body) })
	w.state("checked", api.ImageInProgress)
	w.store.mu.Lock()
	w.store.hold = ""
	w.store.mu.Unlock()
	release()
	if now := w.state("golden", api.ImageReady); now.Status.Digest != st.Digest || now.Status.Readable {
		t.Errorf("the finished image is %+v, and was readable with the digest %s", now.Status, st.Digest)
	}
	w.holds(0, img, body)
	if now := w.await("checked", "is ready or readable", (*api.BackingImage).CanRead); now.Status.State != api.ImageReady {
		t.Errorf("an image with a checksum is readable in state %s", now.Status.State)
	}
	w.delete(&api.Replica{}, "v.1")
}

// TestOnDemandImageFetchesWhatIsRead: without a reader no chunk is fetched, and a reader gets the bytes, after a restart
// of the node, too. The image stays pending, and its deletion leaves nothing.
func TestOnDemandImageFetchesWhatIsRead(t *testing.T) {
	w := newWorld(t, 2)
	w.stop()
	var fetched atomic.Int64
	w.openChunked(func(int64) bool { fetched.Add(1); return false })
	w.serveLayers()
	w.start()
	body := stateBody(7)
	w.store.put(t, backupURL, body, "")
	params := map[string]string{api.RestoreBackupURL: backupURL, api.RestoreOnDemand: "true"}
	w.image("golden", api.SourceRestore, params, onDisk0)
	st := w.await("golden", "is readable", func(i *api.BackingImage) bool { return i.Status.Readable }).Status
	w.stop()
	w.serveLayers()
	w.start()
	layer := string(st.Layers[0])
	w.create(&api.Replica{ObjectMeta: metav1.ObjectMeta{Name: "v.1"}, Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: "v",
		VolumeUID: api.NewUID(), Node: w.node, Disk: api.UID(w.disks[1].UID()), Size: stateSize, Layers: st.Layers}})
	if n := fetched.Load(); n > 0 {
		t.Errorf("%d chunks were fetched for nobody", n)
	}
	w.readServed(layer, st.Digest, body)
	if now := w.state("golden", api.ImagePending); !now.Status.Readable {
		t.Errorf("the image is %+v", now.Status)
	}
	w.delete(&api.Replica{}, "v.1")
	w.delete(&api.BackingImage{}, "golden")
	w.gone("golden")
	w.clean(0)
}

// TestDamagedBackup: the image fails with the list of damaged chunks, after all others were restored; the layer is
// still served to volumes, after a restart of the node, too, and the image is ready once the store has the chunks. With
// allow-damaged zeros take their place, and a notice lists them.
func TestDamagedBackup(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	var healed atomic.Bool
	w.openChunked(func(c int64) bool { return c == 0 && !healed.Load() })
	w.start()
	body := stateBody(7)
	w.store.put(t, backupURL, body, "")
	params := map[string]string{api.RestoreBackupURL: backupURL}
	w.image("golden", api.SourceRestore, params, onDisk0)
	img := w.state("golden", api.ImageFailed)
	if m := img.Status.Message; !strings.Contains(m, "0 (offset 0)") || !strings.Contains(m, "allow-damaged") {
		t.Errorf("the message is %q", m)
	}
	if c := w.copies("golden"); img.CanRead() || len(c) != 1 || !c[0].Status.Readable ||
		c[0].Status.Digest == "" || c[0].Status.VirtualSize != int64(len(body)) {
		t.Errorf("volumes of before cannot read the image, or new ones can: %+v", c)
	}
	params = map[string]string{api.RestoreBackupURL: backupURL, api.RestoreAllowDamaged: "true"}
	w.image("holes", api.SourceRestore, params, onDisk0)
	img = w.await("holes", "is ready or readable", (*api.BackingImage).CanRead)
	holed := bytes.Clone(body)
	clear(holed[:block.ChunkSize])
	w.holds(0, w.state("holes", api.ImageReady), holed)
	if c := w.copies("holes"); len(c) != 1 || !strings.Contains(c[0].Status.Notice, "0 (offset 0)") {
		t.Errorf("no notice tells of the zeros: %+v", c)
	}
	if img.Status.State != api.ImageReady {
		t.Errorf("with damage the image was readable in state %s", img.Status.State)
	}
	w.stop()
	w.start()
	healed.Store(true)
	w.holds(0, w.state("golden", api.ImageReady), body)
}

// TestHealWakesRestore: a restore asks for a damaged chunk when a node has healed the target, and before with pauses.
func TestHealWakesRestore(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	var healed atomic.Bool
	w.openChunked(func(c int64) bool { return c == 0 && !healed.Load() })
	w.opts.RetryMin, w.opts.RetryMax = time.Hour, time.Hour
	w.start()
	target := &api.BackupTarget{ObjectMeta: metav1.ObjectMeta{Name: "default"},
		Spec: api.BackupTargetSpec{BackupTargetURL: "file:///store"}}
	w.create(target)
	body := stateBody(7)
	w.store.put(t, backupURL, body, "")
	w.image("golden", api.SourceRestore, map[string]string{api.RestoreBackupURL: backupURL}, onDisk0)
	w.state("golden", api.ImageFailed)
	healed.Store(true)
	target.Status.Verification = &api.VerificationFact{HealedBlobs: 1}
	w.putStatus(target)
	w.holds(0, w.state("golden", api.ImageReady), body)
	w.delete(&api.BackupTarget{}, "default")
}

// TestRestoreAwaitsItsStore: the store is away when a restore begins, and after a restart of the node. The image says
// so, and the restore begins when the store is back, as the same try.
func TestRestoreAwaitsItsStore(t *testing.T) {
	w := newWorld(t, 1)
	w.stop()
	var away atomic.Bool
	away.Store(true)
	w.openChunked(func(int64) bool { return false })
	open := w.opts.OpenBackup
	w.opts.OpenBackup = func(ctx context.Context, url string) (block.Backup, error) {
		if away.Load() {
			return nil, api.Errorf(api.Unavailable, "the store is away")
		}
		return open(ctx, url)
	}
	w.start()
	body := stateBody(7)
	w.store.put(t, backupURL, body, "")
	w.image("golden", api.SourceRestore, map[string]string{api.RestoreBackupURL: backupURL}, onDisk0)
	for range 2 {
		img := w.state("golden", api.ImageFailed)
		c := w.copies("golden")
		if img.Status.Message != "the store is away; Drover tries again" || len(c) != 1 || c[0].Status.Attempts > 0 {
			t.Errorf("the image says %q, of %+v", img.Status.Message, c)
		}
		w.stop()
		w.start()
	}
	away.Store(false)
	w.holds(0, w.state("golden", api.ImageReady), body)
}

// serveLayers gives the node a socket and an identity for its layers.
func (w *world) serveLayers() {
	w.t.Helper()
	id, err := wire.OpenIdentity(w.t.TempDir(), w.node)
	must := func(err error) {
		w.t.Helper()
		if err != nil {
			w.t.Fatal(err)
		}
	}
	must(err)
	both, err := wire.NewAuthority()
	must(err)
	authority, err := wire.LoadAuthority(both)
	must(err)
	request, err := id.Request()
	must(err)
	cert, _, err := authority.Sign(request, w.node, time.Hour)
	must(err)
	must(id.Put(cert, authority.PEM()))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	w.opts.Identity, w.opts.Layers = id, ln
}

// readServed hydrates disk 1 from the node's server, and compares the bytes.
func (w *world) readServed(layer, root string, body []byte) {
	w.t.Helper()
	c := wire.NewClient(w.opts.Identity, w.node, w.opts.Layers.Addr().String())
	defer c.Close()
	on := w.disks[0].UID()
	var got string
	w.eventually("the node serves the layer", func() (ok bool) {
		var err error
		got, _, err = c.Digest(w.t.Context(), on, layer)
		return err == nil
	})
	sums, err := c.Sums(w.t.Context(), on, layer, stateSize)
	if err != nil || got != root {
		w.t.Fatalf("the served layer has the digest %s, not %s: %v", got, root, err)
	}
	src, err := c.Open(w.t.Context(), on, layer)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := w.disks[1].Hydrate(w.t.Context(), layer, root, src, sums); err != nil {
		w.t.Fatal(err)
	}
	have := make([]byte, len(body))
	if _, err := src.ReadAt(have, 0); err != nil || !bytes.Equal(have, body) {
		w.t.Errorf("the node serves other bytes: %v", err)
	}
}

// TestRestoreKeepsItsBackup: an image with Longhorn's URL, which names the image alone, waits for a single backup of
// the name, and is restored from this one although another backup of the name comes during the restore, also after a
// restart of the node. A later image with the URL chooses none of the two.
func TestRestoreKeepsItsBackup(t *testing.T) {
	w := newWorld(t, 1)
	body := stateBody(7)
	params := map[string]string{api.RestoreBackupURL: "file:///store?backingImage=golden"}
	stored := func(name string) string {
		b := &api.BackupBackingImage{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: api.BackupBackingImageSpec{BackingImageName: "golden"}}
		w.create(b)
		b.Status.State, b.Status.URL = api.BackupCompleted, api.ImageBackupURL("file:///store", name, "golden")
		w.putStatus(b)
		return b.Status.URL
	}
	w.image("golden", api.SourceRestore, params, onDisk0)
	failed := func(name, text string) {
		w.await(name, "fails with "+text, func(i *api.BackingImage) bool {
			return i.Status.State == api.ImageFailed && strings.Contains(i.Status.Message, text)
		})
	}
	failed("golden", "no completed backup has the URL")
	first := api.ImageBackupURL("file:///store", "first", "golden")
	release := w.store.put(t, first, body, api.ImageInProgress)
	stored("first")
	if img := w.state("golden", api.ImageInProgress); img.Status.BackupURL != first {
		t.Errorf("the image is restored from %s", img.Status.BackupURL)
	}
	w.store.mu.Lock()
	w.store.backups[stored("second")] = stateBody(8)
	w.store.mu.Unlock()
	w.stop()
	w.start()
	w.image("later", api.SourceRestore, params, onDisk0)
	failed("later", "several backups")
	release()
	w.holds(0, w.state("golden", api.ImageReady), body)
}
