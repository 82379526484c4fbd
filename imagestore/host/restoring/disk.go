package restoring

import (
	"io"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// disk is a disk with restoring layers. A finished layer of the disk comes first.
type disk struct {
	block.Layers
	set *Set
}

// Open implements block.Layers.
func (d *disk) Open(uid string) (block.Source, error) {
	src, err := d.Layers.Open(uid)
	if l := d.set.find(d.UID(), uid); api.Is(err, api.NotFound) && l != nil {
		p, err := l.currentPlan()
		if err != nil {
			return nil, err
		}
		return &source{l: l, plan: p}, nil
	}
	return src, err
}

// Digest implements block.Layers.
func (d *disk) Digest(uid string) (root string, allocated int64, err error) {
	root, allocated, err = d.Layers.Digest(uid)
	if l := d.set.find(d.UID(), uid); api.Is(err, api.NotFound) && l != nil {
		p, err := l.currentPlan()
		if err != nil {
			return "", 0, err
		}
		return p.root, 0, nil
	}
	return root, allocated, err
}

// Sums returns the file of digests of a layer.
func (d *disk) Sums(uid string) ([]byte, error) {
	x, ok := d.Layers.(interface {
		Sums(uid string) ([]byte, error)
	})
	if !ok {
		return nil, api.Errorf(api.Unsupported, "disk %s does not tell its digests", d.UID())
	}
	if _, _, err := d.Layers.Digest(uid); api.Is(err, api.NotFound) {
		if l := d.set.find(d.UID(), uid); l != nil {
			p, err := l.currentPlan()
			if err != nil {
				return nil, err
			}
			return p.file, nil
		}
	}
	return x.Sums(uid)
}

// source is a restoring layer as a block.Source.
type source struct {
	l    *Layer
	plan *plan

	mu       sync.Mutex
	finished block.Source // the layer of the disk, after the restore
}

// Size implements block.Source.
func (s *source) Size() int64 { return s.plan.size }

// Next implements block.Source.
func (s *source) Next(off int64) (block.Extent, error) { return s.plan.extent(off), nil }

// Close implements io.Closer.
func (s *source) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.finished == nil {
		return nil
	}
	return s.finished.Close()
}

// ReadAt implements io.ReaderAt.
func (s *source) ReadAt(b []byte, off int64) (n int, err error) {
	if f := s.finishedLayer(); f != nil {
		return f.ReadAt(b, off)
	}
	for n < len(b) && off+int64(n) < s.plan.size {
		at := off + int64(n)
		c := at / block.ChunkSize
		chunk, err := s.l.chunk(s.plan, c)
		if err != nil {
			return n, err
		}
		n += copy(b[n:], chunk[at-c*block.ChunkSize:])
	}
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// finishedLayer returns the layer of the disk after the restore; nil: the restore has not finished.
func (s *source) finishedLayer() block.Source {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.l.mu.Lock()
	look := s.finished == nil && (s.l.ended || s.l.whole)
	s.l.mu.Unlock()
	if look {
		if f, err := s.l.on.Open(s.l.uid); err == nil {
			s.finished = f
		}
	}
	return s.finished
}
