package stack

import (
	"cmp"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"slices"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// During a merge the target's file holds blocks of both layers below Done, and neither the digests nor the checksums of
// one layer alone tell the right content. A block is sound if it matches the checksum from either layer. In the end the
// merge compares each changed chunk with the checksums from the layers before the chunk gets a digest: a mismatch is
// recorded as damage of the new layer.

// bothHaveCRCs reports whether two layers have checksums that can move. If the target is shorter than the result, the
// merge computes the checksums in the end.
func (d *Disk) bothHaveCRCs(g *Merge) (bool, error) {
	lower, lerr := d.Record(g.Lower)
	upper, uerr := d.Record(g.Upper)
	to, from := lower, upper
	if g.Up {
		to, from = from, to
	}
	return to.Size >= from.Size && d.HasCRCs(g.Lower, format.CRCsLength(lower.Size)) &&
		d.HasCRCs(g.Upper, format.CRCsLength(upper.Size)), errors.Join(lerr, uerr)
}

// openCRCs opens the moving checksums. Without checksums in the target none move.
func (w *merger) openCRCs() (err error) {
	from, to := w.emptiedAndTarget()
	if !w.seen.Crcs || to.CRCs == nil {
		return nil
	}
	open := func(l *layer.Layer) (file.Handle, error) {
		return w.r.disk.FS.Open(w.r.disk.Join(layer.Dir, l.Rec.UID, layer.CRCsFile), os.O_RDWR, 0)
	}
	if w.crcs, err = open(to); err == nil && from.CRCs != nil {
		w.spent, err = open(from)
	}
	return err
}

// giveCRCs writes the checksums of copied blocks to the target.
func (w *merger) giveCRCs(off, n int64) error {
	if w.crcs == nil {
		return nil
	}
	from, _ := w.emptiedAndTarget()
	crcs, err := from.CRCsAt(off, n)
	if err == nil && crcs == nil { // the layer has lost its checksums
		buf := block.AlignedBuffer(int(n))
		if _, err = w.from.ReadAt(buf, off); err == nil {
			crcs = format.AppendCRCs(nil, buf)
		}
	}
	if err != nil {
		return err
	}
	_, err = w.crcs.WriteAt(crcs, off>>blockBits*crcSize)
	return err
}

// resultCRCs opens the checksums of the result: the target's file under a second name, because the file is as large as
// a thousandth of the data. Writes keep the checksums of all blocks of the target itself; no reader needs others.
func (w *merger) resultCRCs(target *layer.Layer, dir string, whole bool) (h file.Handle, taken bool, err error) {
	fsys, name := w.r.disk.FS, dir+"/"+layer.CRCsFile
	if !whole || target.CRCs == nil {
		h, err = fsys.Open(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		return h, false, err
	}
	if err := fsys.Link(w.r.disk.Join(layer.Dir, target.Rec.UID, layer.CRCsFile), name); err != nil {
		return nil, false, err
	}
	h, err = fsys.Open(name, os.O_RDWR, 0)
	return h, true, err
}

// matchesGiver reports whether the next block of a part matches the checksum of the layer that may have supplied the
// block. Not known: the part waits for the checksums. Without checksums every block matches.
func (r *Replica) matchesGiver(p *part, gave *layer.Layer, blk []byte) (known, whole bool) {
	b := (p.at + int64(p.good)) >> blockBits
	if gave.CRCs == nil || b >= gave.Rec.Size>>blockBits {
		return true, gave.CRCs == nil
	}
	page := r.crcsOfBlock(gave, b)
	if !page.ready {
		p.next, page.waits = page.waits, p
		return false, false
	}
	page.used = true
	return true, format.BlockCRC(blk) == binary.LittleEndian.Uint32(page.crc[b&(format.CRCPageBlocks-1)*crcSize:])
}

// chunkSound reports whether every block of a chunk of the target matches the checksum from its former layer.
func (w *merger) chunkSound(c int64, chunk []byte) (bool, error) {
	first := c * chunkBlks
	lower, upper, err := w.loadKinds(int(first >> pageBits))
	if err != nil {
		return false, err
	}
	n := int64(len(chunk))
	below, lerr := w.lower.CRCsAt(first<<blockBits, n)
	above, uerr := w.upper.CRCsAt(first<<blockBits, n)
	if w.seen.Crcs { // they have moved with the data
		_, to := w.emptiedAndTarget()
		below, lerr = to.CRCsAt(first<<blockBits, n)
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
		if !layer.HasCRC(crcs, i<<blockBits, chunk[i<<blockBits:][:blockSize]) {
			return false, nil
		}
	}
	return true, nil
}

// recordDamage records a damaged chunk of the result.
func (w *merger) recordDamage(c, n int64) {
	slog.Error("the result of a merge is damaged", "disk", w.r.disk.Root, "layer", w.seen.Result,
		"offset", c*chunkSize, "length", n)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.damage = append(w.damage, Damage{Off: c * chunkSize, Len: n})
	slices.SortFunc(w.damage, func(a, b Damage) int { return cmp.Compare(a.Off, b.Off) })
}
