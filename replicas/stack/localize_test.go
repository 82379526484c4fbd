package stack

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// TestLocalizeWhileReadsWaitForALostSource: the switch to a finished copy delays no I/O while reads wait for the lost
// source of another layer: whole-block writes continue, and the replica can be used for everything else.
func TestLocalizeWhileReadsWaitForALostSource(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	const size = 8 << 20
	ctx := context.Background()
	far, d := &farther{disk: newDisk(t)}, newDisk(t)
	d.Sources(nil, far.fetch)
	rng := rand.New(rand.NewPCG(1, 1))
	model := make([]byte, size)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	for range 2 {
		l := makeLayer(t, far.disk, rng, size, model)
		if err := far.hydrate(d, l); err != nil {
			t.Fatal(err)
		}
		spec.Layers = append(spec.Layers, l)
	}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	loop := startLoop(t)
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	adopt(t, r, 1, 1, spec.UID)
	far.fails.Store(true)
	read := make(chan error, 1)
	go func() { read <- issue(loop, r, block.OpRead, 0, size, block.AlignedBuffer(size), false) }()
	for why := error(nil); why == nil; _, why = hydrates(r) {
		time.Sleep(time.Millisecond)
	}
	bring(t, far.disk, d, spec.Layers[0])
	if err := r.Localize(ctx); err != nil {
		t.Errorf("a layer is not given back while reads of another one wait: %v", err)
	}
	if len(r.replaced) > 0 {
		t.Error("a layer that is read from the own disk stays open elsewhere")
	}
	mustIssue(t, loop, r, block.OpWrite, 0, blockSize, block.AlignedBuffer(int(blockSize)))
	bring(t, far.disk, d, spec.Layers[1])
	if err := r.Localize(ctx); err != nil {
		t.Error(err)
	}
	if err := <-read; err != nil {
		t.Errorf("the read that waited: %v", err)
	}
	if r.Hydrates() {
		t.Errorf("%d layers are still open elsewhere", len(r.replaced))
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
