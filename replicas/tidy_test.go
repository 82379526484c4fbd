package replicas

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

// frozen is a disk on which n layers have no digests yet.
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
	spec := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 * mib}
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

// Who makes the digests of many small layers lets guests go first: he rests after each layer, and more while guests are
// at work; but that ends, so that they are made under a steady load, too.
func TestDigestsGiveWay(t *testing.T) {
	for _, c := range []struct {
		name  string
		did   []uint64 // by the guests, each time that is asked; the last step goes on
		rests []int    // after each layer
	}{
		{"no guest", []uint64{5, 5}, []int{1, 1}},
		{"a guest that is done soon", []uint64{5, 6, 7, 7}, []int{3, 1}},
		{"steady load", []uint64{5, 6}, []int{restsAtMost, restsAtMost}},
	} {
		t.Run(c.name, func(t *testing.T) {
			disk := frozen(t, len(c.rests))
			did, at := uint64(0), 0
			tidier := newTidier(func() uint64 {
				if last := len(c.did) - 1; at > last {
					did += c.did[last] - c.did[last-1]
				} else {
					did = c.did[at]
				}
				at++
				return did
			})
			defer tidier.close()
			rests := make([]int, len(c.rests))
			tidier.pause = func(_ context.Context, long time.Duration) {
				left, err := disk.Unfinished()
				if err != nil || long <= 0 || long > restLongest {
					t.Fatalf("a rest of %v, %v", long, err)
				}
				rests[len(rests)-1-len(left)]++
			}
			d := &Data{DataOptions: DataOptions{Log: slog.New(slog.DiscardHandler)}, tidier: tidier}
			if left, failed := d.finishAll(context.Background(), disk); left || len(failed) > 0 {
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
