package engine

import (
	"slices"
	"testing"
	"time"
)

// TestSoonest: a copy reads from the member on the engine's machine while this member is quick. If the member is slow,
// or no member is local, pieces go to all members, each piece to the member with the least to do.
func TestSoonest(t *testing.T) {
	all := []Mirror{&readable{name: "a"}, &readable{name: "b"}, &readable{name: "c"}}
	near := all[1]
	c := &copier{delay: map[Mirror]*delay{}, local: near}
	spread := func() map[Mirror]int {
		asked := map[Mirror]int{}
		var ends []func()
		for range 9 {
			src := append([]Mirror{}, all...)
			m, done := c.putSoonestFirst(src)
			asked[m]++
			ends = append(ends, done)
			if src[0] != m {
				t.Fatal("the first is another one")
			}
			for _, m := range all { // sources to ask after a failure
				if !slices.Contains(src, m) {
					t.Fatal("a member is not there any more")
				}
			}
		}
		for _, end := range ends {
			end()
		}
		return asked
	}
	took := func(m Mirror, long time.Duration) {
		for range 100 { // until earlier figures are forgotten
			c.putSoonestFirst([]Mirror{m})
			c.noteReadTime(m, comparePiece, long)
		}
		c.delay[m].pieces = 0
	}
	if asked := spread(); asked[near] != 9 {
		t.Errorf("nothing is known yet: %v", asked)
	}
	for _, m := range all {
		took(m, time.Millisecond)
	}
	took(near, localSoon-5*time.Millisecond)
	if asked := spread(); asked[near] != 9 {
		t.Errorf("the near one is slower, but quick: %v", asked)
	}
	for _, m := range all {
		took(m, 2*localSoon)
	}
	if asked := spread(); asked[all[0]] != 3 || asked[near] != 3 || asked[all[2]] != 3 {
		t.Errorf("all are slow: %v", asked)
	}
	for _, m := range all {
		took(m, time.Millisecond)
	}
	c.local = nil
	if asked := spread(); asked[all[0]] != 3 || asked[near] != 3 || asked[all[2]] != 3 {
		t.Errorf("none is near: %v", asked)
	}
}

// readable is a member with a name.
type readable struct {
	Mirror
	name string
}
