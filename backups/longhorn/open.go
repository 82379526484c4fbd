package longhorn

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/digests"
	"drover.io/drover/backups/target"
	"drover.io/drover/block"
	"drover.io/drover/block/budget"
)

// mostPlaces bounds an extent, so that a hostile list makes no search long.
const mostPlaces = 1 << 16

// Opened is an open backup of a volume or backing image. It implements block.ChunkedBackup, and
// block.DigestSource for copies.
type Opened struct {
	store    target.Store
	cfg      string // object with the list of blocks
	object   string // for errors
	pool     string // of blocks
	method   string
	checksum string // SHA-512 of an image, as the store tells it
	blocks   *blockMap
	zeroSum  string            // of a whole block of zeros
	base     block.Source      // of the bytes without a block; nil: they are zeros
	baseSum  string            // SHA-512 of the base's file
	digests  *digests.Table    // of the chunks of a volume
	list     [sha256.Size]byte // names the list of blocks of an image
	ctx      context.Context
	cache    blockCache
	reads    *budget.Part // for the blocks of a restore

	total, done atomic.Int64
}

var (
	_ block.ChunkedBackup = (*Opened)(nil)
	_ block.DigestSource  = (*Opened)(nil)
)

// OpenBackup opens a backup of a volume. The context ends the use of the backup, too. An error of kind NotFound: images
// lacks the backing image of the volume, or the store lacks the backup.
func (s *Store) OpenBackup(ctx context.Context, n Name, images *Images) (*Opened, error) {
	v, err := s.ReadVolume(ctx, n.Volume)
	if err != nil {
		return nil, err
	}
	o := &Opened{store: s.store, reads: s.opts.Reads, ctx: ctx, baseSum: v.ImageChecksum, digests: s.opts.Digests,
		object: fmt.Sprintf("Longhorn's backup %s of volume %s", n.Backup, n.Volume),
		cfg:    backupFile(n), pool: volumeFolder(n.Volume) + "blocks/"}
	b, err := s.readBackup(ctx, n, func(b *Backup, offset int64, sum string) error {
		return o.add(s.opts.Cache, v.Size, b.size(), offset, sum)
	})
	o.method = b.method
	if err := o.finish(&s.opts, v.Size, b.blockSize, err); err != nil {
		return nil, err
	}
	if o.base, err = s.openBase(ctx, &v, images); err != nil {
		return nil, errors.Join(api.Errorf(api.KindOf(err), "%s: %w", o.object, err), o.Close())
	}
	return o, nil
}

// OpenImage opens the file of a backing image, whose format the description does not tell.
func (s *Store) OpenImage(ctx context.Context, name string) (*Opened, error) {
	img, err := s.ReadImage(ctx, name) // the size may come after the list of blocks
	if err != nil {
		return nil, err
	}
	o := &Opened{store: s.store, reads: s.opts.Reads, object: "Longhorn's backing image " + name,
		cfg: imageFileOf(name), pool: imageBlocks, method: img.method, checksum: img.Checksum, ctx: ctx}
	list := sha256.New()
	_, err = s.readImage(ctx, name, func(offset int64, sum string) error {
		_, _ = fmt.Fprintln(list, offset, sum)
		return o.add(s.opts.Cache, img.Size, smallestBlock, offset, sum)
	})
	_, _ = fmt.Fprintln(list, img.Size)
	o.list = [sha256.Size]byte(list.Sum(nil))
	if err := o.finish(&s.opts, img.Size, smallestBlock, err); err != nil {
		return nil, err
	}
	return o, nil
}

// add adds a block of the list.
func (o *Opened) add(cache string, size, blockSize, offset int64, sum string) (err error) {
	if o.blocks == nil {
		if o.blocks, err = newBlockMap(cache, size, blockSize); err != nil {
			return err
		}
	}
	return o.blocks.add(offset, sum)
}

// finish ends the opening, after err.
func (o *Opened) finish(opts *Options, size, blockSize int64, err error) error {
	if err == nil && o.blocks == nil { // a backup without blocks
		o.blocks, err = newBlockMap(opts.Cache, size, blockSize)
	}
	if err == nil {
		err = o.blocks.flush()
	}
	if err != nil {
		if o.blocks != nil {
			err = errors.Join(err, o.blocks.close())
		}
		return err
	}
	o.zeroSum = checksum(make([]byte, blockSize))
	o.cache.freed.L, o.cache.most, o.cache.memory = &o.cache.mu, cachedBlocks, opts.Memory
	return nil
}

// Size implements block.Backup.
func (o *Opened) Size() int64 { return o.blocks.size }

// Checksum implements block.Backup: a volume has none.
func (o *Opened) Checksum() string { return o.checksum }

// Restored implements block.Backup.
func (o *Opened) Restored() (done, total int64) { return o.done.Load(), o.total.Load() }

// Close implements block.Backup.
func (o *Opened) Close() error {
	o.cache.close()
	if o.base == nil {
		return o.blocks.close()
	}
	return errors.Join(o.base.Close(), o.blocks.close())
}

// eachPart calls each, in order, with the ranges that may have other bytes than zeros: a block, or a chunk of the base.
func (o *Opened) eachPart(each func(off, n int64) error) error {
	m := o.blocks
	for place := int64(0); place < m.places(); {
		off := place * m.blockSize
		if m.has(place) {
			if err := each(off, m.length(place)); err != nil {
				return err
			}
			place++
			continue
		}
		place = m.next(place, m.places(), true)
		if err := o.eachBaseChunk(off, min(place*m.blockSize, m.size), each); err != nil {
			return err
		}
	}
	return nil
}

// read reads the block at a place, unless the checksum is that of zeros: then into does not change. It notes the
// digests of the block's chunks, with a mark. A digest that was known and is not that of the bytes is an error of kind
// Unavailable, unless the caller has a mark, and is corrected.
func (o *Opened) read(ctx context.Context, place int64, into []byte, mark uint64) (zeros bool, err error) {
	sum, err := o.blocks.sum(place)
	if err != nil {
		return false, err
	}
	if o.isZeros(place, sum) {
		return true, nil
	}
	off := place * o.blocks.blockSize
	if err := readBlock(ctx, o.store, o.pool, sum, o.method, into); err != nil {
		return false, api.Errorf(api.KindOf(err), "%s: block %.16s at offset %d: %w", o.object, sum, off, err)
	}
	return false, o.note(off, into, mark)
}

// isZeros reports whether the block at a place, which has the checksum, is whole and has zeros alone.
func (o *Opened) isZeros(place int64, sum string) bool {
	return sum == o.zeroSum && o.blocks.length(place) == o.blocks.blockSize
}

// Next implements block.Source.
func (o *Opened) Next(off int64) (block.Extent, error) {
	m := o.blocks
	if off < 0 || off >= m.size {
		return block.Extent{}, api.Errorf(api.OutOfRange, "%s: has no offset %d", o.object, off)
	}
	place := off / m.blockSize
	e := block.Extent{Off: off, Kind: block.Hole}
	if m.has(place) {
		e.Kind = block.Data
	}
	end := m.next(place, min(m.places(), place+mostPlaces), e.Kind != block.Data)
	e.Len = min(end*m.blockSize, m.size) - off
	if e.Kind == block.Data || o.base == nil || off >= o.base.Size() {
		return e, nil
	}
	below, err := o.base.Next(off)
	if err != nil {
		return block.Extent{}, o.baseError(off, err)
	}
	e.Kind, e.Len = below.Kind, min(e.Len, below.End()-off)
	return e, nil
}

// ReadAt implements block.Source.
func (o *Opened) ReadAt(p []byte, off int64) (n int, err error) {
	m := o.blocks
	if off < 0 {
		return 0, api.Errorf(api.OutOfRange, "%s: has no offset %d", o.object, off)
	}
	for n < len(p) && off < m.size {
		place, at := off/m.blockSize, off%m.blockSize
		piece := p[n:][:min(int64(len(p)-n), m.length(place)-at)]
		if err := o.readPiece(place, at, piece); err != nil {
			return n, err
		}
		n, off = n+len(piece), off+int64(len(piece))
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// readPiece reads bytes of one block.
func (o *Opened) readPiece(place, at int64, piece []byte) error {
	switch {
	case !o.blocks.has(place):
		return o.readBase(piece, place*o.blocks.blockSize+at)
	case int64(len(piece)) == o.blocks.length(place):
		zeros, err := o.read(o.ctx, place, piece, 0)
		if zeros {
			clear(piece)
		}
		return err
	}
	return o.cache.read(o, place, at, piece)
}
