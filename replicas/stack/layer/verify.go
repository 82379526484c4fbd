package layer

import (
	"context"
	"errors"
	"fmt"
	"os"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Verify implements block.Layers: the content against the sums, the sums and the map against the root digest.
func (d *Store) Verify(ctx context.Context, uid string) (err error) {
	l, err := d.OpenLayer(uid, d.Direct)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, l.Close()); err != nil {
			err = fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if _, frozen := l.Map.(*FrozenMap); frozen {
		return api.Errorf(api.Unavailable, "the layer has no digests yet")
	}
	kinds, err := format.IndexOf(l.Map)
	if err != nil {
		return err
	}
	sums, err := d.FS.Open(d.Join(Dir, uid, SumsFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer sums.Close()
	var b [sumsHeader]byte
	if _, err := sums.ReadAt(b[:], 0); err != nil || string(b[:]) != string(format.SumsHeaderOf(l.Rec.Size)) {
		return api.Errorf(api.Corrupt, "header of the sums is damaged")
	}
	root, err := format.RootDigest(sums, l.Rec.Size, kinds)
	if err != nil {
		return api.Errorf(api.Corrupt, "sums: %w", err)
	}
	if root != l.Rec.Root {
		return api.Errorf(api.Corrupt, "the digests and the map do not match the root digest")
	}
	return EachChunk(ctx, kinds, func(c int64, buf []byte) error {
		var want [sumSize]byte
		if _, err := sums.ReadAt(want[:], sumsHeader+c*sumSize); err != nil {
			return err
		}
		sum, err := format.ChunkSum(l.Data, kinds.Chunk(c), c, l.Rec.Size, buf)
		if err != nil {
			return err
		}
		if sum != want {
			return api.Errorf(api.Corrupt, "the 2 MiB at %d do not match their digest", c*chunkSize)
		}
		return nil
	})
}

// LayerNames implements block.DigestLayers.
func (d *Store) LayerNames() (names []string, err error) {
	entries, err := d.FS.ReadDir(d.Join(Dir))
	if err != nil {
		return nil, fmt.Errorf("layers on disk %s: %w", d.Root, diskfs.Classify(err))
	}
	for _, e := range entries {
		if api.UID(e.Name()).Validate() == nil {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Sums reads the file of digests of a finished layer.
func (d *Store) Sums(uid string) ([]byte, error) {
	return d.readSums(uid, func(chunks int64) (off, n int64) { return 0, sumsHeader + chunks*sumSize })
}

// ChunkDigests implements block.LayerReader.
func (d *Store) ChunkDigests(uid string, first, n int64) ([]byte, error) {
	return d.readSums(uid, func(chunks int64) (int64, int64) {
		return sumsHeader + first*sumSize, min(max(chunks-first, 0), n) * sumSize
	})
}

// readSums reads a part of the file of digests of a finished layer. part says which, for a number of chunks.
func (d *Store) readSums(uid string, part func(chunks int64) (off, n int64)) ([]byte, error) {
	rec, err := d.Record(uid)
	if err == nil {
		var h file.Handle
		if h, err = d.FS.Open(d.Join(Dir, uid, SumsFile), os.O_RDONLY, 0); err == nil {
			off, n := part((rec.Size + chunkSize - 1) / chunkSize)
			b := make([]byte, n)
			_, err = h.ReadAt(b, off)
			if err = errors.Join(err, h.Close()); err == nil {
				return b, nil
			}
		}
	}
	return nil, fmt.Errorf("digests of layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
}
