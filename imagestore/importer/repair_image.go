package importer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// layerRepairer is a disk that repairs a sealed layer below its replicas.
type layerRepairer interface {
	RepairLayer(ctx context.Context, uid, root string, src block.Source) error
}

// Repair repairs an image below replicas, in place, from another disk with the layers. The Spec must be complete.
func Repair(ctx context.Context, from, on block.Layers, want Spec, p *Progress) (Result, error) {
	return repairLayers(ctx, from, on, want, want.Layers, p)
}

// repairLayers repairs the layers of an image from the layers good of another disk, or of the same disk.
func repairLayers(ctx context.Context, from, on block.Layers, want Spec, good []api.UID, p *Progress) (Result, error) {
	m, ok := on.(layerRepairer)
	if !ok || want.Digest == "" || len(good) != len(want.Layers) || len(good) == 0 {
		return Result{}, api.Errorf(api.Unsupported, "image %s cannot be repaired in place", want.Name)
	}
	p.sealing.Store(true)
	for i, l := range good {
		root, _, err := from.Digest(string(l))
		if err == nil && i == len(good)-1 && root != want.Digest {
			err = api.Errorf(api.Corrupt, "disk %s holds other data than image %s", from.UID(), want.Name)
		}
		if err != nil {
			return Result{}, err
		}
		src, err := from.Open(string(l))
		if err != nil {
			return Result{}, err
		}
		if err = errors.Join(m.RepairLayer(ctx, string(want.Layers[i]), root, src), src.Close()); err != nil {
			return Result{}, explainDiskError(on, err)
		}
	}
	got := Result{Image: want.imageRecord()}
	err := on.PutImage(got.Image)
	if err == nil {
		got.Allocated, err = allocatedBytes(on, got.Layers)
	}
	return got, err
}

// RepairSpec names the second import for a repair: the same name every time, so that a later try finds the data of an
// earlier try.
func RepairSpec(want Spec) Spec {
	spare := want
	spare.Name, spare.Object = want.Name+" (being repaired)", nil
	spare.UID = repairUID(want.UID)
	spare.Layers = nil
	for _, l := range want.Layers {
		spare.Layers = append(spare.Layers, repairUID(l))
	}
	return spare
}

// RemoveRepairData removes the data of an unfinished repair. The disk itself collects unfinished layers without a
// checkpoint.
func RemoveRepairData(ctx context.Context, on block.Layers, want Spec) error {
	spare := RepairSpec(want)
	if _, err := readRecord(on, string(spare.UID)); err == nil {
		return Remove(ctx, on, spare)
	}
	if k := FindCheckpoint(ctx, on, spare); k != nil {
		k.Drop()
	}
	return nil
}

func repairUID(uid api.UID) api.UID {
	b := sha256.Sum256([]byte("spare of " + string(uid)))
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80 // a UUID of version 8
	return api.UID(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:16]))
}

// RepairFromOrigin repairs an image below replicas from its origin: it makes the image under another name by fetch, and
// repairs the damaged layers from that image.
func RepairFromOrigin(ctx context.Context, on block.Layers, want, spare Spec, p *Progress,
	fetch func(context.Context) (Result, error)) (Result, error) {
	if _, err := Find(on, spare); err != nil {
		if err := Remove(ctx, on, Spec{UID: spare.UID, Name: spare.Name}); err != nil {
			return Result{}, err
		}
		if _, err := fetch(ctx); err != nil {
			return Result{}, err
		}
	} else if spare.Checkpoint != nil {
		spare.Checkpoint.Drop()
	}
	got, err := repairLayers(ctx, on, on, want, spare.Layers, p)
	return got, errors.Join(err, Remove(ctx, on, spare))
}
