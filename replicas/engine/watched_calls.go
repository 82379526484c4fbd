package engine

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// answer of a call.
type answer[T any] struct {
	v   T
	err error
}

// callBounded calls fn, which may hang. When callBounded returns, the context of fn ends; fn itself may run on until
// the disk answers, so fn uses memory of its own. Anyway allows a call of an abandoned member that is idle.
func callBounded[T any](ctx context.Context, m *WatchedMember, anyway bool, fn func(context.Context) (T, error)) (
	none T, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := &watchedCall{since: m.watch.now()}
	m.mu.Lock()
	alive := m.alive
	if err = m.dead; m.closed {
		err = errEnded
	}
	if err != nil && !(anyway && !m.closed && m.isIdle()) {
		m.mu.Unlock()
		return none, err
	}
	m.calls[c] = true
	m.mu.Unlock()
	done := make(chan answer[T], 1)
	go func() { // closeIfIdle waits for the goroutine
		v, err := fn(ctx)
		done <- answer[T]{v, err}
		m.mu.Lock()
		delete(m.calls, c)
		m.closeIfIdle()
		m.mu.Unlock()
	}()
	if err != nil {
		alive = context.Background() // the member was abandoned before
	}
	select {
	case a := <-done:
		return a.v, a.err
	case <-alive.Done():
		return none, context.Cause(alive)
	case <-ctx.Done():
		return none, api.Errorf(api.Unavailable, "replica %s does not answer: %w", m.o.Replica, ctx.Err())
	}
}

func (m *WatchedMember) callBounded(ctx context.Context, fn func(context.Context) error) error {
	_, err := callBounded(ctx, m, false, func(ctx context.Context) (struct{}, error) { return struct{}{}, fn(ctx) })
	return err
}

// Adopt implements Member, and takes an abandoned member back if the member is idle.
func (m *WatchedMember) Adopt(ctx context.Context, epoch, incarnation int64, members []string) error {
	m.mu.Lock()
	was := m.dead
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, m.o.Timeout().Max)
	defer cancel()
	_, err := callBounded(ctx, m, true, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, m.on.Adopt(ctx, epoch, incarnation, members)
	})
	if err == nil && was != nil {
		m.mu.Lock()
		if m.dead == was { //nolint:errorlint // the very same reason
			m.dead, m.peak = nil, 0
			m.alive, m.end = context.WithCancelCause(context.Background())
		}
		m.mu.Unlock()
	}
	return err
}

// OnFetched implements Fetcher.
func (m *WatchedMember) OnFetched(fn func()) {
	if f, ok := m.on.(Fetcher); ok {
		f.OnFetched(fn)
	}
}

// Expand implements Member.
func (m *WatchedMember) Expand(ctx context.Context, size int64) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.Expand(ctx, size) })
}

// Track implements Mirror.
func (m *WatchedMember) Track(ctx context.Context, on bool) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.Track(ctx, on) })
}

// Intents implements Mirror.
func (m *WatchedMember) Intents(ctx context.Context) (stack.Intents, error) {
	return callBounded(ctx, m, false, func(ctx context.Context) (stack.Intents, error) { return m.on.Intents(ctx) })
}

// Intend implements Mirror.
func (m *WatchedMember) Intend(ctx context.Context, regions []int64) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.Intend(ctx, regions) })
}

// Mark implements Mirror.
func (m *WatchedMember) Mark(ctx context.Context, token int64) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.Mark(ctx, token) })
}

// Clean implements Mirror.
func (m *WatchedMember) Clean(ctx context.Context, token, epoch int64, regions []int64) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.Clean(ctx, token, epoch, regions) })
}

// Unnoted records: intents do not name the writes before an epoch, or in the epoch until now.
func (m *WatchedMember) Unnoted(ctx context.Context, epoch int64) error {
	on, ok := m.on.(unnoter)
	if !ok {
		return api.Errorf(api.Unsupported, "replica %s: it cannot record that writes were not noted", m.o.Replica)
	}
	return m.callBounded(ctx, func(ctx context.Context) error { return on.Unnoted(ctx, epoch) })
}

// Digests implements Mirror.
func (m *WatchedMember) Digests(ctx context.Context, off, size int64) ([]byte, error) {
	return callBounded(ctx, m, false, func(ctx context.Context) ([]byte, error) { return m.on.Digests(ctx, off, size) })
}

// State implements Cutter.
func (m *WatchedMember) State(ctx context.Context) (stack.Meta, error) {
	return callBounded(ctx, m, false, func(ctx context.Context) (stack.Meta, error) { return m.on.State(ctx) })
}

// PrepareCut implements Cutter.
func (m *WatchedMember) PrepareCut(ctx context.Context, s stack.Snapshot) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.PrepareCut(ctx, s) })
}

// DoCut implements Cutter.
func (m *WatchedMember) DoCut(ctx context.Context, layer string) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.DoCut(ctx, layer) })
}

// AbortCut implements Cutter.
func (m *WatchedMember) AbortCut(ctx context.Context) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.AbortCut(ctx) })
}

// Forget implements Cutter.
func (m *WatchedMember) Forget(ctx context.Context, uid string) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.Forget(ctx, uid) })
}

// Seal implements Cutter.
func (m *WatchedMember) Seal(ctx context.Context, list ...stack.Snapshot) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.Seal(ctx, list...) })
}

// Changed implements Cutter.
func (m *WatchedMember) Changed(ctx context.Context, from, to string, base []string, piece int64) ([]int64, error) {
	return callBounded(ctx, m, false, func(ctx context.Context) ([]int64, error) {
		return m.on.Changed(ctx, from, to, base, piece)
	})
}

// SnapDigests implements Cutter.
func (m *WatchedMember) SnapDigests(ctx context.Context, uid string, off, size int64) ([]byte, error) {
	return callBounded(ctx, m, false, func(ctx context.Context) ([]byte, error) {
		return m.on.SnapDigests(ctx, uid, off, size)
	})
}

// SnapRead implements Cutter.
func (m *WatchedMember) SnapRead(ctx context.Context, uid string, off int64, buf []byte) error {
	mine, err := callBounded(ctx, m, false, func(ctx context.Context) ([]byte, error) {
		b := make([]byte, len(buf))
		return b, m.on.SnapRead(ctx, uid, off, b)
	})
	if err == nil {
		copy(buf, mine)
	}
	return err
}

// Sizes implements Cutter.
func (m *WatchedMember) Sizes(ctx context.Context) (map[string]stack.LayerSize, error) {
	return callBounded(ctx, m, false, func(ctx context.Context) (map[string]stack.LayerSize, error) {
		return m.on.Sizes(ctx)
	})
}

// SnapEnd implements Cutter.
func (m *WatchedMember) SnapEnd(ctx context.Context) error {
	return m.callBounded(ctx, func(ctx context.Context) error { return m.on.SnapEnd(ctx) })
}

// Broken implements Repairer.
func (m *WatchedMember) Broken(ctx context.Context) ([]stack.Broken, error) {
	on, ok := m.on.(Repairer)
	if !ok {
		return nil, nil
	}
	return callBounded(ctx, m, false, func(ctx context.Context) ([]stack.Broken, error) { return on.Broken(ctx) })
}

// Repair implements Repairer.
func (m *WatchedMember) Repair(ctx context.Context, layer string, off int64, right []byte) error {
	on, ok := m.on.(Repairer)
	if !ok {
		return api.Errorf(api.Unsupported, "replica %s cannot be repaired", m.o.Replica)
	}
	return m.callBounded(ctx, func(ctx context.Context) error { return on.Repair(ctx, layer, off, right) })
}
