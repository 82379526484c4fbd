package engine

import (
	"context"
	"errors"
	"os"
	"runtime/pprof"
	"sync"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// testLoop runs posted functions on one goroutine, as the real loop does on one thread.
type testLoop struct {
	mu     sync.Mutex
	wake   *sync.Cond
	queue  []func()
	closed bool
	done   chan struct{}
}

func newLoop(t testing.TB) *testLoop {
	l := &testLoop{done: make(chan struct{})}
	l.wake = sync.NewCond(&l.mu)
	go l.run()
	t.Cleanup(func() {
		l.mu.Lock()
		l.closed = true
		l.mu.Unlock()
		l.wake.Signal()
		<-l.done
	})
	return l
}

func (l *testLoop) Post(fn func()) bool {
	l.mu.Lock()
	l.queue = append(l.queue, fn)
	l.mu.Unlock()
	l.wake.Signal()
	return true
}

func (l *testLoop) run() {
	defer close(l.done)
	for {
		l.mu.Lock()
		for len(l.queue) == 0 && !l.closed {
			l.wake.Wait()
		}
		if len(l.queue) == 0 {
			l.mu.Unlock()
			return
		}
		fn := l.queue[0]
		l.queue = l.queue[1:]
		l.mu.Unlock()
		fn()
	}
}

// do runs fn on the loop and waits for its end.
func (l *testLoop) do(fn func()) {
	done := make(chan struct{})
	l.Post(func() { fn(); close(done) })
	<-done
}

// memory is a member with a slice as its disk, and with answers that the test gives.
type memory struct {
	t       testing.TB
	data    []byte
	pending []*block.Request // loop thread
	auto    bool             // answer at once
	fail    func(*block.Request) error
	seen    int

	mu      sync.Mutex
	adopted []int64 // epochs
	members []string
	refuse  func(epoch int64) error
	closed  bool
}

func (m *memory) Submit(r *block.Request) {
	if (r.Off|r.Len)&(block.Size-1) != 0 {
		m.t.Errorf("a member got a partial block: %d+%d", r.Off, r.Len)
	}
	m.seen++
	m.pending = append(m.pending, r)
	if m.auto {
		m.next(0)
	}
}

// next applies and answers a pending request. Loop thread.
func (m *memory) next(i int) {
	r := m.pending[i]
	m.pending = append(m.pending[:i:i], m.pending[i+1:]...)
	r.Err = nil
	if m.fail != nil {
		r.Err = m.fail(r)
	}
	if r.Err == nil {
		at := m.data[min(r.Off, int64(len(m.data))):]
		switch r.Op {
		case block.OpRead:
			copy(r.Buf, at)
		case block.OpWrite:
			copy(at, r.Buf)
		case block.OpDiscard, block.OpZero:
			clear(at[:r.Len])
		}
	}
	r.Done(r)
}

func (m *memory) Adopt(_ context.Context, epoch, _ int64, members []string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refuse != nil {
		if err := m.refuse(epoch); err != nil {
			return err
		}
	}
	m.adopted = append(m.adopted, epoch)
	m.members = members
	return nil
}

func (m *memory) epoch() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.adopted) == 0 {
		return 0
	}
	return m.adopted[len(m.adopted)-1]
}

func (m *memory) Expand(_ context.Context, size int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.data = append(m.data, make([]byte, size-int64(len(m.data)))...)
	return nil
}

func (m *memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		m.t.Error("a member was closed twice")
	}
	m.closed = true
	return nil
}

// rig is an engine with scripted members.
type rig struct {
	t       testing.TB
	l       *testLoop
	e       *Engine
	m       []*memory
	drops   chan string // arguments of Drop
	settle  chan error  // answers of Drop
	space   chan bool
	fenced  chan error
	dropped chan string
	shut    bool
}

const testSize = 1 << 20

func newRig(t testing.TB, n int, change func(*Config)) *rig {
	r := &rig{t: t, l: newLoop(t), drops: make(chan string), settle: make(chan error),
		space: make(chan bool, 16), fenced: make(chan error, 16), dropped: make(chan string, 16)}
	cfg := Config{Loop: r.l, Size: testSize, Epoch: 7, Incarnation: 3,
		OnSpace: func(full bool) { r.space <- full },
		OnFence: func(err error) { r.fenced <- err },
		OnDrop:  func(m string, _ error) { r.dropped <- m },
		Drop: func(ctx context.Context, _ int64, m string) error {
			select {
			case r.drops <- m:
			case <-ctx.Done():
				return ctx.Err()
			}
			select {
			case err := <-r.settle:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		},
	}
	for i := range n {
		m := &memory{t: t, data: make([]byte, testSize)}
		r.m = append(r.m, m)
		cfg.Members = append(cfg.Members, Named{Name: string(rune('a' + i)), Local: i == 0, Member: m})
	}
	if change != nil {
		change(&cfg)
	}
	e, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.e = e
	t.Cleanup(func() {
		if !r.shut {
			r.close()
		}
	})
	return r
}

func (r *rig) close() {
	r.shut = true
	r.l.do(func() {
		for _, m := range r.m {
			for m.auto = true; len(m.pending) > 0; {
				m.next(0)
			}
		}
	})
	if err := r.e.Close(); err != nil {
		r.t.Error(err)
	}
	for i, m := range r.m {
		if !m.closed {
			r.t.Errorf("member %d was not closed", i)
		}
	}
}

// start submits a request; the channel gets its outcome.
func (r *rig) start(kind block.Op, off int64, buf []byte, n int64) chan error {
	done := make(chan error, 1)
	if buf != nil {
		n = int64(len(buf))
	}
	req := &block.Request{Op: kind, Off: off, Len: n, Buf: buf, Done: func(q *block.Request) { done <- q.Err }}
	r.l.do(func() { r.e.Submit(req) })
	return done
}

// answer lets member m answer its i-th pending request with err.
func (r *rig) answer(m, i int, err error) {
	r.t.Helper()
	r.l.do(func() {
		if len(r.m[m].pending) <= i {
			r.t.Errorf("member %d has %d pending requests", m, len(r.m[m].pending))
			return
		}
		r.m[m].fail = func(*block.Request) error { return err }
		r.m[m].next(i)
		r.m[m].fail = nil
	})
}

func (r *rig) pending(m int) (n int) {
	r.l.do(func() { n = len(r.m[m].pending) })
	return n
}

// within returns a value from a channel; a missing value ends the test.
func within[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	late := time.NewTimer(5 * time.Minute)
	defer late.Stop()
	select {
	case v := <-from:
		return v
	case <-late.C:
	}
	_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1) // says where
	t.Fatal("no " + what)
	panic("not reached")
}

func waits(t testing.TB, done chan error, why string) {
	t.Helper()
	select {
	case err := <-done:
		t.Fatalf("done (%v) although %s", err, why)
	default:
	}
}

func is(t testing.TB, done chan error, want error) {
	t.Helper()
	if err := within(t, "answer", done); !errors.Is(err, want) {
		t.Fatalf("got %v, want %v", err, want)
	}
}

func fill(n int, b byte) []byte {
	buf := make([]byte, n)
	for i := range buf {
		buf[i] = b
	}
	return buf
}

func TestAckNeedsEveryMember(t *testing.T) {
	for _, kind := range []block.Op{block.OpWrite, block.OpFlush, block.OpDiscard, block.OpZero} {
		r := newRig(t, 3, nil)
		var buf []byte
		if kind == block.OpWrite {
			buf = fill(4096, 1)
		}
		done := r.start(kind, 8192, buf, 4096)
		r.answer(0, 0, nil)
		r.answer(2, 0, nil)
		waits(t, done, "a member has not answered")
		r.answer(1, 0, nil)
		is(t, done, nil)
		done = r.start(kind, 8192, buf, 4096)
		r.answer(0, 0, nil)
		r.answer(2, 0, nil)
		r.answer(1, 0, syscall.EIO)
		waits(t, done, "a member has failed, and is one still")
		if m := within(t, "drop that is asked for", r.drops); m != "b" {
			t.Fatalf("dropped %s", m)
		}
		r.settle <- nil
		is(t, done, nil)
		r.close()
	}
}

func TestReadPrefersLocalAndFailsOver(t *testing.T) {
	r := newRig(t, 3, nil)
	copy(r.m[1].data, fill(4096, 9))
	buf := make([]byte, 4096)
	done := r.start(block.OpRead, 0, buf, 0)
	if r.pending(0) != 1 || r.pending(1)+r.pending(2) != 0 {
		t.Fatal("the local member was not asked, or not alone")
	}
	r.answer(0, 0, syscall.EIO)
	r.answer(1, 0, nil)
	is(t, done, nil)
	if buf[100] != 9 {
		t.Fatal("not what the second member has")
	}
	if m := within(t, "drop that is asked for", r.drops); m != "a" {
		t.Fatalf("dropped %s", m)
	}
	r.settle <- nil
	within(t, "word of a drop", r.dropped)
}

func TestDropBeforeAck(t *testing.T) {
	r := newRig(t, 2, nil)
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(1, 0, syscall.EIO)
	r.answer(0, 0, nil)
	if m := within(t, "drop that is asked for", r.drops); m != "b" {
		t.Fatalf("dropped %s", m)
	}
	waits(t, done, "the drop is not settled")
	// The outcome is unknown: the member gets no I/O, and the engine acknowledges no write.
	r.settle <- api.Errorf(api.Unavailable, "time-out")
	second := r.start(block.OpWrite, 8192, fill(4096, 2), 0)
	flush := r.start(block.OpFlush, 0, nil, 0)
	if r.pending(1) != 0 {
		t.Fatal("a suspect got I/O")
	}
	r.answer(0, 0, nil)
	r.answer(0, 0, nil)
	if m := within(t, "drop that is asked for", r.drops); m != "b" {
		t.Fatalf("asked again for %s", m)
	}
	waits(t, done, "the drop is not settled")
	waits(t, second, "the drop is not settled")
	waits(t, flush, "the drop is not settled")
	r.settle <- nil
	is(t, done, nil)
	is(t, second, nil)
	is(t, flush, nil)
	if got := r.m[0].epoch(); got != 8 {
		t.Fatalf("the survivor is at epoch %d", got)
	}
	if got := r.m[1].epoch(); got != 7 {
		t.Fatalf("the dropped one adopted %d", got)
	}
	if ep, names, _ := r.e.Epoch(t.Context()); ep != 8 || len(names) != 1 || names[0] != "a" {
		t.Fatalf("epoch %d of %v", ep, names)
	}
}

func TestSurvivorThatCannotAdoptIsDroppedToo(t *testing.T) {
	r := newRig(t, 3, nil)
	r.m[1].refuse = func(epoch int64) error { return syscall.EIO }
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, nil)
	r.answer(1, 0, nil)
	r.answer(2, 0, syscall.EIO)
	if m := within(t, "drop that is asked for", r.drops); m != "c" {
		t.Fatalf("dropped %s", m)
	}
	r.settle <- nil
	if m := within(t, "drop that is asked for", r.drops); m != "b" {
		t.Fatalf("dropped %s", m)
	}
	waits(t, done, "b has not adopted the epoch and is still in it")
	r.settle <- nil
	is(t, done, nil)
	if got := r.m[0].epoch(); got != 9 {
		t.Fatalf("epoch %d", got)
	}
}

func TestLastMemberIsNeverDropped(t *testing.T) {
	r := newRig(t, 2, nil)
	one := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, syscall.EIO)
	r.answer(1, 0, syscall.EIO)
	within(t, "drop that is asked for", r.drops)
	waits(t, one, "a drop is not settled")
	r.settle <- nil
	is(t, one, syscall.EIO)
	// The last member serves on, and the guest gets its errors.
	_, names, _ := r.e.Epoch(t.Context())
	left := int(names[0][0] - 'a')
	two := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(left, 0, syscall.EIO)
	is(t, two, syscall.EIO)
	three := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(left, 0, nil)
	is(t, three, nil)
}

func TestFence(t *testing.T) {
	r := newRig(t, 2, nil)
	full := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, syscall.ENOSPC)
	r.answer(1, 0, syscall.ENOSPC)
	within(t, "word of room", r.space)
	behind := r.start(block.OpWrite, 0, fill(4096, 2), 0)
	flying := r.start(block.OpWrite, 8192, fill(4096, 1), 0)
	read := r.start(block.OpRead, 8192, make([]byte, 4096), 0)
	denied := r.start(block.OpFlush, 0, nil, 0)
	r.answer(1, 1, api.Errorf(api.Denied, "epoch 9 was adopted"))
	within(t, "word of a fence", r.fenced)
	is(t, full, syscall.ENOSPC)
	is(t, behind, syscall.EIO)
	waits(t, flying, "members still have its buffer")
	r.answer(0, 0, nil)
	r.answer(1, 0, nil)
	is(t, flying, syscall.EIO)
	r.answer(0, 0, nil)
	is(t, read, syscall.EIO)
	r.answer(0, 0, nil)
	is(t, denied, syscall.EIO)
	is(t, r.start(block.OpWrite, 0, fill(4096, 2), 0), syscall.EIO)
	is(t, r.start(block.OpFlush, 0, nil, 0), syscall.EIO)
}

func TestFencedByTheRecord(t *testing.T) {
	r := newRig(t, 2, nil)
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, nil)
	r.answer(1, 0, syscall.EIO)
	within(t, "drop that is asked for", r.drops)
	r.settle <- api.Errorf(api.Denied, "the volume is at epoch 9")
	within(t, "word of a fence", r.fenced)
	is(t, done, syscall.EIO)
}

func TestNoRoomHoldsWrites(t *testing.T) {
	r := newRig(t, 1, nil)
	a := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	b := r.start(block.OpWrite, 8192, fill(512, 2), 0) // partial
	r.answer(0, 1, nil)                                // the read of b's block
	r.answer(0, 1, syscall.ENOSPC)
	r.answer(0, 0, syscall.ENOSPC)
	if !within(t, "word of room", r.space) {
		t.Fatal("not told that the disk is full")
	}
	same := r.start(block.OpWrite, 0, fill(4096, 3), 0)
	if r.pending(0) != 0 {
		t.Fatal("an overlapping write passed one that waits")
	}
	read := r.start(block.OpRead, 0, make([]byte, 4096), 0)
	r.answer(0, 0, nil)
	is(t, read, nil)
	other := r.start(block.OpWrite, 65536, fill(4096, 4), 0)
	r.answer(0, 0, nil)
	is(t, other, nil)

	r.e.Retry()
	r.e.Retry()
	if n := r.pending(0); n != 1 {
		t.Fatalf("%d requests probe for room", n)
	}
	r.answer(0, 0, nil) // b: the read of its block, again
	r.answer(0, 0, syscall.ENOSPC)
	waits(t, a, "there is no room")
	waits(t, b, "there is no room")
	r.e.Retry()
	r.answer(0, 0, nil) // a has room; b follows, and the write that overlaps a
	is(t, a, nil)
	for r.pending(0) > 0 {
		r.answer(0, 0, nil)
	}
	is(t, b, nil)
	is(t, same, nil)
	if within(t, "word of room", r.space) {
		t.Fatal("full again")
	}
	if r.m[0].data[0] != 3 || r.m[0].data[8192] != 2 || r.m[0].data[8192+512] != 0 {
		t.Fatal("not what was written")
	}
}

func TestOneFullMemberOfTwoIsDropped(t *testing.T) {
	r := newRig(t, 2, nil)
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, syscall.ENOSPC)
	r.answer(1, 0, nil)
	if m := within(t, "drop that is asked for", r.drops); m != "a" {
		t.Fatalf("dropped %s", m)
	}
	r.settle <- nil
	is(t, done, nil)
}

func TestFailedFlushIsNotTriedAgain(t *testing.T) {
	r := newRig(t, 1, nil)
	done := r.start(block.OpFlush, 0, nil, 0)
	r.answer(0, 0, syscall.ENOSPC)
	is(t, done, syscall.ENOSPC)
}

func TestRefusals(t *testing.T) {
	r := newRig(t, 1, func(c *Config) { c.ReadOnly = true })
	is(t, r.start(block.OpWrite, 0, fill(4096, 1), 0), syscall.EROFS)
	is(t, r.start(block.OpDiscard, 0, nil, 4096), syscall.EROFS)
	is(t, r.start(block.OpRead, testSize, make([]byte, 4096), 0), syscall.EINVAL)
	is(t, r.start(block.OpRead, testSize-512, make([]byte, 1024), 0), syscall.EINVAL)
	is(t, r.start(block.OpRead, 100, make([]byte, 512), 0), syscall.EINVAL)
	is(t, r.start(block.OpRead, -512, make([]byte, 512), 0), syscall.EINVAL)
	is(t, r.start(block.Op(77), 0, nil, 512), syscall.EOPNOTSUPP)
	if err := r.e.Expand(t.Context(), testSize-4096); !api.Is(err, api.OutOfRange) {
		t.Fatal(err)
	}
}

func TestExpand(t *testing.T) {
	r := newRig(t, 2, nil)
	r.m[0].auto, r.m[1].auto = true, true
	is(t, r.start(block.OpWrite, testSize, fill(4096, 1), 0), syscall.EINVAL)
	if err := r.e.Expand(t.Context(), 2*testSize); err != nil {
		t.Fatal(err)
	}
	is(t, r.start(block.OpWrite, 2*testSize-512, fill(512, 1), 0), nil)
	if r.m[1].data[2*testSize-1] != 1 || r.m[1].data[2*testSize-513] != 0 {
		t.Fatal("not written")
	}
}

func TestOpenStopsWhereAMemberIsAhead(t *testing.T) {
	m := &memory{t: t, refuse: func(int64) error { return api.Errorf(api.Denied, "adopted 12") }}
	_, err := Open(t.Context(), Config{Loop: newLoop(t), Size: testSize, Members: []Named{{Name: "a", Member: m}}})
	if !api.Is(err, api.Denied) {
		t.Fatal(err)
	}
}

func TestCloseEndsWhatWaits(t *testing.T) {
	r := newRig(t, 2, nil)
	drop := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, nil)
	r.answer(1, 0, syscall.EIO)
	within(t, "drop that is asked for", r.drops)
	var parts []chan error
	for i := range 2 * bounceMax { // more than there are buffers
		parts = append(parts, r.start(block.OpWrite, int64(65536+8192*i), fill(512, 1), 0))
	}
	r.close()
	is(t, drop, syscall.EIO)
	for _, done := range parts {
		is(t, done, syscall.EIO)
	}
}

type direct struct{ *memory }

func (d direct) Submit(r *block.Request) { r.Err = nil; r.Done(r) }
