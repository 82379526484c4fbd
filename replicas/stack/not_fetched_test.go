package stack

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/layer"
)

// lostSource opens a replica with a single layer, from another node which then fails.
func lostSource(t *testing.T, size int64) (r *Replica, loop ring, far *farther) {
	t.Helper()
	far, d := &farther{disk: newDisk(t)}, newDisk(t)
	d.Sources(nil, far.fetch)
	layer := makeLayer(t, far.disk, rand.New(rand.NewPCG(1, 1)), size, make([]byte, size))
	if err := far.hydrate(d, layer); err != nil {
		t.Fatal(err)
	}
	uid := string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layer}}
	if err := d.CreateReplica(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	l := startLoop(t)
	r, err := d.OpenReplica(t.Context(), uid, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	if err := r.Adopt(t.Context(), 1, 1, []string{uid, "other"}); err != nil {
		t.Fatal(err)
	}
	far.fails.Store(true)
	return r, l, far
}

// once submits a request and returns the answer.
func once(t *testing.T, loop ring, r *Replica, op block.Op, off, n int64) error {
	t.Helper()
	done := make(chan error, 1)
	q := &block.Request{Op: op, Off: off, Len: n, Buf: block.AlignedBuffer(int(n)), Done: func(q *block.Request) { done <- q.Err }}
	loop.Post(func() { r.Submit(q) })
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		t.Fatal("a request waits for another machine")
		return nil
	}
}

// TestReadOfWhatIsNotFetchedIsAnsweredAtOnce: a replica answers a read of blocks on another node before the blocks were
// fetched, and reports when the blocks were fetched.
func TestReadOfWhatIsNotFetchedIsAnsweredAtOnce(t *testing.T) {
	t.Parallel()
	r, loop, far := lostSource(t, 8<<20)
	told := make(chan struct{}, 100)
	r.OnFetched(func() { told <- struct{}{} })
	if err := once(t, loop, r, block.OpRead, 0, 4<<20); !errors.Is(err, ErrNotFetched) {
		t.Fatalf("a read of a lost source: %v", err)
	}
	far.fails.Store(false)
	end := time.After(time.Minute)
	for once(t, loop, r, block.OpRead, 0, 4<<20) != nil {
		select {
		case <-told:
		case <-end:
			t.Fatal("nobody tells that the blocks came")
		}
	}
}

// TestNothingWaitsForALostSource: while reads ask for a lost source, the replica adopts the same session and a newer
// session, expands, writes the record, writes blocks, takes a snapshot, and closes. No operation waits for the source.
func TestNothingWaitsForALostSource(t *testing.T) {
	t.Parallel()
	const size = 8 << 20
	r, loop, _ := lostSource(t, size)
	uid := r.Meta().UID
	if err := once(t, loop, r, block.OpRead, 0, 4<<20); !errors.Is(err, ErrNotFetched) {
		t.Fatalf("a read of a lost source: %v", err)
	}
	for why := error(nil); why == nil; _, why = hydrates(r) {
		time.Sleep(time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"the same session", func() error { return r.Adopt(ctx, 1, 1, []string{uid, "other"}) }},
		{"a newer session", func() error { return r.Adopt(ctx, 2, 1, []string{uid}) }},
		{"expansion", func() error { return r.Expand(ctx, 2*size) }},
		{"a note", func() error { return r.Note([]byte(`{"a":1}`)) }},
		{"a whole-block write", func() error { return once(t, loop, r, block.OpWrite, blockSize, blockSize) }},
		{"a snapshot", func() error {
			return r.Cut(ctx, Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID()), Created: time.Now()})
		}},
	} {
		if err := step.do(); err != nil {
			t.Errorf("%s beside a lost source: %v", step.what, err)
		}
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// slowAll is a slowDisk with slow reads, too.
type slowAll struct{ *slowDisk }

func (s slowAll) Read(op *uring.Op, fd int, buf []byte, off int64) {
	s.do(func() { s.Loop.Read(op, fd, buf, off) })
}

// TestAdoptDrainsWritesAlone: an adoption waits for the writes of the session before, and for no read. An adoption of
// the same session does not wait.
func TestAdoptDrainsWritesAlone(t *testing.T) {
	t.Parallel()
	const size = 4 << 20
	for _, op := range []block.Op{block.OpRead, block.OpDiscard} {
		disk := slowAll{&slowDisk{Loop: startLoop(t)}}
		r := mergeable(t, disk, newDisk(t), size)
		mustIssue(t, disk, r, block.OpWrite, 5<<blockBits, blockSize, numbered(6))
		disk.set(true)
		var buf []byte
		if op == block.OpRead {
			buf = block.AlignedBuffer(int(blockSize))
		}
		hangs := disk.later(r, op, 5, 1, buf)
		until(t, "the request is with the disk", func() bool { return disk.waiting() > 0 })
		if err := r.onLoop(func() { disk.slow = false }); err != nil { // for the next requests
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		m := r.Meta()
		if err := r.Adopt(ctx, m.Epoch, m.Incarnation, m.Members); err != nil {
			t.Errorf("the same session beside a request that is under way: %v", err)
		}
		if op != block.OpRead {
			cancel()
		}
		err := r.Adopt(ctx, m.Epoch+1, 1, m.Members)
		cancel()
		if op == block.OpRead && err != nil {
			t.Errorf("an adoption waits for a read: %v", err)
		}
		if op != block.OpRead && !errors.Is(err, ErrUnderWay) {
			t.Errorf("an adoption beside a write that is under way: %v", err)
		}
		disk.set(false)
		if err := <-hangs; err != nil {
			t.Fatal(err)
		}
	}
}

// TestDamagedChunksStarveNoOthers: chunks which no source can give, more than the disk fetches at once, do not keep the
// disk from fetching other chunks.
func TestDamagedChunksStarveNoOthers(t *testing.T) {
	t.Parallel()
	const size, bad = 16 * chunkSize, 2 * layer.FetchesAtOnce
	far, d := &farther{disk: newDisk(t)}, newDisk(t)
	d.Sources(nil, func(ctx context.Context, l RemoteLayer, off int64, buf []byte, check func([]byte) error) error {
		if off/chunkSize < bad {
			return api.Errorf(api.Corrupt, "the source is damaged there")
		}
		return far.fetch(ctx, l, off, buf, check)
	})
	model := make([]byte, size)
	randomBytes(rand.New(rand.NewPCG(1, 1)), model)
	layerUID := wholeLayer(t, far.disk, model)
	if err := far.hydrate(d, layerUID); err != nil {
		t.Fatal(err)
	}
	uid := string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layerUID}}
	if err := d.CreateReplica(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	loop := startLoop(t)
	r, err := d.OpenReplica(t.Context(), uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	for c := range int64(bad) {
		if err := once(t, loop, r, block.OpRead, c*chunkSize, blockSize); !errors.Is(err, ErrNotFetched) {
			t.Fatal(err)
		}
	}
	h := r.layers[0].Hydration
	until(t, "no source gives the chunks", func() bool {
		h.Mu.Lock()
		defer h.Mu.Unlock()
		return len(h.Failing) >= layer.FetchesAtOnce
	})
	read := make(chan error, 1)
	go func() {
		read <- issue(loop, r, block.OpRead, (bad+1)*chunkSize, blockSize, block.AlignedBuffer(int(blockSize)), false)
	}()
	select {
	case err := <-read:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("a chunk that the source has waits for chunks that it has not")
	}
	if _, why := hydrates(r); !api.Is(why, api.Corrupt) {
		t.Errorf("chunks that no source gives are not reported any more: %v", why)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// wholeLayer makes a layer of data on a disk.
func wholeLayer(t testing.TB, d *Disk, content []byte) string {
	t.Helper()
	uid := string(api.NewUID())
	w, err := d.Create(t.Context(), uid, int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteAt(content, 0); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Seal(t.Context()); err != nil {
		t.Fatal(err)
	}
	return uid
}
