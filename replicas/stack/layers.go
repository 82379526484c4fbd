package stack

import (
	"context"

	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
	"drover.io/drover/replicas/stack/transfer"
)

// Other rooms import stack alone: these are the types of layers and copies that they see.
type (
	// Damage is a range of a layer whose content differs from its digest.
	Damage = layer.Damage
	// RemoteLayer is a layer that a replica reads from sources.
	RemoteLayer = layer.RemoteLayer
	// SourceDisk is a disk of this machine that is a source of a layer.
	SourceDisk = layer.SourceDisk
	// FetchFunc reads a part of a layer from one of its sources.
	FetchFunc = layer.FetchFunc
	// LayerSize is the size of a layer, and the room that the layer takes.
	LayerSize = layer.LayerSize
	// Merge is a merge in progress, as stack.json records it.
	Merge = layer.Merge
	// CopyOptions bound the copy of a layer.
	CopyOptions = transfer.Options
	// Delta lists the blocks that differ between two stacks of layers.
	Delta = transfer.Delta
)

var (
	// ErrNotFetched answers a read of blocks that the disk fetches from a source: the caller reads again later.
	ErrNotFetched = layer.ErrNotFetched
	// ErrDamaged answers a read of blocks that differ from their digest.
	ErrDamaged = layer.ErrDamaged

	errRead = layer.ErrRead
)

// Probe checks that the file system at path keeps the map of a head.
func Probe(ctx context.Context, path string) error { return diskfs.Probe(ctx, path) }
