package stack

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/diskfs"
)

func TestMain(m *testing.M) {
	if args := strings.Fields(os.Getenv(childEnv)); len(args) == 2 {
		fmt.Println(child(args[0], args[1]))
		os.Exit(1)
	}
	slog.SetDefault(slog.New(slog.DiscardHandler)) // killed processes log a lot
	// Tests mostly wait for the disk. A number on the command line replaces the default.
	_ = flag.Set("test.parallel", "4")
	os.Exit(m.Run())
}

// startLoop runs a loop until the test ends.
func startLoop(t testing.TB) *uring.Loop {
	t.Helper()
	l, err := uring.New(128)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- l.Run() }()
	t.Cleanup(func() {
		l.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return l
}

func newDisk(t testing.TB) *Disk {
	t.Helper()
	d, err := Add(context.Background(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// issue submits a request and waits for the answer.
func issue(l ring, r *Replica, op block.Op, off, n int64, buf []byte, fua bool) error {
	for {
		done := make(chan error, 1)
		q := &block.Request{Op: op, Off: off, Len: n, Buf: buf, FUA: fua, Done: func(q *block.Request) { done <- q.Err }}
		if !l.Post(func() { r.Submit(q) }) {
			return uring.ErrClosed
		}
		err := <-done
		if !errors.Is(err, ErrNotFetched) {
			return err
		}
		time.Sleep(5 * time.Millisecond) // an engine sets the read aside
	}
}

func mustIssue(t testing.TB, l ring, r *Replica, op block.Op, off, n int64, buf []byte) {
	t.Helper()
	if err := issue(l, r, op, off, n, buf, false); err != nil {
		t.Fatalf("op %d at %d+%d: %v", op, off, n, err)
	}
}

func randomBytes(rng *rand.Rand, b []byte) {
	for i := 0; i+8 <= len(b); i += 8 {
		v := rng.Uint64()
		for j := range 8 {
			b[i+j] = byte(v >> (8 * j))
		}
	}
}

// makeLayer makes a layer with random data and zeros, applies the same to the model, and returns the layer's UID.
func makeLayer(t testing.TB, d *Disk, rng *rand.Rand, size int64, model []byte) string {
	t.Helper()
	uid := string(api.NewUID())
	w, err := d.Create(context.Background(), uid, size)
	if err != nil {
		t.Fatal(err)
	}
	for range 40 {
		off := rng.Int64N(size/blockSize) * blockSize
		n := min((1+rng.Int64N(40))*blockSize, size-off)
		if rng.IntN(3) == 0 {
			if err := w.ZeroAt(off, n); err != nil {
				t.Fatal(err)
			}
			clear(model[off : off+n])
			continue
		}
		b := make([]byte, n)
		randomBytes(rng, b)
		if rng.IntN(4) == 0 {
			clear(b[:blockSize])
		}
		if _, err := w.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
		copy(model[off:], b)
	}
	if _, _, err := w.Seal(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := d.Verify(context.Background(), uid); err != nil {
		t.Fatal(err)
	}
	return uid
}

// TestModel compares a replica over 0 to 3 layers with an array of bytes, through random I/O and reopening.
func TestModel(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	for layers := range 4 {
		t.Run(fmt.Sprintf("layers=%d", layers), func(t *testing.T) {
			seed := suite.Seed(t)
			rng := rand.New(rand.NewPCG(seed, 0))
			testModel(t, rng, layers)
		})
	}
}

func testModel(t *testing.T, rng *rand.Rand, layers int) {
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	size := int64(pageSize) + 24<<20 // two pages of the index, the last page short
	model := make([]byte, size)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	for range layers {
		small := size - rng.Int64N(30<<20)&^(blockSize-1)
		spec.Layers = append(spec.Layers, makeLayer(t, d, rng, small, model))
	}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatalf("again: %v", err)
	}
	buf := block.AlignedBuffer(1 << 20)
	for round := range 6 {
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			t.Fatal(err)
		}
		if round == 0 && r.Blank() != (layers == 0) {
			t.Fatalf("blank is %v", r.Blank())
		}
		if err := r.Adopt(ctx, int64(round+1), 1, []string{spec.UID}); err != nil {
			t.Fatal(err)
		}
		for range 150 {
			off := rng.Int64N(size/blockSize) * blockSize
			if rng.IntN(4) == 0 {
				off = max(0, int64(pageSize)-rng.Int64N(20)*blockSize) // across the border of pages
			}
			n := min((1+rng.Int64N(64))*blockSize, size-off)
			b := buf[:n]
			switch rng.IntN(8) {
			case 0, 1, 2:
				randomBytes(rng, b)
				if rng.IntN(2) == 0 {
					clear(b[:min(n, 3*blockSize)])
				}
				copy(model[off:], b)
				if err := issue(loop, r, block.OpWrite, off, n, b, rng.IntN(8) == 0); err != nil {
					t.Fatal(err)
				}
			case 3:
				mustIssue(t, loop, r, block.OpDiscard, off, n, nil)
				clear(model[off : off+n])
			case 4:
				mustIssue(t, loop, r, block.OpZero, off, n, nil)
				clear(model[off : off+n])
			case 5:
				mustIssue(t, loop, r, block.OpFlush, 0, 0, nil)
			default:
				mustIssue(t, loop, r, block.OpRead, off, n, b)
				if !bytes.Equal(b, model[off:off+n]) {
					t.Fatalf("round %d: read at %d+%d differs", round, off, n)
				}
			}
		}
		if round == 3 {
			size += 50 << 20
			if err := r.Expand(ctx, size); err != nil {
				t.Fatal(err)
			}
			model = append(model, make([]byte, size-int64(len(model)))...)
		}
		compareAll(t, loop, r, model)
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if m := r.Meta(); m.Dirty || m.Epoch != int64(round+1) || m.Size != size {
			t.Fatalf("meta %+v", m)
		}
		if err := issue(loop, r, block.OpRead, 0, blockSize, buf[:blockSize], false); err == nil {
			t.Fatal("read after close succeeded")
		}
	}
	list, err := d.Replicas()
	if err != nil || len(list) != 1 || list[0].UID != spec.UID {
		t.Fatalf("replicas %+v, %v", list, err)
	}
	compareView(t, d, spec.UID, model)
}

func compareAll(t testing.TB, loop ring, r *Replica, model []byte) {
	t.Helper()
	buf := block.AlignedBuffer(1 << 20)
	for off := int64(0); off < int64(len(model)); off += int64(len(buf)) {
		b := buf[:min(int64(len(buf)), int64(len(model))-off)]
		mustIssue(t, loop, r, block.OpRead, off, int64(len(b)), b)
		if !bytes.Equal(b, model[off:][:len(b)]) {
			for i := range b {
				if b[i] != model[off+int64(i)] {
					t.Fatalf("content differs at %d: %#x, want %#x", off+int64(i), b[i], model[off+int64(i)])
				}
			}
		}
	}
}

func compareView(t testing.TB, d *Disk, uid string, model []byte) {
	t.Helper()
	v, err := d.OpenView(uid)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	if v.Size() != int64(len(model)) {
		t.Fatalf("view has %d bytes, want %d", v.Size(), len(model))
	}
	out := make([]byte, len(model))
	if err := block.Copy(context.Background(), arraySink(out), v, block.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out, model) {
		t.Fatal("the view differs")
	}
}

// arraySink is memory as a block.Sink.
type arraySink []byte

func (s arraySink) WriteAt(p []byte, off int64) (int, error) { return copy(s[off:], p), nil }
func (s arraySink) ZeroAt(off, n int64) error                { clear(s[off : off+n]); return nil }
func (s arraySink) Sync(context.Context) error               { return nil }

func TestAdopt(t *testing.T) {
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.OpenReplica(ctx, spec.UID, loop); !api.Is(err, api.Busy) {
		t.Fatalf("second opener: %v", err)
	}
	if err := d.RemoveReplica(spec.UID); !api.Is(err, api.InUse) {
		t.Fatalf("remove while open: %v", err)
	}
	steps := []struct {
		epoch, inc int64
		members    []string
		denied     bool
	}{
		{2, 7, []string{spec.UID}, false}, {2, 7, []string{spec.UID}, false}, {2, 7, nil, true}, {2, 6, []string{spec.UID}, true},
		{1, 9, []string{spec.UID}, true}, {2, 8, []string{spec.UID}, false}, {3, 1, []string{spec.UID, "other"}, false},
	}
	for i, s := range steps {
		if err := r.Adopt(ctx, s.epoch, s.inc, s.members); api.Is(err, api.Denied) != s.denied || err != nil && !s.denied {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	m, err := d.readStack(spec.UID)
	if err != nil || !m.Dirty || m.Epoch != 3 || m.Incarnation != 1 || len(m.Members) != 2 {
		t.Fatalf("on disk: %+v, %v", m, err)
	}
	if err := r.Expand(ctx, 8<<20); !api.Is(err, api.OutOfRange) {
		t.Fatalf("shrink: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.RemoveReplica(spec.UID); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.OpenReplica(ctx, spec.UID, loop); !api.Is(err, api.NotFound) {
		t.Fatalf("open after removal: %v", err)
	}
	d.Close()
	if e, err := d.FS.ReadDir(d.Join(trashDir)); err != nil || len(e) != 0 {
		t.Fatalf("trash holds %v, %v", e, err)
	}
}

// TestAdoptAfterARestartOfTheMachine: a replica on a node which restarted during a session refuses sessions with other
// members, again and again. A session of the replica alone, or after a clean end, is accepted.
func TestAdoptAfterARestartOfTheMachine(t *testing.T) {
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	boot := "boot one"
	d.lifetime = func() (diskfs.Lifetime, error) { return diskfs.Lifetime{Boot: boot}, nil }
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	open := func() *Replica {
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	adopt := func(r *Replica, epoch, inc int64, members ...string) error {
		return r.Adopt(ctx, epoch, inc, append([]string{spec.UID}, members...))
	}
	r := open()
	if err := adopt(r, 1, 1, "other"); err != nil {
		t.Fatalf("the first session: %v", err)
	}
	r.work.close() // the session has no clean end
	if err := r.closeFiles(); err != nil {
		t.Fatal(err)
	}
	boot = "boot two"
	r = open()
	for _, s := range [][2]int64{{1, 1}, {1, 2}, {2, 2}, {2, 2}} {
		err := adopt(r, s[0], s[1], "other")
		if !errors.Is(err, ErrRestarted) || !api.Is(err, api.Unavailable) {
			t.Fatalf("session %v after the machine restarted: %v", s, err)
		}
	}
	if m, err := d.readStack(spec.UID); err != nil || m.Epoch != 1 || m.BootID != "boot one" {
		t.Fatalf("a refused session was recorded: %+v, %v", m, err)
	}
	// An open of the replica, or a refused session, does not end the interrupted session.
	if err := r.Expand(ctx, 32<<20); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		r = open()
	}
	if err := adopt(r, 2, 3, "other"); !errors.Is(err, ErrRestarted) {
		t.Fatalf("after it was opened and closed: %v", err)
	}
	if err := adopt(r, 3, 1); err != nil {
		t.Fatalf("alone: %v", err)
	}
	if err := adopt(r, 3, 2, "other"); err != nil {
		t.Fatalf("on the same boot: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	boot = "boot three"
	r = open()
	if err := adopt(r, 4, 1, "other"); err != nil {
		t.Fatalf("after a clean end nothing was lost: %v", err)
	}
	if m, err := d.readStack(spec.UID); err != nil || m.BootID != "boot three" {
		t.Fatalf("boot on disk: %+v, %v", m, err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestNote(t *testing.T) {
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20,
		Object: []byte(`{"spec":{"size":1}}`)}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	is := func(want string) {
		t.Helper()
		m, err := d.readStack(spec.UID)
		if err != nil || string(m.Object) != want {
			t.Fatalf("%s, %v; want %s", m.Object, err, want)
		}
	}
	is(`{"spec":{"size":1}}`)
	if err := r.Note([]byte(`{"spec": {"later": "field <&>"}}`)); err != nil {
		t.Fatal(err)
	}
	is(`{"spec":{"later":"field \u003c\u0026\u003e"}}`)
	if err := r.Note([]byte(`{`)); !api.Is(err, api.Invalid) {
		t.Fatalf("nonsense: %v", err)
	}
}

func TestSubmitRefusesNonsense(t *testing.T) {
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b := block.AlignedBuffer(3 * int(blockSize))
	for _, q := range []block.Request{
		{Op: block.OpRead, Off: 512, Len: blockSize, Buf: b[:blockSize]},
		{Op: block.OpRead, Off: 0, Len: 512, Buf: b[:512]},
		{Op: block.OpRead, Off: 0, Len: blockSize, Buf: b[512 : 512+blockSize]},
		{Op: block.OpRead, Off: 0, Len: blockSize, Buf: b[:2*blockSize]},
		{Op: block.OpRead, Off: 16 << 20, Len: blockSize, Buf: b[:blockSize]},
		{Op: block.OpRead, Off: 16<<20 - blockSize, Len: 2 * blockSize, Buf: b[:2*blockSize]},
		{Op: block.OpDiscard, Off: -blockSize, Len: blockSize},
		{Op: block.OpDiscard, Off: blockSize, Len: 1 << 62},
		{Op: block.OpDiscard, Off: 0, Len: 0},
	} {
		if err := issue(loop, r, q.Op, q.Off, q.Len, q.Buf, false); err == nil {
			t.Errorf("op %d at %d+%d was accepted", q.Op, q.Off, q.Len)
		}
	}
	if err := issue(loop, r, block.Op(99), 0, blockSize, nil, false); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("unknown op: %v", err)
	}
}
