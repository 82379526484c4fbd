package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// callFixture is one call of a member, with the server's answer and the caller's result.
type callFixture struct {
	name   string
	answer any // bytes stay as given, all else becomes JSON
	call   func(ctx context.Context, m *Member) (any, error)
	result any
}

var (
	fixSnap = stack.Snapshot{UID: "snapshot", Name: "nightly", Layer: "layer-2",
		Created: time.Date(2026, 11, 25, 12, 30, 15, 123456789, time.UTC)}
	fixIntents = stack.Intents{Region: 16 << 20, Base: 5, Joined: 6, Regions: []int64{0, 2, 3}}
	fixMeta    = stack.Meta{UID: "replica-b", Volume: "data", VolumeUID: "volume", Size: 64 << 20, Epoch: 7,
		Incarnation: 3,
		Members:     []string{"replica-a", "replica-b"}, Dirty: true,
		Layers: []string{"layer-1", "layer-2"},
		Head:   "head-2", Snapshots: []stack.Snapshot{fixSnap},
		Branches: []stack.Branch{{Layer: "layer-3", Below: "layer-1"}},
		Merge: &stack.Merge{Lower: "layer-1", Upper: "layer-2", Result: "layer-4", Up: true, Done: 1 << 20, Crcs: true,
			Mapped: 2, MapSum: 77},
		Created: time.Date(2026, 11, 24, 1, 2, 3, 0, time.UTC), BootID: "boot", Joined: 6, Reverted: 4,
		Object: json.RawMessage(`{"spec":{"size":"64Mi"}}`)}
	fixDigests = bytes.Repeat([]byte("0123456789abcdef"), 2)
)

// done is a call without an answer.
func done(call func(ctx context.Context, m *Member) error) func(context.Context, *Member) (any, error) {
	return func(ctx context.Context, m *Member) (any, error) { return nil, call(ctx, m) }
}

// calls are all calls of a version of the protocol.
func calls(version int) []callFixture {
	list := firstCalls()
	if version < setsSince {
		return list
	}
	// Regions of these calls are runs; in firstCalls a bitmap is shorter. The record of a replica has fields that
	// programs of version 2 did not have.
	runs := fixIntents
	runs.Regions = []int64{1, 2, 3}
	meta := fixMeta
	meta.MountID, meta.EngineNode = "ext4/sda1/4711", "one"
	return append(list,
		callFixture{"intend", nil,
			done(func(ctx context.Context, m *Member) error { return m.Intend(ctx, runs.Regions) }), nil},
		callFixture{"clean", nil,
			done(func(ctx context.Context, m *Member) error { return m.Clean(ctx, 12, 7, runs.Regions) }), nil},
		intentsFixture(runs), intentsFixture(fixIntents),
		callFixture{"meta", meta, func(ctx context.Context, m *Member) (any, error) { return m.State(ctx) }, meta})
}

// intentsFixture is a call of intents with a set as answer.
func intentsFixture(t stack.Intents) callFixture {
	answer, err := encodeIntents(t, intentsArgs{Set: true})
	if err != nil {
		panic(err)
	}
	return callFixture{"intents", answer, func(ctx context.Context, m *Member) (any, error) { return m.Intents(ctx) }, t}
}

// firstCalls are the calls of every version.
func firstCalls() []callFixture {
	sizes := map[string]stack.LayerSize{"snapshot": {Size: 64 << 20, Used: 4096, Root: "c0ffee"}, "younger": {Size: 64 << 20}}
	broken := []stack.Broken{{Layer: "layer-1", Off: 2 << 20, Len: 2 << 20, Snap: "snapshot"},
		{Layer: "layer-2", Len: 4096}}
	return []callFixture{
		{"expand", nil,
			done(func(ctx context.Context, m *Member) error { return m.Expand(ctx, 128<<20) }), nil},
		{"track", nil,
			done(func(ctx context.Context, m *Member) error { return m.Track(ctx, true) }), nil},
		{"track", nil, done(func(ctx context.Context, m *Member) error { return m.Track(ctx, false) }), nil},
		{"intend", nil,
			done(func(ctx context.Context, m *Member) error { return m.Intend(ctx, []int64{1, 3}) }), nil},
		{"mark", nil,
			done(func(ctx context.Context, m *Member) error { return m.Mark(ctx, 11) }), nil},
		{"clean", nil,
			done(func(ctx context.Context, m *Member) error { return m.Clean(ctx, 11, 7, []int64{1, 3}) }), nil},
		{"intents", fixIntents,
			func(ctx context.Context, m *Member) (any, error) { return m.Intents(ctx) }, fixIntents},
		{"digests", fixDigests,
			func(ctx context.Context, m *Member) (any, error) { return m.Digests(ctx, 4096, 8192) }, fixDigests},
		{"note", nil,

			done(func(ctx context.Context, m *Member) error { return m.Note(ctx, json.RawMessage(`{"spec":"x"}`)) }), nil},
		{"meta", fixMeta, func(ctx context.Context, m *Member) (any, error) { return m.State(ctx) }, fixMeta},
		{"drop-snapshot", nil,
			done(func(ctx context.Context, m *Member) error { return m.Forget(ctx, "snapshot") }), nil},
		{"prepare-cut", nil,
			done(func(ctx context.Context, m *Member) error { return m.PrepareCut(ctx, fixSnap) }), nil},
		{"hold", nil, done(func(ctx context.Context, m *Member) error { return m.Hold(ctx) }), nil},
		{"do-cut", nil,
			done(func(ctx context.Context, m *Member) error { return m.DoCut(ctx, "layer-2") }), nil},
		{"abort-cut", nil, done(func(ctx context.Context, m *Member) error { return m.AbortCut(ctx) }), nil},
		{"seal", nil,
			done(func(ctx context.Context, m *Member) error { return m.Seal(ctx, fixSnap, fixSnap) }), nil},
		{"sizes", sizes, func(ctx context.Context, m *Member) (any, error) { return m.Sizes(ctx) }, sizes},
		{"changed", [][2]int64{{1, 3}, {7, 1}},
			func(ctx context.Context, m *Member) (any, error) {
				return m.Changed(ctx, "older", "snapshot", []string{"layer-1"}, 2<<20)
			}, []int64{1, 2, 3, 7}},
		{"snap-digests", fixDigests, func(ctx context.Context, m *Member) (any, error) {
			return m.SnapDigests(ctx, "snapshot", 4096, 8192)
		}, fixDigests},
		{"snap-read", pattern(block.Size, 5),
			func(ctx context.Context, m *Member) (any, error) {
				buf := make([]byte, block.Size)
				return buf, m.SnapRead(ctx, "snapshot", 8192, buf)
			}, pattern(block.Size, 5)},
		{"snap-end", nil, done(func(ctx context.Context, m *Member) error { return m.SnapEnd(ctx) }), nil},
		{"broken", broken, func(ctx context.Context, m *Member) (any, error) { return m.Broken(ctx) }, broken},
		{"repair", nil,

			done(func(ctx context.Context, m *Member) error { return m.Repair(ctx, "layer-1", 2<<20, []byte("right")) }), nil},
		{"repair", nil,
			done(func(ctx context.Context, m *Member) error { return m.Repair(ctx, "layer-1", 2<<20, nil) }), nil},
		{"release", nil, done(func(ctx context.Context, m *Member) error { return m.Release(ctx) }), nil},
	}
}
