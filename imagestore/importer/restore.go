package importer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Restore makes an image of one layer with the content of a backup. Every chunk that the backup writes is data, with
// its zeros, so that the layer of a backup is known before its data. The sink of the backup is an io.ReaderAt of the
// written bytes, and a block.ChunkAdopter: the layer may have bytes of a restore that was cut, and the backup calls
// AdoptChunks before it writes. check, if set, looks at the layer before the image is recorded.
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
	w, err := restoreWriter(ctx, on, want.Layers[0], b.Size())
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
		return Result{}, explainDiskError(on, errors.Join(err, endCutRestore(w, err)))
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

// restoreNote is in the checkpoint of a restore, which is written before any data and claims none: AdoptChunks finds
// the chunks that an earlier process wrote.
type restoreNote struct {
	Restored int64 `json:"restored"` // bytes of the backup
}

// restoreWriter continues the layer of a restore that was cut, or starts a layer.
func restoreWriter(ctx context.Context, on block.Layers, uid api.UID, size int64) (block.LayerWriter, error) {
	note := restoreNote{size}
	if r, ok := on.(block.Resumer); ok {
		if w, _, raw, err := r.Resume(ctx, string(uid)); err == nil {
			var was restoreNote
			if _, adopts := w.(block.ChunkAdopter); adopts && json.Unmarshal(raw, &was) == nil && was == note {
				return w, nil
			}
			if err := w.Abort(); err != nil {
				return nil, err
			}
		}
	}
	w, err := createLayer(ctx, on, uid, size)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(note)
	if k, ok := w.(block.CheckpointWriter); ok && err == nil {
		err = k.Checkpoint(size/chunkSize*chunkSize, raw)
	}
	if err != nil {
		return nil, errors.Join(err, w.Abort())
	}
	return w, nil
}

// endCutRestore ends the work on a layer after an error. The chunks stay for a later restore, which compares each with
// its digest, unless the disk needs their room or no restore follows, because the backup itself is at fault.
func endCutRestore(w block.LayerWriter, err error) error {
	k, ok := w.(block.CheckpointWriter)
	if !ok {
		return w.Abort()
	}
	switch api.KindOf(err) {
	case api.Full, api.OutOfRange, api.Corrupt, api.Unsupported, api.Invalid:
		return w.Abort()
	}
	return k.Leave()
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

// AdoptChunks implements block.ChunkAdopter.
func (s readableSink) AdoptChunks(ctx context.Context, digestOf func(chunk int64) (digest [32]byte, known bool),
	adopted func(chunk int64)) error {
	if a, ok := s.layer.(block.ChunkAdopter); ok {
		return a.AdoptChunks(ctx, digestOf, adopted)
	}
	return nil
}
