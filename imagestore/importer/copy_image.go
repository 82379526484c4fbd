package importer

import (
	"context"
	"errors"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Copy copies an image from another disk of this or another node. It compares the digest of each layer.
func Copy(ctx context.Context, from, on block.Layers, want Spec, p *Progress) (Result, error) {
	src, err := readRecord(from, string(want.UID))
	if err != nil {
		found, err := Find(from, want)
		if err != nil {
			return Result{}, err
		}
		src = found.Image
	}
	if want.Object != nil {
		src.Object = want.Object
	}
	return copyLayers(ctx, from, on, src, want.CheckpointEvery, p)
}

// Share copies an image from a disk that has its layers for another image. The Spec must be complete.
func Share(ctx context.Context, from, on block.Layers, want Spec, p *Progress) (Result, error) {
	if root, _, err := from.Digest(string(want.Layers[len(want.Layers)-1])); err != nil || root != want.Digest {
		return Result{}, errors.Join(api.Errorf(api.NotFound, "disk %s does not have the layers of image %s", from.UID(),
			want.Name), err)
	}
	return copyLayers(ctx, from, on, want.imageRecord(), want.CheckpointEvery, p)
}

// imageRecord returns the record of a complete Spec.
func (w Spec) imageRecord() block.Image {
	return block.Image{UID: string(w.UID), Name: w.Name, Layers: layerNames(w.Layers), Format: w.Format,
		VirtualSize: w.VirtualSize, Checksum: w.Checksum, Digest: w.Digest, Object: w.Object}
}

func copyLayers(ctx context.Context, from, on block.Layers, img block.Image, checkpointEvery time.Duration,
	p *Progress) (Result, error) {
	got := Result{Image: img}
	var total int64
	for _, l := range img.Layers {
		s, err := from.Open(l)
		if err != nil {
			return Result{}, err
		}
		size := s.Size()
		_ = s.Close()
		if img.VirtualSize > 0 && size > api.RoundSize(img.VirtualSize) {
			return Result{}, api.Errorf(api.Corrupt, "layer %s on disk %s has %d bytes, more than its image %s with %d", l,
				from.UID(), size, img.Name, img.VirtualSize)
		}
		total += size
	}
	p.readTotal.Store(total)
	var before int64
	for _, l := range img.Layers {
		n, size, err := copyLayer(ctx, from, on, l, checkpointEvery, func(done int64) { p.read.Store(before + done) })
		if err != nil {
			return Result{}, explainDiskError(on, err)
		}
		got.Allocated += n
		before += size
	}
	p.sealing.Store(true)
	if err := on.PutImage(got.Image); err != nil {
		return Result{}, explainDiskError(on, err)
	}
	return got, nil
}
