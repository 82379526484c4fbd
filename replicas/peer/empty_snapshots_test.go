package peer

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// TestEmptySnapshots: a replica is away while many snapshots without new content are taken. In the rebuild each
// snapshot costs a cut, and the engine reads nothing for the snapshots.
func TestEmptySnapshots(t *testing.T) {
	suite.Slow(t)
	const n = 100
	c := newCluster(t, 256<<20, 1, true)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	f := c.far[0]
	f.stop()
	c.proxy[0].cut()
	c.drop(f.uid)
	if err := Do(t.Context(), c.loop, c.e, &block.Request{Op: block.OpWrite, Len: block.Size,
		Buf: block.AlignedBuffer(block.Size)}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for i := range n {
		if err := c.e.Cut(t.Context(), newSnapshot(strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	cuts := time.Since(began)
	f.start()
	began = time.Now()
	p, err := c.back(f.uid)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d empty snapshots: taken in %v, given to a replica in %v", n, cuts, time.Since(began))
	if p.Total > 2*32<<20 {
		t.Errorf("%d bytes were looked at", p.Total)
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	c.same()
}

// TestRuns: for any limit, the runs contain the whole list.
func TestRuns(t *testing.T) {
	list := []int64{0, 1, 2, 5, 7, 8, 20, 40, 41, 100}
	for most := 1; most < 10; most++ {
		runs := runsOf(slices.Values(list), most)
		if len(runs) > most {
			t.Errorf("%d runs: %v", most, runs)
		}
		for _, n := range list {
			if !slices.ContainsFunc(runs, func(r run) bool { return r[0] <= n && n < r[0]+r[1] }) {
				t.Errorf("%d runs lack %d: %v", most, n, runs)
			}
		}
	}
	if runs := runsOf(slices.Values(list), 10); !slices.Equal(runs, []run{{0, 3}, {5, 1}, {7, 2}, {20, 1}, {40, 2}, {100, 1}}) {
		t.Errorf("exactly: %v", runs)
	}
}
