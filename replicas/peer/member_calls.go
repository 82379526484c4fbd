package peer

import (
	"context"
	"encoding/json"
	"fmt"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// limits returns the limits for the replica's answers.
func (m *Member) limits() limits {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.info.Size == 0 { // there was no session yet
		return limits{size: api.MaxVolumeSize}
	}
	return limits{size: m.info.Size}
}

// Expand implements engine.Member.
func (m *Member) Expand(ctx context.Context, size int64) error {
	_, err := expandCall.call(ctx, m, sizeArgs{size})
	if err == nil {
		m.mu.Lock()
		m.info.Size = max(m.info.Size, size)
		m.mu.Unlock()
	}
	return err
}

// Track implements engine.Mirror. The Member repeats the call whenever the replica may have been opened again.
func (m *Member) Track(ctx context.Context, on bool) error {
	m.mu.Lock()
	m.track = on
	m.mu.Unlock()
	_, err := trackCall.call(ctx, m, onArgs{on})
	return err
}

// Intend implements engine.Mirror.
func (m *Member) Intend(ctx context.Context, regions []int64) error {
	_, err := intendCall.call(ctx, m, regionArgs{Regions: regions})
	return err
}

// Mark implements engine.Mirror.
func (m *Member) Mark(ctx context.Context, token int64) error {
	_, err := markCall.call(ctx, m, markArgs{Token: token})
	return err
}

// Clean implements engine.Mirror.
func (m *Member) Clean(ctx context.Context, token, epoch int64, regions []int64) error {
	_, err := cleanCall.call(ctx, m, cleanArgs{markArgs{token, epoch}, regionArgs{Regions: regions}})
	return err
}

// Intents implements engine.Mirror.
func (m *Member) Intents(ctx context.Context) (stack.Intents, error) {
	return intentsCall.call(ctx, m, intentsArgs{})
}

// Digests implements engine.Mirror.
func (m *Member) Digests(ctx context.Context, off, n int64) ([]byte, error) {
	return digestsCall.call(ctx, m, rangeArgs{off, n})
}

// Note records an object's state in the replica.
func (m *Member) Note(ctx context.Context, object json.RawMessage) error {
	_, err := noteCall.call(ctx, m, noteArgs(object))
	return err
}

// State implements engine.Cutter.
func (m *Member) State(ctx context.Context) (stack.Meta, error) { return metaCall.call(ctx, m, none{}) }

// Forget implements engine.Cutter.
func (m *Member) Forget(ctx context.Context, uid string) error {
	_, err := dropSnapshotCall.call(ctx, m, uidArgs{uid})
	return err
}

// PrepareCut implements engine.Cutter.
func (m *Member) PrepareCut(ctx context.Context, s stack.Snapshot) error {
	_, err := prepareCutCall.call(ctx, m, cutArgs(s))
	return err
}

// Hold makes the replica hold I/O for a cut.
func (m *Member) Hold(ctx context.Context) error {
	_, err := holdCall.call(ctx, m, none{})
	return err
}

// DoCut implements engine.Cutter.
func (m *Member) DoCut(ctx context.Context, layer string) error {
	_, err := doCutCall.call(ctx, m, uidArgs{layer})
	return err
}

// AbortCut implements engine.Cutter.
func (m *Member) AbortCut(ctx context.Context) error {
	_, err := abortCutCall.call(ctx, m, none{})
	return err
}

// Release ends a Hold.
func (m *Member) Release(ctx context.Context) error {
	_, err := releaseCall.call(ctx, m, none{})
	return err
}

// Seal implements engine.Cutter.
func (m *Member) Seal(ctx context.Context, list ...stack.Snapshot) error {
	_, err := sealCall.call(ctx, m, sealArgs(list))
	return err
}

// Sizes implements engine.Cutter.
func (m *Member) Sizes(ctx context.Context) (map[string]stack.LayerSize, error) {
	return sizesCall.call(ctx, m, none{})
}

// Changed implements engine.Cutter.
func (m *Member) Changed(ctx context.Context, from, to string, base []string, piece int64) ([]int64, error) {
	runs, err := changedCall.call(ctx, m, changedArgs{from, to, base, piece})
	if err != nil {
		return nil, err
	}
	return unrollRuns(runs), nil
}

// SnapDigests implements engine.Cutter.
func (m *Member) SnapDigests(ctx context.Context, uid string, off, n int64) ([]byte, error) {
	return snapDigestsCall.call(ctx, m, snapArgs{uid, off, n})
}

// SnapRead implements engine.Cutter.
func (m *Member) SnapRead(ctx context.Context, uid string, off int64, buf []byte) error {
	b, err := snapReadCall.call(ctx, m, snapArgs{uid, off, int64(len(buf))})
	copy(buf, b)
	return err
}

// SnapEnd implements engine.Cutter.
func (m *Member) SnapEnd(ctx context.Context) error {
	_, err := snapEndCall.call(ctx, m, none{})
	return err
}

// Broken implements engine.Repairer.
func (m *Member) Broken(ctx context.Context) ([]stack.Broken, error) {
	return brokenCall.call(ctx, m, none{})
}

// Repair implements engine.Repairer.
func (m *Member) Repair(ctx context.Context, layer string, off int64, right []byte) error {
	_, err := repairCall.call(ctx, m, repairArgs{layer, off, right})
	return err
}

// checkFrame refuses a control frame that exceeds the other side's bound, where it would break the connection.
func checkFrame(of string, payload []byte) error {
	if len(payload) > maxControl {
		return fmt.Errorf("%s: %w", of, api.Errorf(api.OutOfRange, "%d bytes do not fit into a frame of %d", len(payload),
			maxControl))
	}
	return nil
}
