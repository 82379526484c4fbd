package stack

import (
	"context"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// lend makes a layer on one disk and an open replica that borrows it on another.
func lend(t *testing.T, size int64) (a, b *Disk, layer, uid string, r *Replica, loop ring, model []byte) {
	t.Helper()
	ctx := context.Background()
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	a, b = newDisk(t), newDisk(t)
	b.Borrow(func() []*Disk { return []*Disk{a} })
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

// bring copies the layer to the disk that borrows it.
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

// A replica reads a layer of another disk until its own is finished, and then needs the other disk no more.
func TestBorrow(t *testing.T) {
	t.Parallel()
	const size = pageSize + 24<<20
	a, b, layer, uid, r, loop, model := lend(t, size)
	ctx := context.Background()
	if from, lost := r.Lenders(); len(from) != 1 || from[0] != a || lost {
		t.Fatalf("lenders %v, lost %v", from, lost)
	}
	compareAll(t, loop, r, model)
	if err := r.Home(ctx); err != nil { // nothing is here yet
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() { // I/O all the time, on the upper half
		buf := alignedBuffer(64 << 10)
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
	bring(t, a, b, layer)
	comeHome(t, r)
	if from, _ := r.Lenders(); len(from) != 0 {
		t.Fatalf("still borrowed from %v", from)
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(a.path(layersDir, layer)); err != nil {
		t.Fatal(err)
	}
	compareAll(t, loop, r, model)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	b.Borrow(func() []*Disk { return nil })
	compareView(t, b, uid, model)
	if err := b.RemoveReplica(uid); err != nil {
		t.Fatal(err)
	}
}

// comeHome repeats Home, which leaves layers open that I/O on a busy machine has not left in time.
func comeHome(t *testing.T, r *Replica) {
	t.Helper()
	end := time.Now().Add(time.Minute)
	err := r.Home(context.Background())
	for api.Is(err, api.Busy) && time.Now().Before(end) {
		err = r.Home(context.Background())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Where the other disk fails, reads of the layer wait for the own copy; writes and what the head has go on.
func TestBorrowFromALostDisk(t *testing.T) {
	const size = 8 << 20
	a, b, layer, _, r, loop, model := lend(t, size)
	ctx := context.Background()
	told := make(chan bool, 10)
	r.OnLost(func(lost bool) { told <- lost })
	src, err := a.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	e, err := src.Next(0)
	for err == nil && e.Kind != block.Data {
		e, err = src.Next(e.End())
	}
	if err != nil {
		t.Fatal(err)
	}
	bytesOf := make([]byte, size) // the copy is made from memory later: the disk is "gone"
	if err := block.Copy(ctx, arraySink(bytesOf), src, block.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	name := a.path(layersDir, layer, dataFile)
	if err := os.Rename(name, name+".kept"); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(name + ".kept")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(name+".kept", 0); err != nil { // the open file ends: reads find nothing
		t.Fatal(err)
	}
	buf := alignedBuffer(int(blockSize))
	waits := make(chan error, 1)
	go func() { waits <- issue(loop, r, block.OpRead, e.Off, blockSize, buf, false) }()
	select {
	case lost := <-told:
		if _, is := r.Lenders(); !lost || !is {
			t.Errorf("told that lost is %v, and it is %v", lost, is)
		}
	case err := <-waits:
		t.Fatalf("a read of a lost layer ended: %v", err)
	}
	w := alignedBuffer(int(blockSize))
	w[0] = 7
	other := (e.Off + 4<<20) % size
	mustIssue(t, loop, r, block.OpWrite, other, blockSize, w)
	copy(model[other:], w)
	mustIssue(t, loop, r, block.OpRead, other, blockSize, w)
	bring(t, a, b, layer)
	comeHome(t, r)
	if err := <-waits; err != nil {
		t.Fatal(err)
	}
	if lost := <-told; lost {
		t.Error("OnLost did not tell of the end")
	}
	if string(buf) != string(model[e.Off:][:blockSize]) {
		t.Error("the read that waited got something else")
	}
	compareAll(t, loop, r, model)
	if err := src.Close(); err != nil {
		t.Fatal(err)
	}
}

// A replica is closed although reads wait for a borrowed layer: they fail.
func TestCloseWhileLost(t *testing.T) {
	a, _, layer, _, r, loop, _ := lend(t, 8<<20)
	told := make(chan bool, 1)
	r.OnLost(func(lost bool) { told <- lost })
	src, err := a.Open(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	e, err := src.Next(0)
	for err == nil && e.Kind != block.Data {
		e, err = src.Next(e.End())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(a.path(layersDir, layer, dataFile), 0); err != nil {
		t.Fatal(err)
	}
	waits := make(chan error, 1)
	go func() { waits <- issue(loop, r, block.OpRead, e.Off, blockSize, alignedBuffer(int(blockSize)), false) }()
	<-told
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-waits; err == nil {
		t.Error("a read without its layer succeeded")
	}
}
