package file

import (
	"context"
	"io"
	"io/fs"
	"os"

	"drover.io/drover/block"
)

// Source is a sparse file as a block.Source. Ranges without data are holes.
type Source struct {
	h    Handle
	size int64
}

var _ block.Source = (*Source)(nil)

// Open opens a file for reading. Its size is taken once.
func Open(name string) (*Source, error) {
	h, err := OS.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	st, err := h.Stat()
	if err != nil {
		h.Close()
		return nil, err
	}
	if !st.Mode().IsRegular() {
		h.Close()
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	return &Source{h, st.Size()}, nil
}

// ReadAt implements io.ReaderAt.
func (s *Source) ReadAt(p []byte, off int64) (int, error) {
	if off >= s.size {
		return 0, io.EOF
	}
	return s.h.ReadAt(p, off)
}

// Size implements block.Source.
func (s *Source) Size() int64 { return s.size }

// Next implements block.Source.
func (s *Source) Next(off int64) (block.Extent, error) {
	from, to, err := NextData(int(s.h.Fd()), off, s.size)
	if err != nil {
		return block.Extent{}, err
	}
	if from > off {
		return block.Extent{Off: off, Len: from - off, Kind: block.Hole}, nil
	}
	return block.Extent{Off: off, Len: to - off, Kind: block.Data}, nil
}

// Close implements io.Closer.
func (s *Source) Close() error { return s.h.Close() }

// Sink is a sparse file as a block.Sink: zeros become holes, which read the same.
type Sink struct{ h Handle }

var _ block.Sink = (*Sink)(nil)

// Create makes an empty sparse file of size bytes; the name must be free. The owner calls Close, and syncs the folder.
func Create(name string, size int64, perm fs.FileMode) (*Sink, error) {
	h, err := OS.Open(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return nil, err
	}
	if err := h.Truncate(size); err != nil {
		h.Close()
		_ = os.Remove(name)
		return nil, err
	}
	return &Sink{h}, nil
}

// WriteAt implements io.WriterAt.
func (s *Sink) WriteAt(p []byte, off int64) (int, error) { return s.h.WriteAt(p, off) }

// ZeroAt implements block.Sink.
func (s *Sink) ZeroAt(off, n int64) error { return s.h.Punch(off, n) }

// Sync implements block.Sink.
func (s *Sink) Sync(context.Context) error { return s.h.Datasync() }

// Close closes the file without a sync.
func (s *Sink) Close() error { return s.h.Close() }
