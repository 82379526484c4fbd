package engine

import (
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// TestDroppedSlowMemberLetsGoOfRequests: a member of this node whose disk was slow lately has the longest limit of a
// request. The engine drops the member for another failure, and the disk hangs with requests. The close of the member
// answers these requests, because the guest's writes wait for the answers.
func TestDroppedSlowMemberLetsGoOfRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, loop := NewWatch(), newLoop(t)
		here := &elsewhere{loop: loop}
		near := w.Member(struct{ Cutter }{here}, WatchOptions{Loop: loop, Replica: "here"})
		near.Last(true)
		slow := here.write(near)
		time.Sleep(10*time.Second + watchTick/2)
		loop.Post(func() { here.answer(nil) })
		if err := <-slow; err != nil {
			t.Fatal(err)
		}
		near.Last(false) // another replica has joined
		hung := here.write(near)
		synctest.Wait()
		_ = near.Close()
		select {
		case err := <-hung:
			if !api.Is(err, api.Unavailable) || !w.Abandoned("here") {
				t.Errorf("a replica whose disk hangs: %v", err)
			}
		case <-time.After(time.Hour):
			t.Error("a request of a dropped member is not answered: the guest's write hangs")
		}
		loop.Post(func() { here.answer(nil) })
		synctest.Wait()
		if w.Waits() > 0 || !here.closed.Load() {
			t.Error("the disk has answered, and the replica is not closed")
		}
		w.Close()
	})
}

// TestWriteEndsBesideADroppedMemberThatHangs: the same with an engine. One write of the member fails, so the engine
// drops the member, and the disk never answers the other write.
func TestWriteEndsBesideADroppedMemberThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWatch()
		r := newRig(t, 2, func(c *Config) {
			on := &cuttable{mirror: mirror{memory: c.Members[0].Member.(*memory)}}
			c.Members[0].Member = w.Member(struct{ Cutter }{on}, WatchOptions{Loop: c.Loop, Replica: "a"})
		})
		for _, took := range []time.Duration{4*time.Second - watchTick/2, 10 * time.Second} {
			slow := r.start(block.OpWrite, 0, fill(4096, 1), 0)
			time.Sleep(took)
			r.answer(0, 0, nil)
			r.answer(1, 0, nil)
			is(t, slow, nil)
		}
		hung := r.start(block.OpWrite, 4096, fill(4096, 2), 0)
		fails := r.start(block.OpWrite, 8192, fill(4096, 3), 0)
		r.answer(1, 0, nil)
		r.answer(1, 0, nil)
		r.answer(0, 1, errAway)
		<-r.drops
		r.settle <- nil
		<-r.dropped
		is(t, fails, nil)
		select {
		case err := <-hung:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Hour):
			t.Error("the write is not answered: it waits for a member that the engine dropped an hour ago")
		}
		r.shut = true // the Watch closes the member
		r.l.do(func() {
			for _, m := range r.m {
				for m.auto = true; len(m.pending) > 0; {
					m.next(0)
				}
			}
		})
		if err := r.e.Close(); err != nil {
			t.Error(err)
		}
		w.Close()
		if !r.m[0].closed || w.Waits() > 0 {
			t.Error("the disk has answered, and the replica is not closed")
		}
	})
}
