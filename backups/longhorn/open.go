package longhorn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/block"
)

// Bounds of what an open backup reads at once.
const (
	restoreMemory = 128 << 20 // bytes; a block needs room for its object and for its bytes
	mostReaders   = 16
)

// Opened is an open backup of a volume or backing image. It implements block.Backup, and block.DigestSource for copies.
type Opened struct {
	store   target.Store
	object  string // for errors
	pool    string // of blocks
	method  string
	blocks  *blockMap
	zeroSum string // of a whole block of zeros
	ctx     context.Context
	cache   blockCache

	total, done atomic.Int64
}

var (
	_ block.Backup       = (*Opened)(nil)
	_ block.DigestSource = (*Opened)(nil)
)

// OpenBackup opens a backup of a volume. The context ends the use of the backup, too.
func (s *Store) OpenBackup(ctx context.Context, n Name) (*Opened, error) {
	v, err := s.ReadVolume(ctx, n.Volume)
	if err != nil {
		return nil, err
	}
	o := &Opened{store: s.store, object: fmt.Sprintf("Longhorn's backup %s of volume %s", n.Backup, n.Volume),
		pool: volumeFolder(n.Volume) + "blocks/", ctx: ctx}
	if v.Image != "" {
		return nil, api.Errorf(api.Unsupported, "%s: has only the blocks that were written above the backing image %.64q, "+
			"whose bytes the backup lacks; restore the volume in Longhorn, and copy its files into a volume of Drover", o.object,
			v.Image)
	}
	b, err := s.readBackup(ctx, n, func(b *Backup, offset int64, sum string) error {
		return o.add(s.cache, v.Size, b.size(), offset, sum)
	})
	o.method = b.method
	return o, o.finish(s.cache, v.Size, b.blockSize, err)
}

// OpenImage opens the file of a backing image, whose format the description does not tell.
func (s *Store) OpenImage(ctx context.Context, name string) (*Opened, error) {
	img, err := s.ReadImage(ctx, name) // the size may come after the list of blocks
	if err != nil {
		return nil, err
	}
	o := &Opened{store: s.store, object: "Longhorn's backing image " + name, pool: imageBlocks, method: img.method,
		ctx: ctx}
	_, err = s.readImage(ctx, name, func(offset int64, sum string) error {
		return o.add(s.cache, img.Size, smallestBlock, offset, sum)
	})
	return o, o.finish(s.cache, img.Size, smallestBlock, err)
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
func (o *Opened) finish(cache string, size, blockSize int64, err error) error {
	if err == nil && o.blocks == nil { // a backup without blocks
		o.blocks, err = newBlockMap(cache, size, blockSize)
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
	o.cache.freed.L = &o.cache.mu
	return nil
}

// Size implements block.Backup.
func (o *Opened) Size() int64 { return o.blocks.size }

// Checksum implements block.Backup: a volume has none. ReadImage has the checksum of an image.
func (o *Opened) Checksum() string { return "" }

// Restored implements block.Backup.
func (o *Opened) Restored() (done, total int64) { return o.done.Load(), o.total.Load() }

// Close implements block.Backup.
func (o *Opened) Close() error { return o.blocks.close() }

// Restore implements block.Backup. It reads several blocks at once.
func (o *Opened) Restore(ctx context.Context, sink block.Sink) error {
	m := o.blocks
	o.done.Store(0)
	o.total.Store(m.bytes)
	readers := int(min(max(restoreMemory/(2*m.blockSize), 1), mostReaders))
	buffers := make(chan []byte, readers)
	for range readers {
		buffers <- nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(o.ctx, func() { cancel(context.Cause(o.ctx)) })()
	group, work := errgroup.WithContext(ctx)
	group.SetLimit(readers)
	for place := m.next(0, true); place < m.places() && work.Err() == nil; place = m.next(place+1, true) {
		group.Go(func() error {
			buffer := <-buffers
			defer func() { buffers <- buffer }()
			if buffer == nil {
				buffer = block.AlignedBuffer(int(m.blockSize))
			}
			return o.restoreBlock(work, sink, place, buffer[:m.length(place)])
		})
	}
	err := group.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	return sink.Sync(ctx)
}

func (o *Opened) restoreBlock(ctx context.Context, sink block.Sink, place int64, buffer []byte) error {
	zeros, err := o.read(ctx, place, buffer)
	if err != nil {
		return err
	}
	if !zeros { // other bytes of the sink read as zeros
		if _, err := sink.WriteAt(buffer, place*o.blocks.blockSize); err != nil {
			return err
		}
	}
	o.done.Add(int64(len(buffer)))
	return nil
}

// read reads the block at a place, unless the checksum is that of zeros: then into does not change.
func (o *Opened) read(ctx context.Context, place int64, into []byte) (zeros bool, err error) {
	sum, err := o.blocks.sum(place)
	if err != nil {
		return false, err
	}
	if sum == o.zeroSum && int64(len(into)) == o.blocks.blockSize {
		return true, nil
	}
	if err := readBlock(ctx, o.store, o.pool, sum, o.method, into); err != nil {
		return false, api.Errorf(api.KindOf(err), "%s: block %.16s at offset %d: %w", o.object, sum,
			place*o.blocks.blockSize, err)
	}
	return false, nil
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
	e.Len = min(m.next(place, e.Kind != block.Data)*m.blockSize, m.size) - off
	return e, nil
}

// Digest implements block.DigestSource: Longhorn's checksums are none of Drover's digests.
func (o *Opened) Digest(int64) ([32]byte, bool) { return [32]byte{}, false }

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
		clear(piece)
		return nil
	case int64(len(piece)) == o.blocks.length(place):
		zeros, err := o.read(o.ctx, place, piece)
		if zeros {
			clear(piece)
		}
		return err
	}
	return o.cache.read(o, place, at, piece)
}
