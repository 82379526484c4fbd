package engine

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// hangs is a replica whose disk hangs in Close.
type hangs struct {
	Cutter
	goOn chan struct{}
}

func (h hangs) Close() error { <-h.goOn; return nil }

// slowCall is a replica that is slow to answer a call.
type slowCall struct {
	Cutter
	goOn   chan struct{}
	closed *bool
}

func (s slowCall) Track(context.Context, bool) error { <-s.goOn; return nil }
func (s slowCall) Close() error                      { *s.closed = true; return nil }

// TestWatchedMemberEndsBesideACall: at the close of a replica, a call whose caller left is still in progress. The watch
// does not abandon the replica, closes the replica after the end of the call, and only then returns.
func TestWatchedMemberEndsBesideACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, slow := NewWatch(), slowCall{goOn: make(chan struct{}), closed: new(bool)}
		n := w.Member(slow, WatchOptions{Replica: "r"})
		ctx, cancel := context.WithCancel(t.Context())
		asked := make(chan error)
		go func() { asked <- n.Track(ctx, true) }()
		synctest.Wait()
		cancel()
		if err := <-asked; err == nil {
			t.Fatal("the call was answered")
		}
		time.AfterFunc(time.Second, func() {
			if w.Abandoned("r") {
				t.Error("it is abandoned")
			}
			close(slow.goOn)
		})
		if err := n.Close(); err != nil || !*slow.closed || w.Abandoned("r") {
			t.Errorf("the end: %v; closed: %t, abandoned: %t", err, *slow.closed, w.Abandoned("r"))
		}
		w.Close()
	})
}

// TestWatchedMemberHangsAtItsEnd: the watch does not wait for a disk that begins to hang in a close, and the replica
// stays taken until the disk answers.
func TestWatchedMemberHangsAtItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, h := NewWatch(), hangs{goOn: make(chan struct{})}
		n := w.Member(h, WatchOptions{Replica: "r"})
		if err := n.Close(); !api.Is(err, api.Unavailable) {
			t.Errorf("the end of a replica whose disk hangs: %v", err)
		}
		if !w.Abandoned("r") {
			t.Error("the replica is said to be free")
		}
		close(h.goOn)
		synctest.Wait()
		if w.Abandoned("r") || w.Waits() > 0 {
			t.Error("the disk has answered, and the replica is not free")
		}
		w.Close()
	})
}

// elsewhere is a replica on another node that answers nothing.
type elsewhere struct {
	Cutter
	loop      Loop
	link      func(down error)
	asked     []*block.Request // loop thread
	abandoned atomic.Int32
	closed    atomic.Bool
}

func (m *elsewhere) OnLink(fn func(down error))                    { m.link = fn }
func (m *elsewhere) Submit(r *block.Request)                       { m.asked = append(m.asked, r) }
func (m *elsewhere) Seal(context.Context, ...stack.Snapshot) error { return nil }
func (m *elsewhere) Close() error                                  { m.closed.Store(true); return nil }

func (m *elsewhere) Digests(ctx context.Context, _, _ int64) ([]byte, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (m *elsewhere) Abandon(why error) {
	m.abandoned.Add(1)
	m.loop.Post(func() { m.answer(why) })
}

// answer answers all requests. Loop thread.
func (m *elsewhere) answer(err error) {
	list := m.asked
	m.asked = nil
	for _, r := range list {
		r.Err = err
		r.Done(r)
	}
}

// watchElsewhere returns a watched member that is elsewhere.
func watchElsewhere(t *testing.T) (w *Watch, on *elsewhere, m *WatchedMember, stalls chan error) {
	w, on, stalls = NewWatch(), &elsewhere{loop: newLoop(t)}, make(chan error, 9)
	m = w.Member(on, WatchOptions{Loop: on.loop, Replica: "r", OnStall: func(why error) { stalls <- why }})
	return w, on, m, stalls
}

func (m *elsewhere) write(on *WatchedMember) chan error {
	done := make(chan error, 1)
	m.loop.Post(func() { on.Submit(&block.Request{Op: block.OpWrite, Done: func(r *block.Request) { done <- r.Err }}) })
	return done
}

// TestCallsStall: a replica of another node does not answer a call. The call fails, the watch abandons the member, and
// no goroutine is left. The last member has no limit.
func TestCallsStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, on, m, stalls := watchElsewhere(t)
		m.Last(true)
		answered := make(chan error, 1)
		go func() {
			_, err := m.Digests(context.Background(), 0, 1)
			answered <- err
		}()
		time.Sleep(time.Hour)
		if len(answered)+len(stalls) > 0 {
			t.Fatal("the last member is abandoned")
		}
		m.Last(false)
		if err := <-answered; !api.Is(err, api.Unavailable) {
			t.Errorf("the call: %v", err)
		}
		<-stalls
		if err := m.Seal(t.Context()); !api.Is(err, api.Unavailable) {
			t.Errorf("a call of an abandoned member: %v", err)
		}
		if err := m.Close(); !api.Is(err, api.Unavailable) {
			t.Errorf("the end of an abandoned member: %v", err)
		}
		synctest.Wait()
		if !on.closed.Load() || on.abandoned.Load() != 1 || len(stalls) > 0 || w.Waits() > 0 {
			t.Errorf("closed: %t, abandoned %d times, %d more stalls", on.closed.Load(), on.abandoned.Load(), len(stalls))
		}
		w.Close()
	})
}

// TestNoConnectionIsAStall: the watch abandons an unreachable replica, even without requests, and reports the cause.
// The watch does not abandon the last member, and DisconnectedFor returns the time.
func TestNoConnectionIsAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, on, m, stalls := watchElsewhere(t)
		m.Last(true)
		on.link(errAway)
		time.Sleep(time.Minute)
		if n := m.DisconnectedFor(); n < 59*time.Second || n > time.Minute || len(stalls) > 0 {
			t.Errorf("not reached for a minute: %v, %d stalls", n, len(stalls))
		}
		on.link(nil)
		m.Last(false)
		time.Sleep(time.Minute)
		if n := m.DisconnectedFor(); n != 0 || len(stalls) > 0 {
			t.Errorf("reached again: %v, %d stalls", n, len(stalls))
		}
		on.link(errAway)
		if why := <-stalls; !strings.Contains(why.Error(), errAway.Error()) {
			t.Error(why)
		}
		_ = m.Close()
		w.Close()
	})
}

// TestReconnectSaysNothingOfTheDisk: requests sent again were slow because of the connection, not because of the disk.
// So the limit of later requests stays.
func TestReconnectSaysNothingOfTheDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, on, m, stalls := watchElsewhere(t)
		time.Sleep(time.Second)
		first := on.write(m)
		time.Sleep(time.Second)
		on.link(errAway)
		second := on.write(m)
		time.Sleep(2 * time.Second)
		on.link(nil)
		on.loop.Post(func() { on.answer(nil) })
		if err := errors.Join(<-first, <-second); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := <-on.write(m); !api.Is(err, api.Unavailable) || time.Since(began) > 5*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		<-stalls
		_ = m.Close()
		w.Close()
	})
}

// TestDroppedMemberLetsGoOfRequests: the close of a dropped member answers the requests in progress.
func TestDroppedMemberLetsGoOfRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, on, m, _ := watchElsewhere(t)
		done := on.write(m)
		synctest.Wait()
		began := time.Now()
		_ = m.Close()
		if err := <-done; !api.Is(err, api.Unavailable) || time.Since(began) > time.Second {
			t.Errorf("a replica of another node: %v after %v", err, time.Since(began))
		}
		here := &elsewhere{loop: on.loop}
		near := w.Member(struct{ Cutter }{here}, WatchOptions{Loop: on.loop, Replica: "here"})
		done = on.write(near)
		synctest.Wait()
		_ = near.Close()
		if err := <-done; !api.Is(err, api.Unavailable) || !w.Abandoned("here") {
			t.Errorf("a replica whose disk hangs: %v", err)
		}
		on.loop.Post(func() { here.answer(nil) })
		synctest.Wait()
		if w.Waits() > 0 || !here.closed.Load() {
			t.Error("the disk has answered, and the replica is not closed")
		}
		w.Close()
	})
}

// hangsIn is a member that does not answer one kind of call.
type hangsIn struct {
	*keeper
	call string
}

func (m hangsIn) hang(ctx context.Context, call string) error {
	if m.call != call {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func (m hangsIn) Forget(ctx context.Context, uid string) error {
	return errors.Join(m.hang(ctx, "forget"), m.keeper.Forget(ctx, uid))
}

func (m hangsIn) Intents(ctx context.Context) (stack.Intents, error) {
	t, err := m.keeper.Intents(ctx)
	return t, errors.Join(m.hang(ctx, "intents"), err)
}

func (m hangsIn) State(ctx context.Context) (stack.Meta, error) {
	t, err := m.keeper.State(ctx)
	return t, errors.Join(m.hang(ctx, "state"), err)
}

// TestOpenLeavesOutAMemberThatStalls: a member that adopts the epoch and stalls in another call does not keep the
// volume from being attached. The engine begins without the member, and drops the member, like an unreachable member.
func TestOpenLeavesOutAMemberThatStalls(t *testing.T) {
	for _, call := range []string{"forget", "intents", "state"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, loop, dropped := NewWatch(), newLoop(t), make(chan string, 1)
				old := stack.Snapshot{UID: "s", Name: "s", Created: time.Unix(1, 0)}
				watched := func(name string, on Cutter) Named {
					return Named{Name: name, Member: w.Member(on, WatchOptions{Loop: loop, Replica: name})}
				}
				e, err := Open(t.Context(), Config{Loop: loop, Size: 1 << 20, Epoch: 5, Incarnation: 1, Track: true, Lenient: true,
					Resync: true, Members: []Named{watched("a", hangsIn{newKeeper(old), call}), watched("b", newKeeper())},
					Drop:   func(context.Context, int64, string) error { return nil },
					OnDrop: func(m string, _ error) { dropped <- m }})
				if err != nil {
					t.Fatal(err)
				}
				if got := e.Missing(); !slices.Equal(got, []string{"a"}) {
					t.Fatalf("missing: %v", got) // no drop follows
				}
				if got := <-dropped; got != "a" {
					t.Errorf("%s was dropped", got)
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
				w.Close()
			})
		})
	}
}
