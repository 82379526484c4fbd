package stack

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
)

// TestRemovedFilesAreEmptied: the disk empties removed files piece by piece, but no file with a reader.
func TestRemovedFilesAreEmptied(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	d := newDisk(t)
	blocks := make([]int64, 1024)
	for i := range blocks {
		blocks[i] = int64(2 * i)
	}
	remove := func() (layerUID string, done func()) {
		t.Helper()
		layerUID = filledLayer(t, d, 8<<20, blocks, 1<<32, make(expect))
		spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 8 << 20,
			Layers: []string{layerUID}}
		if err := d.CreateReplica(ctx, spec); err != nil {
			t.Fatal(err)
		}
		return layerUID, func() {
			t.Helper()
			if err := errors.Join(d.RemoveReplica(spec.UID), d.Close()); err != nil {
				t.Fatal(err)
			}
			if left, err := d.FS.ReadDir(d.Join(trashDir)); err != nil || len(left) > 0 {
				t.Fatalf("%v, %v", left, err)
			}
		}
	}
	layerUID, done := remove()
	src, err := d.Open(layerUID)
	if err != nil {
		t.Fatal(err)
	}
	before, after := make([]byte, 8<<20), make([]byte, 8<<20)
	if _, err := src.ReadAt(before, 0); err != nil {
		t.Fatal(err)
	}
	done()
	if _, err := src.ReadAt(after, 0); err != nil || !bytes.Equal(before, after) {
		t.Errorf("a layer that is read is not what it was any more: %v", err)
	}
	if err := src.Close(); err != nil {
		t.Fatal(err)
	}

	layerUID, done = remove()
	h, err := os.Open(d.Join(layer.Dir, layerUID, layer.DataFile)) // as a reader without a lock yet
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	until(t, "nobody has a lock on it", func() bool {
		held, err := d.Locked(d.Join(layer.Dir, layerUID, layer.DataFile))
		if err != nil {
			t.Fatal(err)
		}
		return !held
	})
	done()
	if from, _, err := file.NextData(int(h.Fd()), 0, math.MaxInt64); err != nil || from != math.MaxInt64 {
		t.Errorf("it holds data at %d: %v", from, err)
	}
	if st, err := h.Stat(); err != nil || diskfs.LinkCount(st) != 0 {
		t.Errorf("it has a name: %v", err)
	}
}

// slowFile needs long to free more than 1 MiB.
type slowFile struct {
	file.Handle
	largest, calls int64
}

func (s *slowFile) Punch(_, n int64) error {
	s.largest, s.calls = max(s.largest, n), s.calls+1
	if n > 1<<20 {
		<-time.After(2 * diskfs.PieceLong)
	}
	return nil
}

// TestPiecesAreAsLargeAsTheDiskIsFast: the pieces to free grow while the disk is fast, and shrink when the disk is
// slow.
func TestPiecesAreAsLargeAsTheDiskIsFast(t *testing.T) {
	var s slowFile
	e := diskfs.Emptier{}
	if err := e.Punch(&s, 0, 64<<20); err != nil {
		t.Fatal(err)
	}
	if s.largest != 2<<20 || s.calls < 30 || s.calls > 200 {
		t.Errorf("%d calls, the largest of %d bytes", s.calls, s.largest)
	}
}

// TestHalfMergedReplicaIsRemoved: the removal of a replica in the middle of a merge leaves no file.
func TestHalfMergedReplicaIsRemoved(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx, c := context.Background(), newChained(t)
	c.d.window = 2 << 20
	snaps := c.scribble(3)
	uids, err := c.d.Unfinished()
	if err != nil {
		t.Fatal(err)
	}
	for _, uid := range uids {
		if err := c.d.Finish(ctx, uid); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.d.DropSnapshot(c.uid, snaps[0]); err != nil {
		t.Fatal(err)
	}
	r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = r.Merge(untilMerging{ctx, r}, MergeOptions{}); !errors.Is(err, errPatience) {
		t.Fatalf("it was to be interrupted: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	m, err := c.d.Stack(c.uid)
	if err != nil || m.Merge == nil {
		t.Fatalf("%+v, %v", m, err)
	}
	half := c.d.Join(layer.Dir, m.Merge.Result) // as a merge leaves the folder before its last commit
	if err := errors.Join(os.Mkdir(half, 0o700), os.Link(c.d.Join(layer.Dir, m.Merge.Upper, layer.DataFile), half+"/"+layer.DataFile),
		c.d.RemoveReplica(c.uid), c.d.Close()); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{layer.Dir, replicaDir, trashDir} {
		if left, err := c.d.FS.ReadDir(c.d.Join(dir)); err != nil || len(left) > 0 {
			t.Fatalf("%s holds %v, %v", dir, left, err)
		}
	}
}
