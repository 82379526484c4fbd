package layer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// MergedMapFile is the unfinished map of the result, in the target's folder.
const MergedMapFile = "mapped"

// mergedMap is the map of a layer during a merge: below upto, the target holds the blocks of both layers.
type mergedMap struct {
	format.BlockMap             // the layer's own map
	upto            int         // page
	result          *format.Map // the first pages of the result's map; nil: the other layer, which is empty there
}

// Target is the layer with the file that becomes the file of the result.
func (g *Merge) Target() string {
	if g.Up {
		return g.Upper
	}
	return g.Lower
}

// openMapped makes an open layer use the result's map of a merge, as far as that map exists.
func (d *Store) openMapped(l *Layer) error {
	g, err := d.mergeOf(l.Rec.UID)
	if err != nil || g == nil || g.Mapped == 0 {
		return err
	}
	l.Map, l.MergedMapFile, err = d.MergedMap(l, g)
	return err
}

// MergedMap is the map of a layer during a merge, with the open file of the result's map for the target.
func (d *Store) MergedMap(l *Layer, g *Merge) (_ format.BlockMap, h file.Handle, err error) {
	own := OwnMap(l)
	if l.Rec.UID != g.Target() {
		return &mergedMap{own, g.Mapped, nil}, nil, nil
	}
	if h, err = d.FS.Open(d.Join(Dir, l.Rec.UID, MergedMapFile), os.O_RDONLY, 0); err != nil {
		return nil, nil, err
	}
	w, err := format.ResumeMap(h, l.Rec.Size, g.Mapped, g.MapSum)
	if err != nil {
		return nil, nil, errors.Join(err, h.Close())
	}
	return &mergedMap{own, g.Mapped, w.Written(l.Rec.Size, g.Mapped, h)}, h, nil
}

// OwnMap is the map that a layer had before the merge.
func OwnMap(l *Layer) format.BlockMap {
	if m, ok := l.Map.(*mergedMap); ok {
		return m.BlockMap
	}
	return l.Map
}

// Merge is a merge in progress, as stack.json records it.
type Merge struct {
	Lower  string `json:"lower"`
	Upper  string `json:"upper"`
	Result string `json:"result"`           // the uid of the new layer
	Up     bool   `json:"up"`               // the upper layer's file is the target
	Done   int64  `json:"done"`             // the target holds the first Done bytes
	Crcs   bool   `json:"crcs,omitempty"`   // checksums move with the data; false in merges of older versions
	Mapped int    `json:"mapped,omitempty"` // the result's map has the first Mapped pages; only after all data
	MapSum uint32 `json:"mapSum,omitempty"` // CRC-32C of the table entries of these pages
}

// Files that mark the layers of a merge.
const (
	MergingFile = "merging" // in both folders: no other replica may open or name the layers
	MovingFile  = "moving"  // in both folders before a block moves: without a merge in progress the layers are garbage
)

// Redirect replaces the values of moved blocks in vals, the page of an index that begins at block base.
func (g *Merge) Redirect(vals []uint16, base int64, layers []*Layer) {
	if g == nil || base >= g.Done>>blockBits {
		return
	}
	k := slices.IndexFunc(layers, func(l *Layer) bool { return l.Rec.UID == g.Lower })
	if k < 0 {
		return
	}
	from, to := g.Values(k)
	for i := range vals[:min(int64(len(vals)), g.Done>>blockBits-base)] {
		if vals[i] == from {
			vals[i] = to
		}
	}
}

// Values returns the values in the index of the emptied layer and of the target; the lower layer is layer k.
func (g *Merge) Values(k int) (from, to uint16) {
	if g.Up {
		return fromLayer + uint16(k), fromLayer + uint16(k+1)
	}
	return fromLayer + uint16(k+1), fromLayer + uint16(k)
}

// Unmark removes the mark of a merge from a layer.
func (d *Store) Unmark(uid string) error {
	return d.FS.Remove(d.Join(Dir, uid, MergingFile))
}

// ErrRead says that a reader has layers open that shall be merged.
var ErrRead = errors.New("a reader has the layers open")

// readersTime is how long a merge waits for readers that have the layers open for moments, such as heals.
const readersTime = 6 * time.Second

// AwaitReaders calls begin, and again for some seconds while begin returns ErrRead.
func AwaitReaders(ctx context.Context, begin func() error) error {
	err := begin()
	if errors.Is(err, ErrRead) { // a process between fork and exec may have the layers open
		diskfs.AwaitForks()
		err = begin()
	}
	for wait, end := diskfs.ForkTime/8, time.Now().Add(readersTime); errors.Is(err, ErrRead) && time.Now().Before(end); {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		wait = min(2*wait, 2*diskfs.ForkTime)
		err = begin()
	}
	return err
}

// CheckUnread returns ErrRead while others than the owner have one of the layers open.
func (d *Store) CheckUnread(uids ...string) error {
	free, done, err := d.Unread(uids...)
	done()
	if err == nil && !free {
		err = ErrRead
	}
	return err
}

// RetryMerged calls do again if a merge was faster than do: a layer does not exist any more.
func RetryMerged(do func() error) (err error) {
	for range 4 {
		if err = do(); !api.Is(err, api.NotFound) {
			return err
		}
	}
	return err
}

// Unread reports whether only the owner has the layers open, and keeps readers out until done is called. Later readers
// see the mark, and the merge in the stack of the replica that the mark names.
func (d *Store) Unread(uids ...string) (free bool, done func(), err error) {
	var held []file.Handle
	done = func() {
		for _, h := range held {
			_ = h.Close()
		}
	}
	for _, uid := range uids {
		h, err := d.FS.Open(d.Join(Dir, uid, DataFile), os.O_RDONLY, 0)
		if err != nil {
			return false, done, err
		}
		held = append(held, h)
		if err := diskfs.Flock(h, unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
			return false, done, nil
		} else if err != nil {
			return false, done, err
		}
	}
	return true, done, nil
}

// BeingMerged reports whether a layer is part of a merge.
func (d *Store) BeingMerged(uid string) (bool, error) {
	g, err := d.mergeOf(uid)
	return g != nil, err
}

// mergeOf returns the merge that a layer is part of; nil: no merge. A mark without a merge, left by a crash, does not
// count.
func (d *Store) mergeOf(uid string) (*Merge, error) {
	h, err := d.FS.Open(d.Join(Dir, uid, MergingFile), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.NewSectionReader(h, 0, 64))
	if err = errors.Join(err, h.Close()); err != nil {
		return nil, err
	}
	if api.UID(b).Validate() != nil {
		return nil, nil // cut off by a loss of power, before the merge
	}
	m, err := d.records.MergeIn(string(b))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil || m == nil || m.Lower != uid && m.Upper != uid {
		return nil, err
	}
	return m, nil
}

// MergedAway reports whether a merge that has ended, or lost its replica, moved blocks of a layer: the files hold other
// content than the uid means.
func (d *Store) MergedAway(uid string) (bool, error) {
	moved, err := d.Exists(d.Join(Dir, uid, MovingFile))
	if err != nil || !moved {
		return false, err
	}
	merging, err := d.BeingMerged(uid)
	return err == nil && !merging, err
}

// Moved returns up to which byte the file of layer k may hold blocks of a neighbour, and the neighbour.
func (g *Merge) Moved(layers []*Layer, k int) (moved int64, gave *Layer) {
	if g == nil {
		return 0, nil
	}
	switch uid := layers[k].Rec.UID; {
	case uid == g.Lower && k+1 < len(layers):
		return g.Done, layers[k+1]
	case uid == g.Upper && k > 0:
		return g.Done, layers[k-1]
	}
	return 0, nil
}

// JudgeMoved reads a range below Done again, and reports whether all blocks of the range are sound.
func (l *Layer) JudgeMoved(buf []byte, at int64, gave *Layer) bool {
	if len(buf) == 0 {
		return true
	}
	n, err := l.Data.ReadAt(buf, at)
	if n == len(buf) {
		var own, other []byte
		if own, err = l.CRCsAt(at, int64(n)); err == nil {
			other, err = gave.CRCsAt(at, int64(n))
		}
		bad := int64(-1)
		for off := int64(0); err == nil && off < int64(n); off += blockSize {
			if blk := buf[off:][:blockSize]; !HasCRC(own, off, blk) && !HasCRC(other, off, blk) && !l.digestIs(at+off) {
				bad = at + off
				break
			}
		}
		if err == nil && bad < 0 {
			return true
		}
		at = max(bad, at)
	}
	slog.Error("a layer is damaged during its merge", "layer", l.Rec.UID, "disk", l.Store.Root, "offset", at,
		"length", blockSize, "error", err)
	return false
}

// ReadMoved reads a range below Done, and fails if the range is damaged.
func (l *Layer) ReadMoved(p []byte, off int64, gave *Layer) error {
	from := off &^ (blockSize - 1)
	buf := block.AlignedBuffer(int((off+int64(len(p))+blockSize-1)&^(blockSize-1) - from))
	if !l.JudgeMoved(buf, from, gave) {
		return api.Errorf(api.Corrupt, "layer %s: some of the %d bytes at %d are damaged", l.Rec.UID, len(p), off)
	}
	copy(p, buf[off-from:])
	return nil
}

// CRCsAt reads the checksums of blocks; nil: the layer has no checksums.
func (l *Layer) CRCsAt(off, length int64) ([]byte, error) {
	if l.CRCs == nil {
		return nil, nil
	}
	first, end := off>>blockBits, min(off+length, l.Rec.Size)>>blockBits
	if end <= first {
		return []byte{}, nil
	}
	from := first >> format.CRCPageBits
	n := ((end-1)>>format.CRCPageBits - from + 1) * format.CRCPageSize
	pages := block.AlignedBuffer(int(n)) // the file may be open for direct I/O
	if k, err := l.CRCs.ReadAt(pages, from*format.CRCPageSize); k < len(pages) {
		return nil, errors.Join(err, os.ErrInvalid)
	}
	return pages[(first-from<<format.CRCPageBits)*crcSize : (end-from<<format.CRCPageBits)*crcSize], nil
}

// HasCRC reports whether the block at off matches its checksum; without checksums every block matches.
func HasCRC(crcs []byte, off int64, blk []byte) bool {
	i := off >> blockBits * crcSize
	if crcs == nil {
		return true
	}
	return i < int64(len(crcs)) && format.BlockCRC(blk) == binary.LittleEndian.Uint32(crcs[i:])
}

// digestIs reports whether the chunk of a block matches the layer's digest, so that only a checksum is wrong.
func (l *Layer) digestIs(at int64) bool {
	sums, err := l.Store.FS.Open(l.Store.Join(Dir, l.Rec.UID, SumsFile), os.O_RDONLY, 0)
	if err != nil {
		return false
	}
	defer sums.Close()
	c := at / chunkSize
	chunk := block.AlignedBuffer(int(min(chunkSize, l.Rec.Size-c*chunkSize)))
	var want [sumSize]byte
	_, err = sums.ReadAt(want[:], sumsHeader+c*sumSize)
	n, _ := l.Data.ReadAt(chunk, c*chunkSize)
	return err == nil && n == len(chunk) && sha256.Sum256(chunk) == want
}

func (m *mergedMap) Uniform(p int) (block.Kind, bool) {
	switch {
	case p >= m.upto:
		return m.BlockMap.Uniform(p)
	case m.result == nil:
		return block.Hole, true
	}
	return m.result.Uniform(p)
}

func (m *mergedMap) Load(p int, kinds *[pageBlocks]block.Kind) error {
	switch {
	case p >= m.upto:
		return m.BlockMap.Load(p, kinds)
	case m.result == nil:
		clear(kinds[:])
		return nil
	}
	return m.result.Load(p, kinds)
}
