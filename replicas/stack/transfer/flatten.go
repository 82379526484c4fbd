package transfer

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
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// Flatten makes one layer of disk d that holds the content of several layers, bottom first, together, and needs none of
// them afterwards. Flatten reads each layer on the first disk that has the layer, and verifies layers with digests: a
// chunk that is the same in the copy keeps its digest after a comparison of its checksums; a chunk with a new digest is
// compared with the old digests first. So no damage gets a digest that matches.
func Flatten(ctx context.Context, d *layer.Store, from []*layer.Store, layers []string, uid string, o Options) (
	err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("copy to layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	if _, err := d.Record(uid); !api.Is(err, api.NotFound) {
		return err // finished already
	}
	f := &flat{}
	defer f.close()
	size := blockSize
	for _, l := range layers {
		one, err := layer.OpenFirst(from, l, unix.O_DIRECT)
		if err != nil {
			return err
		}
		f.parts = append(f.parts, &flatPart{Layer: one})
		size = max(size, one.Rec.Size)
		if one.Rec.Root == "" {
			continue
		}
		if err := f.parts[len(f.parts)-1].openDigests(); err != nil {
			return err
		}
	}
	if err := f.resolveBlocks(ctx, size); err != nil {
		return err
	}
	note, err := json.Marshal(map[string]any{"layers": layers})
	if err != nil {
		return err
	}
	return makeLayer(ctx, d, uid, origin{size, &f.kinds, note, "", f.readChunk}, o)
}

// flat reads several layers as one.
type flat struct {
	parts []*flatPart
	from  format.Index // the layer of each block
	kinds format.Index // values are block.Kind
}

// flatPart is one of the layers.
type flatPart struct {
	*layer.Layer
	sums  file.Handle   // nil: no digests yet
	kinds *format.Index // the map that matches the digests; nil: no match
}

// openDigests opens the digests, and compares digests and map with the root digest.
func (p *flatPart) openDigests() (err error) {
	on := p.Store
	if p.sums, err = on.FS.Open(on.Join(layer.Dir, p.Rec.UID, layer.SumsFile), os.O_RDONLY, 0); err != nil {
		return err
	}
	kinds, err := format.IndexOf(p.Map)
	if err != nil {
		return err
	}
	if root, err := format.RootDigest(p.sums, p.Rec.Size, kinds); err == nil && root == p.Rec.Root {
		p.kinds = kinds
	}
	return nil
}

func (f *flat) close() {
	for _, p := range f.parts {
		_ = p.Close()
		if p.sums != nil {
			_ = p.sums.Close()
		}
	}
}

func (f *flat) resolveBlocks(ctx context.Context, size int64) error {
	f.from, f.kinds = format.NewIndex(size>>blockBits, fromNowhere), format.NewIndex(size>>blockBits, uint16(block.Hole))
	none := format.NewIndex(size>>blockBits, 0)
	layers := make([]*layer.Layer, len(f.parts))
	for i, p := range f.parts {
		layers[i] = p.Layer
	}
	for p := range f.from.Uniform {
		if err := ctx.Err(); err != nil {
			return err
		}
		vals := make([]uint16, f.from.PageLen(p))
		if err := layer.Resolve(vals, p, layers, &none, -1); err != nil {
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

func (f *flat) readChunk(c int64, buf, scratch []byte) (sums format.ChunkSums, err error) {
	first := c * chunkBlks
	end := first + int64(len(buf))>>blockBits
	var of []*flatPart // layers with blocks in the chunk
	for b := first; b < end; {
		v, n := f.from.Run(b, end)
		part := buf[(b-first)<<blockBits:][:n<<blockBits]
		if v < fromLayer {
			clear(part)
		} else {
			p := f.parts[v-fromLayer]
			if m, err := p.Data.ReadAt(part, b<<blockBits); m < len(part) {
				return sums, fmt.Errorf("layer %s: read %d bytes at %d: %w", p.Rec.UID, len(part), b<<blockBits, err)
			}
			if !slices.Contains(of, p) {
				of = append(of, p)
			}
		}
		b += n
	}
	sums.CRCs = format.ChunkCRCs(buf)
	if len(of) == 1 && f.isUnchanged(c, of[0]) && of[0].matchesChecksums(c, sums.CRCs) {
		sums.Digest, err = of[0].digestOf(c)
		return sums, err
	}
	sums.Digest = sha256.Sum256(buf)
	for _, p := range of {
		if p.sums == nil {
			continue
		}
		if err := p.verifyChunk(c, sums.Digest, len(of) == 1, scratch); err != nil {
			return sums, fmt.Errorf("layer %s: %w", p.Rec.UID, err)
		}
	}
	return sums, nil
}

// isUnchanged reports whether chunk c, which has blocks of layer p alone, is equal to the chunk of p and has the same
// digest.
func (f *flat) isUnchanged(c int64, p *flatPart) bool {
	return p.kinds != nil && p.kinds.Chunk(c) == f.kinds.Chunk(c)
}

// matchesChecksums reports whether the checksums of a chunk match the layer's. Otherwise the digest decides.
func (p *flatPart) matchesChecksums(c int64, crcs []byte) bool {
	off, n := c*chunkSize, int64(len(crcs)/crcSize)<<blockBits
	if layer.Hits(p.Damage, off, n) {
		return false
	}
	want, err := p.CRCsAt(off, n)
	if err != nil || len(want) < len(crcs) { // no checksums, or a smaller layer
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

func (p *flatPart) digestOf(c int64) (sum [sumSize]byte, err error) {
	_, err = p.sums.ReadAt(sum[:], sumsHeader+c*sumSize)
	return sum, err
}

// verifyChunk compares the layer's chunk with its digest. sum is the digest of the result's chunk; if the layer
// supplies the whole chunk alone, sum is enough, otherwise verifyChunk reads the layer's chunk.
func (p *flatPart) verifyChunk(c int64, sum [sumSize]byte, alone bool, scratch []byte) error {
	if c*chunkSize >= p.Rec.Size {
		return nil
	}
	scratch = scratch[:min(int64(len(scratch)), p.Rec.Size-c*chunkSize)]
	want, err := p.digestOf(c)
	if err != nil {
		return err
	}
	if alone && sum == want {
		return nil
	}
	n, err := p.Data.ReadAt(scratch, c*chunkSize)
	if n < len(scratch) {
		return fmt.Errorf("read at %d: %w", c*chunkSize, err)
	}
	if sha256.Sum256(scratch) != want {
		return api.Errorf(api.Corrupt, "the 2 MiB at %d do not match their digest", c*chunkSize)
	}
	return nil
}
