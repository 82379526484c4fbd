package mover

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const chunkSize = block.ChunkSize

// disk is a source, and a sink, whose chunks are in memory.
type disk struct {
	size    int64
	digests bool // the source knows the digests
	reads   atomic.Int64

	mu     sync.Mutex
	chunks map[int64][]byte
}

func newDisk(size int64) *disk { return &disk{size: size, chunks: map[int64][]byte{}} }

func (d *disk) Size() int64  { return d.size }
func (d *disk) Close() error { return nil }

// chunk returns a chunk's bytes, or nil for a hole.
func (d *disk) chunk(c int64) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.chunks[c]
}

func (d *disk) length(c int64) int64 { return min(chunkSize, d.size-c*chunkSize) }

func (d *disk) ReadAt(p []byte, off int64) (n int, err error) {
	d.reads.Add(1)
	for n < len(p) && off+int64(n) < d.size {
		at := off + int64(n)
		c, in := at/chunkSize, at%chunkSize
		m := min(int64(len(p)-n), d.length(c)-in)
		if data := d.chunk(c); data != nil {
			copy(p[n:], data[in:in+m])
		} else {
			clear(p[n:][:m])
		}
		n += int(m)
	}
	if n < len(p) {
		err = io.EOF
	}
	return n, err
}

func (d *disk) Next(off int64) (block.Extent, error) {
	c := off / chunkSize
	e := block.Extent{Off: off, Len: min((c+1)*chunkSize, d.size) - off}
	if d.chunk(c) != nil {
		e.Kind = block.Data
	}
	return e, nil
}

func (d *disk) Digest(c int64) (sum [32]byte, known bool) {
	if !d.digests {
		return sum, false
	}
	if data := d.chunk(c); data != nil {
		return blob.Sum(data), true
	}
	return manifest.Zeros(d.length(c)).Digest, true
}

func (d *disk) WriteAt(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for rest := p; len(rest) > 0; {
		c, in := off/chunkSize, off%chunkSize
		data := d.chunks[c]
		if data == nil {
			data = make([]byte, d.length(c))
		} else {
			data = bytes.Clone(data) // copies of the disk share the chunks
		}
		n := copy(data[in:], rest)
		d.chunks[c] = data
		off, rest = off+int64(n), rest[n:]
	}
	return len(p), nil
}

func (d *disk) ZeroAt(int64, int64) error  { return nil }
func (d *disk) Sync(context.Context) error { return nil }

// copy is the disk as of now, with another size.
func (d *disk) copy(size int64) *disk {
	c := newDisk(size)
	c.digests = d.digests
	for i, data := range d.chunks {
		c.chunks[i] = data
	}
	return c
}

// equals compares the bytes of two disks of one size.
func (d *disk) equals(o *disk) bool {
	zero := make([]byte, chunkSize)
	or := func(data []byte, n int64) []byte {
		if data == nil {
			return zero[:n]
		}
		return data
	}
	for c := range d.chunks {
		if !bytes.Equal(d.chunks[c], or(o.chunks[c], d.length(c))) {
			return false
		}
	}
	for c := range o.chunks {
		if !bytes.Equal(o.chunks[c], or(d.chunks[c], d.length(c))) {
			return false
		}
	}
	return d.size == o.size
}

// randomBytes cannot be compressed.
func randomBytes(seed uint64, n int64) []byte {
	r := rand.NewChaCha8([32]byte(binary.LittleEndian.AppendUint64(make([]byte, 24), seed)))
	b := make([]byte, n)
	_, _ = r.Read(b)
	return b
}

// fill writes random bytes to chunks.
func (d *disk) fill(seed uint64, chunks ...int64) {
	for _, c := range chunks {
		d.chunks[c] = randomBytes(seed+uint64(c), d.length(c))
	}
}

// hookedStore calls before in front of each operation; an error of before fails the operation. An error of after takes
// the place of the answer to a Put or Delete that was done.
type hookedStore struct {
	target.Store
	mu     sync.Mutex
	before func(operation, name string) error
	after  func() error
	hides  func(name string) bool // objects that lists lack; nil: none
	counts map[string]int         // of operations, by folder
}

func (s *hookedStore) begin(operation, name string) error {
	s.mu.Lock()
	s.counts[operation+" "+path.Dir(name)]++
	before := s.before
	s.mu.Unlock()
	if before == nil {
		return nil
	}
	return before(operation, name)
}

func (s *hookedStore) end(err error) error {
	s.mu.Lock()
	after := s.after
	s.mu.Unlock()
	if err != nil || after == nil {
		return err
	}
	return after()
}

func (s *hookedStore) Put(ctx context.Context, name string, body []byte) error {
	if err := s.begin("put", name); err != nil {
		return err
	}
	return s.end(s.Store.Put(ctx, name, body))
}

func (s *hookedStore) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	if err := s.begin("get", name); err != nil {
		return nil, err
	}
	return s.Store.Get(ctx, name, off, n)
}

func (s *hookedStore) Stat(ctx context.Context, name string) (target.Object, error) {
	if err := s.begin("stat", name); err != nil {
		return target.Object{}, err
	}
	return s.Store.Stat(ctx, name)
}

func (s *hookedStore) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	if err := s.begin("list", prefix); err != nil {
		return err
	}
	s.mu.Lock()
	hides := s.hides
	s.mu.Unlock()
	if hides == nil {
		return s.Store.List(ctx, prefix, each)
	}
	return s.Store.List(ctx, prefix, func(o target.Object) error {
		if hides(o.Name) {
			return nil
		}
		return each(o)
	})
}

func (s *hookedStore) Delete(ctx context.Context, names ...string) error {
	if err := s.begin("delete", strings.Join(names, " ")); err != nil {
		return err
	}
	return s.end(s.Store.Delete(ctx, names...))
}

const password = "correct horse"

// world is a repository, usually in a folder.
type world struct {
	newRestic string // path of the program, once it is installed
	testing.TB
	folder   string
	location string // of the repository, for restic
	store    *hookedStore
	r        *repo.Repository
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{TB: t, folder: t.TempDir()}
	w.location = w.folder
	must(t, os.RemoveAll(w.folder))
	must(t, os.CopyFS(w.folder, os.DirFS(emptyRepository())))
	s, err := folder.Open(t.Context(), w.folder)
	must(t, err)
	w.store = &hookedStore{Store: s, counts: map[string]int{}}
	w.open()
	return w
}

// open opens the repository as another process does.
func (w *world) open() {
	w.Helper()
	var err error
	w.r, err = repo.Open(w.Context(), w.store, password, repo.Options{Cache: w.TempDir(), Hostname: "node-1"})
	must(w, err)
}

// emptyRepository is a folder that the tests copy: to derive a key from a password takes long.
var emptyRepository = sync.OnceValue(func() string {
	path, err := os.MkdirTemp("", "drover-mover")
	if err != nil {
		panic(err)
	}
	s, err := folder.Open(context.Background(), path)
	if err == nil {
		err = repo.Init(context.Background(), s, password, repo.Options{})
	}
	if err != nil {
		panic(err)
	}
	return path
})

func TestMain(m *testing.M) {
	code := m.Run()
	_ = os.RemoveAll(emptyRepository())
	os.Exit(code)
}

func options(name string) BackupOptions {
	return BackupOptions{
		Description: manifest.Description{Kind: manifest.Volume, Name: name, Object: []byte(`{"size":1}`)},
		Snapshot:    repo.Snapshot{Time: time.Unix(1_700_000_000, 0), Hostname: "cluster", Tags: []string{"drover"}},
		Writer:      repo.WriterOptions{PackSize: 5 << 20, Memory: 40 << 20},
	}
}

func (w *world) backup(src Source, o BackupOptions) Result {
	w.Helper()
	result, err := Backup(w.Context(), w.r, src, o)
	must(w, err)
	return result
}

// load opens a backup.
func (w *world) load(id blob.ID) (*repo.Blobs, *manifest.Manifest) {
	w.Helper()
	blobs, err := w.r.LoadIndex(w.Context())
	must(w, err)
	w.Cleanup(func() { must(w, blobs.Close()) })
	m, err := openSnapshot(w.Context(), w.r, blobs, id)
	must(w, err)
	return blobs, m
}

// compare demands that a restore of the backup has the bytes of want.
func (w *world) compare(id blob.ID, want *disk) {
	w.Helper()
	blobs, m := w.load(id)
	got, p := newDisk(m.Size), &Progress{}
	damaged, err := Restore(w.Context(), blobs, m, got, RestoreOptions{Progress: p})
	must(w, err)
	if len(damaged) > 0 || !got.equals(want) {
		w.Errorf("backup %.8s: the restore differs, %d chunks are damaged", id, len(damaged))
	}
	if done, total := p.Bytes(); done != total || total != want.size {
		w.Errorf("backup %.8s: progress %d of %d bytes, want %d", id, done, total, want.size)
	}
}

// packs are the names of the repository's packs.
func (w *world) packs() []string { return w.objects("data/") }

// objects are the names of the repository's objects in a folder.
func (w *world) objects(folder string) (names []string) {
	must(w, w.store.Store.List(w.Context(), folder, func(o target.Object) error {
		names = append(names, o.Name)
		return nil
	}))
	slices.Sort(names)
	return names
}

// restic runs Debian's restic, the oracle of the format.
func (w *world) restic(args ...string) string {
	w.Helper()
	return w.runRestic("restic", args...)
}

func (w *world) runRestic(program string, args ...string) string {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append([]string{"--no-cache", "--repo", w.location}, args...)...)
	cmd.Env = append(os.Environ(), "RESTIC_PASSWORD="+password)
	cmd.WaitDelay = time.Second
	output, err := cmd.CombinedOutput()
	if err != nil {
		w.Fatalf("%s %v: %v\n%.2000s", program, args, err, output)
	}
	return string(output)
}

// newRestic is a newer release than Debian's.
const newRestic = "github.com/restic/restic/cmd/restic@v0.19.1"

// oracles are the programs of restic to try: Debian's, and with DROVER_TEST=all a newer release, which takes two
// minutes to build.
func (w *world) oracles() []string {
	w.Helper()
	if !suite.All() {
		return []string{"restic"}
	}
	if w.newRestic == "" {
		w.newRestic = targettest.Install(w, newRestic)
	}
	return []string{"restic", w.newRestic}
}

// check demands that restic finds no error, a new restic, too, where the run wants all.
func (w *world) check() {
	w.Helper()
	for _, restic := range w.oracles() {
		output := w.runRestic(restic, "check", "--read-data", "--no-lock")
		if !strings.Contains(output, "no errors were found") {
			w.Errorf("%s check: %.2000s", restic, output)
		}
	}
}
