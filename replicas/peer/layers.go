package peer

import (
	"context"
	"errors"
	"io"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Calls for the snapshots of a volume with several members: Backend serves the calls, Member makes the calls.

// seen is the open snapshot of a replica; one at a time.
type seen struct {
	mu     sync.RWMutex
	uid    string
	src    block.Source
	closed bool // with the replica: no snapshot opens any more
}

func (s *seen) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.closeSnapshot()
}

// endSnapshot closes the snapshot, until the next call opens one.
func (s *seen) endSnapshot() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closeSnapshot()
}

// closeSnapshot closes the snapshot. The caller has the lock.
func (s *seen) closeSnapshot() error {
	src := s.src
	s.src, s.uid = nil, ""
	if src == nil {
		return nil
	}
	return src.Close()
}

// withSnapshot calls fn with the content of a snapshot.
func (b *Backend) withSnapshot(ctx context.Context, uid string, fn func(block.Source) error) error {
	for {
		if done, err := b.readSnapshot(ctx, uid, fn); done {
			return err
		}
		if err := b.openSnapshot(ctx, uid); err != nil {
			return err
		}
	}
}

// readSnapshot calls fn with the content of the open snapshot, and reports whether the call is done. A call that the
// end of the snapshot passed opens the snapshot for itself alone: other work of the engine may have ended the
// snapshot.
func (b *Backend) readSnapshot(ctx context.Context, uid string, fn func(block.Source) error) (done bool, err error) {
	v := &b.seen
	v.mu.RLock()
	defer v.mu.RUnlock()
	switch end := ctx.Err(); {
	case v.src != nil && v.uid == uid:
		return true, fn(v.src)
	case v.closed:
		return true, errClosed
	case end == nil:
		return false, nil
	case !errors.Is(context.Cause(ctx), errScopeEnded):
		return true, api.Errorf(api.Unavailable, "the engine has given the read of snapshot %s up: %w", uid, end)
	}
	src, err := b.openSource(uid)
	if err != nil {
		return true, err
	}
	return true, errors.Join(fn(src), src.Close())
}

// openSnapshot opens a snapshot for reads. Its layers are not merged meanwhile. The engine ends the snapshot after the
// contexts of its calls: openSnapshot looks at the context with the lock, so that no late call opens the snapshot
// again.
func (b *Backend) openSnapshot(ctx context.Context, uid string) error {
	v := &b.seen
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || ctx.Err() != nil || v.src != nil && v.uid == uid {
		return nil // readSnapshot decides
	}
	if err := v.closeSnapshot(); err != nil {
		return err
	}
	src, err := b.openSource(uid)
	if err == nil {
		v.uid, v.src = uid, src
	}
	return err
}

func (b *Backend) openSource(uid string) (block.Source, error) {
	layers, size, err := b.SnapshotLayers(uid)
	if err != nil {
		return nil, err
	}
	return b.Disk().OpenStack(layers, size)
}

// SnapDigests returns the Digests of a snapshot's content.
func (b *Backend) SnapDigests(ctx context.Context, uid string, off, n int64) ([]byte, error) {
	if off < 0 || n <= 0 || (off|n)%block.Size != 0 || n > digestPiece {
		return nil, api.Errorf(api.Invalid, "digests of %d+%d", off, n)
	}
	return b.digestRange(off, n, func(off int64, buf []byte) (bool, error) {
		return false, b.SnapRead(ctx, uid, off, buf)
	})
}

// SnapRead reads a snapshot's content.
func (b *Backend) SnapRead(ctx context.Context, uid string, off int64, buf []byte) error {
	if err := ctx.Err(); err != nil && !errors.Is(context.Cause(ctx), errScopeEnded) {
		return err
	}
	return b.withSnapshot(ctx, uid, func(src block.Source) error {
		n, err := src.ReadAt(buf, off)
		if errors.Is(err, io.EOF) && n == len(buf) {
			err = nil
		}
		return err
	})
}

// SnapEnd closes the open snapshot.
func (b *Backend) SnapEnd(context.Context) error { return b.seen.endSnapshot() }

// State returns the replica's record. After a failed sync State is an error: the record may name a snapshot whose data
// the disk lacks, and the API would report the snapshot ready.
func (b *Backend) State(context.Context) (stack.Meta, error) {
	if err := b.Failed(); err != nil {
		return stack.Meta{}, err
	}
	return b.Meta(), nil
}

// Forget takes a snapshot's name away.
func (b *Backend) Forget(_ context.Context, uid string) error {
	return b.besideCut(func() error { return b.DropSnapshot(uid) })
}

// besideCut runs a change of layers, unless a cut is prepared: the prepared cut blocks every other change of the
// replica, and a blocked call would delay the adoption of the next session, which ends the cut.
func (b *Backend) besideCut(change func() error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cut != nil {
		return api.Errorf(api.Busy, "a cut is prepared; try again when it is done")
	}
	return change()
}

// Seal cuts the head, apart from the other members, for one snapshot or for several snapshots of the same content.
func (b *Backend) Seal(ctx context.Context, list ...stack.Snapshot) error {
	if len(list) == 0 {
		return api.Errorf(api.Invalid, "a layer for no snapshot")
	}
	return b.besideCut(func() error { return b.Cut(ctx, list[0], list[1:]...) })
}

// Sizes returns the sizes of the snapshots' layers.
func (b *Backend) Sizes(context.Context) (map[string]stack.LayerSize, error) {
	all := map[string]stack.LayerSize{}
	for _, s := range b.Meta().Snapshots {
		size, used, err := b.Disk().LayerSize(s.Layer)
		if err != nil {
			return nil, err
		}
		all[s.UID] = stack.LayerSize{Size: size, Used: used, Root: b.Disk().LayerRoot(s.Layer)}
	}
	return all, nil
}
