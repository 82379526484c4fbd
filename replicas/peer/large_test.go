package peer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/stack"
)

// everyRegion lists every n-th of the largest volume's regions.
func everyRegion(n int64) (list []int64) {
	for g := int64(0); g < maxRegions; g += n {
		list = append(list, g)
	}
	return list
}

// newLargest is a node with a replica of the largest volume, in memory: few file systems have files of 64 TiB.
func newLargest(t *testing.T) *far {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "drover")
	if err != nil {
		t.Skipf("no file system in memory: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	disk, err := stack.Add(t.Context(), filepath.Join(dir, "disk"))
	if err != nil {
		t.Fatal(err)
	}
	return newFarOn(t, disk, api.MaxVolumeSize, nil)
}

// TestCallsOfTheLargestVolume: each call with regions or pieces fits for 64 TiB, with all regions, and with every other
// region. The connection stays, and the session has a clean end.
func TestCallsOfTheLargestVolume(t *testing.T) {
	suite.Slow(t)
	f := newLargest(t)
	m := member(t, newDialer(t, f.at), f, startLoop(t), nil)
	adoptAs(t, m, 1, 1, "other")
	c := m.c
	for i, list := range [][]int64{everyRegion(1), everyRegion(2), everyRegion(1001), {}} {
		if err := m.Intend(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		is, err := m.Intents(t.Context())
		if err != nil || !slices.Equal(is.Regions, list) {
			t.Fatalf("%d regions were intended, %d are: %v", len(list), len(is.Regions), err)
		}
		token := int64(i)
		if err := m.Mark(t.Context(), token); err != nil {
			t.Fatal(err)
		}
		if err := m.Clean(t.Context(), token, 1, list); err != nil {
			t.Fatal(err)
		}
		if is, err := m.Intents(t.Context()); err != nil || len(is.Regions) > 0 {
			t.Fatalf("%d regions stay: %v", len(is.Regions), err)
		}
	}
	for _, off := range []int64{0, api.MaxVolumeSize / 2, api.MaxVolumeSize - block.Size} {
		w := block.Request{Op: block.OpWrite, Off: off, Len: block.Size, Buf: slices.Repeat([]byte{1}, block.Size)}
		if err := Do(t.Context(), m.o.Loop, m, &w); err != nil {
			t.Fatal(err)
		}
	}
	list, err := m.Changed(t.Context(), "", "", nil, 1<<20)
	if want := []int64{0, maxPieces / 2, maxPieces - 1}; err != nil || !slices.Equal(list, want) {
		t.Fatalf("changed: %v, not %v: %v", list, want, err)
	}
	if m.c != c || c.cause() != nil {
		t.Errorf("the connection broke: %v", c.cause())
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if s, err := f.disk.Stack(f.uid); err != nil || s.Dirty {
		t.Errorf("the end is not clean: %v", err)
	}
}

// TestChangedOfTheLargestVolume: an answer with every other piece of 1 MiB of 64 TiB fits into a frame, and names each.
func TestChangedOfTheLargestVolume(t *testing.T) {
	suite.Slow(t)
	for _, step := range []int64{1, 2, 700} {
		runs := runsOf(func(yield func(int64) bool) {
			for n := int64(0); n < maxPieces && yield(n); n += step {
			}
		}, maxRuns)
		b, err := asJSON(runs, changedArgs{})
		if err == nil {
			err = checkFrame("answer", b)
		}
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeChanged(b, changedArgs{Piece: 1 << 20}, limits{size: api.MaxVolumeSize})
		if err != nil || !slices.Equal(got, runs) {
			t.Fatalf("%d runs of %d: %v", len(got), len(runs), err)
		}
		at := 0
		for n := int64(0); n < maxPieces; n += step {
			for n >= got[at].end() {
				at++
			}
			if n < got[at][0] {
				t.Fatalf("piece %d is in no run", n)
			}
		}
	}
}

// TestDetachOfTheLargestVolume: the end of an engine clears all intents of 64 TiB, on all members, and is clean on all
// members.
func TestDetachOfTheLargestVolume(t *testing.T) {
	suite.Slow(t)
	fars := []*far{newLargest(t), newLargest(t)}
	loop := startLoop(t)
	cfg := engine.Config{Loop: loop, Size: api.MaxVolumeSize, Epoch: 1, Incarnation: 1, Track: true, Resync: true,
		Drop: func(context.Context, int64, string) error { return api.Errorf(api.Denied, "nobody is to be dropped") }}
	for i, f := range fars {
		d := newDialer(t, f.at)
		cfg.Members = append(cfg.Members, engine.Named{Name: f.uid, Member: d.Member(Options{Node: fmt.Sprint("far", i),
			Replica: f.uid, Volume: f.volume, Loop: loop})})
	}
	e, err := engine.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	e.SetWhole(1, true)
	for _, off := range []int64{0, api.MaxVolumeSize / 2, api.MaxVolumeSize - block.Size} {
		w := block.Request{Op: block.OpWrite, Off: off, Len: block.Size, Buf: block.AlignedBuffer(block.Size)}
		if err := Do(t.Context(), loop, e, &w); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for _, f := range fars {
		f.stop()
		r, err := f.disk.OpenReplica(t.Context(), f.uid, f.loop)
		if err != nil {
			t.Fatal(err)
		}
		is, err := r.Intents(t.Context())
		if err != nil || len(is.Regions) > 0 || is.Base != 1 {
			t.Errorf("intents stay: %+v, %v", is, err)
		}
		if r.Meta().Dirty {
			t.Error("the end is not clean")
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestFrameThatIsTooLarge: a call does not fit into a frame, because the other side's version knows no sets. The call
// fails with an error that gives the cause. The connection stays, with all its sessions.
func TestFrameThatIsTooLarge(t *testing.T) {
	suite.Slow(t)
	f, o := newLargest(t), newScripted(t, 2, nil)
	d := &Dialer{Node: "near", Address: func(_ context.Context, node string) (string, error) {
		if node == "old" {
			return o.at(), nil
		}
		return f.at(), nil
	}}
	t.Cleanup(d.Close)
	loop := startLoop(t)
	var all []*Member
	for range 2 * laneCount { // two members per connection
		m := d.Member(Options{Node: "old", Replica: "r", Volume: "v", Loop: loop})
		adoptAs(t, m, 1, 1, "other")
		all = append(all, m)
	}
	m := all[0]
	c := m.c
	err := m.Intend(t.Context(), everyRegion(2))
	if !api.Is(err, api.OutOfRange) || !strings.Contains(err.Error(), `call "intend"`) ||
		!strings.Contains(err.Error(), "upgrade") {
		t.Errorf("the refusal: %v", err)
	}
	for _, m := range all {
		if err := m.Intend(t.Context(), []int64{7}); err != nil {
			t.Error(err)
		}
	}
	if m.c != c || c.cause() != nil {
		t.Errorf("the connection broke: %v", c.cause())
	}

	// The same for an answer with a list.
	m = member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1, "other")
	if err := m.Intend(t.Context(), everyRegion(1)); err != nil {
		t.Fatal(err)
	}
	c = m.c
	if _, err := m.callRaw(t.Context(), c, m.session, kindCall, []byte("intents\n{}")); !api.Is(err, api.OutOfRange) {
		t.Errorf("an answer that is too large: %v", err)
	}
	if _, err := m.State(t.Context()); err != nil || m.c != c {
		t.Errorf("the connection broke: %v", err)
	}
}
