package peer

import (
	"context"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Broken returns the damaged chunks of the replica's layers that other members may show.
func (b *Backend) Broken(context.Context) ([]stack.Broken, error) { return b.Replica.Broken(), nil }

// Repair repairs a chunk of a layer with the content of another replica; nil: no replica has the content.
func (b *Backend) Repair(_ context.Context, layer string, off int64, right []byte) error {
	if !slices.Contains(b.Meta().AllLayers(), layer) {
		return api.Errorf(api.NotFound, "the replica has no layer %s", layer) // merged meanwhile
	}
	if len(right) == 0 {
		b.Replica.Hopeless(layer, off)
		return nil
	}
	return b.Disk().Repair(layer, off, right)
}
