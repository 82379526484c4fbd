package maintain

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack"
)

// fakeNode is a node with no engine.
type fakeNode struct {
	Node
	reached  bool
	requests func() uint64
}

func (n *fakeNode) APIReached() bool                      { return n.reached }
func (n *fakeNode) GuestRequests() uint64                 { return n.requests() }
func (n *fakeNode) Opened(*stack.Disk) []*stack.Replica   { return nil }
func (n *fakeNode) DigestsMade([]string)                  {}
func (n *fakeNode) Setting(context.Context, string) int64 { return 0 }

// frozen makes a disk with n layers that have no digests yet.
func frozen(t *testing.T, n int) *stack.Disk {
	t.Helper()
	ctx := context.Background()
	disk, err := stack.Add(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	loop, err := uring.New(8)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- loop.Run() }()
	defer func() {
		loop.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	spec := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20}
	if err := disk.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := disk.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	err = r.Adopt(ctx, 1, 1, []string{spec.UID})
	for i := 0; i < n && err == nil; i++ {
		err = r.Cut(ctx, stack.Snapshot{UID: string(api.NewUID()), Name: fmt.Sprint(i), Layer: string(api.NewUID())})
	}
	if err := errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	return disk
}

// TestFinishingGivesWayToGuests: the worker pauses after each finished layer, more often while guests are at work,
// with an upper bound, and never starves.
func TestFinishingGivesWayToGuests(t *testing.T) {
	for _, c := range []struct {
		name  string
		did   []uint64 // by the guests, at each question; the last step repeats
		rests []int    // after each layer
	}{
		{"no guest", []uint64{5, 5}, []int{1, 1}},
		{"a guest that is done soon", []uint64{5, 6, 7, 7}, []int{3, 1}},
		{"steady load", []uint64{5, 6}, []int{restsAtMost, restsAtMost}},
	} {
		t.Run(c.name, func(t *testing.T) {
			disk := frozen(t, len(c.rests))
			did, at := uint64(0), 0
			workers := NewWorkers()
			defer workers.Close()
			w := NewMergeWorker(&fakeNode{requests: func() uint64 {
				if last := len(c.did) - 1; at > last {
					did += c.did[last] - c.did[last-1]
				} else {
					did = c.did[at]
				}
				at++
				return did
			}}, workers, slog.New(slog.DiscardHandler))
			rests := make([]int, len(c.rests))
			w.pause = func(_ context.Context, long time.Duration) {
				left, err := disk.Unfinished()
				if err != nil || long <= 0 || long > restLongest {
					t.Fatalf("a rest of %v, %v", long, err)
				}
				rests[len(rests)-1-len(left)]++
			}
			if left, failed := w.finishAll(context.Background(), disk); left || len(failed) > 0 {
				t.Fatalf("left %v, failed %v", left, failed)
			}
			if left, err := disk.Unfinished(); err != nil || len(left) > 0 {
				t.Fatalf("without digests: %v, %v", left, err)
			}
			if !slices.Equal(rests, c.rests) {
				t.Errorf("%v rests after the layers, not %v", rests, c.rests)
			}
		})
	}
}

// TestNothingIsMergedBeforeTheAPI: another node's engine cuts a replica of a node that has not reached the API. The
// node merges the layers later, because the rate and the other users of the volume are not known yet.
func TestNothingIsMergedBeforeTheAPI(t *testing.T) {
	disk := frozen(t, 1)
	workers := NewWorkers()
	w := NewMergeWorker(&fakeNode{}, workers, slog.New(slog.DiscardHandler))
	w.Merge(disk, "r", "v")
	workers.Close() // waits for merges in progress
	if !w.IsDue("r") {
		t.Error("the replica is not due any more")
	}
	if left, err := disk.Unfinished(); err != nil || len(left) != 1 {
		t.Errorf("layers without digests: %v, %v", left, err)
	}
}
