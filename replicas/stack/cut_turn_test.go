package stack

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/layer"
)

// slowDisk is a ring whose writes and punches wait while slow is set. The fields belong to the loop thread.
type slowDisk struct {
	*uring.Loop
	slow bool
	late []func()
}

func (s *slowDisk) Write(op *uring.Op, fd int, buf []byte, off int64) {
	s.do(func() { s.Loop.Write(op, fd, buf, off) })
}

func (s *slowDisk) Fallocate(op *uring.Op, fd int, mode uint32, off, n int64) {
	s.do(func() { s.Loop.Fallocate(op, fd, mode, off, n) })
}

func (s *slowDisk) do(fn func()) {
	if s.slow {
		s.late = append(s.late, fn)
		return
	}
	fn()
}

// set makes the disk slow or fast, and starts the waiting operations.
func (s *slowDisk) set(slow bool) {
	done := make(chan struct{})
	s.Post(func() {
		s.slow = slow
		for _, fn := range s.late {
			fn()
		}
		s.late = nil
		close(done)
	})
	<-done
}

// waiting counts the waiting operations.
func (s *slowDisk) waiting() int {
	n := make(chan int)
	s.Post(func() { n <- len(s.late) })
	return <-n
}

// later begins a request.
func (s *slowDisk) later(r *Replica, op block.Op, b, blocks int64, buf []byte) <-chan error {
	done := make(chan error, 1)
	q := &block.Request{Op: op, Off: b << blockBits, Len: blocks << blockBits, Buf: buf,
		Done: func(q *block.Request) { done <- q.Err }}
	s.Post(func() { r.Submit(q) })
	return done
}

func numbered(v uint64) []byte {
	b := block.AlignedBuffer(int(blockSize))
	fill(b, v)
	return b
}

// TestCutDoesNotWaitForWrites: a cut during slow writes does not delay later writes. The slow writes belong to the
// snapshot, the later writes to the volume alone. The volume reads the later write of a block.
func TestCutDoesNotWaitForWrites(t *testing.T) {
	for _, below := range []bool{false, true} {
		ctx := context.Background()
		const size = 8 << 20
		d, disk := newDisk(t), &slowDisk{Loop: startLoop(t)}
		spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
		if below {
			spec.Layers = []string{filledLayer(t, d, size, []int64{0, 3, 4}, 7<<32, make(expect))}
		}
		if err := d.CreateReplica(ctx, spec); err != nil {
			t.Fatal(err)
		}
		r, err := d.openReplica(ctx, spec.UID, disk)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
			t.Fatal(err)
		}
		mustIssue(t, disk, r, block.OpWrite, 1<<blockBits, blockSize, numbered(11))
		disk.set(true)
		late := []<-chan error{disk.later(r, block.OpWrite, 1, 1, numbered(21)),
			disk.later(r, block.OpWrite, 2, 1, numbered(22)), disk.later(r, block.OpWrite, 3, 1, numbered(0))}
		for disk.waiting() < len(late) {
		}
		snap := Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())}
		cut := make(chan error, 1)
		go func() { cut <- r.Cut(ctx, snap) }()
		for cutting := 0; cutting == 0; { // until the instant is over
			if err := r.onLoop(func() { cutting = r.cutting }); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case err := <-cut:
			t.Fatalf("the cut is there before what it holds: %v", err)
		default:
		}
		if err := r.onLoop(func() { disk.slow = false }); err != nil { // for the next requests
			t.Fatal(err)
		}
		mustIssue(t, disk, r, block.OpWrite, 1<<blockBits, blockSize, numbered(31))
		mustIssue(t, disk, r, block.OpWrite, 4<<blockBits, blockSize, numbered(34))
		flushed := disk.later(r, block.OpFlush, 0, 0, nil)
		if _, err := d.OpenStack(r.Meta().Layers, size); !api.Is(err, api.Busy) {
			t.Fatalf("a reader while the snapshot is still being written: %v", err)
		}
		if err := d.Finish(ctx, snap.Layer); !api.Is(err, api.Busy) {
			t.Fatalf("finish while the snapshot is still being written: %v", err)
		}
		select {
		case err := <-flushed:
			t.Fatalf("a flush that does not cover the layer: %v", err)
		default:
		}
		disk.set(false)
		for _, c := range append(late, cut, flushed) {
			if err := <-c; err != nil {
				t.Fatal(err)
			}
		}
		was := map[int64]uint64{1: 21, 2: 22, 3: 0, 4: 0}
		is := map[int64]uint64{1: 31, 2: 22, 3: 0, 4: 34}
		if below {
			was[4] = 7<<32 + 4
		}
		check := func(when string, want map[int64]uint64, read func(buf []byte, off int64)) {
			t.Helper()
			buf := block.AlignedBuffer(int(blockSize))
			for b, v := range want {
				read(buf, b<<blockBits)
				if string(buf) != string(numbered(v)) {
					t.Fatalf("%s: block %d begins with %x, want %d", when, b, buf[:8], v)
				}
			}
		}
		volume := func(buf []byte, off int64) { mustIssue(t, disk, r, block.OpRead, off, blockSize, buf) }
		snapshot := func(buf []byte, off int64) {
			src, err := d.OpenStack(r.Meta().Layers, size)
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			if _, err := src.ReadAt(buf, off); err != nil {
				t.Fatal(err)
			}
		}
		check("the volume", is, volume)
		check("the snapshot", was, snapshot)
		if err := d.Finish(ctx, snap.Layer); err != nil {
			t.Fatal(err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if r, err = d.openReplica(ctx, spec.UID, disk); err != nil {
			t.Fatal(err)
		}
		check("the volume, opened again", is, volume)
		check("the finished snapshot", was, snapshot)
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCutWaitsForDiscards: a cut waits for the end of a discard in progress, which belongs to the old head. A write
// issued meanwhile lands in the new head.
func TestCutWaitsForDiscards(t *testing.T) {
	ctx := context.Background()
	const size = 8 << 20
	d, disk := newDisk(t), &slowDisk{Loop: startLoop(t)}
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.openReplica(ctx, spec.UID, disk)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	mustIssue(t, disk, r, block.OpWrite, 0, blockSize, numbered(1))
	disk.set(true)
	gone := disk.later(r, block.OpDiscard, 0, 1, nil)
	for disk.waiting() < 1 {
	}
	cut := make(chan error, 1)
	go func() {
		cut <- r.Cut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())})
	}()
	for holding := 0; holding == 0; {
		if err := r.onLoop(func() { holding = r.holding }); err != nil {
			t.Fatal(err)
		}
	}
	wrote := disk.later(r, block.OpWrite, 0, 1, numbered(2))
	if n := len(r.Meta().Layers); n > 0 {
		t.Fatalf("%d layers while a discard of the head is under way", n)
	}
	disk.set(false)
	for _, c := range []<-chan error{gone, cut, wrote} {
		if err := <-c; err != nil {
			t.Fatal(err)
		}
	}
	src, err := d.OpenStack(r.Meta().Layers, size)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	buf := make([]byte, blockSize)
	if _, err := src.ReadAt(buf, 0); err != nil || string(buf) != string(numbered(0)) {
		t.Fatalf("the snapshot begins with %x, %v: the discard came before it, the write after", buf[:8], err)
	}
	buf = block.AlignedBuffer(int(blockSize))
	mustIssue(t, disk, r, block.OpRead, 0, blockSize, buf)
	if string(buf) != string(numbered(2)) {
		t.Fatalf("the volume begins with %x", buf[:8])
	}
}

// TestCutThatIsGivenUp: the replica undoes a cut which does not reach its instant in time.
func TestCutThatIsGivenUp(t *testing.T) {
	ctx := context.Background()
	const size = 8 << 20
	d, disk := newDisk(t), &slowDisk{Loop: startLoop(t)}
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.openReplica(ctx, spec.UID, disk)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	mustIssue(t, disk, r, block.OpWrite, 0, blockSize, numbered(1))
	mustIssue(t, disk, r, block.OpWrite, 1<<blockBits, blockSize, numbered(2))
	disk.set(true)
	gone := disk.later(r, block.OpDiscard, 0, 1, nil)
	for disk.waiting() < 1 {
	}
	c, err := r.PrepareCut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())})
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	if err := c.Do(over); !api.Is(err, api.Busy) {
		t.Fatalf("a cut in no time: %v", err)
	}
	disk.set(false)
	if err := <-gone; err != nil {
		t.Fatal(err)
	}
	if m, err := d.Stack(spec.UID); err != nil || len(m.Layers) > 0 || len(m.Snapshots) > 0 || m.Head != r.Meta().Head {
		t.Fatalf("after a cut that was given up: %+v, %v", m, err)
	}
	mustIssue(t, disk, r, block.OpWrite, 2<<blockBits, blockSize, numbered(3))
	if err := r.Cut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())}); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if left, err := d.FS.ReadDir(d.Join(layer.Dir)); err != nil || len(left) != 1 {
		t.Fatalf("layers: %v, %v", left, err)
	}
	model := make([]byte, size)
	copy(model[blockSize:], append(numbered(2), numbered(3)...))
	compareView(t, d, spec.UID, model)
}

// TestCutThatIsGivenUpAndNamed: a pin references the layer between the commit of a cut and the instant of the cut. The
// replica does not undo the cut: the layer stays, with all acknowledged data.
func TestCutThatIsGivenUpAndNamed(t *testing.T) {
	ctx := context.Background()
	const size = 8 << 20
	plain, disk := newDisk(t), &slowDisk{Loop: startLoop(t)}
	d, f := tap(t, plain)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.openReplica(ctx, spec.UID, disk)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	mustIssue(t, disk, r, block.OpWrite, 0, blockSize, numbered(1))
	mustIssue(t, disk, r, block.OpWrite, 1<<blockBits, blockSize, numbered(2))
	disk.set(true)
	gone := disk.later(r, block.OpDiscard, 0, 1, nil)
	for disk.waiting() < 1 {
	}
	s := Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())}
	c, err := r.PrepareCut(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	pin := Pin{UID: string(api.NewUID()), For: "copy"}
	f.set(func(op, name string) (func(), error) {
		if op != opSync || name != d.Join(replicaDir, spec.UID) || pin.Layers != nil {
			return nil, nil
		}
		return func() { // committed
			if pin, err = plain.Pin(ctx, pin, spec.UID, ""); err != nil || len(pin.Layers) != 1 {
				t.Errorf("pin: %+v, %v", pin, err)
			}
		}, nil
	})
	over, cancel := context.WithCancel(ctx)
	cancel()
	if err := c.Do(over); !errors.Is(err, ErrFailed) {
		t.Errorf("a cut that cannot be taken back: %v", err)
	}
	f.set(nil)
	disk.set(false)
	<-gone // done or refused: the discard was not acknowledged yet
	if err := issue(disk, r, block.OpWrite, 1<<blockBits, blockSize, numbered(3), false); err == nil {
		t.Error("a layer that is pinned takes writes")
	}
	_ = r.Close() // returns the failure
	compare := func(read func(buf []byte, off int64) error) {
		t.Helper()
		buf := block.AlignedBuffer(int(blockSize))
		if err := read(buf, 1<<blockBits); err != nil || !bytes.Equal(buf, numbered(2)) {
			t.Fatalf("it begins with %x, %v", buf[:8], err)
		}
	}
	src, err := plain.OpenStack(pin.Layers, size)
	if err != nil {
		t.Fatal(err)
	}
	compare(func(buf []byte, off int64) error { _, err := src.ReadAt(buf, off); return err })
	if err := src.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err = plain.openReplica(ctx, spec.UID, disk); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if m := r.Meta(); len(m.Layers) != 1 || m.Layers[0] != s.Layer || len(m.Snapshots) != 1 {
		t.Errorf("opened again: %+v", m)
	}
	compare(func(buf []byte, off int64) error { return issue(disk, r, block.OpRead, off, blockSize, buf, false) })
}

// TestCutThatIsGivenUpBesideABadRecord: an unreadable record of an image hinders neither the undoing of a cut nor the
// volume.
func TestCutThatIsGivenUpBesideABadRecord(t *testing.T) {
	ctx := context.Background()
	d, disk := newDisk(t), &slowDisk{Loop: startLoop(t)}
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 8 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.openReplica(ctx, spec.UID, disk)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	mustIssue(t, disk, r, block.OpWrite, 0, blockSize, numbered(1))
	mustIssue(t, disk, r, block.OpWrite, 1<<blockBits, blockSize, numbered(2))
	bad := d.Join(imagesDir, string(api.NewUID()))
	if err := os.Mkdir(bad, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(bad+"/"+imageFile, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	disk.set(true)
	gone := disk.later(r, block.OpDiscard, 0, 1, nil)
	for disk.waiting() < 1 {
	}
	c, err := r.PrepareCut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())})
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	if err := c.Do(over); err == nil || errors.Is(err, ErrFailed) {
		t.Errorf("a cut whose time is over: %v", err)
	}
	disk.set(false)
	<-gone
	mustIssue(t, disk, r, block.OpWrite, 0, blockSize, numbered(3))
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if m, err := d.readStack(spec.UID); err != nil || len(m.Snapshots) > 0 {
		t.Errorf("it has the cut: %+v, %v", m, err)
	}
}
