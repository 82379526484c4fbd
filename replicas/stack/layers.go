package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// source is a finished layer as a block.Source.
type source struct {
	l *layer

	mu    sync.Mutex
	page  int // whose kinds are in kinds, or -1
	kinds [pageBlocks]block.Kind
}

// Open implements block.Layers.
func (d *Disk) Open(uid string) (block.Source, error) {
	l, err := d.openLayer(uid, 0)
	if err != nil {
		return nil, err
	}
	return &source{l: l, page: -1}, nil
}

// openFirst opens a layer on the first of some disks that has it.
func openFirst(disks []*Disk, uid string, flag int) (*layer, error) {
	coming := false
	for _, d := range disks {
		l, err := d.openLayer(uid, flag&d.direct)
		if !api.Is(err, api.NotFound) {
			return l, err
		}
		coming = coming || d.Hydrating(uid)
	}
	if coming {
		return nil, api.Errorf(api.Unavailable, "layer %s is not copied to this machine yet", uid)
	}
	return nil, api.Errorf(api.NotFound, "no disk has layer %s", uid)
}

// Size implements block.Source.
func (s *source) Size() int64 { return s.l.rec.Size }

// ReadAt implements io.ReaderAt.
func (s *source) ReadAt(p []byte, off int64) (int, error) { return s.l.readAt(p, off) }

// readAt reads what is not damaged.
func (l *layer) readAt(p []byte, off int64) (int, error) {
	if len(l.damage) > 0 && hits(l.damage, off, int64(len(p))) {
		return 0, api.Errorf(api.Corrupt, "layer %s: the %d bytes at %d are damaged", l.rec.UID, len(p), off)
	}
	for {
		if l.hy != nil && len(p) > 0 {
			if err := l.hy.await(off, min(int64(len(p)), l.rec.Size-off)); err != nil {
				return 0, err
			}
		}
		n, err := l.data.ReadAt(p, off)
		if l.crcs == nil || n == 0 {
			return n, err
		}
		switch cerr := l.compare(p[:n], off); {
		case errors.Is(cerr, ErrNotFetched):
			continue // a damaged chunk is fetched again
		case cerr != nil:
			return 0, cerr
		}
		return n, err
	}
}

// Close implements io.Closer.
func (s *source) Close() error { return s.l.close() }

// Next implements block.Source.
func (s *source) Next(off int64) (block.Extent, error) {
	size := s.l.rec.Size
	if off < 0 || off >= size {
		return block.Extent{}, io.EOF
	}
	b := off >> blockBits
	end := size >> blockBits
	s.mu.Lock()
	defer s.mu.Unlock()
	kind := block.Kind(0)
	for first := true; b < end; first = false {
		k, n, err := s.run(b, end)
		if err != nil {
			return block.Extent{}, fmt.Errorf("layer %s: %w", s.l.rec.UID, err)
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

// run is the kind of block b, and how many blocks of its page, from there on, are of that kind.
func (s *source) run(b, end int64) (block.Kind, int64, error) {
	p := int(b >> pageBits)
	lo, hi := b&(pageBlocks-1), min(end-int64(p)<<pageBits, pageBlocks)
	if k, ok := s.l.m.Uniform(p); ok {
		return k, hi - lo, nil
	}
	if s.page != p {
		s.page = -1
		if err := s.l.m.Load(p, &s.kinds); err != nil {
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

// Digest implements block.Layers.
func (d *Disk) Digest(uid string) (root string, allocated int64, err error) {
	if err := api.UID(uid).Validate(); err != nil {
		return "", 0, fmt.Errorf("layer: %w", err)
	}
	rec, err := d.layerRecord(uid)
	if err != nil {
		return "", 0, fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
	}
	return rec.Root, rec.Allocated, nil
}

// Verify implements block.Layers: the content against the sums, the sums and the map against the root digest.
func (d *Disk) Verify(ctx context.Context, uid string) (err error) {
	l, err := d.openLayer(uid, d.direct)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, l.close()); err != nil {
			err = fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if _, frozen := l.m.(*frozenMap); frozen {
		return api.Errorf(api.Unavailable, "it has no digests yet")
	}
	kinds, err := format.IndexOf(l.m)
	if err != nil {
		return err
	}
	sums, err := d.fs.Open(d.path(layersDir, uid, sumsFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer sums.Close()
	var b [sumsHeader]byte
	if _, err := sums.ReadAt(b[:], 0); err != nil || string(b[:]) != string(format.SumsHeaderOf(l.rec.Size)) {
		return api.Errorf(api.Corrupt, "header of the sums is damaged")
	}
	root, err := format.RootDigest(sums, l.rec.Size, kinds)
	if err != nil {
		return api.Errorf(api.Corrupt, "sums: %w", err)
	}
	if root != l.rec.Root {
		return api.Errorf(api.Corrupt, "its sums and map do not match its root digest")
	}
	return eachChunk(ctx, kinds, func(c int64, buf []byte) error {
		var want [sumSize]byte
		if _, err := sums.ReadAt(want[:], sumsHeader+c*sumSize); err != nil {
			return err
		}
		sum, err := format.ChunkSum(l.data, kinds.Chunk(c), c, l.rec.Size, buf)
		if err != nil {
			return err
		}
		if sum != want {
			return api.Errorf(api.Corrupt, "the 2 MiB at %d do not match their digest", c*chunkSize)
		}
		return nil
	})
}

// Sums is the file of digests of a finished layer.
func (d *Disk) Sums(uid string) ([]byte, error) {
	rec, err := d.layerRecord(uid)
	if err == nil {
		var h file.Handle
		if h, err = d.fs.Open(d.path(layersDir, uid, sumsFile), os.O_RDONLY, 0); err == nil {
			b := make([]byte, sumsHeader+(rec.Size+chunkSize-1)/chunkSize*sumSize)
			_, err = h.ReadAt(b, 0)
			if err = errors.Join(err, h.Close()); err == nil {
				return b, nil
			}
		}
	}
	return nil, fmt.Errorf("digests of layer %s on disk %s: %w", uid, d.root, classify(err))
}
