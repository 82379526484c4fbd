package backups_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/driver/kubeapi/apitest"
)

// memorySink keeps what a restore writes. The first write waits in the gate, if there is one.
type memorySink struct {
	mu   sync.Mutex
	got  []byte
	gate func() error
}

func (s *memorySink) WriteAt(p []byte, off int64) (int, error) {
	if s.gate != nil {
		if err := s.gate(); err != nil {
			return 0, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return copy(s.got[off:], p), nil
}

func (s *memorySink) ZeroAt(int64, int64) error      { return nil }
func (s *memorySink) Sync(ctx context.Context) error { return ctx.Err() }

// A backup is restored by its URL, byte by byte. A URL that no completed Backup has is refused. A user who deletes the
// backup in the middle of a restore does not harm the restore: its lock keeps the blobs until the backup is closed.
func TestBackupIsRestoredByItsURL(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("vol", 6*chunk, map[int64][]byte{0: randomBytes(1, chunk), 3 * chunk: randomBytes(2, chunk+4096)})
	w.start(nil)
	b := w.newBackup("b1", v, 0)
	w.awaitState(b, api.BackupCompleted)
	must(t, w.Client.Get(t.Context(), client.ObjectKeyFromObject(b), b))

	if _, err := w.open(t.Context(), b.Status.URL+"x"); !api.Is(err, api.NotFound) {
		t.Errorf("an unknown URL: %v", err)
	}
	open := w.openBackup(b.Status.URL)
	if open.Size() != v.size {
		t.Errorf("the backup has %d bytes, want %d", open.Size(), v.size)
	}
	deleted := sync.OnceFunc(func() {
		w.Delete(b)
		w.AwaitDeleted(b, &api.BackupList{})
	})
	sink := &memorySink{got: make([]byte, v.size), gate: func() error { deleted(); return nil }}
	must(t, open.Restore(t.Context(), sink))
	if !bytes.Equal(sink.got, v.contents[0]) {
		t.Error("the restore has other bytes than the snapshot")
	}
	if done, total := open.Restored(); done != total || total == 0 {
		t.Errorf("%d of %d bytes are reported", done, total)
	}
	if w.objects("locks/") == 0 {
		t.Error("the restore held no lock")
	}
	must(t, open.Close())
	if n := w.objects("locks/"); n != 0 {
		t.Errorf("%d locks stay", n)
	}
	if _, err := w.open(t.Context(), b.Status.URL); !api.Is(err, api.NotFound) {
		t.Errorf("a deleted backup: %v", err)
	}
}

// An error of the sink ends the restore, and is the restore's error. A lost lock ends the restore, too, with an error
// that says so and is no cancellation: nobody keeps the blobs any more.
func TestRestoreEnds(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("vol", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.start(nil)
	b := w.newBackup("b1", v, 0)
	w.awaitState(b, api.BackupCompleted)
	must(t, w.Client.Get(t.Context(), client.ObjectKeyFromObject(b), b))

	open := w.openBackup(b.Status.URL)
	full := errors.New("the disk is full")
	if err := open.Restore(t.Context(), &memorySink{gate: func() error { return full }}); !errors.Is(err, full) {
		t.Errorf("a sink without room: %v", err)
	}
	must(t, open.Close())
	err := open.Restore(t.Context(), &memorySink{got: make([]byte, v.size)})
	if err == nil || errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "session was closed") {
		t.Errorf("a restore without the lock: %v", err)
	}
}

// The digests of a backup are those of its chunks, without zeros, and each chunk is read alone, whole or of fragments.
// A restore leaves out the chunks of skip. Afterwards a chunk that the store lost is an error of its own: all others
// can be read, and the restore lists the lost ones.
func TestBackupIsReadChunkByChunk(t *testing.T) {
	w := newWorld(t)
	first := map[int64][]byte{0: randomBytes(1, chunk), 3 * chunk: randomBytes(2, chunk+4096)}
	v := w.newVolume("vol", 6*chunk, first, map[int64][]byte{3*chunk + 8192: randomBytes(3, 4096)})
	w.start(nil)
	for i := range v.snapshots { // the second backup has fragments
		w.awaitState(w.newBackup(v.snapshot(i), v, i), api.BackupCompleted)
	}
	b := &api.Backup{}
	must(t, w.Client.Get(t.Context(), client.ObjectKey{Name: v.snapshot(1)}, b))
	opened := w.openBackup(b.Status.URL)
	defer func() { must(t, opened.Close()) }()
	open, ok := opened.(block.ChunkedBackup)
	if !ok {
		t.Fatal("the backup cannot be read chunk by chunk")
	}
	content := v.contents[1]
	part := func(c int64) []byte { return content[c*chunk : min((c+1)*chunk, v.size)] }
	var list []int64
	must(t, open.Digests(t.Context(), func(c int64, sum [32]byte) {
		list = append(list, c)
		if sum != sha256.Sum256(part(c)) {
			t.Errorf("chunk %d has another digest", c)
		}
	}))
	if !slices.Equal(list, []int64{0, 3, 4}) {
		t.Errorf("chunks %v have data", list)
	}
	read := func(c int64) error {
		buf := make([]byte, len(part(c)))
		err := open.ReadChunk(t.Context(), c, buf)
		if err == nil && !bytes.Equal(buf, part(c)) {
			t.Errorf("chunk %d has other bytes", c)
		}
		return err
	}
	for c := range int64(6) {
		must(t, read(c))
	}
	sink := &memorySink{got: make([]byte, v.size)}
	damaged, err := open.RestoreIntact(t.Context(), sink, func(c int64) bool { return c == 3 })
	must(t, err)
	copy(sink.got[3*chunk:], part(3))
	if !bytes.Equal(sink.got, content) || len(damaged) > 0 {
		t.Errorf("the restore without a chunk differs elsewhere; damaged: %v", damaged)
	}

	w.spoilData()
	if err := read(0); !api.Is(err, api.Corrupt) || !strings.Contains(err.Error(), "chunk 0 at offset 0") {
		t.Errorf("a damaged chunk: %v", err)
	}
	must(t, read(1)) // zeros
	damaged, err = open.RestoreIntact(t.Context(), sink, nil)
	must(t, err)
	for _, c := range []int64{0, 3, 4} { // without the sums of the fragments, all chunks of the segment are lost
		if !slices.Contains(damaged, c) {
			t.Errorf("chunk %d is not among the damaged chunks %v", c, damaged)
		}
	}
}

// spoilData damages all packs of the store with data of volumes.
func (w *world) spoilData() {
	w.T.Helper()
	must(w.T, filepath.WalkDir(filepath.Join(w.folder, "data"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil || info.Size() < 100<<10 { // small packs have the manifests
			return err
		}
		must(w.T, os.Chmod(path, 0o600))
		return os.WriteFile(path, make([]byte, info.Size()), 0o600)
	}))
}

// The deletion of a Backup waits while an image is being restored from it, and a restore that begins again meanwhile
// finds the backup.
func TestDeletionWaitsForRestore(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("vol", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.start(nil)
	b := w.newBackup("b1", v, 0)
	w.awaitState(b, api.BackupCompleted)
	must(t, w.Client.Get(t.Context(), client.ObjectKeyFromObject(b), b))
	url := strings.Replace(b.Status.URL, "?", "/?", 1) // the same backup
	img := &api.BackingImage{ObjectMeta: apitest.Named("golden"), Spec: api.BackingImageSpec{SourceType: api.SourceRestore,
		SourceParameters: map[string]string{api.RestoreBackupURL: url}}}
	w.Create(img)
	w.Delete(b)
	w.await(b, "a deletion that waits", func(b *api.Backup) bool {
		return b.Status.State == api.BackupDeleting && strings.Contains(b.Status.Message, "backing image golden")
	})
	open := w.openBackup(url)
	sink := &memorySink{got: make([]byte, v.size)}
	must(t, open.Restore(t.Context(), sink))
	if !bytes.Equal(sink.got, v.contents[0]) {
		t.Error("the restore has other bytes than the snapshot")
	}
	must(t, open.Close())
	apitest.EditStatus(w.Server, img, func(i *api.BackingImage) { i.Status.State = api.ImageReady })
	w.AwaitDeleted(b, &api.BackupList{})
	if n := w.objects("snapshots/"); n != 0 {
		t.Errorf("the store still has %d snapshots", n)
	}
}
