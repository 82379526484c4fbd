package layer

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// ErrDamaged answers a read of content that does not match its digest.
var ErrDamaged = api.Errorf(api.Corrupt, "the content on the disk is damaged: %w", unix.EIO)

// ChunkOf names a damaged chunk that no member of the volume of a replica can repair; another volume with the layer
// may. An empty replica: no volume can.
type ChunkOf struct {
	Replica, Layer string
	Off            int64 // allOf: the layer as a whole
}

const allOf = -1

// Repair repairs the chunk of a layer that begins at off. right is the content of another replica at that place; Repair
// writes only blocks that lead to the chunk's digest. An error of kind corrupt: right does not have the content, or the
// layer's digests are damaged.
func (d *Store) Repair(uid string, off int64, right []byte) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("repair layer %s at %d on disk %s: %w", uid, off, d.Root, diskfs.Classify(err))
		}
	}()
	l, err := d.OpenLayer(uid, d.Direct) // an open layer is not merged
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if _, frozen := l.Map.(*FrozenMap); frozen {
		return api.Errorf(api.Unavailable, "the layer has no digests yet")
	}
	n := min(chunkSize, l.Rec.Size-off)
	if off < 0 || off&(chunkSize-1) != 0 || n <= 0 || int64(len(right)) != n {
		return api.Errorf(api.Invalid, "%d bytes at %d are no chunk", len(right), off)
	}
	kinds, err := format.IndexOf(l.Map)
	if err != nil {
		return err
	}
	want, err := d.sumOf(l, off/chunkSize, kinds)
	if err != nil {
		if api.Is(err, api.Corrupt) {
			d.MarkHopeless(ChunkOf{"", uid, allOf})
		}
		return err
	}
	c := chunkRepair{l: l, off: off, have: block.AlignedBuffer(int(n)), bad: make([]bool, n>>blockBits)}
	c.readChunk()
	if !slices.Contains(c.bad, true) && sha256.Sum256(c.have) == want {
		return d.chunkRepaired(l, off, c.have) // the chunk is sound again
	}
	k := kinds.Chunk(off / chunkSize)
	if !k.Data {
		return d.chunkRepaired(l, off, nil) // no reader needs the file there
	}
	now := c.composeContent(kinds, right, false)
	if sha256.Sum256(now) != want {
		if now = c.composeContent(kinds, right, true); sha256.Sum256(now) != want {
			return api.Errorf(api.Corrupt, "the other replica does not have the chunk's content")
		}
	}
	if err := d.rewriteBlocks(&c, kinds, now); err != nil {
		return err
	}
	return d.chunkRepaired(l, off, now)
}

// sumOf returns the digest of a chunk after a comparison of all digests with the root digest.
func (d *Store) sumOf(l *Layer, c int64, kinds *format.Index) (want [sumSize]byte, err error) {
	sums, err := d.FS.Open(d.Join(Dir, l.Rec.UID, SumsFile), os.O_RDONLY, 0)
	if err != nil {
		return want, api.Errorf(api.Corrupt, "the digests are missing: %w", err)
	}
	defer sums.Close()
	if root, err := format.RootDigest(sums, l.Rec.Size, kinds); err != nil || root != l.Rec.Root {
		return want, api.Errorf(api.Corrupt, "the digests are damaged: %v", err)
	}
	_, err = sums.ReadAt(want[:], sumsHeader+c*sumSize)
	return want, err
}

// chunkRepair is the present content of a chunk.
type chunkRepair struct {
	l    *Layer
	off  int64
	have []byte
	bad  []bool // by block: a read fails
}

// readChunk reads the chunk, block by block if a read of the whole chunk fails.
func (c *chunkRepair) readChunk() {
	if n, _ := c.l.Data.ReadAt(c.have, c.off); n == len(c.have) {
		return
	}
	for b := range c.bad {
		blk := c.have[int64(b)<<blockBits:][:blockSize]
		if n, _ := c.l.Data.ReadAt(blk, c.off+int64(b)<<blockBits); n < len(blk) {
			clear(blk)
			c.bad[b] = true
		}
	}
}

// composeContent returns content that the chunk may have had: blocks of data from the other replica, zeros elsewhere.
// With keep, blocks that match their checksum stay, because later writes may hide such a block in the other replica.
func (c *chunkRepair) composeContent(kinds *format.Index, right []byte, keep bool) []byte {
	now := block.AlignedBuffer(len(c.have))
	copy(now, right)
	crcs := make([]byte, format.ChunkCRCsSize)
	if keep {
		if c.l.CRCs == nil {
			return now
		}
		page := block.AlignedBuffer(int(format.CRCPageSize)) // the file may be open for direct I/O
		if n, _ := c.l.CRCs.ReadAt(page, c.off>>blockBits>>format.CRCPageBits*format.CRCPageSize); n < len(page) {
			return now
		}
		copy(crcs, page[c.off>>blockBits&(format.CRCPageBlocks-1)*crcSize:])
	}
	for b := range c.bad {
		at := int64(b) << blockBits
		v, _ := kinds.Run((c.off+at)>>blockBits, (c.off+at)>>blockBits+1)
		mine := c.have[at:][:blockSize]
		switch {
		case block.Kind(v) != block.Data:
			clear(now[at:][:blockSize])
		case keep && !c.bad[b] && string(format.AppendCRCs(nil, mine)) == string(crcs[b*crcSize:][:crcSize]):
			copy(now[at:], mine)
		}
	}
	return now
}

// rewriteBlocks writes the blocks that differ.
func (d *Store) rewriteBlocks(c *chunkRepair, kinds *format.Index, now []byte) (err error) {
	h, err := d.FS.Open(d.Join(Dir, c.l.Rec.UID, DataFile), os.O_RDWR|d.Direct, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	if st, err := h.Stat(); err != nil {
		return err
	} else if st.Size() < c.l.Rec.Size {
		if err := h.Truncate(c.l.Rec.Size); err != nil {
			return err
		}
	}
	for b := range c.bad {
		at := int64(b) << blockBits
		blk := now[at:][:blockSize]
		if !c.bad[b] && string(blk) == string(c.have[at:][:blockSize]) {
			continue
		}
		v, _ := kinds.Run((c.off+at)>>blockBits, (c.off+at)>>blockBits+1)
		if block.Kind(v) == block.Data {
			_, err = h.WriteAt(blk, c.off+at)
		} else {
			err = h.Punch(c.off+at, blockSize)
		}
		if err != nil {
			return err
		}
	}
	return h.Datasync()
}

// chunkRepaired removes a chunk from the record of damage, and notifies the observer.
func (d *Store) chunkRepaired(l *Layer, off int64, now []byte) error {
	if now != nil {
		if err := d.rightCRCs(l, off/chunkSize, now); err != nil {
			return err
		}
	}
	uid := l.Rec.UID
	d.hopelessMu.Lock()
	maps.DeleteFunc(d.hopeless, func(c ChunkOf, _ bool) bool { return c.Layer == uid && c.Off == off })
	d.hopelessMu.Unlock()
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	was := d.KnownDamage(uid, l.Rec.Size)
	left := ReplaceDamage(was, off, min(chunkSize, l.Rec.Size-off), nil)
	if !slices.Equal(was, left) {
		err = d.PutDamage(uid, l.Rec.Size, left)
	}
	unlock()
	if err != nil {
		return err
	}
	d.Observer.Damaged(uid, left)
	return nil
}

// MarkHopeless records in memory that a damaged chunk cannot be repaired, and notifies the observer.
func (d *Store) MarkHopeless(c ChunkOf) {
	d.hopelessMu.Lock()
	if d.hopeless == nil {
		d.hopeless = map[ChunkOf]bool{}
	}
	d.hopeless[c] = true
	d.hopelessMu.Unlock()
	d.Observer.Hopeless(c.Layer)
}

// IsHopeless reports whether MarkHopeless was called for the chunk, for the whole layer, or for all replicas.
func (d *Store) IsHopeless(replica, layer string, off int64) bool {
	d.hopelessMu.Lock()
	defer d.hopelessMu.Unlock()
	return d.hopeless[ChunkOf{replica, layer, off}] || d.hopeless[ChunkOf{"", layer, allOf}]
}

// BeyondRepair reports whether no member of the replica's volume can repair some damaged chunk of a layer.
func (d *Store) BeyondRepair(replica, uid string) bool {
	d.hopelessMu.Lock()
	none := len(d.hopeless) == 0
	d.hopelessMu.Unlock()
	if none {
		return false
	}
	for _, g := range d.Damaged(uid) {
		for off := g.Off &^ (chunkSize - 1); off < g.Off+g.Len; off += chunkSize {
			if d.IsHopeless(replica, uid, off) {
				return true
			}
		}
	}
	return false
}
