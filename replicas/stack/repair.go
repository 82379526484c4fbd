package stack

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
	"drover.io/drover/replicas/stack/format"
)

// A chunk of a layer that is damaged is put right with what another replica of the volume holds there: not the same
// layer, which that one does not have, but a snapshot in which the layer's blocks are to be seen. The chunk's digest
// says whether what comes of it is what the layer has held from the beginning; else nothing is written.

// ErrDamaged is what a read of a layer ends with where its content is not what its digest says.
var ErrDamaged = api.Errorf(api.Corrupt, "what the disk holds there is damaged: %w", unix.EIO)

// Broken is a damaged chunk of a layer.
type Broken struct {
	Layer string `json:"layer"`
	Off   int64  `json:"off"`
	Len   int64  `json:"len"`
	// Snap is the snapshot in which most of the layer's blocks are to be seen; empty: it is what the replica holds now.
	Snap string `json:"snap,omitempty"`
}

// mostBroken bounds an answer.
const mostBroken = 256

// chunkOf is a damaged chunk of a layer of which one replica's volume shows nowhere what it held: another volume with
// the layer may. No replica: of which nothing tells what it held.
type chunkOf struct {
	replica, layer string
	off            int64 // allOf: of the layer as a whole
}

const allOf = -1

// Broken are damaged chunks of the replica's layers, but those of which is known that nobody has what they held.
func (r *Replica) Broken() []Broken {
	m, d := r.Meta(), r.disk
	var all []Broken
	for _, uid := range m.all() {
		rec, err := d.layerRecord(uid)
		if err != nil {
			continue // it is not finished, or on another disk
		}
		list := d.damaged(uid, rec.Size)
		if len(list) == 0 {
			continue
		}
		snap := m.shows(uid)
		for _, g := range list {
			for off := g.Off &^ (chunkSize - 1); off < g.Off+g.Len && len(all) < mostBroken; off += chunkSize {
				if !d.isHopeless(m.UID, uid, off) {
					all = append(all, Broken{uid, off, min(chunkSize, rec.Size-off), snap})
				}
			}
		}
	}
	return all
}

// shows is the snapshot that has a layer, and the fewest others above it; empty: none has.
func (m Meta) shows(layer string) string {
	best, snap := len(m.Layers)+len(m.Branches)+1, ""
	for _, s := range m.Snapshots {
		chain, err := m.Chain(s.Layer)
		if at := slices.Index(chain, layer); err == nil && at >= 0 && len(chain)-at < best {
			best, snap = len(chain)-at, s.UID
		}
	}
	return snap
}

// Repair puts the chunk of a layer right that begins at off. right is what another replica shows there; of that, as
// much is taken as is needed for what the chunk's digest says. An error of kind corrupt: it is not in there, or the
// layer's own digests are damaged.
func (d *Disk) Repair(uid string, off int64, right []byte) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("repair layer %s at %d on disk %s: %w", uid, off, d.root, classify(err))
		}
	}()
	l, err := d.openLayer(uid, d.direct) // nobody begins to merge it meanwhile
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	if _, frozen := l.m.(*frozenMap); frozen {
		return api.Errorf(api.Unavailable, "it has no digests yet")
	}
	n := min(chunkSize, l.rec.Size-off)
	if off < 0 || off&(chunkSize-1) != 0 || n <= 0 || int64(len(right)) != n {
		return api.Errorf(api.Invalid, "%d bytes at %d are no chunk", len(right), off)
	}
	kinds, err := format.IndexOf(l.m)
	if err != nil {
		return err
	}
	want, err := d.sumOf(l, off/chunkSize, kinds)
	if err != nil {
		if api.Is(err, api.Corrupt) {
			d.hopelessly(chunkOf{"", uid, allOf})
		}
		return err
	}
	c := chunkRepair{l: l, off: off, have: alignedBuffer(int(n)), bad: make([]bool, n>>blockBits)}
	c.read()
	if !slices.Contains(c.bad, true) && sha256.Sum256(c.have) == want {
		return d.repaired(l, off, c.have) // somebody did it
	}
	k := kinds.Chunk(off / chunkSize)
	if !k.Data {
		return d.repaired(l, off, nil) // nobody reads the file there
	}
	now := c.compose(kinds, right, false)
	if sha256.Sum256(now) != want {
		if now = c.compose(kinds, right, true); sha256.Sum256(now) != want {
			return api.Errorf(api.Corrupt, "the other replica does not show what the layer held there")
		}
	}
	if err := d.rewrite(&c, kinds, now); err != nil {
		return err
	}
	return d.repaired(l, off, now)
}

// sumOf is the digest of a chunk, once the root digest has told that it is right.
func (d *Disk) sumOf(l *layer, c int64, kinds *format.Index) (want [sumSize]byte, err error) {
	sums, err := d.fs.Open(d.path(layersDir, l.rec.UID, sumsFile), os.O_RDONLY, 0)
	if err != nil {
		return want, api.Errorf(api.Corrupt, "its digests are gone: %w", err)
	}
	defer sums.Close()
	if root, err := format.RootDigest(sums, l.rec.Size, kinds); err != nil || root != l.rec.Root {
		return want, api.Errorf(api.Corrupt, "its digests are damaged: %v", err)
	}
	_, err = sums.ReadAt(want[:], sumsHeader+c*sumSize)
	return want, err
}

// chunkRepair is a chunk as it is.
type chunkRepair struct {
	l    *layer
	off  int64
	have []byte
	bad  []bool // by block: it cannot be read
}

// read takes what can be read, block by block where the whole cannot.
func (c *chunkRepair) read() {
	if n, _ := c.l.data.ReadAt(c.have, c.off); n == len(c.have) {
		return
	}
	for b := range c.bad {
		blk := c.have[int64(b)<<blockBits:][:blockSize]
		if n, _ := c.l.data.ReadAt(blk, c.off+int64(b)<<blockBits); n < len(blk) {
			clear(blk)
			c.bad[b] = true
		}
	}
}

// compose is what the chunk may have held: its blocks of data as the other replica shows them, zeros elsewhere. Keep:
// blocks that match their checksum are taken as they are; what was written over them later hides them over there.
func (c *chunkRepair) compose(kinds *format.Index, right []byte, keep bool) []byte {
	now := alignedBuffer(len(c.have))
	copy(now, right)
	crcs := make([]byte, format.ChunkCRCsSize)
	if keep {
		if c.l.crcs == nil {
			return now
		}
		page := alignedBuffer(int(format.CRCPageSize)) // the file may be open for direct I/O
		if n, _ := c.l.crcs.ReadAt(page, c.off>>blockBits>>format.CRCPageBits*format.CRCPageSize); n < len(page) {
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

// rewrite writes the blocks that are not what they should be.
func (d *Disk) rewrite(c *chunkRepair, kinds *format.Index, now []byte) (err error) {
	h, err := d.fs.Open(d.path(layersDir, c.l.rec.UID, dataFile), os.O_RDWR|d.direct, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	if st, err := h.Stat(); err != nil {
		return err
	} else if st.Size() < c.l.rec.Size {
		if err := h.Truncate(c.l.rec.Size); err != nil {
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

// repaired takes a chunk off the list of what is damaged, and tells it to whoever has the layer open.
func (d *Disk) repaired(l *layer, off int64, now []byte) error {
	if now != nil {
		if err := d.rightCRCs(l, off/chunkSize, now); err != nil {
			return err
		}
	}
	uid := l.rec.UID
	d.hopelessMu.Lock()
	maps.DeleteFunc(d.hopeless, func(c chunkOf, _ bool) bool { return c.layer == uid && c.off == off })
	d.hopelessMu.Unlock()
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	was := d.damaged(uid, l.rec.Size)
	left := replaceDamage(was, off, min(chunkSize, l.rec.Size-off), nil)
	if !slices.Equal(was, left) {
		err = d.putDamage(uid, l.rec.Size, left)
	}
	unlock()
	if err != nil {
		return err
	}
	d.tell(uid, left)
	return nil
}

// Hopeless takes note that no other replica of the volume has what a damaged chunk held. It is forgotten with the
// process: then the others are asked again.
func (r *Replica) Hopeless(layer string, off int64) {
	r.disk.hopelessly(chunkOf{r.Meta().UID, layer, off})
}

func (d *Disk) hopelessly(c chunkOf) {
	d.hopelessMu.Lock()
	if d.hopeless == nil {
		d.hopeless = map[chunkOf]bool{}
	}
	d.hopeless[c] = true
	d.hopelessMu.Unlock()
	if fn := d.onDamage.Load(); fn != nil {
		(*fn)(c.layer)
	}
}

func (d *Disk) isHopeless(replica, layer string, off int64) bool {
	d.hopelessMu.Lock()
	defer d.hopelessMu.Unlock()
	return d.hopeless[chunkOf{replica, layer, off}] || d.hopeless[chunkOf{"", layer, allOf}]
}

// BeyondRepair reports whether no other replica of the volume has what some damaged chunk of a layer held.
func (d *Disk) BeyondRepair(replica, uid string) bool {
	d.hopelessMu.Lock()
	none := len(d.hopeless) == 0
	d.hopelessMu.Unlock()
	if none {
		return false
	}
	for _, g := range d.Damaged(uid) {
		for off := g.Off &^ (chunkSize - 1); off < g.Off+g.Len; off += chunkSize {
			if d.isHopeless(replica, uid, off) {
				return true
			}
		}
	}
	return false
}
