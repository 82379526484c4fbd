package format

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"drover.io/drover/block/file"
)

// Units of the file of checksums, in bytes unless said otherwise.
const (
	CRCSize       = 4
	CRCPageBits   = 10 // blocks per page of the file; readers read whole pages
	CRCPageBlocks = int64(1) << CRCPageBits
	CRCPageSize   = CRCPageBlocks * CRCSize // one block
	ChunkCRCsSize = int(ChunkSize>>BlockBits) * CRCSize
)

// CRCsLength is the length of the checksum file of a layer of size bytes: whole pages.
func CRCsLength(size int64) int64 {
	return (size>>BlockBits + CRCPageBlocks - 1) >> CRCPageBits * CRCPageSize
}

// BlockCRC is the checksum of one block.
func BlockCRC(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// AppendCRCs appends the checksums of the blocks in buf.
func AppendCRCs(dst, buf []byte) []byte {
	for ; len(buf) > 0; buf = buf[BlockSize:] {
		dst = binary.LittleEndian.AppendUint32(dst, BlockCRC(buf[:BlockSize]))
	}
	return dst
}

// ChunkCRCs returns the checksums of the blocks of a chunk with the content buf.
func ChunkCRCs(buf []byte) []byte { return AppendCRCs(make([]byte, 0, ChunkCRCsSize), buf) }

// PutCRCs writes the checksums of chunk c with the content buf.
func PutCRCs(h io.WriterAt, c int64, buf []byte) error {
	_, err := h.WriteAt(ChunkCRCs(buf), c*int64(ChunkCRCsSize))
	return err
}

// CopyCRCs copies the checksums of an unchanged chunk. Without checksums in from, readers compare the digest.
func CopyCRCs(to, from file.Handle, c int64) error {
	var room [ChunkCRCsSize]byte
	if from == nil {
		return nil
	}
	n, err := from.ReadAt(room[:], c*int64(ChunkCRCsSize))
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("checksums of chunk %d: %w", c, err)
	}
	_, err = to.WriteAt(room[:n], c*int64(ChunkCRCsSize))
	return err
}

// SealCRCs gives the checksum file its length and makes the file durable.
func SealCRCs(h file.Handle, size int64) error {
	return errors.Join(h.Truncate(CRCsLength(size)), h.Datasync(), h.Chmod(0o444))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
