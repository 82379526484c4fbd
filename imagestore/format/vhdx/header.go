package vhdx

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/bits"
	"strings"
	"unicode/utf16"

	"drover.io/drover/api"
)

const (
	magic = "vhdxfile"

	kib, mib     = 1 << 10, 1 << 20
	headersSize  = mib // identifier, two headers, two region tables
	headerSize   = 4 * kib
	tableSize    = 64 * kib // region and metadata tables
	maxEntries   = 2047
	maxEffective = 128 << 40 // bytes to which a log may grow a file

	flagLeaveAllocated = 1 << 0
	flagHasParent      = 1 << 1

	entryRequired = 1 << 2 // of the metadata
	entryUser     = 1 << 0
)

type guid [16]byte

// parseGUID returns the bytes in a file for the usual notation, whose first three parts are numbers.
func parseGUID(s string) (g guid) {
	var a uint32
	var b, c uint16
	var d []byte
	if _, err := fmt.Sscanf(strings.ReplaceAll(s, "-", ""), "%8x%4x%4x%16x", &a, &b, &c, &d); err != nil {
		panic(err)
	}
	le.PutUint32(g[:], a)
	le.PutUint16(g[4:], b)
	le.PutUint16(g[6:], c)
	copy(g[8:], d)
	return g
}

func (g guid) String() string {
	return fmt.Sprintf("%08X-%04X-%04X-%X-%X", le.Uint32(g[:]), le.Uint16(g[4:]), le.Uint16(g[6:]), g[8:10], g[10:])
}

var (
	regionBAT      = parseGUID("2DC27766-F623-4200-9D64-115E9BFD4A08")
	regionMetadata = parseGUID("8B7CA206-4790-4B9A-B8FE-575F050F886E")

	itemFile     = parseGUID("CAA16737-FA36-4D43-B3B6-33F0AA44E76B")
	itemSize     = parseGUID("2FA54224-CD1B-4876-B211-5DBED83BF4B8")
	itemID       = parseGUID("BECA12AB-B2E6-4523-93EF-C309E000C746")
	itemLogical  = parseGUID("8141BF1D-A96F-4709-BA47-F233A8FAAB5F")
	itemPhysical = parseGUID("CDA348C7-445D-4471-9CC9-E9885251C556")
	itemParent   = parseGUID("A8D35F2D-B30B-454D-ABF7-D3D84834AB0C")
)

// Detect reports whether a file with the first bytes head is a VHDX image. 8 bytes are enough.
func Detect(head []byte) bool { return bytes.HasPrefix(head, []byte(magic)) }

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	zeros      [4]byte
)

// checksum is the CRC-32C of b with zeros in the place of the checksum, the four bytes at 4.
func checksum(b []byte) uint32 {
	sum := crc32.Update(0, castagnoli, b[:4])
	sum = crc32.Update(sum, castagnoli, zeros[:])
	return crc32.Update(sum, castagnoli, b[8:])
}

func hasValidChecksum(b []byte, signature string) bool {
	return bytes.HasPrefix(b, []byte(signature)) && le.Uint32(b[4:]) == checksum(b)
}

func (im *Image) readIdentifier() error {
	head := make([]byte, min(im.fileSize, 520))
	if err := im.readFull(head, 0, "the file identifier"); err != nil {
		return err
	}
	if !Detect(head) {
		return api.Errorf(api.Invalid, "not a VHDX image: it does not start with %s", magic)
	}
	if im.fileSize < headersSize {
		return corrupt("the file ends inside the headers, at byte %d of %d: it was cut off", im.fileSize, headersSize)
	}
	var name []uint16
	for b := head[8:]; len(b) >= 2 && le.Uint16(b) != 0; b = b[2:] {
		name = append(name, le.Uint16(b))
	}
	im.info.Creator = string(utf16.Decode(name))
	return nil
}

type header struct {
	sequence uint64
	logID    guid
	log      span
}

// readHeader returns the current header of the two headers.
func (im *Image) readHeader() (*header, error) {
	both := make([]byte, 2*headerSize)
	var current []byte
	for i, off := range []int64{64 * kib, 128 * kib} {
		b := both[i*headerSize:][:headerSize]
		if err := im.readFull(b, off, "a header"); err != nil {
			return nil, err
		}
		if !hasValidChecksum(b, "head") {
			continue
		}
		switch first := current; {
		case first == nil || le.Uint64(b[8:]) > le.Uint64(first[8:]):
			current = b
		case le.Uint64(b[8:]) == le.Uint64(first[8:]) && !bytes.Equal(b, first):
			return nil, corrupt("the two headers differ and have the same sequence number: none of them is the current one")
		}
	}
	if current == nil {
		return nil, corrupt("neither of the two headers has a correct checksum")
	}
	if v := le.Uint16(current[66:]); v != 1 {
		return nil, api.Errorf(api.Unsupported, "format version %d cannot be read, only 1", v)
	}
	h := &header{sequence: le.Uint64(current[8:]), logID: guid(current[48:64])}
	length, off := int64(le.Uint32(current[68:])), le.Uint64(current[72:])
	switch {
	case length == 0:
		if h.logID != (guid{}) {
			return nil, corrupt("the header has a log with length 0")
		}
		return h, nil
	case length%mib != 0 || off%mib != 0 || off < headersSize || off > uint64(im.fileSize):
		return nil, corrupt("the log's place in the file (%d bytes at %#x) is not in whole MiB behind the headers", length,
			off)
	case length > im.fileSize-int64(off):
		return nil, corrupt("the log at %#x is not within the file of %d bytes: it was cut off", off, im.fileSize)
	}
	if v := le.Uint16(current[64:]); h.logID != (guid{}) && v != 0 {
		return nil, api.Errorf(api.Unsupported, "the log has version %d and must be replayed, which needs version 0; "+
			"attach the image once in the program that made it", v)
	}
	h.log = span{int64(off), int64(off) + length}
	return h, nil
}

type span struct{ from, to int64 }

func (s span) hits(o span) bool { return s.from < o.to && s.to > o.from }

// readRegions reads the region table, or the copy of a damaged region table.
func (im *Image) readRegions(h *header) (table, metadata span, err error) {
	b := make([]byte, tableSize)
	good := false
	for _, off := range []int64{192 * kib, 256 * kib} {
		if err := im.readFull(b, off, "a region table"); err != nil {
			return table, metadata, err
		}
		if good = hasValidChecksum(b, "regi"); good {
			break
		}
	}
	if !good {
		return table, metadata, corrupt("neither of the two region tables has a correct checksum")
	}
	count := le.Uint32(b[8:])
	if count > maxEntries {
		return table, metadata, corrupt("the region table has %d entries: it must be at most %d", count, maxEntries)
	}
	seen := []span{{0, headersSize}, h.log}
	for i := range count {
		e := b[16+i*32:][:32]
		id, off, length, flags := guid(e[:16]), le.Uint64(e[16:]), int64(le.Uint32(e[24:])), le.Uint32(e[28:])
		if off%mib != 0 || length%mib != 0 || length == 0 || off > uint64(im.fileSize) || length > im.fileSize-int64(off) {
			return table, metadata, corrupt("region %s (%d bytes at %#x) is not in whole MiB within the file of %d bytes", id,
				length, off, im.fileSize)
		}
		s := span{int64(off), int64(off) + length}
		for _, o := range seen {
			if s.hits(o) {
				return table, metadata, corrupt("region %s at %#x overlaps another region, the log or the headers", id, off)
			}
		}
		seen = append(seen, s)
		var to *span
		switch id {
		case regionBAT:
			to = &table
		case regionMetadata:
			to = &metadata
		default:
			if flags&1 != 0 {
				return table, metadata, api.Errorf(api.Unsupported, "the image needs the unknown region %s", id)
			}
			continue
		}
		if to.to != 0 {
			return table, metadata, corrupt("region %s exists twice", id)
		}
		*to = s
	}
	if table.to == 0 || metadata.to == 0 {
		return table, metadata, corrupt("the region table lacks the block allocation table or the metadata")
	}
	return table, metadata, nil
}

// readMetadata reads the description of the image.
func (im *Image) readMetadata(region span) error {
	b := make([]byte, tableSize)
	if err := im.readFull(b, region.from, "the metadata table"); err != nil {
		return err
	}
	if !bytes.HasPrefix(b, []byte("metadata")) {
		return corrupt("the metadata table at %#x does not start with metadata", region.from)
	}
	count := int(le.Uint16(b[10:]))
	if count > maxEntries {
		return corrupt("the metadata table has %d entries, more than %d", count, maxEntries)
	}
	items := map[guid][]byte{}
	for i := range count {
		e := b[32+i*32:][:32]
		id, off, length, flags := guid(e[:16]), int64(le.Uint32(e[16:])), int64(le.Uint32(e[20:])), le.Uint32(e[24:])
		size, known := map[guid]int64{itemFile: 8, itemSize: 8, itemID: 16, itemLogical: 4, itemPhysical: 4}[id]
		switch {
		case flags&entryUser != 0:
			if flags&entryRequired != 0 {
				return api.Errorf(api.Unsupported, "the image needs the unknown item %s", id)
			}
			continue
		case id == itemParent:
			continue // other metadata shows a parent
		case !known && flags&entryRequired != 0:
			return api.Errorf(api.Unsupported, "the image needs the unknown item %s", id)
		case !known:
			continue
		case items[id] != nil:
			return corrupt("item %s exists twice", id)
		case length < size || off < tableSize || off+length > region.to-region.from:
			return corrupt("item %s (%d bytes at %#x) is not within the region of %d bytes", id, length, off,
				region.to-region.from)
		}
		items[id] = make([]byte, size)
		if err := im.readFull(items[id], region.from+off, "an item"); err != nil {
			return err
		}
	}
	for _, id := range []guid{itemFile, itemSize, itemLogical} {
		if items[id] == nil {
			return corrupt("item %s is missing", id)
		}
	}
	return im.applyMetadata(le.Uint32(items[itemFile]), le.Uint32(items[itemFile][4:]), le.Uint64(items[itemSize]),
		le.Uint32(items[itemLogical]))
}

func (im *Image) applyMetadata(blockSize, flags uint32, size uint64, logical uint32) error {
	if flags&flagHasParent != 0 {
		return api.Errorf(api.Unsupported, "a differencing disk, whose parent is another file: "+
			"merge it in Hyper-V first")
	}
	switch {
	case blockSize < mib || blockSize > 256*mib || bits.OnesCount32(blockSize) != 1:
		return corrupt("the block size is %d bytes: it must be a power of two, from 1 to 256 MiB", blockSize)
	case logical != 512 && logical != 4096:
		return corrupt("the logical sector size is %d bytes: it must be 512 or 4096", logical)
	case size > uint64(im.limits.VirtualSize):
		return api.Errorf(api.OutOfRange, "the virtual size of %d bytes is above the limit of %d bytes", size,
			im.limits.VirtualSize)
	case size%uint64(logical) != 0:
		return corrupt("the virtual size of %d bytes is not a multiple of the sector size of %d", size, logical)
	}
	im.info.VirtualSize, im.info.BlockSize, im.info.LogicalSectorSize = int64(size), int64(blockSize), int64(logical)
	im.info.Fixed = flags&flagLeaveAllocated != 0
	im.blockBits = uint(bits.TrailingZeros32(blockSize))
	im.ratioBits = uint(23 + bits.TrailingZeros32(logical) - bits.TrailingZeros32(blockSize))
	return nil
}
