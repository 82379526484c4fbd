package engine

import (
	"context"
	"syscall"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

var errOther = api.Errorf(api.Denied, "the replica adopted another session")

// owned is a rig with an API that answers as the test says.
func owned(t *testing.T, n int) (r *rig, asked chan int64, says chan error) {
	asked, says = make(chan int64), make(chan error)
	r = newRig(t, n, func(c *Config) {
		c.Owns = func(ctx context.Context, epoch int64) error {
			select {
			case asked <- epoch:
			case <-ctx.Done():
				return ctx.Err()
			}
			select {
			case err := <-says:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	return r, asked, says
}

// refuseAll has a member refuse every Adopt.
func (m *memory) refuseAll(why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refuse = func(int64) error { return why }
}

func notFenced(t *testing.T, r *rig) {
	t.Helper()
	select {
	case err := <-r.fenced:
		t.Fatalf("fenced: %v", err)
	default:
	}
}

// TestAMembersWordDropsThatMember: a member names another engine, while the API still names this engine. The engine
// drops the member. Reads and writes wait until the API has answered, and then continue.
func TestAMembersWordDropsThatMember(t *testing.T) {
	for _, op := range []block.Op{block.OpWrite, block.OpRead} {
		r, _, _ := owned(t, 3)
		var denied chan error
		if op == block.OpWrite {
			denied = r.start(op, 0, fill(4096, 1), 0)
			r.answer(0, 0, nil)
			r.answer(1, 0, errOther)
			r.answer(2, 0, nil)
		} else {
			denied = r.start(op, 0, make([]byte, 4096), 0)
			r.answer(0, 0, errOther)
		}
		want := "b"
		if op == block.OpRead {
			want = "a"
		}
		if m := within(t, "drop that is asked for", r.drops); m != want {
			t.Fatalf("dropped %s", m)
		}
		read := r.start(block.OpRead, 8192, make([]byte, 4096), 0)
		if r.pending(0)+r.pending(1)+r.pending(2) != 0 {
			t.Fatal("a member is read from while another engine may have the volume")
		}
		r.settle <- api.Errorf(api.Unavailable, "the API is away")
		if m := within(t, "second try", r.drops); m != want {
			t.Fatalf("dropped %s", m)
		}
		waits(t, denied, "the API has not answered")
		waits(t, read, "the API has not answered")
		r.settle <- nil
		within(t, "word of a drop", r.dropped)
		r.l.do(func() {
			for _, m := range r.m {
				for m.auto = true; len(m.pending) > 0; {
					m.next(0)
				}
			}
		})
		is(t, denied, nil)
		is(t, read, nil)
		notFenced(t, r)
		r.close()
	}
}

// TestDoubtOutlivesTheDropOfAnotherMember: during the drop of a member, another member names another engine. The first
// drop does not settle this doubt: reads wait for the second drop.
func TestDoubtOutlivesTheDropOfAnotherMember(t *testing.T) {
	r, _, _ := owned(t, 3)
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, nil)
	r.answer(1, 0, errAway)
	r.answer(2, 0, nil)
	if m := within(t, "drop that is asked for", r.drops); m != "b" {
		t.Fatalf("dropped %s", m)
	}
	denied := r.start(block.OpWrite, 4096, fill(4096, 2), 0)
	r.answer(0, 0, nil)
	r.answer(2, 0, errOther)
	r.settle <- nil
	within(t, "word of a drop", r.dropped)
	if m := within(t, "second drop that is asked for", r.drops); m != "c" {
		t.Fatalf("dropped %s", m)
	}
	read := r.start(block.OpRead, 8192, make([]byte, 4096), 0)
	if r.pending(0) != 0 {
		t.Error("a member is read from while another engine may have the volume")
	}
	r.settle <- nil
	within(t, "word of a drop", r.dropped)
	is(t, done, nil)
	is(t, denied, nil)
	r.answer(0, 0, nil)
	is(t, read, nil)
	notFenced(t, r)
}

// TestAMembersWordAndTheAPIFence: if the API names another engine, the device goes down.
func TestAMembersWordAndTheAPIFence(t *testing.T) {
	r, _, _ := owned(t, 2)
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, nil)
	r.answer(1, 0, errOther)
	within(t, "drop that is asked for", r.drops)
	r.settle <- api.Errorf(api.Denied, "the volume has its engine on node b")
	within(t, "word of a fence", r.fenced)
	is(t, done, syscall.EIO)
}

// TestAllMembersWordAsksTheAPI: if all members name another engine, I/O waits for the API, and fails once the API names
// another engine.
func TestAllMembersWordAsksTheAPI(t *testing.T) {
	r, asked, says := owned(t, 2)
	r.m[0].refuseAll(errOther)
	r.m[1].refuseAll(errOther)
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, errOther)
	r.answer(1, 0, errOther)
	for range 2 {
		if at := within(t, "question", asked); at != 7 {
			t.Fatalf("asked about epoch %d", at)
		}
		waits(t, done, "the API has not answered")
		notFenced(t, r)
		says <- api.Errorf(api.Unavailable, "the API is away")
	}
	within(t, "question", asked)
	says <- api.Errorf(api.Denied, "the volume has its engine on node b")
	within(t, "word of a fence", r.fenced)
	is(t, done, syscall.EIO)
}

// TestTheOnlyMembersWordFences: if the only member names another engine, no member is left, and the engine is fenced.
func TestTheOnlyMembersWordFences(t *testing.T) {
	r, _, _ := owned(t, 1)
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, errOther)
	within(t, "word of a fence", r.fenced)
	is(t, done, syscall.EIO)
}

// TestSurvivorsWordIsNoFence: the API has just given a new epoch to this engine, and a survivor does not adopt the
// epoch. The engine drops the survivor next.
func TestSurvivorsWordIsNoFence(t *testing.T) {
	r, _, _ := owned(t, 3)
	r.m[1].mu.Lock()
	r.m[1].refuse = func(epoch int64) error {
		if epoch > 7 {
			return errOther
		}
		return nil
	}
	r.m[1].mu.Unlock()
	done := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	r.answer(0, 0, nil)
	r.answer(1, 0, nil)
	r.answer(2, 0, syscall.EIO)
	for _, want := range []string{"c", "b"} {
		if m := within(t, "drop that is asked for", r.drops); m != want {
			t.Fatalf("dropped %s", m)
		}
		r.settle <- nil
		within(t, "word of a drop", r.dropped)
	}
	is(t, done, nil)
	notFenced(t, r)
}

// TestOpenAsksTheAPI: a member names another engine to an engine that resumes. If the API names this engine, the engine
// continues without the member. If the API does not answer, or names another engine, the open fails.
func TestOpenAsksTheAPI(t *testing.T) {
	for _, c := range []struct {
		says, want error
	}{
		{nil, nil},
		{api.Errorf(api.Unavailable, "the API is away"), api.Errorf(api.Unavailable, "")},
		{api.Errorf(api.Denied, "the engine is on node b"), api.Errorf(api.Denied, "")},
	} {
		a, b := &memory{t: t, auto: true, data: make([]byte, testSize)}, &memory{t: t}
		b.refuseAll(errOther)
		dropped := make(chan string, 1)
		e, err := Open(t.Context(), Config{Loop: newLoop(t), Size: testSize, Lenient: true, Epoch: 7,
			Members: []Named{{Name: "a", Member: a}, {Name: "b", Member: b}},
			Drop:    func(_ context.Context, _ int64, m string) error { dropped <- m; return nil },
			Owns:    func(context.Context, int64) error { return c.says }})
		if (err == nil) != (c.want == nil) || c.want != nil && api.KindOf(err) != api.KindOf(c.want) {
			t.Fatalf("the API says %v: %v", c.says, err)
		}
		if err != nil {
			continue
		}
		if m := within(t, "drop", dropped); m != "b" {
			t.Errorf("dropped %s", m)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}
