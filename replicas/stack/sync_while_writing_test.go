package stack

import (
	"context"
	"io/fs"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/layer"
)

// syncsFS lets the test end each sync of a layer's data.
type syncsFS struct {
	file.FS
	t     *testing.T
	syncs chan chan error
}

type syncsHandle struct {
	file.Handle
	t       *testing.T
	syncs   chan chan error
	running atomic.Int32
}

func (f *syncsFS) Open(name string, flag int, perm fs.FileMode) (file.Handle, error) {
	h, err := f.FS.Open(name, flag, perm)
	if err != nil || filepath.Base(name) != layer.DataFile {
		return h, err
	}
	return &syncsHandle{Handle: h, syncs: f.syncs, t: f.t}, nil
}

func (h *syncsHandle) Datasync() error {
	h.running.Add(1)
	defer h.running.Add(-1)
	ended := make(chan error)
	h.syncs <- ended
	if err := <-ended; err != nil {
		return err
	}
	return h.Handle.Datasync()
}

func (h *syncsHandle) Close() error {
	if h.running.Load() > 0 {
		h.t.Error("a file was closed while it was synced")
	}
	return h.Handle.Close()
}

// begun waits for the next sync to begin.
func (f *syncsFS) begun(t *testing.T) (ended chan error) {
	t.Helper()
	select {
	case ended = <-f.syncs:
		return ended
	case <-time.After(5 * time.Minute):
		t.Fatal("no sync was begun")
		return nil
	}
}

// goes lets every sync succeed from now on.
func (f *syncsFS) goes(t *testing.T) {
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case ended := <-f.syncs:
				ended <- nil
			case <-ctx.Done():
				return
			}
		}
	})
	t.Cleanup(func() { stop(); wg.Wait() })
}

func earlyWriter(t *testing.T) (*syncsFS, *Disk, block.LayerWriter) {
	t.Helper()
	d := newDisk(t)
	syncs := &syncsFS{d.FS, t, make(chan chan error)}
	d.FS, d.Early = syncs, 8<<20
	w, err := d.Create(t.Context(), string(api.NewUID()), 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	return syncs, d, w
}

func writeMiB(t *testing.T, w block.LayerWriter, from, n int64) {
	t.Helper()
	buf := block.AlignedBuffer(1 << 20)
	fill(buf, 7)
	for i := range n {
		if _, err := w.WriteAt(buf, (from+i)<<20); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSyncsWhileWriting: the writer syncs data during further writes, with a single sync at a time. The end of the
// layer waits for the sync.
func TestSyncsWhileWriting(t *testing.T) {
	t.Parallel()
	syncs, d, w := earlyWriter(t)
	writeMiB(t, w, 0, 8)
	first := syncs.begun(t)
	writeMiB(t, w, 8, 16) // the sync does not hold up the writes
	select {
	case <-syncs.syncs:
		t.Fatal("two syncs at once")
	default:
	}
	gone := make(chan error, 1)
	go func() { gone <- w.Abort() }()
	until(t, "it is aborted", func() bool {
		l := w.(*layer.Writer)
		l.Mu.Lock()
		defer l.Mu.Unlock()
		return l.State == layer.Aborted
	})
	if unlock, err := d.Lock(); err != nil { // Abort waits for the sync without the disk's lock
		t.Fatal(err)
	} else {
		unlock()
	}
	first <- nil
	if err := <-gone; err != nil {
		t.Fatal(err)
	}
}

// TestFailedSyncCountsForGood: a failed sync may have lost data, and no later sync reports the loss. The writer neither
// makes a checkpoint of such a layer nor seals the layer.
func TestFailedSyncCountsForGood(t *testing.T) {
	t.Parallel()
	t.Run("early", func(t *testing.T) {
		t.Parallel()
		syncs, _, w := earlyWriter(t)
		writeMiB(t, w, 0, 8)
		syncs.begun(t) <- unix.EIO
		syncs.goes(t)
		if _, _, err := w.Seal(t.Context()); !api.Is(err, api.Unavailable) {
			t.Fatalf("seal: %v", err)
		}
		if err := w.Abort(); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("kept", func(t *testing.T) {
		t.Parallel()
		syncs, _, w := earlyWriter(t)
		writeMiB(t, w, 0, 4)
		writer, kept := w.(block.CheckpointWriter), make(chan error, 1)
		go func() { kept <- writer.Checkpoint(4<<20, []byte(`{}`)) }()
		syncs.begun(t) <- unix.EIO
		if err := <-kept; !api.Is(err, api.Unavailable) {
			t.Fatalf("keep: %v", err)
		}
		syncs.goes(t)
		if err := writer.Checkpoint(4<<20, []byte(`{}`)); !api.Is(err, api.Unavailable) {
			t.Fatalf("kept all the same: %v", err)
		}
		if _, _, err := w.Seal(t.Context()); !api.Is(err, api.Unavailable) {
			t.Fatalf("sealed all the same: %v", err)
		}
		if err := w.Abort(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestEarlySyncedLayer: a layer synced during writes is whole.
func TestEarlySyncedLayer(t *testing.T) {
	t.Parallel()
	syncs, d, w := earlyWriter(t)
	syncs.goes(t)
	writeMiB(t, w, 0, 40)
	root, _, err := w.Seal(t.Context())
	if err != nil || root == "" {
		t.Fatal(root, err)
	}
	list, err := d.FS.ReadDir(d.Join(layer.Dir))
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	if err := d.Verify(t.Context(), list[0].Name()); err != nil {
		t.Fatal(err)
	}
}
