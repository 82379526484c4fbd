package imagestore_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
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

func (b *storedBackup) Size() int64  { return int64(len(b.body)) }
func (b *storedBackup) Close() error { return nil }

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
