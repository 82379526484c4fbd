package stack

import (
	"context"
	"slices"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// TestChangedTakesOwnLayersOnly: Changed refuses a base with a layer which the replica lacks, even a larger layer of
// the disk. Changed also refuses invalid sizes of pieces.
func TestChangedTakesOwnLayersOnly(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	d, e := newDisk(t), make(expect)
	const size = int64(64) << 20
	own := filledLayer(t, d, size, []int64{3, 5000}, 1<<32, e)
	larger := filledLayer(t, d, 4*size, []int64{3, 60000}, 1<<32, make(expect))
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{own}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	mustIssue(t, loop, r, block.OpWrite, 40<<20, blockSize, numbered(7))
	if _, err := r.Changed(ctx, "", "", []string{larger}, blockSize); !api.Is(err, api.NotFound) {
		t.Errorf("a base with another's layer: %v", err)
	}
	if _, err := r.Changed(ctx, "", "", []string{"../" + own}, blockSize); !api.Is(err, api.NotFound) {
		t.Errorf("a base with no layer: %v", err)
	}
	for _, piece := range []int64{0, -blockSize, blockSize / 2, blockSize + 1} {
		if _, err := r.Changed(ctx, "", "", nil, piece); !api.Is(err, api.Invalid) {
			t.Errorf("pieces of %d bytes: %v", piece, err)
		}
	}
	all, err := r.Changed(ctx, "", "", nil, 1<<20)
	if want := []int64{0, 19, 40}; err != nil || !slices.Equal(all, want) {
		t.Errorf("%v, not %v: %v", all, want, err)
	}
	head, err := r.Changed(ctx, "", "", []string{own}, 1<<20)
	if want := []int64{40}; err != nil || !slices.Equal(head, want) {
		t.Errorf("%v, not %v: %v", head, want, err)
	}
}

// TestPiecesEndWithTheVolume: a mark beyond the end of the volume has no effect.
func TestPiecesEndWithTheVolume(t *testing.T) {
	for _, size := range []int64{1 << 20, 3<<20 + blockSize, 64 << 20, api.MaxVolumeSize} {
		const piece = 1 << 20
		p := newPieces(size, piece)
		p.mark(0, blockSize)
		p.mark(size-blockSize, size)
		p.mark(size-blockSize, 4*size)
		p.mark(size, 4*size)
		p.mark(4*size, 5*size)
		want := slices.Compact([]int64{0, (size - 1) / piece})
		if got := slices.Collect(p.all()); !slices.Equal(got, want) {
			t.Errorf("%d bytes: %v, not %v", size, got, want)
		}
	}
}
