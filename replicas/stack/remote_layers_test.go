package stack

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"
)

// fromDisk lets d read layers of another disk of the node.
func fromDisk(d, other *Disk) {
	d.Sources(func() []*Disk { return []*Disk{other} },
		func(ctx context.Context, l RemoteLayer, off int64, buf []byte, check func([]byte) error) error {
			b, err := other.ReadLayer(ctx, l.UID, off, len(buf))
			if err == nil {
				err = check(b)
			}
			copy(buf, b)
			return err
		})
}

// onTwoDisks makes a layer on disk a, and opens a replica of the layer on disk b.
func onTwoDisks(t *testing.T, size int64) (a, b *Disk, layer, uid string, r *Replica, loop ring, model []byte) {
	t.Helper()
	ctx := context.Background()
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	a, b = newDisk(t), newDisk(t)
	fromDisk(b, a)
	model = make([]byte, size)
	layer = makeLayer(t, a, rng, size, model)
	uid = string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layer}}
	if err := a.CreateReplica(ctx, Spec{UID: string(api.NewUID()), Volume: "w", VolumeUID: string(api.NewUID()), Size: size,
		Layers: []string{string(api.NewUID())}}); !api.Is(err, api.NotFound) {
		t.Fatalf("a layer that is nowhere: %v", err)
	}
	if err := b.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	l := startLoop(t)
	r, err := b.OpenReplica(ctx, uid, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	if err := r.Adopt(ctx, 1, 1, []string{uid}); err != nil {
		t.Fatal(err)
	}
	return a, b, layer, uid, r, l, model
}

// bring copies the layer to another disk.
func bring(t *testing.T, from, to *Disk, layer string) {
	t.Helper()
	ctx := context.Background()
	src, err := from.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	w, err := to.Create(ctx, layer, src.Size())
	if err != nil {
		t.Fatal(err)
	}
	if err := block.Copy(ctx, w, src, block.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Seal(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestLayerOfAnotherDiskIsReadUntilTheCopyIsHere: a replica reads a layer from another disk until the copy on the own
// disk is finished. Then the replica needs the other disk no more.
func TestLayerOfAnotherDiskIsReadUntilTheCopyIsHere(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	const size = pageSize + 24<<20
	a, b, layerUID, uid, r, loop, model := onTwoDisks(t, size)
	ctx := context.Background()
	if got := r.Remote(); len(got) != 1 || got[0] != (RemoteLayer{UID: layerUID, From: SourceDisk{UID: a.UID(), Path: a.Path()}, Why: nil}) {
		t.Fatalf("it reads %v from elsewhere", got)
	}
	compareAll(t, loop, r, model)
	if err := r.Localize(ctx); err != nil { // no copy exists yet
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() { // I/O all the time, on the upper half
		buf := block.AlignedBuffer(64 << 10)
		for i := int64(0); ; i++ {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			off := size/2 + i*int64(len(buf))%(size/4)
			for j := range buf {
				buf[j] = byte(i + int64(j))
			}
			copy(model[off:], buf)
			if err := issue(loop, r, block.OpWrite, off, int64(len(buf)), buf, false); err != nil {
				ended <- err
				return
			}
			if err := issue(loop, r, block.OpRead, off-size/2, int64(len(buf)), buf, false); err != nil {
				ended <- err
				return
			}
		}
	}()
	bring(t, a, b, layerUID)
	localizeAll(t, r)
	if r.Hydrates() {
		t.Fatalf("it still reads %v from elsewhere", r.Remote())
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(a.Join(layer.Dir, layerUID)); err != nil {
		t.Fatal(err)
	}
	compareAll(t, loop, r, model)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	b.Sources(nil, nil)
	compareView(t, b, uid, model)
	if err := b.RemoveReplica(uid); err != nil {
		t.Fatal(err)
	}
}

// localizeAll repeats Localize, which leaves a layer open while I/O on a busy node still uses the layer.
func localizeAll(t *testing.T, r *Replica) {
	t.Helper()
	end := time.Now().Add(time.Minute)
	err := r.Localize(context.Background())
	for api.Is(err, api.Busy) && time.Now().Before(end) {
		err = r.Localize(context.Background())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestFirstReadBringsAChunkHome: the first read of a chunk on another disk writes the chunk to the own disk. A later
// process reads the chunk there, also without the other disk. Reads of other chunks wait for the other disk. Writes
// continue, and the replica can be closed.
func TestFirstReadBringsAChunkHome(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	const size = 8 << 20
	ctx := context.Background()
	a, b := newDisk(t), newDisk(t)
	fromDisk(b, a)
	model := make([]byte, size)
	randomBytes(rand.New(rand.NewPCG(1, 1)), model)
	layerUID, uid := wholeLayer(t, a, model), string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layerUID}}
	if err := b.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	if b.Hydrating(layerUID) {
		t.Error("the layer was looked at before anybody opened the replica")
	}
	loop := startLoop(t)
	read := func(r *Replica, off int64) error {
		buf := block.AlignedBuffer(int(blockSize))
		err := issue(loop, r, block.OpRead, off, blockSize, buf, false)
		if err == nil && !bytes.Equal(buf, model[off:off+blockSize]) {
			t.Errorf("the block at %d is another one", off)
		}
		return err
	}
	r, err := b.OpenReplica(ctx, uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	if err := read(r, chunkSize+5*blockSize); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Close(), b.Close()); err != nil {
		t.Fatal(err)
	}
	away := a.Join(layer.Dir, layerUID) + ".away"
	if err := os.Rename(a.Join(layer.Dir, layerUID), away); err != nil {
		t.Fatal(err)
	}
	if b, err = Open(b.Root); err != nil { // as a new process which sees no other disk
		t.Fatal(err)
	}
	defer b.Close()
	b.Sources(nil, func(context.Context, RemoteLayer, int64, []byte, func([]byte) error) error {
		return api.Errorf(api.Unavailable, "no disk has it")
	})
	if r, err = b.OpenReplica(ctx, uid, loop); err != nil {
		t.Fatal(err)
	}
	told := make(chan bool, 10)
	r.OnLost(func(lost bool) { told <- lost })
	for i := range chunkSize >> blockBits {
		if err := read(r, chunkSize+i<<blockBits); err != nil {
			t.Fatal(err)
		}
	}
	waits := make(chan error, 1)
	go func() { waits <- read(r, 0) }()
	if lost := <-told; !lost || !api.Is(r.Remote()[0].Why, api.Unavailable) {
		t.Errorf("that the source is lost is told as %v, %v", lost, r.Remote())
	}
	mustIssue(t, loop, r, block.OpWrite, 6<<20, blockSize, block.AlignedBuffer(int(blockSize)))
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if err := <-waits; err == nil {
		t.Error("a read without its layer succeeded")
	}
}

// TestReadsGoOnWhenTheOtherDiskIsBack: a source loses a layer after reads began. Reads of other chunks wait until the
// source has the layer again.
func TestReadsGoOnWhenTheOtherDiskIsBack(t *testing.T) {
	t.Parallel()
	a, b, layerUID, _, r, loop, model := onTwoDisks(t, 8<<20)
	told := make(chan bool, 10)
	r.OnLost(func(lost bool) { told <- lost })
	at := a.Join(layer.Dir, layerUID)
	if err := os.Rename(at, at+".away"); err != nil {
		t.Fatal(err)
	}
	whole := make(chan struct{})
	go func() {
		defer close(whole)
		compareAll(t, loop, r, model)
	}()
	if lost := <-told; !lost {
		t.Error("told that a lost disk is back")
	}
	if err := os.Rename(at+".away", at); err != nil {
		t.Fatal(err)
	}
	<-whole
	if lost := <-told; lost {
		t.Error("OnLost did not tell of the end")
	}
	bring(t, a, b, layerUID)
	localizeAll(t, r)
	compareAll(t, loop, r, model)
}

// TestFrozenLayerOfAnotherDisk: another disk has cut a layer a moment ago, and the layer has no digests yet. The
// replica reads the layer at once and compares fetched chunks with checksums. The finished layer is copied, and the
// copy takes over.
func TestFrozenLayerOfAnotherDisk(t *testing.T) {
	t.Parallel()
	c := newChained(t)
	ctx := context.Background()
	snap := c.scribble(2)[1]
	b := c.second()
	uid := string(api.NewUID())
	pin, err := c.d.Pin(ctx, Pin{UID: uid, For: "clone", Disk: b.UID()}, c.uid, snap)
	if err != nil {
		t.Fatal(err)
	}
	top := pin.Layers[len(pin.Layers)-1]
	if _, err := c.d.Record(top); !api.Is(err, api.NotFound) {
		t.Fatalf("the layer was to be frozen: %v", err)
	}
	spec := Spec{UID: uid, Volume: "clone", VolumeUID: string(api.NewUID()), Size: int64(len(c.model)), Layers: pin.Layers}
	if err := b.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := b.OpenReplica(ctx, uid, c.loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	model := c.snaps[snap]
	compareAll(t, c.loop, r, model)
	l := r.layers[len(r.layers)-1]
	off, n := int64(0), l.Rec.Size>>blockBits
	for b := int64(0); b < n; {
		v, m := l.Hydration.Kinds.Run(b, n)
		if block.Kind(v) == block.Data {
			off = b << blockBits
			break
		}
		b += m
	}
	flip(t, b, top, off, model[off]) // in a fetched chunk: fetched again, not served
	compareAll(t, c.loop, r, model)
	for _, uid := range pin.Layers {
		if err := b.CopyLayer(ctx, c.d, uid, CopyOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	localizeAll(t, r)
	if err := os.RemoveAll(c.d.Join(layer.Dir)); err != nil {
		t.Fatal(err)
	}
	compareAll(t, c.loop, r, model)
	if r.Hydrates() {
		t.Errorf("it still reads %v elsewhere", r.Remote())
	}
}

// TestFailedHydrationIsNoMissingLayer: a replica cannot hydrate a layer for the moment, because the other disk is
// cutting the layer or the own disk is full. The error does not report a missing layer.
func TestFailedHydrationIsNoMissingLayer(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	a, plain := newDisk(t), newDisk(t)
	b, f := tap(t, plain)
	fromDisk(b, a)
	layerUID, uid := wholeLayer(t, a, make([]byte, 4<<20)), string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: 4 << 20, Layers: []string{layerUID}}
	if err := b.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	loop := startLoop(t)
	f.set(func(op, name string) (func(), error) {
		if strings.Contains(name, layer.HydratingDir) {
			return nil, unix.ENOSPC
		}
		return nil, nil
	})
	if _, err := b.openReplica(ctx, uid, loop); !api.Is(err, api.Full) {
		t.Errorf("a full disk: %v", err)
	}
	f.set(nil)
	r, err := b.openReplica(ctx, uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// hydrateStep does all operations on a layer of another disk: the first open, reads, and the record of fetched chunks.
var hydrateStep = step{name: "hydrate from another disk", setup: func(t *testing.T, d *Disk, i *ids) {
	i.from = newDisk(t)
	i.makeLayer(t, i.from)
	fromDisk(d, i.from)
	if err := d.CreateReplica(context.Background(), i.spec(i.layer)); err != nil {
		t.Fatal(err)
	}
},
	do: func(d *Disk, p *power, i *ids) error {
		fromDisk(d, i.from)
		r, err := d.openReplica(context.Background(), i.replica, p)
		if err != nil {
			return err
		}
		for _, at := range []int64{0, 700} {
			err = errors.Join(err, r.layers[0].Hydration.Await(at<<blockBits, blockSize))
			r.layers[0].Hydration.SaveState()
		}
		return errors.Join(err, r.Close(), d.Close())
	},
	check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
		fromDisk(d, i.from)
		i.e.check(t, d, p, i.replica)
		if err := errors.Join(d.RemoveReplica(i.replica), d.Close()); err != nil {
			t.Fatal(err)
		}
		d.DropHydrating()
		d.Wait()
		if left, err := d.FS.ReadDir(d.Join(layer.HydratingDir)); err == nil && len(left) > 0 {
			t.Fatalf("what was read stays: %v", left)
		}
	}}
