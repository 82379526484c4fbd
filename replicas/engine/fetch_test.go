package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"sync"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// fetcher is a member that answers immediately, and still lacks every block below lacks.
type fetcher struct {
	*memory
	mu    sync.Mutex
	lacks int64
	asked int
	tell  func()
	clean []int64
}

func newFetcher(t testing.TB, lacks int64) *fetcher {
	f := &fetcher{memory: &memory{t: t, data: make([]byte, testSize), auto: true}, lacks: lacks}
	f.fail = func(q *block.Request) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if q.Op == block.OpRead && q.Off < f.lacks {
			f.asked++
			return stack.ErrNotFetched
		}
		return nil
	}
	return f
}

func (f *fetcher) OnFetched(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tell = fn
}

// came gives the member all blocks, and notifies the engine.
func (f *fetcher) came() {
	f.mu.Lock()
	f.lacks = 0
	tell := f.tell
	f.mu.Unlock()
	if tell != nil {
		tell()
	}
}

func (f *fetcher) Track(context.Context, bool) error     { return nil }
func (f *fetcher) Intend(context.Context, []int64) error { return nil }
func (f *fetcher) Mark(context.Context, int64) error     { return nil }
func (f *fetcher) Clean(_ context.Context, _, _ int64, r []int64) error {
	f.clean = append(f.clean, r...)
	return nil
}
func (*fetcher) Unnoted(context.Context, int64) error { return nil }

func (f *fetcher) Intents(context.Context) (i stack.Intents, err error) {
	return stack.Intents{Region: 16 << 20, Base: 7, Joined: 7, Regions: []int64{0}}, nil
}
func (f *fetcher) Digests(_ context.Context, off, n int64) (sums []byte, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if off < f.lacks {
		return nil, stack.ErrNotFetched
	}
	for ; n > 0; off, n = off+block.Size, n-block.Size {
		s := sha256.Sum256(f.data[off : off+block.Size])
		sums = append(sums, s[:digestSize]...)
	}
	return sums, nil
}

// fetchers is a rig with these members.
func fetchers(t *testing.T, change func(*Config), list ...*fetcher) *rig {
	return newRig(t, 0, func(c *Config) {
		for i, f := range list {
			c.Members = append(c.Members, Named{Name: string(rune('a' + i)), Local: i == 0, Member: f})
		}
		if change != nil {
			change(c)
		}
	})
}

// asideIn returns once so many operations are set aside.
func (r *rig) asideIn(n int) {
	r.t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		is, flight := 0, 0
		r.l.do(func() { is, flight = len(r.e.fetches.list), r.e.inflight })
		if is == n && flight == 0 {
			return
		}
	}
	r.t.Fatal("an operation that waits for blocks to be fetched is I/O under way")
}

// TestAnotherMemberAnswersWhatIsNotFetched: if the local member still fetches a block, another member answers the read.
// No member is dropped.
func TestAnotherMemberAnswersWhatIsNotFetched(t *testing.T) {
	a, b := newFetcher(t, testSize), newFetcher(t, 0)
	copy(b.data, "there")
	r := fetchers(t, nil, a, b)
	buf := make([]byte, block.Size)
	is(t, r.start(block.OpRead, 0, buf, 0), nil)
	if string(buf[:5]) != "there" {
		t.Errorf("the read got %q", buf[:5])
	}
	if _, members, err := r.e.Epoch(t.Context()); err != nil || len(members) != 2 {
		t.Errorf("members %v: %v", members, err)
	}
	r.l.do(func() {
		if r.e.suspect != 0 {
			t.Error("the engine is about to drop a member that still fetches")
		}
	})
}

// TestWhatNobodyFetchedIsSetAside: if no member has fetched the blocks, the engine sets reads of these blocks aside,
// whole or partial, and also writes of partial blocks. The requests end once a member reports the blocks as fetched.
func TestWhatNobodyFetchedIsSetAside(t *testing.T) {
	a, b := newFetcher(t, 2*block.Size), newFetcher(t, 2*block.Size)
	r := fetchers(t, nil, a, b)
	whole, part := make([]byte, block.Size), make([]byte, 512)
	read, small := r.start(block.OpRead, 0, whole, 0), r.start(block.OpRead, 512, part, 0)
	write := r.start(block.OpWrite, block.Size+512, fill(512, 7), 0)
	r.asideIn(3)
	is(t, r.start(block.OpWrite, 0, fill(block.Size, 3), 0), nil)
	is(t, r.start(block.OpWrite, block.Size, fill(block.Size, 4), 0), nil) // the block of the waiting write
	is(t, r.start(block.OpFlush, 0, nil, 0), nil)
	waits(t, read, "its block is not there")
	waits(t, small, "its block is not there")
	waits(t, write, "the rest of its block is not there")
	a.came()
	b.came()
	for _, done := range []chan error{read, small, write} {
		is(t, done, nil)
	}
	if !bytes.Equal(whole, fill(block.Size, 3)) || !bytes.Equal(part, fill(512, 3)) {
		t.Error("a read that waited got something else than what is there")
	}
	want := fill(block.Size, 4)
	copy(want[512:], fill(512, 7))
	for i, m := range []*fetcher{a, b} {
		if !bytes.Equal(m.data[block.Size:2*block.Size], want) {
			t.Errorf("member %d has lost one of two writes to a block", i)
		}
	}
}

// TestWhatIsNotFetchedIsAskedForAgain: the engine asks again, after a while, a member that reports no fetched blocks.
func TestWhatIsNotFetchedIsAskedForAgain(t *testing.T) {
	a := newFetcher(t, block.Size)
	r := fetchers(t, nil, a)
	read := r.start(block.OpRead, 0, make([]byte, block.Size), 0)
	r.asideIn(1)
	a.mu.Lock()
	a.lacks = 0
	a.mu.Unlock()
	is(t, read, nil)
}

// TestFailedMemberIsDroppedBesideAFetch: a failed member is dropped, although the other member has not fetched the
// block of the read.
func TestFailedMemberIsDroppedBesideAFetch(t *testing.T) {
	a, b := newFetcher(t, block.Size), newFetcher(t, 0)
	b.fail = func(*block.Request) error { return api.Errorf(api.Unavailable, "it is gone") }
	r := fetchers(t, nil, a, b)
	read := r.start(block.OpRead, 0, make([]byte, block.Size), 0)
	if m := within(t, "a drop", r.drops); m != "b" {
		t.Errorf("%s is dropped", m)
	}
	r.settle <- nil
	within(t, "the end of the drop", r.dropped)
	waits(t, read, "its block is not there")
	write := r.start(block.OpWrite, 0, fill(block.Size, 1), 0)
	is(t, write, nil)
	a.came()
	is(t, read, nil)
}

// TestJoinBesideAFetch: a replica joins while reads and writes wait for unfetched blocks, and the comparison waits for
// its blocks.
func TestJoinBesideAFetch(t *testing.T) {
	a, b := newFetcher(t, block.Size), newFetcher(t, 0)
	b.data = fill(testSize, 9)
	r := fetchers(t, func(c *Config) {
		c.Track = true
		c.Add = func(context.Context, int64, string) error { return nil }
	}, a)
	read := r.start(block.OpRead, 0, make([]byte, block.Size), 0)
	write := r.start(block.OpWrite, 512, fill(512, 7), 0)
	r.asideIn(2)
	joined := make(chan error, 1)
	go func() {
		_, err := r.e.Join(t.Context(), Named{Name: "b", Member: b}, JoinOptions{})
		joined <- err
	}()
	for gets, end := false, time.Now().Add(time.Minute); !gets; time.Sleep(time.Millisecond) {
		r.l.do(func() { gets = r.e.joiners != 0 && len(r.e.gens) == 1 })
		if time.Now().After(end) {
			t.Fatal("a replica that joins waits for a read that is set aside")
		}
	}
	a.came()
	is(t, read, nil)
	is(t, write, nil)
	if err := within(t, "the end of the join", joined); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.data, b.data) {
		t.Error("the members differ")
	}
	r.m = append(r.m, a.memory, b.memory)
}

// TestCutBesideAFetch: a cut does not wait for a write with an unfetched block, and the write does not begin before the
// end of the cut.
func TestCutBesideAFetch(t *testing.T) {
	a := newFetcher(t, block.Size)
	r := fetchers(t, nil, a)
	write := r.start(block.OpWrite, 512, fill(512, 7), 0)
	r.asideIn(1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := r.e.AwaitOperations(ctx); err != nil {
		t.Fatal(err)
	}
	c := &Cut{e: r.e, who: bit(0)}
	if err := c.Hold(ctx); err != nil {
		t.Fatalf("a cut beside a write that waits for its block: %v", err)
	}
	a.came()
	r.l.do(r.e.fetches.askDueAgain)
	waits(t, write, "writes are held for a cut")
	c.ended = true
	c.Release()
	is(t, write, nil)
}

// TestWhatIsSetAsideEndsWithTheEngine: the close of an engine, or a fence, ends the requests set aside.
func TestWhatIsSetAsideEndsWithTheEngine(t *testing.T) {
	for _, how := range []string{"closed", "fenced"} {
		a := newFetcher(t, block.Size)
		r := fetchers(t, nil, a)
		read := r.start(block.OpRead, 0, make([]byte, block.Size), 0)
		write := r.start(block.OpWrite, 512, fill(512, 7), 0)
		r.asideIn(2)
		if how == "closed" {
			r.close()
		} else {
			r.l.do(func() { r.e.fence(api.Errorf(api.Denied, "another engine")) })
		}
		is(t, read, syscall.EIO)
		is(t, write, syscall.EIO)
	}
}
