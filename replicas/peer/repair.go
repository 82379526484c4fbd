package peer

import (
	"context"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Broken are the damaged chunks of the replica's layers that others may be asked for.
func (b *Backend) Broken(context.Context) ([]stack.Broken, error) { return b.Replica.Broken(), nil }

// Repair puts a chunk of a layer right with what another replica shows there; nil: nobody has what it held.
func (b *Backend) Repair(_ context.Context, layer string, off int64, right []byte) error {
	if !slices.Contains(b.Meta().All(), layer) {
		return api.Errorf(api.NotFound, "the replica has no layer %s", layer) // it was merged meanwhile
	}
	if len(right) == 0 {
		b.Replica.Hopeless(layer, off)
		return nil
	}
	return b.Disk().Repair(layer, off, right)
}
