package engine

import (
	"context"
	"runtime"
	"syscall"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

var errAway = api.Errorf(api.Unavailable, "away")

// mirror is a member for joins.
type mirror struct {
	*memory
	digests chan struct{} // if not nil, Digests sends a value when called, and another value before the answer
}

func (m mirror) Track(context.Context, bool) error     { return nil }
func (m mirror) Intend(context.Context, []int64) error { return nil }
func (mirror) Unnoted(context.Context, int64) error    { return nil }

func (m mirror) Intents(context.Context) (stack.Intents, error) {
	return stack.Intents{Region: testSize, Regions: []int64{0}}, nil
}
func (m mirror) Mark(context.Context, int64) error                  { return nil }
func (m mirror) Clean(context.Context, int64, int64, []int64) error { return nil }
func (m mirror) Digests(ctx context.Context, _, n int64) ([]byte, error) {
	for range 2 {
		if m.digests == nil {
			break
		}
		select {
		case m.digests <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return make([]byte, n/block.Size*digestSize), nil // all the same: nothing is copied
}

// TestJoinerThatMissedAWrite: a replica that failed a write during its resync does not become a member, although all
// members have the write.
func TestJoinerThatMissedAWrite(t *testing.T) {
	for _, why := range []error{syscall.ENOSPC, syscall.EIO} {
		added := make(chan string, 1)
		r := newRig(t, 2, func(c *Config) {
			for i, m := range c.Members {
				m.Member.(*memory).auto = true
				c.Members[i].Member = mirror{memory: m.Member.(*memory)}
			}
			c.Add = func(_ context.Context, _ int64, name string) error {
				added <- name
				return nil
			}
		})
		late := mirror{&memory{t: t, data: make([]byte, testSize), auto: true}, make(chan struct{})}
		joined := make(chan error, 1)
		go func() {
			_, err := r.e.Join(t.Context(), Named{Name: "late", Member: late}, JoinOptions{})
			joined <- err
		}()
		<-late.digests // the replica gets all writes from now on
		r.l.do(func() { late.fail = func(*block.Request) error { return why } })
		is(t, r.start(block.OpWrite, 0, fill(4096, 1), 0), nil)
		r.l.do(func() { late.fail = nil })
		select { // the join may have failed already
		case <-late.digests:
		case err := <-joined:
			joined <- err
		}
		select {
		case err := <-joined:
			if err == nil {
				t.Fatal("it joined")
			}
		case name := <-added:
			t.Fatalf("%s is a member and lacks a write", name)
		}
		r.close()
	}
}

// TestWritesWhileAllAreLost: writes which arrive while a member does not serve reach the member when the member serves
// again, and are acknowledged.
func TestWritesWhileAllAreLost(t *testing.T) {
	r := newRig(t, 2, nil)
	refusals := make(chan int, 64)
	refuse := func(m int, is bool) {
		r.m[m].mu.Lock()
		defer r.m[m].mu.Unlock()
		r.m[m].refuse = nil
		if is {
			r.m[m].refuse = func(int64) error {
				select {
				case refusals <- m:
				default:
				}
				return errAway
			}
		}
	}
	refuse(0, true)
	refuse(1, true)
	first := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, errAway)
	r.answer(1, 0, errAway)
	within(t, "refusal", refusals)
	second := r.start(block.OpWrite, 8192, fill(4096, 2), 0) // member 0 is not asked
	if r.pending(0) != 0 {
		t.Fatal("a member got a write while it was being dropped")
	}
	r.answer(1, 0, errAway)
	waits(t, second, "nobody has it")
	refuse(0, false)
	for range 2 {
		for r.pending(0) == 0 {
			runtime.Gosched()
		}
		r.answer(0, 0, nil)
	}
	if m := within(t, "drop that is asked for", r.drops); m != "b" {
		t.Fatalf("dropped %s", m)
	}
	waits(t, first, "the drop is not settled")
	r.settle <- nil
	within(t, "word of a drop", r.dropped)
	is(t, first, nil)
	is(t, second, nil)
	if r.m[0].data[0] != 1 || r.m[0].data[8192] != 2 {
		t.Fatal("the member lacks an acknowledged write")
	}
}

// TestReadWaitsForADrop: the last member failed a read during the drop of another member; the engine asks the last
// member again.
func TestReadWaitsForADrop(t *testing.T) {
	r := newRig(t, 2, nil)
	write := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(1, 0, nil)
	r.answer(0, 0, syscall.EIO)
	if m := within(t, "drop that is asked for", r.drops); m != "a" {
		t.Fatalf("dropped %s", m)
	}
	buf := make([]byte, 4096)
	read := r.start(block.OpRead, 0, buf, 0)
	r.answer(1, 0, errAway) // the connection broke and is back
	waits(t, read, "a member may answer yet")
	r.settle <- nil
	within(t, "word of a drop", r.dropped)
	is(t, write, nil)
	if r.pending(1) == 0 { // the loop settles the epoch together with the read
		t.Fatal("the read is not asked again")
	}
	r.answer(1, 0, nil)
	is(t, read, nil)
	if buf[0] != 1 {
		t.Fatal("not what was written")
	}
}

// TestReadWhoseMemberIsDropped: a member fails a read, and the other member is dropped while it reads. The member that
// is left is the last one now: the engine asks it again before the guest hears of an error.
func TestReadWhoseMemberIsDropped(t *testing.T) {
	r := newRig(t, 2, nil)
	buf := make([]byte, 4096)
	read := r.start(block.OpRead, 0, buf, 0)
	r.answer(0, 0, syscall.EIO)
	write := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, nil)
	r.answer(1, 1, syscall.EIO)
	if m := within(t, "drop that is asked for", r.drops); m != "b" {
		t.Fatalf("dropped %s", m)
	}
	r.settle <- nil
	within(t, "word of a drop", r.dropped)
	is(t, write, nil)
	r.answer(1, 0, errAway) // the dropped member
	for r.pending(0) == 0 {
		select {
		case err := <-read:
			t.Fatalf("the read ended: %v", err)
		default:
			runtime.Gosched()
		}
	}
	r.answer(0, 0, nil)
	is(t, read, nil)
	if buf[0] != 1 {
		t.Fatal("not what was written")
	}
}
