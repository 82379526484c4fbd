package engine

import (
	"context"
	"slices"
	"syscall"
	"testing"

	"drover.io/drover/replicas/stack"
)

// layeredMember holds some pieces above its layers, and notes intents in regions of 16 MiB.
type layeredMember struct {
	*cuttable
	layers  []string
	regions []int64
	pieces  []int64
	fail    error // of Changed
}

func (m *layeredMember) State(context.Context) (stack.Meta, error) {
	return stack.Meta{Layers: m.layers}, nil
}

func (m *layeredMember) Intents(context.Context) (stack.Intents, error) {
	return stack.Intents{Region: 16 << 20, Base: 5, Joined: 5, Regions: m.regions}, nil
}

func (m *layeredMember) Changed(_ context.Context, _, _ string, base []string, _ int64) ([]int64, error) {
	if !slices.Equal(base, []string{"image"}) {
		return nil, syscall.EINVAL
	}
	return slices.Clone(m.pieces), m.fail
}

// TestJoinLeavesSharedLayersOut: a returning replica is compared where one side holds data above the shared image, within
// the regions of the intents; without a shared layer, or without the maps, in these regions as a whole.
func TestJoinLeavesSharedLayersOut(t *testing.T) {
	image := []string{"image"}
	for name, c := range map[string]struct {
		src, dst layeredMember
		want     []int64
		region   int64
	}{
		"both wrote": {layeredMember{layers: image, regions: []int64{0, 2}, pieces: []int64{3, 20, 40}},
			layeredMember{layers: image, regions: []int64{1}, pieces: []int64{3, 17}}, []int64{3, 17, 20, 40}, comparePiece},
		"a write of before the intents": {layeredMember{layers: image, regions: []int64{1}, pieces: []int64{3, 20}},
			layeredMember{layers: image}, []int64{20}, comparePiece},
		"own layers above": {layeredMember{layers: []string{"image", "a"}, regions: []int64{0}, pieces: []int64{1}},
			layeredMember{layers: []string{"image", "b"}, pieces: []int64{2}}, []int64{1, 2}, comparePiece},
		"nothing shared": {layeredMember{layers: []string{"a"}, regions: []int64{0}, pieces: []int64{3}},
			layeredMember{layers: []string{"b"}, regions: []int64{1}}, []int64{0, 1}, 16 << 20},
		"no map of the member": {layeredMember{layers: image, regions: []int64{0}, fail: syscall.EIO},
			layeredMember{layers: image}, []int64{0}, 16 << 20},
		"no map of the replica": {layeredMember{layers: image, regions: []int64{0}},
			layeredMember{layers: image, fail: syscall.EIO}, []int64{0}, 16 << 20},
	} {
		run := joinRun{dst: &c.dst}
		got, region, full, err := run.findDifferingRegions(t.Context(), &c.src, "")
		if err != nil || full || region != c.region || !slices.Equal(got, c.want) {
			t.Errorf("%s: regions %v of %d bytes are compared, all: %v: %v; want %v", name, got, region, full, err, c.want)
		}
	}
}
