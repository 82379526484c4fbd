package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Expand makes every member, and every replica in a join, then the engine, size bytes long. After an error the caller
// may repeat Expand.
func (e *Engine) Expand(ctx context.Context, size int64) error {
	if size%block.Size != 0 {
		return api.Errorf(api.Invalid, "size %d is not a multiple of %d", size, block.Size)
	}
	long := map[Member]bool{}
	for {
		var old int64
		var short []Named
		unknown := "" // a member whose drop is not decided
		err := e.runOnLoop(ctx, func() {
			who := (e.members | e.joiners | e.joining) &^ e.suspect
			for i, m := range e.cfg.Members {
				if who.has(i) && !long[m.Member] {
					short = append(short, m)
				}
			}
			// A suspect may serve again: to vouch for the content when the others have failed.
			for i, m := range e.cfg.Members {
				if (e.members & e.suspect).has(i) && !long[m.Member] && size > e.size {
					unknown = m.Name
				}
			}
			// A later joiner asks for the size after enlistReplica.
			if old = e.size; len(short) == 0 && unknown == "" {
				e.size = max(old, size)
			}
		})
		if err == nil && len(short) == 0 && unknown != "" {
			return api.Errorf(api.Busy, "replica %s does not answer, and is a member until it was dropped: try again",
				unknown)
		}
		if err != nil || len(short) == 0 && size >= old {
			return err
		}
		if size < old {
			return api.Errorf(api.OutOfRange, "a volume of %d bytes cannot shrink to %d", old, size)
		}
		for _, m := range short {
			if err := m.Member.Expand(ctx, size); err == nil {
				long[m.Member] = true
			} else if ctx.Err() != nil || !e.continuesWithout(ctx, m.Member, err) {
				if errors.Is(err, stack.ErrFailed) {
					e.Suspect(m.Name, err)
				}
				return fmt.Errorf("replica %s: %w", m.Name, err)
			}
		}
	}
}

// continuesWithout reports whether the volume continues without a replica that failed to expand, since the replica is
// no member. The engine gives up the join of such a replica.
func (e *Engine) continuesWithout(ctx context.Context, m Member, why error) (is bool) {
	err := e.runOnLoop(ctx, func() {
		i := slices.IndexFunc(e.cfg.Members, func(n Named) bool { return n.Member == m })
		if is = i < 0 || !(e.members | e.joining).has(i); is && i >= 0 {
			e.removeJoiners(bit(i), why)
		}
	})
	return err == nil && is
}

// expandReplica expands a joining replica to the volume's size. The replica may be longer: by an expansion that others
// did not follow, or because a user salvaged the volume with a shorter replica.
func (r *joinRun) expandReplica(ctx context.Context) error {
	size, err := r.e.volumeSize(ctx)
	if err != nil {
		return err
	}
	if err := r.dst.Expand(ctx, size); !api.Is(err, api.OutOfRange) {
		return err
	}
	return nil
}

// tailPiece is how much of a longer replica one request clears.
const tailPiece = int64(1) << 30

// clearTail makes a joining replica zero beyond the volume's size: a later expansion of the volume gives the members
// zeros there. The replica gets no guest write before.
func (r *joinRun) clearTail(ctx context.Context) error {
	x, ok := r.dst.(Cutter)
	if !ok {
		return nil
	}
	size, err := r.e.volumeSize(ctx)
	if err != nil {
		return err
	}
	m, err := x.State(ctx)
	if err != nil {
		return err
	}
	for off := size; off < m.Size; off += tailPiece {
		q := &block.Request{Op: block.OpZero, Off: off, Len: min(tailPiece, m.Size-off)}
		if err := submitAndWait(ctx, r.e.cfg.Loop, r.dst, q); err != nil {
			return err
		}
	}
	return nil
}
