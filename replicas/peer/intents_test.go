package peer

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/engine"
)

// spell is one session: members begin the session, the engine writes value, and joiners become members. With whole, the
// end clears the intents: replicas outside of the session no longer count.
func (c *cluster) spell(members []string, value byte, whole bool, joiners ...string) {
	c.t.Helper()
	c.rec.mu.Lock()
	c.rec.members = members
	c.rec.mu.Unlock()
	if err := c.attach(); err != nil {
		c.t.Fatal(err)
	}
	epoch, _ := c.rec.state()
	c.e.SetWhole(epoch, whole)
	if value != 0 {
		buf := block.AlignedBuffer(block.Size)
		copy(buf, bytes.Repeat([]byte{value}, block.Size))
		r := &block.Request{Op: block.OpWrite, Off: 8 * block.Size, Len: block.Size, Buf: buf}
		if err := Do(context.Background(), c.loop, c.e, r); err != nil {
			c.t.Fatal(err)
		}
	}
	for _, uid := range joiners {
		p, err := c.back(uid)
		if err != nil {
			c.t.Fatal(err)
		}
		c.t.Logf("%s joined: %+v", uid, p)
	}
	if err := c.e.Close(); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) hold(value byte, uids ...string) {
	c.t.Helper()
	for _, uid := range uids {
		if got := c.content(uid)[8*block.Size]; got != value {
			c.t.Errorf("replica %s holds %#x, not %#x", uid, got, value)
		}
	}
}

// TestSalvaged: a user salvages a replica that was away. A former member cleared its intents in between, and lacks more
// than the intents of both replicas name. The join still copies all.
func TestSalvaged(t *testing.T) {
	c := newCluster(t, testSize, 2, true)
	s, b, old := c.local, c.far[0].uid, c.far[1].uid
	c.spell([]string{s, b, old}, 1, true)
	c.spell([]string{s, b}, 2, true)
	c.hold(2, s, b)
	c.spell([]string{old}, 0, false, b, s)
	c.hold(1, old, b, s)
}

// TestBackAndForth: a member's content changes back to the content of a replica, so the join of the replica copies
// nothing. A later join of two such replicas still copies the difference.
func TestBackAndForth(t *testing.T) {
	c := newCluster(t, testSize, 2, true)
	s, b, third := c.local, c.far[0].uid, c.far[1].uid
	c.spell([]string{s, third, b}, 1, true)
	c.spell([]string{s, third}, 2, true)
	c.spell([]string{s}, 1, false, b)
	c.hold(1, s, b)
	c.spell([]string{s}, 2, false, third)
	c.hold(2, s, third)
	c.spell([]string{third}, 0, false, b)
	c.hold(2, third, b)
}

// TestReturnAfterWritesThatWereNotNoted: a replica leaves before any write. The volume then has one member, whose
// engine notes no intents, and gets a write. The next engine notes intents, and the replica comes back: the few intents
// do not name all missing regions, so the engine compares the whole replica.
func TestReturnAfterWritesThatWereNotNoted(t *testing.T) {
	c := newCluster(t, testSize, 1, true)
	s, b := c.local, c.far[0].uid
	c.spell([]string{s, b}, 0, false)
	c.alone = true
	c.spell([]string{s}, 1, false)
	c.alone = false
	c.spell([]string{s}, 0, false, b)
	c.hold(1, s, b)
}

// TestReopenedGoesOnNoting: a replica is opened again under its engine, as after a restart of the replica's process.
// The replica notes all later writes, even as the only member left. A returning replica gets these writes.
func TestReopenedGoesOnNoting(t *testing.T) {
	const region = 16 << 20
	for name, reopen := range map[string]func(c *cluster){
		"closed": func(c *cluster) {
			if err := c.far[1].s.Release(c.far[1].uid); err != nil {
				c.t.Fatal(err)
			}
		},
		"restarted": func(c *cluster) {
			c.far[1].stop()
			c.proxy[1].cut()
			c.far[1].start()
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, 2*region, 2, false)
			if err := c.attach(); err != nil {
				t.Fatal(err)
			}
			write := func(off int64, value byte) {
				t.Helper()
				buf := block.AlignedBuffer(block.Size)
				copy(buf, bytes.Repeat([]byte{value}, block.Size))
				r := &block.Request{Op: block.OpWrite, Off: off, Len: block.Size, Buf: buf}
				if err := Do(context.Background(), c.loop, c.e, r); err != nil {
					t.Fatal(err)
				}
			}
			write(0, 1)
			c.drop(c.far[0].uid)
			write(0, 2)
			reopen(c)
			write(region, 3) // nothing was noted there before
			told, err := c.members[1].Member.(engine.Mirror).Intents(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(told.Regions, []int64{0, 1}) {
				t.Errorf("intents of regions %v are noted, not of 0 and 1", told.Regions)
			}
			if p, err := c.back(c.far[0].uid); err != nil || p.Full {
				t.Fatalf("%+v, %v", p, err)
			}
			if err := c.e.Close(); err != nil {
				t.Fatal(err)
			}
			for _, f := range c.far {
				if have := c.content(f.uid); have[0] != 2 || have[region] != 3 {
					t.Errorf("replica %s holds %d and %d, not 2 and 3", f.uid, have[0], have[region])
				}
			}
		})
	}
}

// drop has a member dropped at once, without a stall timeout.
func (c *cluster) drop(uid string) {
	c.t.Helper()
	c.e.Suspect(uid, api.Errorf(api.Unavailable, "the test says so"))
	c.await(func() bool { _, members := c.rec.state(); return !slices.Contains(members, uid) })
}

// await waits until something is so.
func (c *cluster) await(is func() bool) {
	c.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.NewTimer(5 * time.Minute)
	defer late.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-late.C:
			c.t.Fatal("it never came to that")
		}
	}
}
