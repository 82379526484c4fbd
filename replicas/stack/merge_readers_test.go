package stack

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"
)

// TestOpenSnapshotNeedsNoHold: an open snapshot stays readable after the snapshot and the replica are removed, and holds
// nothing. A snapshot or replica that does not exist is an error of kind not found.
func TestOpenSnapshotNeedsNoHold(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	c := newChained(t)
	snaps := c.scribble(3)
	want := c.snaps[snaps[1]]
	src, err := c.d.OpenSnapshot(c.uid, anyCut(snaps[1]))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if pins, err := c.d.Pins(); err != nil || len(pins) > 0 {
		t.Errorf("pins %v, %v", pins, err)
	}
	for _, uid := range snaps {
		if err := c.d.DropSnapshot(c.uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.d.RemoveReplica(c.uid); err != nil {
		t.Fatal(err)
	}
	if n := c.layersOnDisk(); n > 0 {
		t.Errorf("%d layers are left", n)
	}
	if src.Size() != int64(len(want)) {
		t.Fatalf("%d bytes, want %d", src.Size(), len(want))
	}
	for i := range src.Size() / chunkSize {
		if !bytes.Equal(readChunk(t, src, i), want[i*chunkSize:][:chunkSize]) {
			t.Errorf("chunk %d differs from the snapshot", i)
		}
	}
	for replica, snapshot := range map[string]string{c.uid: snaps[1], string(api.NewUID()): snaps[1]} {
		if _, err := c.d.OpenSnapshot(replica, anyCut(snapshot)); !api.Is(err, api.NotFound) {
			t.Errorf("a snapshot that does not exist: %v", err)
		}
	}
}

// TestMergeWaitsForAReader: a reader has a layer open when its merge begins. The layers are merged as soon as the reader
// has closed the layer, and stay while the reader does not.
func TestMergeWaitsForAReader(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := t.Context()
	c := newChained(t)
	snaps := c.scribble(3)
	if err := c.d.DropSnapshot(c.uid, snaps[0]); err != nil {
		t.Fatal(err)
	}
	r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := r.Adopt(ctx, 2, 1, []string{c.uid}); err != nil {
		t.Fatal(err)
	}
	if err := c.d.MakeDigests(ctx, r.Meta().Layers); err != nil {
		t.Fatal(err)
	}
	src, err := c.d.OpenSnapshot(c.uid, anyCut(snaps[1]))
	if err != nil {
		t.Fatal(err)
	}
	if did, err := r.Merge(ctx, MergeOptions{}); did || err != nil {
		t.Errorf("layers that a reader has open: merged %v, %v", did, err)
	}
	type result struct {
		did bool
		err error
	}
	merged := make(chan result, 1)
	go func() {
		did, err := r.Merge(ctx, MergeOptions{})
		merged <- result{did, err}
	}()
	for r.merging.TryLock() { // until the merge waits for the reader
		r.merging.Unlock()
		runtime.Gosched()
	}
	if err := src.Close(); err != nil {
		t.Fatal(err)
	}
	if got := <-merged; !got.did || got.err != nil {
		t.Errorf("after the reader: merged %v, %v", got.did, got.err)
	}
	src, err = c.d.OpenSnapshot(c.uid, anyCut(snaps[1]))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if want := c.snaps[snaps[1]]; !bytes.Equal(readChunk(t, src, 0), want[:chunkSize]) {
		t.Error("the merged layer differs from the snapshot")
	}
}

// TestMergesWaitSecondsForReaders: a merge waits until readers have closed the layers, for seconds and not longer, and
// ends with its context.
func TestMergesWaitSecondsForReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, open := time.Now(), 4*time.Second
		begin := func() error {
			if time.Since(began) < open {
				return layer.ErrRead
			}
			return nil
		}
		if err := layer.AwaitReaders(t.Context(), begin); err != nil || time.Since(began) > open+time.Second {
			t.Errorf("a reader of %v: %v after %v", open, err, time.Since(began))
		}
		began, open = time.Now(), time.Hour
		if err := layer.AwaitReaders(t.Context(), begin); !errors.Is(err, layer.ErrRead) || time.Since(began) > time.Minute {
			t.Errorf("a reader of %v: %v after %v", open, err, time.Since(began))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := layer.AwaitReaders(ctx, begin); !errors.Is(err, context.Canceled) {
			t.Errorf("after the end of the context: %v", err)
		}
	})
}
