package stack

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
)

// While layers are merged, the target's file holds blocks of both, up to where the merge is, and neither its digests
// nor its checksums alone say what is right there. A block is right if it matches the checksum that either layer has of
// it. In the end each block that the merge had to do with is compared with the checksum that came with it from its
// layer, before it gets a digest: what does not match is damaged in the new layer, too, and told.

// movedTo is up to where the file of layer k holds blocks of another layer as well, and that layer. The two are
// neighbours.
func (g *Merge) movedTo(layers []*layer, k int) (moved int64, gave *layer) {
	if g == nil {
		return 0, nil
	}
	switch uid := layers[k].rec.UID; {
	case uid == g.Lower && k+1 < len(layers):
		return g.Done, layers[k+1]
	case uid == g.Upper && k > 0:
		return g.Done, layers[k-1]
	}
	return 0, nil
}

// given reports whether the next block of a part matches the checksum of the layer that may have given it; not known:
// the part waits for that. A layer that has no checksums says nothing.
func (r *Replica) given(p *part, gave *layer, blk []byte) (known, whole bool) {
	b := (p.at + int64(p.good)) >> blockBits
	if gave.crcs == nil || b >= gave.rec.Size>>blockBits {
		return true, gave.crcs == nil
	}
	page := r.crcsOfBlock(gave, b)
	if !page.ready {
		p.next, page.waits = page.waits, p
		return false, false
	}
	page.used = true
	return true, format.BlockCRC(blk) == binary.LittleEndian.Uint32(page.crc[b&(format.CRCPageBlocks-1)*crcSize:])
}

// judgeMoved reads a range anew of which the merge is through, and reports whether all its blocks are right.
func (l *layer) judgeMoved(buf []byte, at int64, gave *layer) bool {
	if len(buf) == 0 {
		return true
	}
	n, err := l.data.ReadAt(buf, at)
	if n == len(buf) {
		var own, other []byte
		if own, err = l.crcsAt(at, int64(n)); err == nil {
			other, err = gave.crcsAt(at, int64(n))
		}
		bad := int64(-1)
		for off := int64(0); err == nil && off < int64(n); off += blockSize {
			if blk := buf[off:][:blockSize]; !crcIs(own, off, blk) && !crcIs(other, off, blk) && !l.digestIs(at+off) {
				bad = at + off
				break
			}
		}
		if err == nil && bad < 0 {
			return true
		}
		at = max(bad, at)
	}
	slog.Error("a layer that is being merged is damaged", "layer", l.rec.UID, "disk", l.disk.root, "offset", at,
		"length", blockSize, "error", err)
	return false
}

// readMoved reads what is not damaged of a range of which the merge is through.
func (l *layer) readMoved(p []byte, off int64, gave *layer) error {
	from := off &^ (blockSize - 1)
	buf := alignedBuffer(int((off+int64(len(p))+blockSize-1)&^(blockSize-1) - from))
	if !l.judgeMoved(buf, from, gave) {
		return api.Errorf(api.Corrupt, "layer %s: of the %d bytes at %d some are damaged", l.rec.UID, len(p), off)
	}
	copy(p, buf[off-from:])
	return nil
}

// crcsAt are the checksums of blocks; nil: the layer has none.
func (l *layer) crcsAt(off, length int64) ([]byte, error) {
	if l.crcs == nil {
		return nil, nil
	}
	first, end := off>>blockBits, min(off+length, l.rec.Size)>>blockBits
	if end <= first {
		return []byte{}, nil
	}
	from := first >> format.CRCPageBits
	n := ((end-1)>>format.CRCPageBits - from + 1) * format.CRCPageSize
	pages := alignedBuffer(int(n)) // the file may be open for direct I/O
	if k, err := l.crcs.ReadAt(pages, from*format.CRCPageSize); k < len(pages) {
		return nil, errors.Join(err, os.ErrInvalid)
	}
	return pages[(first-from<<format.CRCPageBits)*crcSize : (end-from<<format.CRCPageBits)*crcSize], nil
}

// crcIs reports whether the block at off matches; no checksums say nothing against it.
func crcIs(crcs []byte, off int64, blk []byte) bool {
	i := off >> blockBits * crcSize
	if crcs == nil {
		return true
	}
	return i < int64(len(crcs)) && format.BlockCRC(blk) == binary.LittleEndian.Uint32(crcs[i:])
}

// digestIs reports whether the chunk of a block is still what the layer's digest says: then a checksum is wrong.
func (l *layer) digestIs(at int64) bool {
	sums, err := l.disk.fs.Open(l.disk.path(layersDir, l.rec.UID, sumsFile), os.O_RDONLY, 0)
	if err != nil {
		return false
	}
	defer sums.Close()
	c := at / chunkSize
	chunk := alignedBuffer(int(min(chunkSize, l.rec.Size-c*chunkSize)))
	var want [sumSize]byte
	_, err = sums.ReadAt(want[:], sumsHeader+c*sumSize)
	n, rerr := l.data.ReadAt(chunk, c*chunkSize)
	return err == nil && n == len(chunk) && ignore(rerr) == nil && sha256.Sum256(chunk) == want
}

// noSum is the digest of a chunk that was damaged before it could get one: no content has it.
var noSum = [sumSize]byte(bytes.Repeat([]byte{0xff}, sumSize))

// whole reports whether every block of a chunk of the target matches the checksum of the layer that it came from.
func (w *merger) whole(c int64, chunk []byte) (bool, error) {
	first := c * chunkBlks
	lower, upper, err := w.kinds(int(first >> pageBits))
	if err != nil {
		return false, err
	}
	n := int64(len(chunk))
	below, lerr := w.lower.crcsAt(first<<blockBits, n)
	above, uerr := w.upper.crcsAt(first<<blockBits, n)
	if w.seen.Crcs { // they have moved with the data
		_, to := w.ends()
		below, lerr = to.crcsAt(first<<blockBits, n)
		above, uerr = below, nil
	}
	if err := errors.Join(lerr, uerr); err != nil {
		return false, err
	}
	for i := range n >> blockBits {
		crcs := above
		switch at := (first + i) & (pageBlocks - 1); {
		case upper[at] == block.Data:
		case upper[at] == block.Hole && lower[at] == block.Data:
			crcs = below
		default:
			continue
		}
		if !crcIs(crcs, i<<blockBits, chunk[i<<blockBits:][:blockSize]) {
			return false, nil
		}
	}
	return true, nil
}

// damaged notes that a chunk of the result is.
func (w *merger) damaged(c, n int64) {
	slog.Error("what two layers were merged to is damaged", "disk", w.r.disk.root, "layer", w.seen.Result,
		"offset", c*chunkSize, "length", n)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.damage = append(w.damage, Damage{c * chunkSize, n})
	slices.SortFunc(w.damage, func(a, b Damage) int { return cmp.Compare(a.Off, b.Off) })
}
