package restoring

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/watched"
)

// A restore takes a chunk from a layer on a disk of the node that has a chunk of the same digest at the same place, as
// an earlier backup of the volume has, or a snapshot of the volume itself. The store sends the other chunks. A layer is
// open only while its chunks are copied, because an open layer delays merges.

// copyLocal copies the chunks that layers on the node's disks have. An error is one of the sink, or the end of ctx: a
// layer that cannot be read is no source.
func (f *Fill) copyLocal(ctx context.Context, s *fillSink) error {
	p, err := f.l.currentPlan()
	if err != nil || p == nil {
		return nil // nothing to compare with; the restore says why
	}
	disks := []block.Layers{f.l.on}
	if f.l.set.Disks != nil {
		others := slices.DeleteFunc(f.l.set.Disks(ctx), func(d block.Layers) bool { return d.UID() == f.l.on.UID() })
		disks = append(disks, others...)
	}
	for _, d := range disks {
		on, ok := d.(block.DigestLayers)
		if !ok {
			continue
		}
		if err := f.copyFromDisk(ctx, s, p, on); err != nil {
			return err
		}
	}
	return nil
}

// copyFromDisk copies the chunks that layers of a disk have. The disk may hang: then the store sends the chunks.
func (f *Fill) copyFromDisk(ctx context.Context, s *fillSink, p *plan, on block.DigestLayers) error {
	watch := watched.NewDisk(on.UID(), api.Errorf(api.Unavailable, "disk %s: does not answer", on.UID()))
	layers := watched.Layers(watch, on)
	names, err := layers.LayerNames()
	for _, uid := range names {
		if err := f.copyFrom(ctx, s, p, layers, uid); err != nil {
			return err
		}
	}
	if err = cmp.Or(watch.Failure(), err); err != nil {
		f.l.set.Log.Info("a restore does not see all layers of a disk", "disk", on.UID(), "err", err)
	}
	return nil
}

// copyFrom copies the chunks of a layer that the plan has, too.
func (f *Fill) copyFrom(ctx context.Context, s *fillSink, p *plan, on block.LayerReader, uid string) error {
	src, err := block.OpenLayer(on, uid)
	if err != nil {
		return nil // not finished, or without digests
	}
	defer src.Close()
	chunks := p.equalChunks(src)
	chunks = slices.DeleteFunc(chunks, f.l.isFilled)
	group, copying := errgroup.WithContext(ctx)
	group.SetLimit(localAtOnce)
	for _, c := range chunks {
		group.Go(func() error {
			if copying.Err() != nil {
				return context.Cause(copying)
			}
			return f.copyChunk(s, p, src, c)
		})
	}
	return group.Wait()
}

// copyChunk copies a chunk whose bytes match the digest.
func (f *Fill) copyChunk(s *fillSink, p *plan, src block.Source, c int64) error {
	b, off := block.AlignedBuffer(int(p.length(c))), c*block.ChunkSize
	n, err := src.ReadAt(b, off)
	if n < len(b) || err != nil && !errors.Is(err, io.EOF) || !p.matches(c, b) {
		return nil // the disk hangs, or has damage of its own, which its scrub reports
	}
	if whole := off+int64(n) <= p.content; whole {
		err = s.WriteChunk(b, off, p.digest(c))
	} else {
		_, err = s.WriteAt(b[:p.content-off], off)
	}
	if err != nil {
		return err
	}
	restoredBytes.WithLabelValues("disk").Add(float64(n))
	f.l.mu.Lock()
	defer f.l.mu.Unlock()
	f.local += int64(n)
	return nil
}

// equalChunks lists the chunks with data that a layer has, by the layer's digests.
func (p *plan) equalChunks(layer block.DigestSource) (same []int64) {
	for c := range chunksOf(p.size) {
		if !p.isData(c) {
			continue
		}
		if sum, known := layer.Digest(c); known && sum == p.digest(c) {
			same = append(same, c)
		}
	}
	return same
}
