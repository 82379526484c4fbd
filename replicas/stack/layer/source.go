package layer

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Source is a finished layer as a block.Source.
type Source struct {
	l *Layer

	mu    sync.Mutex
	page  int // the page in kinds, or -1
	kinds [pageBlocks]block.Kind
}

// Open implements block.Layers.
func (d *Store) Open(uid string) (block.Source, error) {
	l, err := d.OpenLayer(uid, 0)
	if err != nil {
		return nil, err
	}
	return &Source{l: l, page: -1}, nil
}

// Size implements block.Source.
func (s *Source) Size() int64 { return s.l.Rec.Size }

// ReadAt implements io.ReaderAt.
func (s *Source) ReadAt(p []byte, off int64) (int, error) { return s.l.ReadAt(p, off) }

// ReadAt reads sound content, and fails if the range is damaged.
func (l *Layer) ReadAt(p []byte, off int64) (int, error) { return l.readSound(p, off, false) }

// ReadData reads blocks that are data by the map, and fails if a block is damaged. A block without a checksum is
// compared with the digest, whatever the block holds.
func (l *Layer) ReadData(p []byte, off int64) error {
	n, err := l.readSound(p, off, true)
	if n < len(p) && (err == nil || errors.Is(err, io.EOF)) {
		err = api.Errorf(api.Corrupt, "layer %s: the file of the data ends %d bytes after %d, before the end of a block of "+
			"data", l.Rec.UID, n, off)
	}
	if n == len(p) {
		return nil
	}
	return err
}

// readSound reads a range; data says that all blocks are data.
func (l *Layer) readSound(p []byte, off int64, data bool) (int, error) {
	if len(l.Damage) > 0 && Hits(l.Damage, off, int64(len(p))) {
		return 0, api.Errorf(api.Corrupt, "layer %s: the %d bytes at %d are damaged", l.Rec.UID, len(p), off)
	}
	for {
		if l.Hydration != nil && len(p) > 0 {
			if err := l.Hydration.Await(off, min(int64(len(p)), l.Rec.Size-off)); err != nil {
				return 0, err
			}
		}
		n, err := l.dataFor(p, off).ReadAt(p, off)
		if l.CRCs == nil || n == 0 {
			return n, err
		}
		switch cerr := l.compareChecksums(p[:n], off, data); {
		case errors.Is(cerr, ErrNotFetched):
			continue // a damaged chunk is fetched again
		case cerr != nil:
			return 0, cerr
		}
		return n, err
	}
}

// Close implements io.Closer.
func (s *Source) Close() error { return s.l.Close() }

// Next implements block.Source.
func (s *Source) Next(off int64) (block.Extent, error) {
	size := s.l.Rec.Size
	if off < 0 || off >= size {
		return block.Extent{}, io.EOF
	}
	b := off >> blockBits
	end := size >> blockBits
	s.mu.Lock()
	defer s.mu.Unlock()
	kind := block.Kind(0)
	for first := true; b < end; first = false {
		k, n, err := s.runAt(b, end)
		if err != nil {
			return block.Extent{}, fmt.Errorf("layer %s: %w", s.l.Rec.UID, err)
		}
		if !first && k != kind {
			break
		}
		kind = k
		b += n
		if b&(pageBlocks-1) != 0 {
			break
		}
	}
	return block.Extent{Off: off, Len: min(b<<blockBits, size) - off, Kind: kind}, nil
}

// runAt returns the kind of block b, and how many blocks of the page, from b on, are of the same kind.
func (s *Source) runAt(b, end int64) (block.Kind, int64, error) {
	p := int(b >> pageBits)
	lo, hi := b&(pageBlocks-1), min(end-int64(p)<<pageBits, pageBlocks)
	if k, ok := s.l.Map.Uniform(p); ok {
		return k, hi - lo, nil
	}
	if s.page != p {
		s.page = -1
		if err := s.l.Map.Load(p, &s.kinds); err != nil {
			return 0, 0, err
		}
		s.page = p
	}
	k := s.kinds[lo]
	i := lo + 1
	for i < hi && s.kinds[i] == k {
		i++
	}
	return k, i - lo, nil
}
