package stack

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"log/slog"
	"slices"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// While layers are merged, the target's file holds blocks of both, up to where the merge is, and neither its digests
// nor its checksums alone say what is right there. A block is right if it matches the checksum that either layer has of
// it. In the end each block that the merge had to do with is compared with the checksum that came with it from its
// layer, before it gets a digest: what does not match is damaged in the new layer, too, and told.

// given reports whether the next block of a part matches the checksum of the layer that may have given it; not known:
// the part waits for that. A layer that has no checksums says nothing.
func (r *Replica) given(p *part, gave *layer.Layer, blk []byte) (known, whole bool) {
	b := (p.at + int64(p.good)) >> BlockBits
	if gave.CRCs == nil || b >= gave.Rec.Size>>BlockBits {
		return true, gave.CRCs == nil
	}
	page := r.crcsOfBlock(gave, b)
	if !page.ready {
		p.next, page.waits = page.waits, p
		return false, false
	}
	page.used = true
	return true, format.BlockCRC(blk) == binary.LittleEndian.Uint32(page.crc[b&(format.CRCPageBlocks-1)*CRCSize:])
}

// noSum is the digest of a chunk that was damaged before it could get one: no content has it.
var noSum = [SumSize]byte(bytes.Repeat([]byte{0xff}, SumSize))

// whole reports whether every block of a chunk of the target matches the checksum of the layer that it came from.
func (w *merger) whole(c int64, chunk []byte) (bool, error) {
	first := c * ChunkBlks
	lower, upper, err := w.kinds(int(first >> PageBits))
	if err != nil {
		return false, err
	}
	n := int64(len(chunk))
	below, lerr := w.lower.CRCsAt(first<<BlockBits, n)
	above, uerr := w.upper.CRCsAt(first<<BlockBits, n)
	if w.seen.Crcs { // they have moved with the data
		_, to := w.ends()
		below, lerr = to.CRCsAt(first<<BlockBits, n)
		above, uerr = below, nil
	}
	if err := errors.Join(lerr, uerr); err != nil {
		return false, err
	}
	for i := range n >> BlockBits {
		crcs := above
		switch at := (first + i) & (PageBlocks - 1); {
		case upper[at] == block.Data:
		case upper[at] == block.Hole && lower[at] == block.Data:
			crcs = below
		default:
			continue
		}
		if !layer.HasCRC(crcs, i<<BlockBits, chunk[i<<BlockBits:][:BlockSize]) {
			return false, nil
		}
	}
	return true, nil
}

// damaged notes that a chunk of the result is.
func (w *merger) damaged(c, n int64) {
	slog.Error("what two layers were merged to is damaged", "disk", w.r.disk.Root, "layer", w.seen.Result,
		"offset", c*ChunkSize, "length", n)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.damage = append(w.damage, Damage{Off: c * ChunkSize, Len: n})
	slices.SortFunc(w.damage, func(a, b Damage) int { return cmp.Compare(a.Off, b.Off) })
}
