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

// What snapshots of a volume with several members need of each of them: Backend does it, Member asks for it.

// seen is the snapshot of a replica that is being read; one at a time.
type seen struct {
	mu  sync.RWMutex
	uid string
	src block.Source
}

func (s *seen) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shut()
}

// shut closes what is open. The caller has the lock.
func (s *seen) shut() error {
	src := s.src
	s.src, s.uid = nil, ""
	if src == nil {
		return nil
	}
	return src.Close()
}

// with calls fn with the content of a snapshot.
func (b *Backend) with(uid string, fn func(block.Source) error) error {
	v := &b.seen
	for {
		v.mu.RLock()
		if v.src != nil && v.uid == uid {
			defer v.mu.RUnlock()
			return fn(v.src)
		}
		v.mu.RUnlock()
		if err := b.show(uid); err != nil {
			return err
		}
	}
}

// show opens a snapshot to be read. Its layers are not merged meanwhile.
func (b *Backend) show(uid string) error {
	b.mu.Lock()
	end := b.end
	b.mu.Unlock()
	if end {
		return errClosed
	}
	v := &b.seen
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.src != nil && v.uid == uid {
		return nil
	}
	if err := v.shut(); err != nil {
		return err
	}
	layers, size, err := b.SnapshotLayers(uid)
	if err != nil {
		return err
	}
	src, err := b.Disk().OpenStack(layers, size)
	if err != nil {
		return err
	}
	v.uid, v.src = uid, src
	return nil
}

// SnapDigests are the Digests of what a snapshot holds.
func (b *Backend) SnapDigests(ctx context.Context, uid string, off, n int64) ([]byte, error) {
	if off < 0 || n <= 0 || (off|n)%block.Size != 0 || n > digestPiece {
		return nil, api.Errorf(api.Invalid, "digests of %d+%d", off, n)
	}
	return b.digests(off, n, func(off int64, buf []byte) (bool, error) {
		return false, b.SnapRead(ctx, uid, off, buf)
	})
}

// SnapRead reads what a snapshot holds.
func (b *Backend) SnapRead(ctx context.Context, uid string, off int64, buf []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return b.with(uid, func(src block.Source) error {
		n, err := src.ReadAt(buf, off)
		if errors.Is(err, io.EOF) && n == len(buf) {
			err = nil
		}
		return err
	})
}

// SnapEnd lets go of the layers that were read.
func (b *Backend) SnapEnd(context.Context) error { return b.seen.close() }

// State is what the replica's stack.json says. After a failed sync State is an error: the record may name a snapshot
// whose data the disk lacks, and the API would report the snapshot ready.
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

// besideCut runs what changes layers, unless a cut is prepared: that lets nothing else be done with the replica, and a
// call that waits for it keeps the next session from being adopted, which would end it.
func (b *Backend) besideCut(change func() error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cut != nil {
		return api.Errorf(api.Busy, "a cut is prepared; try again when it is done")
	}
	return change()
}

// Seal cuts off the head as it is, apart from the other members, for one snapshot or for several that hold the same.
func (b *Backend) Seal(ctx context.Context, list ...stack.Snapshot) error {
	if len(list) == 0 {
		return api.Errorf(api.Invalid, "a layer for no snapshot")
	}
	return b.besideCut(func() error { return b.Cut(ctx, list[0], list[1:]...) })
}

// Sizes are those of the layers that snapshots name.
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
