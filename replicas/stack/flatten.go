package stack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// Flatten makes one layer of this disk that holds what several layers, bottom first, hold together: neither needs the
// other afterwards. Each layer is read on the first of some disks that has it. Layers that have digests are verified as
// they are read: a chunk that is the same in the copy keeps its digest, and its blocks are compared with their
// checksums; what gets a new digest is compared with the old ones. So no damage gets a digest that matches it.
func (d *Disk) Flatten(ctx context.Context, from []*Disk, layers []string, uid string, o BringOptions) (err error) {
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
		one, err := openFirst(from, l, unix.O_DIRECT)
		if err != nil {
			return err
		}
		f.parts = append(f.parts, &flatPart{layer: one})
		size = max(size, one.rec.Size)
		if one.rec.Root == "" {
			continue
		}
		if err := f.parts[len(f.parts)-1].open(); err != nil {
			return err
		}
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
	parts []*flatPart
	from  format.Index // which of them a block is of
	kinds format.Index // values are block.Kind
}

// flatPart is one of them.
type flatPart struct {
	*layer
	sums  file.Handle   // nil: it has none yet
	kinds *format.Index // that the digests are of; nil: map and digests do not match
}

// open opens what tells whether the layer is whole.
func (p *flatPart) open() (err error) {
	on := p.disk
	if p.sums, err = on.fs.Open(on.path(layersDir, p.rec.UID, sumsFile), os.O_RDONLY, 0); err != nil {
		return err
	}
	kinds, err := format.IndexOf(p.m)
	if err != nil {
		return err
	}
	if root, err := format.RootDigest(p.sums, p.rec.Size, kinds); err == nil && root == p.rec.Root {
		p.kinds = kinds
	}
	return nil
}

func (f *flat) close() {
	for _, p := range f.parts {
		_ = p.close()
		if p.sums != nil {
			_ = p.sums.Close()
		}
	}
}

func (f *flat) resolve(ctx context.Context, size int64) error {
	f.from, f.kinds = format.NewIndex(size>>blockBits, fromNowhere), format.NewIndex(size>>blockBits, uint16(block.Hole))
	none := format.NewIndex(size>>blockBits, 0)
	layers := make([]*layer, len(f.parts))
	for i, p := range f.parts {
		layers[i] = p.layer
	}
	for p := range f.from.Uniform {
		if err := ctx.Err(); err != nil {
			return err
		}
		vals := make([]uint16, f.from.PageLen(p))
		if err := resolve(vals, p, layers, &none, -1); err != nil {
			return err
		}
		f.from.Load(p, vals)
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
		f.kinds.Load(p, vals)
	}
	return nil
}

func (f *flat) read(c int64, buf, scratch []byte) (sums format.ChunkSums, err error) {
	first := c * chunkBlks
	end := first + int64(len(buf))>>blockBits
	var of []*flatPart // that give something
	for b := first; b < end; {
		v, n := f.from.Run(b, end)
		part := buf[(b-first)<<blockBits:][:n<<blockBits]
		if v < fromLayer {
			clear(part)
		} else {
			p := f.parts[v-fromLayer]
			if m, err := p.data.ReadAt(part, b<<blockBits); m < len(part) {
				return sums, fmt.Errorf("layer %s: read %d bytes at %d: %w", p.rec.UID, len(part), b<<blockBits, err)
			}
			if !slices.Contains(of, p) {
				of = append(of, p)
			}
		}
		b += n
	}
	sums.CRCs = format.ChunkCRCs(buf)
	if len(of) == 1 && f.same(c, of[0]) && of[0].matches(c, sums.CRCs) {
		sums.Digest, err = of[0].digest(c)
		return sums, err
	}
	sums.Digest = sha256.Sum256(buf)
	for _, p := range of {
		if p.sums == nil {
			continue
		}
		if err := p.verify(c, sums.Digest, len(of) == 1, scratch); err != nil {
			return sums, fmt.Errorf("layer %s: %w", p.rec.UID, err)
		}
	}
	return sums, nil
}

// same reports whether chunk c, to which no other layer gives anything, is the chunk of that one: then its digest is
// that of both.
func (f *flat) same(c int64, p *flatPart) bool {
	return p.kinds != nil && p.kinds.Chunk(c) == f.kinds.Chunk(c)
}

// matches reports whether a chunk whose blocks have these checksums is what it was. Else its digest has to tell.
func (p *flatPart) matches(c int64, crcs []byte) bool {
	off, n := c*chunkSize, int64(len(crcs)/crcSize)<<blockBits
	if hits(p.damage, off, n) {
		return false
	}
	want, err := p.crcsAt(off, n)
	if err != nil || len(want) < len(crcs) { // it has none, or ends before the copy does
		return false
	}
	for b, end := off>>blockBits, (off+n)>>blockBits; b < end; {
		v, m := p.kinds.Run(b, end)
		i, j := (b-off>>blockBits)*crcSize, (b+m-off>>blockBits)*crcSize
		if block.Kind(v) == block.Data && !bytes.Equal(crcs[i:j], want[i:j]) {
			return false
		}
		b += m
	}
	return true
}

func (p *flatPart) digest(c int64) (sum [sumSize]byte, err error) {
	_, err = p.sums.ReadAt(sum[:], sumsHeader+c*sumSize)
	return sum, err
}

// verify compares what the layer has of a chunk with its digest. If it alone gives the chunk, and nothing of it is
// hidden, that is the chunk's; else all that it has there is read.
func (p *flatPart) verify(c int64, sum [sumSize]byte, alone bool, scratch []byte) error {
	if c*chunkSize >= p.rec.Size {
		return nil
	}
	scratch = scratch[:min(int64(len(scratch)), p.rec.Size-c*chunkSize)]
	want, err := p.digest(c)
	if err != nil {
		return err
	}
	if alone && sum == want {
		return nil
	}
	n, err := p.data.ReadAt(scratch, c*chunkSize)
	if n < len(scratch) {
		return fmt.Errorf("read at %d: %w", c*chunkSize, err)
	}
	if sha256.Sum256(scratch) != want {
		return api.Errorf(api.Corrupt, "the 2 MiB at %d do not match their digest", c*chunkSize)
	}
	return nil
}
