package archive

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"

	"drover.io/drover/api"
)

// The xz container (version 1.1.0 of its description): streams of blocks, each with an index. A block is a row of
// LZMA2 chunks that say their sizes.

const (
	xzMagic    = "\xfd7zXZ\x00"
	xzHeadSize = 12
	minDict    = 4 << 10
	maxDict    = 72 << 20 // xz -9 has 64 MiB
	// maxBlocks bounds the memory of the decoder's list of blocks: 16 bytes each, twice.
	maxBlocks = 1 << 20
	// The decoder allocates the dictionary for each block. A file may have it allocate this many bytes, and so many more
	// for each byte of the file.
	dictAllowance = 1 << 40
	dictPerByte   = 1 << 10
)

var xzFilters = map[uint64]string{0x03: "delta", 0x04: "BCJ x86", 0x05: "BCJ PowerPC", 0x06: "BCJ IA-64",
	0x07: "BCJ ARM", 0x08: "BCJ ARM-Thumb", 0x09: "BCJ SPARC", 0x0a: "BCJ ARM64", 0x0b: "BCJ RISC-V"}

// xzChecks are the sizes of the checks that the decoder knows: none, CRC32, CRC64, SHA-256.
var xzChecks = map[byte]int64{0: 0, 1: 4, 4: 8, 10: 32}

// xzGuard passes an xz file on to the decoder, and refuses files that the decoder accepts: a dictionary beyond the
// limit (the decoder allocates the size in the header of each block), endless lists of blocks, a file that ends between
// two blocks (the decoder takes the place for the end), data behind the end. xzGuard follows the structure by the sizes
// in the file; the decoder verifies the content.
type xzGuard struct {
	r    io.Reader
	err  error
	seen int64 // bytes that passed

	skip int64  // bytes that pass before the next part
	part []byte // received bytes of the next part
	want int    // size of the next part
	take func(part []byte) error

	check  int64 // size of the check of a block
	packed int64 // bytes of the open block
	blocks int   // of the stream; -1: behind it
	dicts  int64 // bytes of all dictionaries
	index  int64 // bytes of the index
	fields int   // numbers of the index left
}

func newXzGuard(r io.Reader) *xzGuard {
	g := &xzGuard{r: r}
	g.expectPart(xzHeadSize, g.streamHead)
	return g
}

// expectPart names the next part.
func (g *xzGuard) expectPart(n int, take func([]byte) error) { g.want, g.take = n, take }

func (g *xzGuard) Read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	n, err := g.r.Read(p)
	if g.err = g.checkBytes(p[:n]); g.err != nil {
		return 0, g.err
	}
	if err == io.EOF {
		g.err = g.endError()
		return n, g.err
	}
	return n, err
}

// endError returns the error for the end of the file here; io.EOF: a valid end.
func (g *xzGuard) endError() error {
	switch {
	case g.blocks >= 0 || g.skip > 0 || g.want != 4:
		return io.ErrUnexpectedEOF
	case len(g.part) > 0:
		return trailingError(Xz)
	}
	return io.EOF
}

// checkBytes handles the next bytes.
func (g *xzGuard) checkBytes(b []byte) error {
	for len(b) > 0 {
		if g.skip > 0 {
			n := min(g.skip, int64(len(b)))
			b, g.skip, g.seen = b[n:], g.skip-n, g.seen+n
			continue
		}
		n := min(g.want-len(g.part), len(b))
		g.part = append(g.part, b[:n]...)
		b, g.seen = b[n:], g.seen+int64(n)
		if len(g.part) < g.want {
			return nil
		}
		part := g.part
		g.part = g.part[:0]
		if err := g.take(part); err != nil {
			return err
		}
	}
	return nil
}

func (g *xzGuard) damagedError(what string) error {
	return api.Errorf(api.Corrupt, "xz: the archive is damaged before byte %d: %s", g.seen, what)
}

func hasValidCRC(b []byte) bool {
	n := len(b) - 4
	return crc32.ChecksumIEEE(b[:n]) == binary.LittleEndian.Uint32(b[n:])
}

func (g *xzGuard) streamHead(b []byte) error {
	if string(b[:6]) != xzMagic || !hasValidCRC(b[6:]) {
		return g.damagedError("the header of the stream is wrong")
	}
	var known bool
	if g.check, known = xzChecks[b[7]]; !known || b[6] != 0 {
		return api.Errorf(api.Unsupported, "xz: the file has checksums of an unknown kind (%#x)", b[6:8])
	}
	g.blocks = 0
	g.expectPart(1, g.blockSize)
	return nil
}

// blockSize is the size of a block's header, or the start of the index.
func (g *xzGuard) blockSize(b []byte) error {
	if b[0] == 0 {
		g.index, g.fields = 1, -1
		g.expectPart(1, g.indexField)
		return nil
	}
	if g.blocks++; g.blocks > maxBlocks {
		return api.Errorf(api.OutOfRange, "xz: the file has more than %d blocks", maxBlocks)
	}
	g.part = append(g.part, b[0]) // the checksum covers the size as well
	g.expectPart((int(b[0])+1)*4, g.blockHead)
	return nil
}

func (g *xzGuard) blockHead(b []byte) error {
	if !hasValidCRC(b) {
		return g.damagedError("the header of a block is wrong")
	}
	h := bytes.NewReader(b[2 : len(b)-4])
	flags := b[1]
	if flags&0x3c != 0 {
		return api.Errorf(api.Unsupported, "xz: a block has unknown flags (%#x)", flags)
	}
	for _, size := range []byte{0x40, 0x80} { // of the packed and the plain bytes
		if flags&size == 0 {
			continue
		}
		if _, err := binary.ReadUvarint(h); err != nil {
			return g.damagedError("the sizes of a block cannot be")
		}
	}
	id, err := binary.ReadUvarint(h)
	size, err2 := binary.ReadUvarint(h)
	props, err3 := h.ReadByte()
	switch {
	case err == nil && xzFilters[id] != "":
		return api.Errorf(api.Unsupported, "xz: the filter %s is not supported: pack it without", xzFilters[id])
	case err == nil && id != 0x21:
		return api.Errorf(api.Unsupported, "xz: the filter %#x is not supported", id)
	case err != nil || err2 != nil || err3 != nil || flags&3 != 0 || size != 1 || props > 40:
		return g.damagedError("the filters of a block cannot be")
	}
	dict := uint64(1<<32 - 1)
	if props < 40 {
		dict = uint64(2|props&1) << (props/2 + 11)
	}
	if dict > maxDict {
		return api.Errorf(api.Unsupported, "xz: the archive needs a dictionary of %d MiB, more than the allowed %d MiB: "+
			"pack the image with a smaller dictionary (xz -9 is fine)", (dict+1<<20-1)>>20, maxDict>>20)
	}
	if g.dicts += int64(dict); g.dicts > dictAllowance+g.seen*dictPerByte {
		return api.Errorf(api.OutOfRange, "xz: the file has many small blocks with a dictionary of %d MiB: pack it again "+
			"with larger blocks", dict>>20)
	}
	g.packed = 0
	g.expectPart(1, g.chunkStart)
	return nil
}

// chunkStart is the first byte of a chunk of LZMA2.
func (g *xzGuard) chunkStart(b []byte) error {
	g.packed++
	switch control := b[0]; {
	case control == 0: // the end of the block
		g.skip = -g.packed&3 + g.check
		g.expectPart(1, g.blockSize)
	case control >= 0xc0:
		g.expectPart(5, g.chunkSizes)
	case control >= 0x80:
		g.expectPart(4, g.chunkSizes)
	case control <= 2:
		g.expectPart(2, g.chunkSizes)
	default:
		return g.damagedError("a chunk has an unknown kind")
	}
	return nil
}

func (g *xzGuard) chunkSizes(b []byte) error {
	g.skip = int64(binary.BigEndian.Uint16(b)) + 1
	if len(b) > 2 {
		g.skip = int64(binary.BigEndian.Uint16(b[2:])) + 1
	}
	g.packed += int64(len(b)) + g.skip
	g.expectPart(1, g.chunkStart)
	return nil
}

// indexField is a byte of the index: of the number of its records, or of a number in one.
func (g *xzGuard) indexField(b []byte) error {
	if g.index++; b[0] >= 0x80 {
		return nil
	}
	if g.fields < 0 {
		g.fields = 2*g.blocks + 1
	}
	if g.fields--; g.fields == 0 {
		g.skip = -g.index&3 + 4 + xzHeadSize // padding, the index's checksum, the stream's footer
		g.blocks = -1
		g.expectPart(4, g.betweenStreams)
	}
	return nil
}

// betweenStreams is behind a stream: four zeros, or the start of another stream.
func (g *xzGuard) betweenStreams(b []byte) error {
	switch string(b) {
	case "\x00\x00\x00\x00":
		return nil
	case xzMagic[:4]:
		g.part = append(g.part, b...)
		g.expectPart(xzHeadSize, g.streamHead)
		return nil
	}
	return trailingError(Xz)
}
