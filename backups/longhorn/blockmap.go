package longhorn

import (
	"crypto/sha512"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"

	"drover.io/drover/api"
)

// sumSize is the size of a checksum.
const sumSize = sha512.Size / 2

// blockMap knows the blocks of an open backup: a bit for each place, and the checksums in a local file without a name,
// of which holes take no room.
type blockMap struct {
	size, blockSize int64 // of the backup and of its blocks
	present         []uint64
	bytes           int64 // of all blocks
	file            *os.File

	buffer []byte // checksums of neighbours that are not in the file yet
	first  int64  // place of the first one
}

const bufferedSums = 2048

func newBlockMap(folder string, size, blockSize int64) (*blockMap, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	file, err := os.CreateTemp(folder, "longhorn-blocks-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(filepath.Join(folder, filepath.Base(file.Name()))); err != nil {
		_ = file.Close()
		return nil, err
	}
	m := &blockMap{size: size, blockSize: blockSize, file: file}
	m.present = make([]uint64, (m.places()+63)/64)
	return m, nil
}

// places is the number of blocks of a backup without holes.
func (m *blockMap) places() int64 { return (m.size + m.blockSize - 1) / m.blockSize }

// length is the length of the block at a place: the last one may be short.
func (m *blockMap) length(place int64) int64 { return min(m.blockSize, m.size-place*m.blockSize) }

func (m *blockMap) has(place int64) bool { return m.present[place/64]>>(place%64)&1 != 0 }

// add adds a block of the list. No two blocks have the same place.
func (m *blockMap) add(offset int64, sum string) error {
	var digest [sumSize]byte
	if n, err := hex.Decode(digest[:], []byte(sum[:min(len(sum), 2*sumSize)])); err != nil || len(sum) != 2*sumSize ||
		n != sumSize || hex.EncodeToString(digest[:]) != sum {
		return api.Errorf(api.Corrupt, "the block at offset %d has the checksum %.80q; 64 small hexadecimal digits are "+
			"allowed", offset, sum)
	}
	if offset < 0 || offset >= m.size || offset%m.blockSize != 0 {
		return api.Errorf(api.Corrupt, "a block of %d bytes at offset %d does not fit %d bytes", m.blockSize, offset, m.size)
	}
	place := offset / m.blockSize
	if m.has(place) {
		return api.Errorf(api.Corrupt, "two blocks have the offset %d", offset)
	}
	m.present[place/64] |= 1 << (place % 64)
	m.bytes += m.length(place)
	if place != m.first+int64(len(m.buffer)/sumSize) || len(m.buffer) == bufferedSums*sumSize {
		if err := m.flush(); err != nil {
			return err
		}
		m.first = place
	}
	m.buffer = append(m.buffer, digest[:]...)
	return nil
}

// flush writes the buffer. It is the last call before sum.
func (m *blockMap) flush() error {
	_, err := m.file.WriteAt(m.buffer, m.first*sumSize)
	m.buffer = m.buffer[:0]
	return err
}

// sum is the checksum of the block at a place.
func (m *blockMap) sum(place int64) (string, error) {
	var digest [sumSize]byte
	if n, err := m.file.ReadAt(digest[:], place*sumSize); n < sumSize {
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		return "", err
	}
	return hex.EncodeToString(digest[:]), nil
}

// next is the first place from place on that has a block, or has none; end if there is no such place before.
func (m *blockMap) next(place, end int64, present bool) int64 {
	for ; place < end; place++ {
		word := m.present[place/64]
		if present && word == 0 || !present && word == ^uint64(0) {
			place |= 63
			continue
		}
		if m.has(place) == present {
			return place
		}
	}
	return end
}

func (m *blockMap) close() error { return m.file.Close() }
