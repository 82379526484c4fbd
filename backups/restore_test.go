package backups_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
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
	open, err := w.open(t.Context(), b.Status.URL)
	must(t, err)
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

	open, err := w.open(t.Context(), b.Status.URL)
	must(t, err)
	full := errors.New("the disk is full")
	if err := open.Restore(t.Context(), &memorySink{gate: func() error { return full }}); !errors.Is(err, full) {
		t.Errorf("a sink without room: %v", err)
	}
	must(t, open.Close())
	err = open.Restore(t.Context(), &memorySink{got: make([]byte, v.size)})
	if err == nil || errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "session was closed") {
		t.Errorf("a restore without the lock: %v", err)
	}
}
