package peer

import (
	"context"
	"encoding/json"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// The calls, by their names on the wire.
var (
	expandCall = &method[sizeArgs, none]{name: "expand", repeat: true,
		run: func(ctx context.Context, b *Backend, a sizeArgs) (none, error) { return none{}, b.Expand(ctx, a.Size) }}
	trackCall = &method[onArgs, none]{name: "track", repeat: true,
		run: func(ctx context.Context, b *Backend, a onArgs) (none, error) { return none{}, b.Track(ctx, a.On) }}
	intendCall = &method[regionArgs, none]{name: "intend", repeat: true, atOnce: listCalls,
		run: func(ctx context.Context, b *Backend, a regionArgs) (none, error) {
			return none{}, b.Intend(ctx, a.regionsWithin(b.limits()))
		}}
	markCall = &method[markArgs, none]{name: "mark",
		run: func(ctx context.Context, b *Backend, a markArgs) (none, error) { return none{}, b.Mark(ctx, a.Token) }}
	// cleanCall is not repeated: a late repetition could remove later intents.
	cleanCall = &method[cleanArgs, none]{name: "clean", atOnce: listCalls,
		run: func(ctx context.Context, b *Backend, a cleanArgs) (none, error) {
			return none{}, b.Clean(ctx, a.Token, a.Epoch, a.regionsWithin(b.limits()))
		}}
	intentsCall = &method[intentsArgs, stack.Intents]{name: "intents", repeat: true, atOnce: listCalls,
		run:    func(ctx context.Context, b *Backend, _ intentsArgs) (stack.Intents, error) { return b.Intents(ctx) },
		encode: encodeIntents, decode: decodeIntents}
	digestsCall = &method[rangeArgs, []byte]{name: "digests", repeat: true, atOnce: sessionCalls,
		run:    func(ctx context.Context, b *Backend, a rangeArgs) ([]byte, error) { return b.Digests(ctx, a.Off, a.N) },
		encode: asBytes[rangeArgs], decode: func(d []byte, a rangeArgs, _ limits) ([]byte, error) {
			return d, checkDigests(d, a.N)
		}}
	noteCall = &method[noteArgs, none]{name: "note", repeat: true,
		run: func(_ context.Context, b *Backend, a noteArgs) (none, error) {
			return none{}, b.Note(json.RawMessage(a))
		}}
	metaCall = &method[none, stack.Meta]{name: "meta", repeat: true, atOnce: sessionCalls,
		run:    func(ctx context.Context, b *Backend, _ none) (stack.Meta, error) { return b.State(ctx) },
		encode: asJSON[none, stack.Meta], decode: decodeMeta}
	dropSnapshotCall = &method[uidArgs, none]{name: "drop-snapshot", repeat: true, changes: true, commits: true,
		run: func(ctx context.Context, b *Backend, a uidArgs) (none, error) { return none{}, b.Forget(ctx, a.UID) }}
	// prepareCutCall commits nothing: the stack keeps its layers until do-cut.
	prepareCutCall = &method[cutArgs, none]{name: "prepare-cut", changes: true, scope: "cut", ends: true,
		run: func(ctx context.Context, b *Backend, a cutArgs) (none, error) {
			return none{}, b.PrepareCut(ctx, stack.Snapshot(a))
		}}
	holdCall = &method[none, none]{name: "hold",
		run: func(ctx context.Context, b *Backend, _ none) (none, error) { return none{}, b.Hold(ctx) }}
	doCutCall = &method[uidArgs, none]{name: "do-cut", repeat: true, changes: true, commits: true,
		run: func(ctx context.Context, b *Backend, a uidArgs) (none, error) { return none{}, b.DoCut(ctx, a.UID) }}
	abortCutCall = &method[none, none]{name: "abort-cut", scope: "cut", ends: true,
		run: func(ctx context.Context, b *Backend, _ none) (none, error) { return none{}, b.AbortCut(ctx) }}
	releaseCall = &method[none, none]{name: "release",
		run: func(_ context.Context, b *Backend, _ none) (none, error) { b.Release(); return none{}, nil }}
	sealCall = &method[sealArgs, none]{name: "seal", changes: true, commits: true,
		run: func(ctx context.Context, b *Backend, a sealArgs) (none, error) { return none{}, b.Seal(ctx, a...) }}
	sizesCall = &method[none, map[string]stack.LayerSize]{name: "sizes", repeat: true, atOnce: sessionCalls,
		run:    func(ctx context.Context, b *Backend, _ none) (map[string]stack.LayerSize, error) { return b.Sizes(ctx) },
		encode: asJSON[none, map[string]stack.LayerSize], decode: decodeSizes}
	changedCall = &method[changedArgs, []run]{name: "changed", repeat: true, atOnce: listCalls,
		run: func(ctx context.Context, b *Backend, a changedArgs) ([]run, error) {
			list, err := b.ChangedPieces(ctx, a.From, a.To, a.Base, a.Piece)
			if err != nil {
				return nil, err
			}
			return runsOf(list, maxRuns), nil
		},
		encode: asJSON[changedArgs, []run], decode: decodeChanged}
	snapDigestsCall = &method[snapArgs, []byte]{name: "snap-digests", repeat: true, atOnce: sessionCalls,
		scope: "snapshot",
		run: func(ctx context.Context, b *Backend, a snapArgs) ([]byte, error) {
			return b.SnapDigests(ctx, a.UID, a.Off, a.N)
		},
		encode: asBytes[snapArgs], decode: func(d []byte, a snapArgs, _ limits) ([]byte, error) {
			return d, checkDigests(d, a.N)
		}}
	snapReadCall = &method[snapArgs, []byte]{name: "snap-read", repeat: true, atOnce: sessionCalls, scope: "snapshot",
		run: func(ctx context.Context, b *Backend, a snapArgs) ([]byte, error) {
			buf := make([]byte, a.N)
			return buf, b.SnapRead(ctx, a.UID, a.Off, buf)
		},
		encode: asBytes[snapArgs], decode: func(d []byte, a snapArgs, _ limits) ([]byte, error) {
			if int64(len(d)) != a.N {
				return nil, api.Errorf(api.Corrupt, "%d bytes instead of %d", len(d), a.N)
			}
			return d, nil
		}}
	snapEndCall = &method[none, none]{name: "snap-end", repeat: true, scope: "snapshot", ends: true,
		run: func(ctx context.Context, b *Backend, _ none) (none, error) { return none{}, b.SnapEnd(ctx) }}
	brokenCall = &method[none, []stack.Broken]{name: "broken", repeat: true, atOnce: sessionCalls,
		run:    func(ctx context.Context, b *Backend, _ none) ([]stack.Broken, error) { return b.Broken(ctx) },
		encode: asJSON[none, []stack.Broken], decode: decodeBroken}
	repairCall = &method[repairArgs, none]{name: "repair", repeat: true,
		run: func(ctx context.Context, b *Backend, a repairArgs) (none, error) {
			return none{}, b.Repair(ctx, a.Layer, a.Off, a.Right)
		}}
)

// methods is the table of all calls.
var methods = tableOf(expandCall, trackCall, intendCall, markCall, cleanCall, intentsCall, digestsCall, noteCall,
	metaCall, dropSnapshotCall, prepareCutCall, holdCall, doCutCall, abortCutCall, releaseCall, sealCall, sizesCall,
	changedCall, snapDigestsCall, snapReadCall, snapEndCall, brokenCall, repairCall)

// CommitsLayers reports whether a replica has other layers or snapshots after the call of a name.
func CommitsLayers(name string) bool {
	m := methods[name]
	return m != nil && m.commitsLayers()
}

func tableOf(list ...servedMethod) map[string]servedMethod {
	table := map[string]servedMethod{}
	for _, m := range list {
		table[m.callName()] = m
	}
	return table
}

// intentsAnswer is the answer to intents: with Set on request, else with Regions.
type intentsAnswer struct {
	stack.Intents
	Set *regionSet `json:"set,omitempty"`
}

func encodeIntents(t stack.Intents, a intentsArgs) ([]byte, error) {
	if !a.Set {
		return json.Marshal(t)
	}
	set, err := newRegionSet(t.Regions)
	if err != nil {
		return nil, err
	}
	t.Regions = nil
	return json.Marshal(intentsAnswer{t, set})
}

func decodeIntents(b []byte, _ intentsArgs, l limits) (stack.Intents, error) {
	t, err := decodeJSON[intentsAnswer](b)
	if err != nil {
		return stack.Intents{}, err
	}
	if t.Region <= 0 || t.Region%block.Size != 0 || (l.size-1)/t.Region >= maxRegions || t.Base < 0 || t.Joined < 0 {
		return stack.Intents{}, api.Errorf(api.Corrupt, "regions of %d bytes of a replica with %d, of epochs %d and %d",
			t.Region, l.size, t.Base, t.Joined)
	}
	if err := (regionArgs{Regions: t.Regions, Set: t.Set}).Validate(l); err != nil {
		return stack.Intents{}, err
	}
	if t.Set != nil {
		t.Regions = t.Set.regionsBelow(limits{l.size, t.Region}.regions())
	}
	return t.Intents, nil
}

func decodeChanged(b []byte, a changedArgs, l limits) ([]run, error) {
	runs, err := decodeJSON[[]run](b)
	if err == nil {
		err = checkRuns(runs, (l.size+a.Piece-1)/a.Piece)
	}
	return runs, err
}

func checkDigests(d []byte, n int64) error {
	if int64(len(d)) != n/block.Size*digestSize {
		return api.Errorf(api.Corrupt, "%d bytes of digests for %d bytes", len(d), n)
	}
	return nil
}

func decodeMeta(b []byte, _ none, l limits) (stack.Meta, error) {
	m, err := decodeList[stack.Meta](b)
	if err != nil {
		return stack.Meta{}, err
	}
	if m.Size <= 0 || m.Size > api.MaxVolumeSize || m.Epoch < 0 || m.Incarnation < 0 {
		return stack.Meta{}, api.Errorf(api.Corrupt, "size %d, session %d.%d", m.Size, m.Epoch, m.Incarnation)
	}
	ids := append(append([]string{m.UID}, m.Members...), m.AllLayers()...)
	for _, s := range m.Snapshots {
		if err := checkSnapshot(s); err != nil {
			return stack.Meta{}, err
		}
	}
	for _, id := range ids {
		if err := checkID(id); err != nil {
			return stack.Meta{}, err
		}
	}
	return m, nil
}

func decodeSizes(b []byte, _ none, _ limits) (map[string]stack.LayerSize, error) {
	all, err := decodeList[map[string]stack.LayerSize](b)
	if err != nil {
		return nil, err
	}
	for id, s := range all {
		if err := checkID(id); err != nil {
			return nil, err
		}
		if s.Size < 0 || s.Size > api.MaxVolumeSize || s.Used < 0 || len(s.Root) > maxID {
			return nil, api.Errorf(api.Corrupt, "the layer of snapshot %s has %d bytes, %d of them used", id, s.Size, s.Used)
		}
	}
	return all, nil
}

func decodeBroken(b []byte, _ none, l limits) ([]stack.Broken, error) {
	list, err := decodeList[[]stack.Broken](b)
	if err != nil {
		return nil, err
	}
	if len(list) > maxBroken {
		return nil, api.Errorf(api.Corrupt, "%d damaged chunks: at most %d are told", len(list), maxBroken)
	}
	for _, x := range list {
		if err := checkID(x.Layer); err != nil {
			return nil, err
		}
		if x.Off < 0 || x.Len <= 0 || x.Len > block.ChunkSize || x.Off > l.size-x.Len {
			return nil, api.Errorf(api.Corrupt, "a damaged chunk of %d bytes at %d", x.Len, x.Off)
		}
		if x.Snap != "" {
			if err := checkID(x.Snap); err != nil {
				return nil, err
			}
		}
	}
	return slices.Clip(list), nil
}

// validate checks a replica's description at the begin of a session.
func (i Info) validate() error {
	if i.Size < 0 || i.Size > api.MaxVolumeSize || i.Epoch < 0 || i.Joined < 0 || i.Joined > i.Epoch ||
		i.Reverted < 0 || i.Reverted > i.Epoch {
		return api.Errorf(api.Corrupt, "a replica of %d bytes, in epoch %d, member in epoch %d, reverted in epoch %d", i.Size,
			i.Epoch, i.Joined, i.Reverted)
	}
	return nil
}
