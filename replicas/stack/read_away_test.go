package stack

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"drover.io/drover/api"
)

// TestNoMergeOfWhatIsReadAway: a replica has copies of layers, but still reads the layers from another disk or node.
// The replica does not merge such layers, because reads would miss the moved blocks.
func TestNoMergeOfWhatIsReadAway(t *testing.T) {
	t.Parallel()
	const size = 8 << 20
	for _, from := range []string{"disk", "machine"} {
		t.Run(from, func(t *testing.T) {
			t.Parallel()
			ctx := context.Background()
			far, d := &farther{disk: newDisk(t)}, newDisk(t)
			d.window = size / 2
			if from == "disk" {
				fromDisk(d, far.disk)
			} else {
				d.Sources(nil, far.fetch)
			}
			rng := rand.New(rand.NewPCG(1, 1))
			model := make([]byte, size)
			spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
			for range 2 {
				l := makeLayer(t, far.disk, rng, size, model)
				if from == "machine" {
					if err := far.hydrate(d, l); err != nil {
						t.Fatal(err)
					}
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
			defer func() {
				if err := r.Close(); err != nil {
					t.Error(err)
				}
			}()
			adopt(t, r, 1, 1, spec.UID)
			for _, l := range spec.Layers {
				bring(t, far.disk, d, l)
			}
			// aWindow carries the first window of a merge, and reports whether a merge began.
			aWindow := func() bool {
				t.Helper()
				w, err := r.beginMerge()
				for errors.Is(err, errRead) { // a starting process has a layer's lock
					w, err = r.beginMerge()
				}
				if w == nil || err != nil {
					if err != nil {
						t.Fatal(err)
					}
					return false
				}
				defer w.close()
				if err := errors.Join(w.copyNextWindow(ctx), w.switchReads(ctx)); err != nil {
					t.Fatal(err)
				}
				return true
			}
			if aWindow() {
				t.Error("layers are merged that are read elsewhere")
			}
			compareAll(t, loop, r, model)
			if err := r.Localize(ctx); err != nil {
				t.Fatal(err)
			}
			if !aWindow() {
				t.Error("layers that came home are not merged")
			}
			compareAll(t, loop, r, model)
		})
	}
}
