package engine

import (
	"context"
	"fmt"
	"slices"

	"drover.io/drover/replicas/stack"
)

// level makes the snapshots of the members the same, before anything is served: one that is not on all of them was not
// there for anybody yet, or was being taken away.
func (e *Engine) level(ctx context.Context, all []Mirror) error {
	states := make([]stack.Meta, len(all))
	for i, m := range all {
		x, ok := m.(Cutter)
		if !ok {
			return nil
		}
		var err error
		if states[i], err = x.State(ctx); err != nil {
			return fmt.Errorf("snapshots of the members: %w", err)
		}
	}
	for i, m := range all {
		for _, s := range states[i].Snapshots {
			if !slices.ContainsFunc(states, func(o stack.Meta) bool { return !slices.ContainsFunc(o.Snapshots, s.Same) }) {
				continue
			}
			if err := m.(Cutter).Forget(ctx, s.UID); err != nil {
				return fmt.Errorf("snapshots of the members: %w", err)
			}
		}
	}
	return nil
}
