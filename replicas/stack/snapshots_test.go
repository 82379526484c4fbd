package stack

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// chained is a replica with snapshots, and the expected content.
type chained struct {
	t     *testing.T
	d     *Disk
	loop  *uring.Loop
	uid   string
	epoch int64
	rng   *rand.Rand
	model []byte
	snaps map[string][]byte // by uid of the snapshot
}

// scribble writes at random, and cuts a snapshot after each of n rounds.
func (c *chained) scribble(n int) (uids []string) {
	c.t.Helper()
	ctx := context.Background()
	c.epoch++
	r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
	if err != nil {
		c.t.Fatal(err)
	}
	if err := r.Adopt(ctx, c.epoch, 1, []string{c.uid}); err != nil {
		c.t.Fatal(err)
	}
	size := int64(len(c.model))
	buf := block.AlignedBuffer(256 << 10)
	for range n {
		for range 30 {
			off := c.rng.Int64N(size>>blockBits) << blockBits
			n := min((1+c.rng.Int64N(64))<<blockBits, size-off)
			if c.rng.IntN(4) == 0 {
				mustIssue(c.t, c.loop, r, block.OpDiscard, off, n, nil)
				clear(c.model[off : off+n])
				continue
			}
			randomBytes(c.rng, buf[:n])
			mustIssue(c.t, c.loop, r, block.OpWrite, off, n, buf[:n])
			copy(c.model[off:], buf[:n])
		}
		s := Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID()), Created: time.Now()}
		s.Name = s.UID
		if err := r.Cut(ctx, s); err != nil {
			c.t.Fatal(err)
		}
		c.snaps[s.UID] = slices.Clone(c.model)
		uids = append(uids, s.UID)
	}
	if err := r.Close(); err != nil {
		c.t.Fatal(err)
	}
	return uids
}

// check compares the replica and all snapshots with the model.
func (c *chained) check() {
	c.t.Helper()
	ctx := context.Background()
	if err := c.d.Collect(ctx, 0); err != nil {
		c.t.Fatal(err)
	}
	compareView(c.t, c.d, c.uid, c.model)
	m, err := c.d.readStack(c.uid)
	if err != nil || len(m.Snapshots) != len(c.snaps) {
		c.t.Fatalf("%d snapshots: %+v, %v", len(c.snaps), m, err)
	}
	for _, s := range m.Snapshots {
		chain, err := m.Chain(s.Layer)
		if err != nil {
			c.t.Fatal(err)
		}
		src, err := c.d.OpenStack(chain, int64(len(c.model)))
		if err != nil {
			c.t.Fatal(err)
		}
		got := make([]byte, len(c.model))
		if err := block.Copy(ctx, arraySink(got), src, block.CopyOptions{}); err != nil {
			c.t.Fatal(err)
		}
		if err := src.Close(); err != nil {
			c.t.Fatal(err)
		}
		if !bytes.Equal(got, c.snaps[s.UID]) {
			c.t.Fatalf("snapshot %s differs", s.UID)
		}
	}
}

func (c *chained) layersOnDisk() int {
	c.t.Helper()
	if err := c.d.Close(); err != nil { // waits for removals
		c.t.Fatal(err)
	}
	list, err := c.d.FS.ReadDir(c.d.Join(layer.Dir))
	if err != nil {
		c.t.Fatal(err)
	}
	return len(list)
}

func newChained(t *testing.T) *chained {
	seed := suite.Seed(t)
	const size = 16 << 20
	c := &chained{t: t, d: newDisk(t), loop: startLoop(t), uid: string(api.NewUID()), rng: rand.New(rand.NewPCG(seed, 0)),
		model: make([]byte, size), snaps: map[string][]byte{}}
	spec := Spec{UID: c.uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := c.d.CreateReplica(context.Background(), spec); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestRevertAndDrop: a revert keeps newer snapshots beside the head. The removal of such snapshots frees their layers,
// and no other layers.
func TestRevertAndDrop(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	c := newChained(t)
	first := c.scribble(3)
	c.check()
	if err := c.d.Revert(ctx, c.uid, string(api.NewUID()), 0); !api.Is(err, api.NotFound) {
		t.Fatalf("a snapshot that is not there: %v", err)
	}
	if err := c.d.Revert(ctx, c.uid, first[0], 0); err != nil {
		t.Fatal(err)
	}
	c.model = slices.Clone(c.snaps[first[0]])
	c.check()
	second := c.scribble(2)
	c.check()
	if err := c.d.Revert(ctx, c.uid, first[2], 0); err != nil { // to the other branch
		t.Fatal(err)
	}
	c.model = slices.Clone(c.snaps[first[2]])
	c.check()
	if n := c.layersOnDisk(); n != 5 {
		t.Fatalf("%d layers, want 5", n)
	}
	// The removal of the newest snapshot of the other branch removes the layer, too. The layer below stays.
	drop := func(uid string, left int) {
		t.Helper()
		if err := c.d.DropSnapshot(c.uid, uid); err != nil {
			t.Fatal(err)
		}
		delete(c.snaps, uid)
		c.check()
		if n := c.layersOnDisk(); n != left {
			t.Fatalf("%d layers, want %d", n, left)
		}
	}
	drop(second[1], 4)
	drop(second[0], 3)
	drop(first[0], 3) // in the head's chain: the layer stays until a merge
	drop(first[0], 3)
	c.scribble(1)
	c.check()
}

// TestRevertFences: a revert in a new epoch fences the engines of earlier epochs.
func TestRevertFences(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := newChained(t)
	first := c.scribble(1)[0]
	if err := c.d.Revert(ctx, c.uid, first, c.epoch+2); err != nil {
		t.Fatal(err)
	}
	r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
	if err != nil {
		t.Fatal(err)
	}
	for epoch := c.epoch; epoch < c.epoch+2; epoch++ {
		if err := r.Adopt(ctx, epoch, 9, []string{c.uid}); !api.Is(err, api.Denied) {
			t.Errorf("epoch %d is adopted: %v", epoch, err)
		}
	}
	if err := r.Adopt(ctx, c.epoch+3, 1, []string{c.uid}); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// TestClone: a clone is a new head on layers of the source, frozen or finished. The clone and the source can outlive
// each other.
func TestClone(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	c := newChained(t)
	snaps := c.scribble(2)
	m, err := c.d.readStack(c.uid)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := m.Chain(m.Snapshots[0].Layer)
	if err != nil {
		t.Fatal(err)
	}
	clone := &chained{t: t, d: c.d, loop: c.loop, uid: string(api.NewUID()), rng: c.rng,
		model: make([]byte, len(c.model)+8<<20), snaps: map[string][]byte{}}
	copy(clone.model, c.snaps[snaps[0]])
	spec := Spec{UID: clone.uid, Volume: "clone", VolumeUID: string(api.NewUID()), Size: int64(len(clone.model)), Layers: chain}
	if err := c.d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	clone.check()
	clone.scribble(1)
	clone.check()
	c.check()
	uids, err := c.d.Unfinished()
	if err != nil || len(uids) != 3 {
		t.Fatalf("unfinished %v, %v", uids, err)
	}
	for _, uid := range uids {
		if err := c.d.Finish(ctx, uid); err != nil {
			t.Fatal(err)
		}
	}
	clone.check()
	c.check()
	if err := c.d.RemoveReplica(c.uid); err != nil {
		t.Fatal(err)
	}
	clone.check()
	clone.scribble(1)
	clone.check()
	if n := c.layersOnDisk(); n != 3 {
		t.Fatalf("%d layers, want 3", n)
	}
	if err := c.d.RemoveReplica(clone.uid); err != nil {
		t.Fatal(err)
	}
	if n := c.layersOnDisk(); n != 0 {
		t.Fatalf("%d layers are left", n)
	}
}

// mergeAll merges all mergeable layers, under random I/O with writes in the upper half of the volume.
func (c *chained) mergeAll() {
	c.t.Helper()
	ctx := context.Background()
	uids, err := c.d.Unfinished()
	if err != nil {
		c.t.Fatal(err)
	}
	for _, uid := range uids {
		if err := c.d.Finish(ctx, uid); err != nil {
			c.t.Fatal(err)
		}
	}
	c.epoch++
	r, err := c.d.OpenReplica(ctx, c.uid, c.loop)
	if err != nil {
		c.t.Fatal(err)
	}
	if err := r.Adopt(ctx, c.epoch, 1, []string{c.uid}); err != nil {
		c.t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan error, 1)
	size := int64(len(c.model))
	go func() {
		rng := rand.New(rand.NewPCG(c.rng.Uint64(), 1))
		buf := block.AlignedBuffer(64 << 10)
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			off := rng.Int64N(size>>blockBits) << blockBits
			n := min(int64(len(buf)), size-off)
			if off >= size/2 && rng.IntN(2) == 0 {
				randomBytes(rng, buf[:n])
				if err := issue(c.loop, r, block.OpWrite, off, n, buf[:n], false); err != nil {
					ended <- err
					return
				}
				copy(c.model[off:], buf[:n])
				continue
			}
			if err := issue(c.loop, r, block.OpRead, off, n, buf[:n], false); err != nil {
				ended <- err
				return
			}
			if !bytes.Equal(buf[:n], c.model[off:off+n]) {
				ended <- api.Errorf(api.Corrupt, "read of %d at %d", n, off)
				return
			}
		}
	}()
	for {
		did, err := r.Merge(ctx, MergeOptions{})
		if err != nil {
			c.t.Fatal(err)
		}
		if !did {
			break
		}
	}
	close(stop)
	if err := <-ended; err != nil {
		c.t.Fatal(err)
	}
	compareAll(c.t, c.loop, r, c.model)
	if err := r.Close(); err != nil {
		c.t.Fatal(err)
	}
}

// TestMerge: layers of deleted snapshots are merged during I/O. Layers with other references stay.
func TestMerge(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	c := newChained(t)
	c.d.window = 3 << 20
	snaps := c.scribble(6)
	m, err := c.d.readStack(c.uid)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := m.Chain(m.Snapshots[1].Layer)
	if err != nil {
		t.Fatal(err)
	}
	clone := Spec{UID: string(api.NewUID()), Volume: "clone", VolumeUID: string(api.NewUID()), Size: int64(len(c.model)),
		Layers: chain}
	if err := c.d.CreateReplica(ctx, clone); err != nil {
		t.Fatal(err)
	}
	image := slices.Clone(c.snaps[snaps[1]])
	for _, k := range []int{0, 2, 3} {
		if err := c.d.DropSnapshot(c.uid, snaps[k]); err != nil {
			t.Fatal(err)
		}
		delete(c.snaps, snaps[k])
	}
	c.mergeAll()
	c.check()
	// The clone has 0 and 1; 2, 3 and 4 are merged; 5 is a snapshot.
	if n := c.layersOnDisk(); n != 4 {
		t.Fatalf("%d layers, want 4", n)
	}
	compareView(t, c.d, clone.UID, image)
	if err := c.d.RemoveReplica(clone.UID); err != nil {
		t.Fatal(err)
	}
	c.mergeAll()
	c.check()
	if n := c.layersOnDisk(); n != 3 {
		t.Fatalf("%d layers, want 3", n)
	}
	list, err := c.d.Replicas()
	if err != nil {
		t.Fatal(err)
	}
	for _, uid := range list[0].Layers {
		if err := c.d.Verify(ctx, uid); err != nil {
			t.Fatal(err)
		}
	}
	// A reader keeps the open layers unchanged.
	for _, uid := range []string{snaps[1], snaps[4]} {
		if err := c.d.DropSnapshot(c.uid, uid); err != nil {
			t.Fatal(err)
		}
		delete(c.snaps, uid)
	}
	src, err := c.d.OpenStack(list[0].Layers, int64(len(c.model)))
	if err != nil {
		t.Fatal(err)
	}
	c.mergeAll()
	if n := c.layersOnDisk(); n != 3 {
		t.Fatalf("%d layers, want 3: they are being read", n)
	}
	if err := src.Close(); err != nil {
		t.Fatal(err)
	}
	c.mergeAll()
	c.check()
	if n := c.layersOnDisk(); n != 1 {
		t.Fatalf("%d layers, want 1", n)
	}
}

// TestImageBeforeDigests: an image of a snapshot references layers before the layers have digests, and keeps the
// layers.
func TestImageBeforeDigests(t *testing.T) {
	t.Parallel()
	c := newChained(t)
	snap := c.scribble(2)[1]
	img := block.Image{UID: string(api.NewUID()), Name: "golden", Format: "raw"}
	holds := func(in block.Image, finished bool) {
		t.Helper()
		rec, err := c.d.Image(img.UID)
		if err != nil || (rec.Digest != "") != finished || rec.Digest != in.Digest {
			t.Fatalf("%+v, %+v, %v", rec, in, err)
		}
		src, err := c.d.OpenStack(rec.Layers, rec.VirtualSize)
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		got := make([]byte, rec.VirtualSize)
		if err := block.Copy(t.Context(), arraySink(got), src, block.CopyOptions{}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, c.snaps[snap]) {
			t.Fatal("the image holds something else")
		}
		if n, err := c.d.Taken(rec); err != nil || n == 0 {
			t.Fatalf("it takes %d bytes, %v", n, err)
		}
	}
	var err error
	if img.Layers, img.VirtualSize, err = c.d.Hold(t.Context(), img.UID, img.Name, c.uid, snap); err != nil {
		t.Fatal(err)
	}
	for _, uid := range img.Layers { // another node sends a copy of such an image meanwhile
		if _, err := c.d.Create(t.Context(), uid, 1<<20); !api.Is(err, api.Busy) && !api.Is(err, api.Exists) {
			t.Fatalf("a layer that a snapshot has is made anew: %v", err)
		}
	}
	wrong := img
	wrong.Digest = "sha256:00"
	if err := c.d.PutImage(wrong); !api.Is(err, api.NotFound) {
		t.Fatalf("an image with a digest of layers without: %v", err)
	}
	wrong.Layers = append(slices.Clone(img.Layers), string(api.NewUID()))
	if _, err := c.d.Name(t.Context(), wrong); !api.Is(err, api.NotFound) {
		t.Fatalf("an image of a layer that is not there: %v", err)
	}
	named, err := c.d.Name(t.Context(), img)
	if err != nil {
		t.Fatal(err)
	}
	if pins, err := c.d.Pins(); err != nil || len(pins) > 0 {
		t.Fatalf("pins %v, %v", pins, err)
	}
	if err := c.d.RemoveReplica(c.uid); err != nil {
		t.Fatal(err)
	}
	if err := c.d.Collect(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	holds(named, false)
	if named, err = c.d.Digests(t.Context(), named); err != nil {
		t.Fatal(err)
	}
	holds(named, true)
	root, _, err := c.d.Digest(img.Layers[len(img.Layers)-1])
	if err != nil || root != named.Digest {
		t.Fatalf("%s, not %s; %v", root, named.Digest, err)
	}
	if again, err := c.d.Name(t.Context(), img); err != nil || again.Digest != root {
		t.Fatalf("%+v, %v", again, err)
	}
	if err := c.d.Forget(img.UID); err != nil {
		t.Fatal(err)
	}
	if n := c.layersOnDisk(); n != 0 {
		t.Fatalf("%d layers are left", n)
	}
}

// TestImageOfDamagedLayers: the disk makes no image of layers with known damage, until the layers are whole again.
func TestImageOfDamagedLayers(t *testing.T) {
	t.Parallel()
	c := newChained(t)
	snap := c.scribble(2)[1]
	img := block.Image{UID: string(api.NewUID()), Name: "golden", Format: "raw"}
	var err error
	if img.Layers, img.VirtualSize, err = c.d.Hold(t.Context(), img.UID, img.Name, c.uid, snap); err != nil {
		t.Fatal(err)
	}
	uid := img.Layers[0]
	if err := c.d.Finish(t.Context(), uid); err != nil {
		t.Fatal(err)
	}
	l, err := c.d.OpenLayer(uid, c.d.Direct)
	if err != nil {
		t.Fatal(err)
	}
	kinds, err := format.IndexOf(l.Map)
	if err := errors.Join(err, l.Close()); err != nil {
		t.Fatal(err)
	}
	e := int64(0)
	for !kinds.Chunk(e / chunkSize).Data {
		e += chunkSize
	}
	f, err := os.OpenFile(c.d.Join(layer.Dir, uid, layer.DataFile), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	was, bad := make([]byte, chunkSize), make([]byte, chunkSize)
	n, err := f.ReadAt(was, e)
	if err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	for i := range bad {
		bad[i] = was[i] ^ 1
	}
	if _, err := f.WriteAt(bad[:n], e); err != nil {
		t.Fatal(err)
	}
	if list, err := c.d.Scrub(t.Context(), uid, 0); err != nil || len(list) == 0 {
		t.Fatal(list, err)
	}
	if _, err := c.d.Name(t.Context(), img); !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "damaged") {
		t.Fatalf("an image of a damaged layer: %v", err)
	}
	if _, err := c.d.Image(img.UID); !errors.Is(err, os.ErrNotExist) && !api.Is(err, api.NotFound) {
		t.Fatalf("it is recorded: %v", err)
	}
	if _, err := f.WriteAt(was[:n], e); err != nil {
		t.Fatal(err)
	}
	if _, err := c.d.Name(t.Context(), img); err != nil {
		t.Fatalf("after a repair: %v", err)
	}
	if list := c.d.Damaged(uid); len(list) > 0 {
		t.Errorf("it is still said to be damaged: %v", list)
	}
}

// TestRevertOfUnknownOutcome: Revert does not report a failed revert if the record is in place, but may not be durable.
func TestRevertOfUnknownOutcome(t *testing.T) {
	t.Parallel()
	c := newChained(t)
	first := c.scribble(2)[0]
	d, f := tap(t, c.d)
	dir := c.d.Join(replicaDir, c.uid)
	was, err := c.d.readStack(c.uid)
	if err != nil {
		t.Fatal(err)
	}
	hit := false
	f.set(func(op, name string) (func(), error) {
		if m, err := c.d.readStack(c.uid); op == opSync && name == dir && !hit && err == nil && m.Head != was.Head {
			hit = true
			return nil, unix.EIO
		}
		return nil, nil
	})
	if err := d.Revert(context.Background(), c.uid, first, c.epoch+1); !hit || !api.Is(err, api.Busy) {
		t.Errorf("a revert whose end is not known: %v", err)
	}
	if m, err := c.d.readStack(c.uid); err != nil || m.Reverted != c.epoch+1 {
		t.Errorf("after that: %+v, %v", m, err)
	}
	if err := d.SyncRecord(c.uid); err != nil {
		t.Error(err)
	}
	c.model = c.snaps[first]
	c.check()
}
