package importer

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// feed supplies the bytes of an origin in order: in buf, or in other memory of the same size in exchange for buf; or no
// bytes and the length of a hole, which reads as zeros. io.EOF comes alone, at the end. Only the last chunk is shorter
// than buf.
type feed interface {
	fillChunk(buf []byte) (b []byte, hole int64, err error)
}

// streamFeed reads a stream after its first bytes, the head, were read.
type streamFeed struct {
	head []byte
	r    io.Reader
}

func (s *streamFeed) fillChunk(buf []byte) ([]byte, int64, error) {
	n := copy(buf, s.head)
	s.head = s.head[n:]
	m, err := io.ReadFull(s.r, buf[n:])
	if errors.Is(err, io.EOF) || err == io.ErrUnexpectedEOF {
		err = nil
		if n+m == 0 {
			err = io.EOF
		}
	}
	return buf[:n+m], 0, err
}

// fileFeed reads a file and skips its holes: holes cost neither reads nor a search for zeros.
type fileFeed struct {
	f         *os.File
	off, size int64
	data, gap int64 // the known extent of data: [data, gap)
	blind     bool  // the file system reports no holes
}

func (s *fileFeed) fillChunk(buf []byte) ([]byte, int64, error) {
	if s.off >= s.size {
		return nil, 0, io.EOF
	}
	if !s.blind && s.off >= s.gap {
		s.seekData()
	}
	if !s.blind && s.off < s.data {
		// The hole ends at a chunk before the data: chunks stay aligned.
		if hole := s.data/chunkSize*chunkSize - s.off; hole > 0 {
			s.off += hole
			return buf[:0], hole, nil
		}
		if s.data >= s.size {
			hole := s.size - s.off
			s.off = s.size
			return buf[:0], hole, nil
		}
	}
	n, err := s.f.ReadAt(buf[:min(int64(len(buf)), s.size-s.off)], s.off)
	s.off += int64(n)
	if err == io.EOF && s.off < s.size {
		return nil, 0, io.ErrUnexpectedEOF
	}
	if n > 0 && err == io.EOF {
		err = nil
	}
	return buf[:n], 0, err
}

// seekData finds the next data at or after off.
func (s *fileFeed) seekData() {
	fd := int(s.f.Fd())
	data, err := unix.Seek(fd, s.off, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		s.data, s.gap = s.size, s.size
		return
	case err != nil:
		s.blind = true
		return
	}
	gap, err := unix.Seek(fd, data, unix.SEEK_HOLE)
	if err != nil {
		gap = s.size
	}
	s.data, s.gap = min(data, s.size), min(gap, s.size)
}
