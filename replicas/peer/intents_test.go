package peer

import (
	"bytes"
	"context"
	"testing"

	"drover.io/drover/block"
)

// spell is one session: members begin it, value is written, and joiners become members. With whole, intents are cleared
// at its end: the replicas that are not in it count no more.
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
		buf := aligned(block.Size)
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

// TestSalvaged: after a salvage of a replica that was away, a former member that cleared its intents in between lacks
// more than the intents of both tell.
func TestSalvaged(t *testing.T) {
	c := newCluster(t, testSize, 2, true)
	c.patience = endless
	s, b, old := c.local, c.far[0].uid, c.far[1].uid
	c.spell([]string{s, b, old}, 1, true)
	c.spell([]string{s, b}, 2, true)
	c.hold(2, s, b)
	c.spell([]string{old}, 0, false, b, s)
	c.hold(1, old, b, s)
}

// TestBackAndForth: a replica is made like a member that happens to hold again what it had itself, so nothing is written
// to it. One that is made like it later has something else there.
func TestBackAndForth(t *testing.T) {
	c := newCluster(t, testSize, 2, true)
	c.patience = endless
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
