package stack

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// Flatten makes one layer of this disk that holds what several layers of a disk, bottom first, hold together: neither
// needs the other afterwards. Layers that have digests are verified as they are read.
func (d *Disk) Flatten(ctx context.Context, from *Disk, layers []string, uid string, o BringOptions) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("copy to layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	if _, err := d.layerRecord(uid); !api.Is(err, api.NotFound) {
		return err // it is whole
	}
	f := &flat{}
	defer f.close()
	size := blockSize
	for _, l := range layers {
		one, err := from.findLayer(l, from.direct, false)
		if err != nil {
			return err
		}
		f.layers = append(f.layers, one)
		if one.hy != nil {
			return api.Errorf(api.Unavailable, "layer %s is still on its way from another machine", l)
		}
		size = max(size, one.rec.Size)
		var sums file.Handle
		if one.rec.Root != "" {
			on := from
			if one.lender != nil {
				on = one.lender
			}
			if sums, err = on.fs.Open(on.path(layersDir, l, sumsFile), os.O_RDONLY, 0); err != nil {
				return err
			}
		}
		f.sums = append(f.sums, sums)
	}
	if err := f.resolve(ctx, size); err != nil {
		return err
	}
	note, err := json.Marshal(map[string]any{"layers": layers})
	if err != nil {
		return err
	}
	return d.take(ctx, uid, origin{size, &f.kinds, note, "", f.read}, o)
}

// flat is several layers as one.
type flat struct {
	layers []*layer
	sums   []file.Handle // nil: that layer has none yet
	from   index         // which layer a block is of
	kinds  index         // values are block.Kind
}

func (f *flat) close() {
	for _, l := range f.layers {
		_ = l.close()
	}
	for _, s := range f.sums {
		if s != nil {
			_ = s.Close()
		}
	}
}

func (f *flat) resolve(ctx context.Context, size int64) error {
	f.from, f.kinds = newIndex(size>>blockBits, fromNowhere), newIndex(size>>blockBits, uint16(block.Hole))
	none := newIndex(size>>blockBits, 0)
	for p := range f.from.uniform {
		if err := ctx.Err(); err != nil {
			return err
		}
		vals := make([]uint16, f.from.pageLen(p))
		if err := resolve(vals, p, f.layers, &none, -1); err != nil {
			return err
		}
		f.from.load(p, vals)
		for i, v := range vals {
			switch {
			case v >= fromLayer:
				vals[i] = uint16(block.Data)
			case v == fromZero:
				vals[i] = uint16(block.Zero)
			default:
				vals[i] = uint16(block.Hole)
			}
		}
		f.kinds.load(p, vals)
	}
	return nil
}

func (f *flat) read(c int64, buf, scratch []byte) (sum [sumSize]byte, err error) {
	clear(buf)
	first := c * chunkBlks
	end := first + int64(len(buf))>>blockBits
	var of []int // the layers that give something
	for b := first; b < end; {
		v, n := f.from.run(b, end)
		if v >= fromLayer {
			k := int(v - fromLayer)
			part := buf[(b-first)<<blockBits:][:n<<blockBits]
			if m, err := f.layers[k].data.ReadAt(part, b<<blockBits); m < len(part) {
				return sum, fmt.Errorf("layer %s: read %d bytes at %d: %w", f.layers[k].rec.UID, len(part), b<<blockBits, err)
			}
			if !slices.Contains(of, k) {
				of = append(of, k)
			}
		}
		b += n
	}
	sum = sha256.Sum256(buf)
	for _, k := range of {
		if f.sums[k] == nil {
			continue
		}
		if err := f.verify(k, c, sum, len(of) == 1, scratch); err != nil {
			return sum, fmt.Errorf("layer %s: %w", f.layers[k].rec.UID, err)
		}
	}
	return sum, nil
}

// verify compares what layer k has of a chunk with its digest. If it alone gives the chunk, and nothing of it is
// hidden, that is the chunk's; else all that it has there is read.
func (f *flat) verify(k int, c int64, sum [sumSize]byte, alone bool, scratch []byte) error {
	l := f.layers[k]
	if c*chunkSize >= l.rec.Size {
		return nil
	}
	scratch = scratch[:min(int64(len(scratch)), l.rec.Size-c*chunkSize)]
	var want [sumSize]byte
	if _, err := f.sums[k].ReadAt(want[:], sumsHeader+c*sumSize); err != nil {
		return err
	}
	if alone && sum == want {
		return nil
	}
	n, err := l.data.ReadAt(scratch, c*chunkSize)
	if n < len(scratch) {
		return fmt.Errorf("read at %d: %w", c*chunkSize, err)
	}
	if sha256.Sum256(scratch) != want {
		return api.Errorf(api.Corrupt, "the 2 MiB at %d do not match their digest", c*chunkSize)
	}
	return nil
}
