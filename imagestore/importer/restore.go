package importer

import (
	"cmp"
	"context"
	"errors"
	"io"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Restore makes an image of one layer with the content of a backup. Every chunk that the backup writes is data, with
// its zeros, so that the layer of a backup is known before its data. The sink of the backup is an io.ReaderAt of the
// written bytes. check, if set, looks at the layer before the image is recorded. A restore that was cut starts again.
func Restore(ctx context.Context, on block.Layers, want Spec, b block.Backup,
	check func(context.Context, block.Image) error, p *Progress) (Result, error) {
	if len(want.Layers) != 1 {
		return Result{}, api.Errorf(api.Invalid, "image %s: one layer is restored, not %d", want.Name, len(want.Layers))
	}
	if n := b.Size(); n <= 0 || n > api.MaxVolumeSize {
		return Result{}, api.Errorf(api.OutOfRange, "image %s: a backup of %d bytes is smaller or larger than every volume",
			want.Name, n)
	}
	restored := b.Restored
	p.restored.Store(&restored)
	w, err := createLayer(ctx, on, want.Layers[0], b.Size())
	if err != nil {
		return Result{}, explainDiskError(on, err)
	}
	if x, ok := w.(block.Exact); ok {
		x.Exact("") // the comparison below explains more
	}
	got := Result{Image: want.imageRecord()}
	err = b.Restore(ctx, readableSink{guardedSink{w, newSpaceGuard(on)}, w})
	if err == nil {
		p.sealing.Store(true)
		got.Digest, got.Allocated, err = w.Seal(ctx)
	}
	if err != nil {
		return Result{}, explainDiskError(on, errors.Join(err, w.Abort()))
	}
	got.Format, got.VirtualSize = "raw", b.Size()
	got.Checksum = cmp.Or(b.Checksum(), got.Checksum)
	if want.Digest != "" && got.Digest != want.Digest {
		err = api.Errorf(api.Corrupt, "image %s: the backup has other content than the image had", want.Name)
	} else if check != nil {
		err = check(ctx, got.Image)
	}
	if err != nil {
		return Result{}, errors.Join(err, removeLayer(on, string(want.Layers[0])))
	}
	return got, on.PutImage(got.Image)
}

// readableSink lets the backup read the bytes that it has written.
type readableSink struct {
	guardedSink
	layer block.LayerWriter
}

// ReadAt implements io.ReaderAt.
func (s readableSink) ReadAt(p []byte, off int64) (int, error) {
	r, ok := s.layer.(io.ReaderAt)
	if !ok {
		return 0, api.Errorf(api.Unsupported, "the layer cannot be read before it is finished")
	}
	return r.ReadAt(p, off)
}
