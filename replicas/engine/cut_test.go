package engine

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// cuttable is a member for cuts.
type cuttable struct {
	mirror
	mu       sync.Mutex
	prepared int
	failed   bool          // the disk may have the cut: the member takes no more writes
	seal     error         // answer of DoCut
	aborts   chan struct{} // AbortCut waits for its close; may be nil
}

func (m *cuttable) PrepareCut(context.Context, stack.Snapshot) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.prepared++
	return m.cause()
}

func (m *cuttable) DoCut(context.Context, string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failed = errors.Is(m.seal, stack.ErrFailed)
	return m.seal
}

func (m *cuttable) AbortCut(context.Context) error {
	if m.aborts != nil {
		<-m.aborts
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cause()
}

// cause returns why the member takes no more writes. The caller has the lock.
func (m *cuttable) cause() error {
	if m.failed {
		return stack.ErrFailed
	}
	return nil
}

func (m *cuttable) State(context.Context) (stack.Meta, error)                 { return stack.Meta{}, nil }
func (m *cuttable) Forget(context.Context, string) error                      { return nil }
func (m *cuttable) Seal(context.Context, ...stack.Snapshot) error             { return nil }
func (m *cuttable) SnapRead(context.Context, string, int64, []byte) error     { return nil }
func (m *cuttable) SnapEnd(context.Context) error                             { return nil }
func (m *cuttable) Sizes(context.Context) (map[string]stack.LayerSize, error) { return nil, nil }
func (m *cuttable) SnapDigests(context.Context, string, int64, int64) ([]byte, error) {
	return nil, nil
}
func (m *cuttable) Changed(context.Context, string, string, []string, int64) ([]int64, error) {
	return nil, nil
}

// cutRig is a rig with cuttable members and successful drops.
func cutRig(t *testing.T, n int) (*rig, []*cuttable) {
	var all []*cuttable
	r := newRig(t, n, func(c *Config) {
		for i, m := range c.Members {
			x := &cuttable{mirror: mirror{memory: m.Member.(*memory)}}
			x.memory.auto = true
			all = append(all, x)
			c.Members[i].Member = x
		}
		c.Drop = func(context.Context, int64, string) error { return nil }
	})
	return r, all
}

// cut takes a snapshot; the time is the bubble's.
func (r *rig) cut(t *testing.T) error {
	done := make(chan error, 1)
	go func() {
		done <- r.e.Cut(context.Background(), stack.Snapshot{UID: "u", Name: "s", Created: time.Unix(1, 0)})
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Hour):
		t.Error("the cut does not end")
		return nil
	}
}

// TestCutOnFailedDisks: a member whose disk may have the cut answers with an error. The engine does not ask the member
// again for this cut, and drops the member before a write continues, if a healthy member is left. A single member fails
// its own writes.
func TestCutOnFailedDisks(t *testing.T) {
	away := api.Errorf(api.Unavailable, "not now")
	for name, c := range map[string]struct {
		seals   []error
		dropped string
	}{
		"the only one":             {[]error{stack.ErrFailed}, ""},
		"one of two":               {[]error{stack.ErrFailed, nil}, "a"},
		"and the other makes none": {[]error{stack.ErrFailed, away}, "a"},
		"both":                     {[]error{stack.ErrFailed, stack.ErrFailed}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, all := cutRig(t, len(c.seals))
				for i, err := range c.seals {
					all[i].seal = err
				}
				err := r.cut(t)
				if done := c.seals[len(c.seals)-1] == nil; (err == nil) != done {
					t.Errorf("the cut: %v", err)
				}
				for i, m := range all {
					if errors.Is(c.seals[i], stack.ErrFailed) && m.prepared != 1 {
						t.Errorf("member %d was to prepare it %d times", i, m.prepared)
					}
				}
				synctest.Wait()
				select {
				case m := <-r.dropped:
					if m != c.dropped {
						t.Errorf("%s was dropped", m)
					}
				default:
					if c.dropped != "" {
						t.Error("nobody was dropped")
					}
				}
				wrote := r.start(block.OpWrite, 0, fill(block.Size, 1), 0)
				select {
				case <-wrote:
				case <-time.After(time.Hour):
					t.Error("a write is held back")
				}
			})
		})
	}
}

// TestFailedMemberKeepsNoSnapshot: a member that takes no more writes, and got none since, does not prevent a cut of
// the other members: the engine drops the failed member.
func TestFailedMemberKeepsNoSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, all := cutRig(t, 2)
		all[1].failed = true
		if err := r.cut(t); !errors.Is(err, stack.ErrFailed) {
			t.Errorf("the first try: %v", err)
		}
		synctest.Wait()
		select {
		case m := <-r.dropped:
			if m != "b" {
				t.Errorf("%s was dropped", m)
			}
		default:
			t.Error("nobody was dropped")
		}
		if err := r.cut(t); err != nil {
			t.Errorf("the next try: %v", err)
		}
	})
}

// TestWritesDoNotWaitForAnAbort: the engine aborts a cut, and held writes continue before all members have answered the
// abort. Another cut begins after the last answer.
func TestWritesDoNotWaitForAnAbort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, all := cutRig(t, 2)
		s := stack.Snapshot{UID: "u", Name: "s", Created: time.Unix(1, 0)}
		c, err := r.e.PrepareCut(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Hold(t.Context()); err != nil {
			t.Fatal(err)
		}
		all[1].aborts = make(chan struct{})
		wrote := r.start(block.OpWrite, 0, fill(block.Size, 1), 0)
		aborted := make(chan struct{})
		go func() {
			c.Abort()
			close(aborted)
		}()
		select {
		case <-wrote:
		case <-time.After(time.Hour):
			t.Error("a write waits for a member that gives a cut up")
		}
		if _, err := r.e.PrepareCut(t.Context(), s); !api.Is(err, api.Busy) {
			t.Errorf("a cut beside one that is being given up: %v", err)
		}
		close(all[1].aborts)
		<-aborted
		all[1].aborts = nil
		if err := r.cut(t); err != nil {
			t.Errorf("the next cut: %v", err)
		}
	})
}

// TestCutBesideAReadThatHangs: a cut holds no writes for a read that waits for another machine. The engine tries the
// snapshot again.
func TestCutBesideAReadThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := cutRig(t, 2)
		r.l.do(func() { r.m[0].auto = false })
		read := r.start(block.OpRead, 0, make([]byte, block.Size), 0)
		var hangs []*block.Request
		r.l.do(func() { hangs, r.m[0].pending, r.m[0].auto = r.m[0].pending, nil, true })
		cut := make(chan error, 1)
		go func() { cut <- r.cut(t) }()
		for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(time.Second / 2) {
			at := time.Now()
			<-r.start(block.OpFlush, 0, nil, 0)
			if err := <-r.start(block.OpWrite, 2*block.Size, fill(block.Size, 1), 0); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(at); took > 0 {
				t.Fatalf("a write was held for %v", took)
			}
		}
		if err := <-cut; !api.Is(err, api.Busy) || !errors.Is(err, stack.ErrUnderWay) {
			t.Errorf("the cut: %v", err)
		}
		waits(t, read, "its source is away")
		r.l.do(func() { r.m[0].pending = hangs })
		r.answer(0, 0, nil)
		is(t, read, nil)
		if err := r.cut(t); err != nil {
			t.Errorf("the next cut: %v", err)
		}
	})
}

// TestCutOfASingleMemberHoldsNoWrites: a single member cuts beside its own writes, and waits for no write.
func TestCutOfASingleMemberHoldsNoWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := cutRig(t, 1)
		r.l.do(func() { r.m[0].auto = false })
		write := r.start(block.OpWrite, 0, fill(block.Size, 1), 0)
		if err := r.cut(t); err != nil {
			t.Errorf("the cut beside a write: %v", err)
		}
		waits(t, write, "its disk has not answered")
		r.answer(0, 0, nil)
		is(t, write, nil)
	})
}

// slowCut is a replica on a disk that is slow to cut. Calls wait for each other, and continue after their callers left.
type slowCut struct {
	*cuttable
	turn  chan struct{} // a mutex
	takes time.Duration
	next  stack.Snapshot
	has   []stack.Snapshot
}

func (m *slowCut) lock() (unlock func()) {
	m.turn <- struct{}{}
	return func() { <-m.turn }
}

func (m *slowCut) PrepareCut(_ context.Context, s stack.Snapshot) error {
	defer m.lock()()
	time.Sleep(m.takes)
	m.next = s
	return nil
}

func (m *slowCut) DoCut(context.Context, string) error {
	defer m.lock()()
	time.Sleep(m.takes)
	m.has = append(m.has, m.next)
	return nil
}

func (m *slowCut) AbortCut(context.Context) error { m.lock()(); return nil }

func (m *slowCut) State(context.Context) (stack.Meta, error) {
	return stack.Meta{Snapshots: m.has}, nil
}

func (m *slowCut) Forget(context.Context, string) error {
	defer m.lock()()
	m.has = nil
	return nil
}

// TestSlowDiskIsCut: a slow cut holds no writes of a single member back, so the cut has no time limit. With a limit, no
// try would ever succeed.
func TestSlowDiskIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWatch()
		slow := &slowCut{turn: make(chan struct{}, 1), takes: 12 * time.Second}
		r := newRig(t, 1, func(c *Config) {
			m := c.Members[0].Member.(*memory)
			m.auto = true
			slow.cuttable = &cuttable{mirror: mirror{memory: m}}
			c.Members[0].Member = w.Member(slow, WatchOptions{Loop: c.Loop, Replica: "a"})
		})
		done := make(chan error)
		go func() { done <- r.cut(t) }()
		synctest.Wait()
		wrote := r.start(block.OpWrite, 0, fill(block.Size, 1), 0)
		select {
		case <-wrote:
		case <-time.After(time.Second):
			t.Error("a write waits for the cut")
		}
		if err := <-done; err != nil || len(slow.has) != 1 {
			t.Errorf("the cut: %v; the replica has %d snapshots", err, len(slow.has))
		}
		r.close()
		w.Close()
	})
}
