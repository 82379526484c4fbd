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

// Expand makes every member, and every replica that is about to be one, then the engine, size bytes long. It can be
// repeated after an error.
func (e *Engine) Expand(ctx context.Context, size int64) error {
	if size%block.Size != 0 {
		return api.Errorf(api.Invalid, "size %d is not a multiple of %d", size, block.Size)
	}
	long := map[Member]bool{}
	for {
		var old int64
		var short []Named
		unknown := "" // a member of which it is not known whether it is to be one
		err := e.on(ctx, func() {
			who := (e.members | e.joiners | e.joining) &^ e.suspect
			for i, m := range e.cfg.Members {
				if who.has(i) && !long[m.Member] {
					short = append(short, m)
				}
			}
			// A suspect that vouches for what is there when the others have failed serves again, as long as it is.
			for i, m := range e.cfg.Members {
				if (e.members & e.suspect).has(i) && !long[m.Member] && size > e.size {
					unknown = m.Name
				}
			}
			// Who joins from now on asks for the size after it was enlisted.
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
			} else if ctx.Err() != nil || !e.without(ctx, m.Member, err) {
				if errors.Is(err, stack.ErrFailed) {
					e.Suspect(m.Name, err)
				}
				return fmt.Errorf("replica %s: %w", m.Name, err)
			}
		}
	}
}

// without reports whether the volume goes on without a replica that cannot be made longer: it is no member. One that
// was to join is given up.
func (e *Engine) without(ctx context.Context, m Member, why error) (is bool) {
	err := e.on(ctx, func() {
		i := slices.IndexFunc(e.cfg.Members, func(n Named) bool { return n.Member == m })
		if is = i < 0 || !(e.members | e.joining).has(i); is && i >= 0 {
			e.unjoin(bit(i), why)
		}
	})
	return err == nil && is
}

// lengthen makes a replica that is to join as long as the volume is. It may be longer, by an expansion that others did
// not follow: nobody sees more of it than the volume has.
func (r *joinRun) lengthen(ctx context.Context) error {
	size, err := r.e.length(ctx)
	if err != nil {
		return err
	}
	if err := r.dst.Expand(ctx, size); !api.Is(err, api.OutOfRange) {
		return err
	}
	return nil
}
