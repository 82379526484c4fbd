package stack

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/replicas/stack/layer"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// farther is the disk of another node, as a source of layers.
type farther struct {
	disk    *Disk
	fetched atomic.Int64 // bytes
	fails   atomic.Bool
	lies    atomic.Bool
}

func (f *farther) fetch(_ context.Context, l RemoteLayer, off int64, buf []byte, _ func([]byte) error) error {
	if f.fails.Load() {
		return api.Errorf(api.Unavailable, "it is cut off")
	}
	src, err := f.disk.Open(l.UID)
	if err != nil {
		return err
	}
	defer src.Close()
	if _, err := src.ReadAt(buf, off); err != nil {
		return err
	}
	if f.lies.Load() {
		buf[len(buf)/2] ^= 1
	}
	f.fetched.Add(int64(len(buf)))
	return nil
}

// hydrate lets d read a layer of f.
func (f *farther) hydrate(d *Disk, uid string) error {
	root, _, err := f.disk.Digest(uid)
	if err != nil {
		return err
	}
	src, err := f.disk.Open(uid)
	if err != nil {
		return err
	}
	defer src.Close()
	sums, err := f.disk.Sums(uid)
	if err != nil {
		return err
	}
	return d.Hydrate(context.Background(), uid, root, src, sums)
}

// hydrates returns the layers which a replica reads from sources, and the reason why reads wait.
func hydrates(r *Replica) (layers []string, why error) {
	for _, l := range r.Remote() {
		layers = append(layers, l.UID)
		why = cmp.Or(why, l.Why)
	}
	return layers, why
}

// TestHydrate: a replica hydrates a layer of another node chunk by chunk on demand, waits while the source does not
// answer, knows the fetched chunks after a restart, and in the end reads the copy on its own disk.
func TestHydrate(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	const size = pageSize + 24<<20
	ctx := context.Background()
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	far := &farther{disk: newDisk(t)}
	d := newDisk(t)
	d.Sources(nil, far.fetch)
	model := make([]byte, size)
	layerUID := makeLayer(t, far.disk, rng, size, model)
	uid := string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layerUID}}
	if err := d.CreateReplica(ctx, spec); !api.Is(err, api.NotFound) {
		t.Fatalf("a layer that nobody has spoken of: %v", err)
	}
	for range 2 {
		if err := far.hydrate(d, layerUID); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	loop := startLoop(t)
	open := func() *Replica {
		t.Helper()
		r, err := d.OpenReplica(ctx, uid, loop)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := open()
	if layers, why := hydrates(r); len(layers) != 1 || why != nil {
		t.Fatalf("it reads %v from elsewhere: %v", layers, why)
	}
	if n := far.fetched.Load(); n != 0 {
		t.Errorf("%d bytes were fetched before anybody read", n)
	}
	check := func(r *Replica, off, n int64) error {
		buf := block.AlignedBuffer(int(n))
		if err := issue(loop, r, block.OpRead, off, n, buf, false); err != nil {
			return err
		}
		if string(buf) != string(model[off:off+n]) {
			return errors.New("it reads something else")
		}
		return nil
	}
	for range 20 {
		off := rng.Int64N(size/blockSize-256) * blockSize
		if err := check(r, off, (1+rng.Int64N(255))*blockSize); err != nil {
			t.Fatal(err)
		}
	}
	some := far.fetched.Load()
	if some >= size {
		t.Errorf("%d bytes were fetched for 20 reads", some)
	}

	// The source fails, then sends rubbish: reads wait, and writes continue.
	var lost atomic.Int32
	r.OnLost(func(is bool) {
		if lost.Add(-1); is {
			lost.Add(2)
		}
	})
	far.fails.Store(true)
	done := make(chan error, 1)
	go func() {
		for off := int64(0); off < size; off += 1 << 20 {
			if err := check(r, off, 1<<20); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for lost.Load() == 0 {
		select {
		case <-tick.C:
		case err := <-done:
			t.Fatalf("reads went on without the other machine: %v", err)
		}
	}
	if _, why := hydrates(r); !api.Is(why, api.Unavailable) {
		t.Errorf("why reads wait: %v", why)
	}
	buf := block.AlignedBuffer(int(blockSize))
	mustIssue(t, loop, r, block.OpWrite, size-blockSize, blockSize, buf)
	clear(model[size-blockSize:])
	far.lies.Store(true)
	far.fails.Store(false)
	for {
		_, why := hydrates(r)
		if api.Is(why, api.Corrupt) {
			break
		}
		select {
		case <-tick.C:
		case err := <-done:
			t.Fatalf("rubbish was taken: %v", err)
		}
	}
	far.lies.Store(false)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := lost.Load(); n != 0 {
		t.Errorf("told %d times more that reads wait than that they do not", n)
	}
	all := far.fetched.Load()

	// After the replica was closed and opened, no chunk is fetched again. A view of the replica reads the same data.
	if err := errors.Join(r.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	r = open()
	compareAll(t, loop, r, model)
	if n := far.fetched.Load(); n != all {
		t.Errorf("%d bytes travelled again", n-all)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	compareView(t, d, uid, model)
	r = open()
	defer func() { _ = r.Close() }()

	bring(t, far.disk, d, layerUID)
	if err := r.Localize(ctx); err != nil {
		t.Fatal(err)
	}
	if layers, _ := hydrates(r); len(layers) != 0 {
		t.Fatalf("still read from elsewhere: %v", layers)
	}
	far.fails.Store(true)
	compareAll(t, loop, r, model)
	if err := d.Close(); err != nil { // the removal in the background has ended
		t.Fatal(err)
	}
	if _, err := os.Stat(d.Join(layer.HydratingDir, layerUID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what was read on the way stays: %v", err)
	}
}

// TestHydrateClose: a replica which waits for a source can be closed. Waiting reads then fail.
func TestHydrateClose(t *testing.T) {
	const size = 8 << 20
	ctx := context.Background()
	far := &farther{disk: newDisk(t)}
	d := newDisk(t)
	d.Sources(nil, far.fetch)
	model := make([]byte, size)
	layerUID := makeLayer(t, far.disk, rand.New(rand.NewPCG(1, 1)), size, model)
	if err := far.hydrate(d, layerUID); err != nil {
		t.Fatal(err)
	}
	far.fails.Store(true)
	uid := string(api.NewUID())
	if err := d.CreateReplica(ctx, Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: size,
		Layers: []string{layerUID}}); err != nil {
		t.Fatal(err)
	}
	loop := startLoop(t)
	r, err := d.OpenReplica(ctx, uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- issue(loop, r, block.OpRead, 0, 4<<20, block.AlignedBuffer(4<<20), false) }()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for why := error(nil); why == nil; _, why = hydrates(r) {
		<-tick.C
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil {
		t.Error("a read was answered without its layer")
	}
	if err := errors.Join(d.RemoveReplica(uid), d.Close()); err != nil {
		t.Fatal(err)
	}
	d.DropHydrating()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(d.Join(layer.HydratingDir, layerUID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what nobody needs stays: %v", err)
	}
}
