package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Scrub compares a layer with its digests, at rate bytes per second (0: no bound), records the damage, and returns the
// damage. A frozen layer has no digests yet: an error of kind unavailable.
func (d *Store) Scrub(ctx context.Context, uid string, rate int64) (list []Damage, err error) {
	l, err := d.OpenLayer(uid, d.Direct)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err = errors.Join(err, l.Close()); err != nil {
			err = fmt.Errorf("scrub layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if _, frozen := l.Map.(*FrozenMap); frozen {
		return nil, api.Errorf(api.Unavailable, "the layer has no digests yet")
	}
	if list, err = d.CompareDigests(ctx, l, rate, nil); err != nil {
		return nil, err
	}
	return d.RecordDamage(l, list)
}

// CompareDigests returns the chunks of a layer that do not match their digests. With a damaged map or damaged digests
// the whole layer counts as damaged. only, if set, selects the chunks to compare.
func (d *Store) CompareDigests(ctx context.Context, l *Layer, rate int64, only func(c int64) bool) (list []Damage,
	err error) {
	all := []Damage{{0, l.Rec.Size}}
	kinds, err := format.IndexOf(l.Map)
	if api.Is(err, api.Corrupt) {
		return all, nil
	} else if err != nil {
		return nil, err
	}
	sums, err := d.FS.Open(d.Join(Dir, l.Rec.UID, SumsFile), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return all, nil
	} else if err != nil {
		return nil, err
	}
	defer sums.Close()
	var head [sumsHeader]byte
	if _, err := sums.ReadAt(head[:], 0); err != nil || string(head[:]) != string(format.SumsHeaderOf(l.Rec.Size)) {
		return all, nil
	}
	if root, err := format.RootDigest(sums, l.Rec.Size, kinds); err != nil || root != l.Rec.Root {
		return all, nil
	}
	buf := block.AlignedBuffer(int(chunkSize))
	began, done := time.Now(), int64(0)
	for c := range kinds.Chunks() {
		if only != nil && !only(c) {
			continue
		}
		k := kinds.Chunk(c)
		var want [sumSize]byte
		if _, err := sums.ReadAt(want[:], sumsHeader+c*sumSize); err != nil {
			return nil, err
		}
		sum, err := format.ChunkSum(l.Data, k, c, l.Rec.Size, buf)
		if err != nil || sum != want { // an unreadable chunk is damaged, too
			g := Damage{c * chunkSize, min(chunkSize, l.Rec.Size-c*chunkSize)}
			if n := len(list); n > 0 && list[n-1].Off+list[n-1].Len == g.Off {
				list[n-1].Len += g.Len
			} else {
				list = append(list, g)
			}
		} else if k.Data {
			d.repairCRCs(l, c, buf[:min(chunkSize, l.Rec.Size-c*chunkSize)])
		}
		if k.Data {
			done += chunkSize
		}
		if err := Throttle(ctx, began, done, rate); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// repairCRCs is rightCRCs with a warning in place of an error.
func (d *Store) repairCRCs(l *Layer, c int64, buf []byte) {
	if err := d.rightCRCs(l, c, buf); err != nil {
		slog.Warn("checksums of a layer cannot be compared", "disk", d.Root, "layer", l.Rec.UID, "error", err)
	}
}
