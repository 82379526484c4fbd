package vhd

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"unicode/utf16"

	"drover.io/drover/api"
)

const (
	cookie        = "conectix"
	cookieDynamic = "cxsparse"

	sector      = 512
	footerSize  = 512
	dynamicSize = 1024
	maxBlock    = 256 << 20
	maxBAT      = 4 << 20 // entries
	maxOffset   = 1 << 62

	kindFixed        = 2
	kindDynamic      = 3
	kindDifferencing = 4

	checksumFooter  = 64 // offset
	checksumDynamic = 36

	// The largest disk that a geometry can describe; larger ones have this geometry too.
	maxGeometry = 65535 * 16 * 255
	maxSectors  = 65535 * 255 * 255
)

var be = binary.BigEndian

func corrupt(format string, args ...any) error { return api.Errorf(api.Corrupt, format, args...) }

// Detect reports whether a file with the first bytes head is a dynamic or differencing VHD image. A fixed image starts
// with its disk, see DetectEnd. 8 bytes are enough.
func Detect(head []byte) bool { return bytes.HasPrefix(head, []byte(cookie)) }

// DetectEnd reports whether a file with the last bytes tail, at least 512, is a VHD image. Without a VHD head the file
// is a fixed disk.
func DetectEnd(tail []byte) bool {
	return len(tail) >= footerSize && Detect(tail[len(tail)-footerSize:])
}

// checksum is the complement of the sum of all bytes except the checksum itself.
func checksum(b []byte, at int) uint32 {
	sum := uint32(0)
	for i, c := range b {
		if i < at || i >= at+4 {
			sum += uint32(c)
		}
	}
	return ^sum
}

type footer struct {
	kind       uint32
	dynamic    uint64 // offset of the dynamic header
	creator    string
	current    uint64 // bytes
	geometry   int64  // sectors
	size       int64  // bytes
	byGeometry bool
}

// readFooter returns the valid footer: at the end, or the copy at the start.
func (im *Image) readFooter() (*footer, error) {
	if im.fileSize < footerSize {
		return nil, api.Errorf(api.Invalid, "not a VHD image: it has %d bytes", im.fileSize)
	}
	front, end := make([]byte, footerSize), make([]byte, footerSize)
	if im.stream {
		if err := im.readFull(front, 0, "the header"); err != nil {
			return nil, err
		}
		if isValidFooter(front) {
			if f, err := parseFooter(front); err == nil && f.kind != kindFixed {
				im.front = f
				return f, nil
			}
		}
	}
	if err := im.readFull(end, im.fileSize-footerSize, "the footer"); err != nil {
		return nil, err
	}
	if isValidFooter(end) {
		return parseFooter(end)
	}
	if err := im.readFull(front, 0, "the header"); err != nil {
		return nil, err
	}
	switch {
	case !Detect(front) && !Detect(end):
		return nil, api.Errorf(api.Invalid, "not a VHD image: neither its start nor its last sector says %s", cookie)
	case !Detect(front):
		return nil, corrupt("the footer's checksum is wrong")
	case checksum(front, checksumFooter) != be.Uint32(front[checksumFooter:]):
		return nil, corrupt("the checksum of the header is wrong, and the image has no good footer at the end")
	}
	im.info.FrontCopy = true
	f, err := parseFooter(front)
	if err == nil && f.kind == kindFixed {
		return nil, corrupt("the disk is fixed, but its footer is not at the end: the file was cut off")
	}
	return f, err
}

func isValidFooter(b []byte) bool {
	return Detect(b) && checksum(b, checksumFooter) == be.Uint32(b[checksumFooter:])
}

// Settled compares the footer copy of a stream with a valid footer at the end.
func (im *Image) Settled() error {
	if im.front == nil {
		return nil
	}
	b := make([]byte, footerSize)
	if err := im.readFull(b, im.fileSize-footerSize, "the footer"); err != nil {
		return fmt.Errorf("vhd: %w", err)
	}
	if !isValidFooter(b) {
		im.info.FrontCopy = true
		return nil
	}
	f, err := parseFooter(b)
	if err == nil {
		err = f.setSize(im.limits)
	}
	if err != nil {
		return fmt.Errorf("vhd: %w", err)
	}
	if was := im.front; f.kind != was.kind || f.dynamic != was.dynamic || f.size != was.size {
		return fmt.Errorf("vhd: %w", corrupt("the footer at the end differs from its copy at the start: a program "+
			"changed the image and did not close it; import the image from a file of a node, which reads the footer"))
	}
	im.info.Creator, im.info.ByGeometry = f.creator, f.byGeometry
	return nil
}

func parseFooter(b []byte) (*footer, error) {
	if v := be.Uint32(b[12:]); v>>16 != 1 {
		return nil, api.Errorf(api.Unsupported, "format version %d.%d cannot be read, only 1", v>>16, v&0xffff)
	}
	f := &footer{kind: be.Uint32(b[60:]), dynamic: be.Uint64(b[16:]), creator: string(b[28:32]),
		current: be.Uint64(b[48:])}
	f.geometry = int64(be.Uint16(b[56:])) * int64(b[58]) * int64(b[59])
	switch f.kind {
	case kindFixed, kindDynamic, kindDifferencing:
		return f, nil
	}
	return nil, api.Errorf(api.Unsupported, "disk type %d cannot be read, only fixed (2) and dynamic (3)", f.kind)
}

// setSize determines the size of the disk.
func (f *footer) setSize(lim Limits) error {
	if f.current > uint64(lim.VirtualSize) {
		return api.Errorf(api.OutOfRange, "the virtual size of %d bytes is above the limit of %d bytes", f.current,
			lim.VirtualSize)
	}
	f.size = int64(f.current) / sector * sector
	// Both write the size that was asked for next to a geometry that is not of that size.
	if (f.creator == "vpc " || f.creator == "qemu") && f.geometry != 0 && f.geometry != maxGeometry {
		f.byGeometry = true
		f.size = f.geometry * sector
	}
	f.creator = strings.TrimRight(f.creator, " \x00")
	if f.size > lim.VirtualSize || f.size > maxSectors*sector {
		return api.Errorf(api.OutOfRange, "the virtual size of %d bytes is above the limit of %d bytes", f.size,
			min(lim.VirtualSize, maxSectors*sector))
	}
	return nil
}

// dynamic header
type header struct {
	table   int64 // offset of the allocation table
	entries int64 // entries for the size
	block   int64 // bytes
	own     span
}

func (im *Image) readDynamicHeader(f *footer) (*header, error) {
	if f.dynamic > maxOffset {
		return nil, corrupt("the dynamic header's offset %#x is outside of the file", f.dynamic)
	}
	b := make([]byte, dynamicSize)
	if err := im.readFull(b, int64(f.dynamic), "the dynamic header"); err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(b, []byte(cookieDynamic)) {
		return nil, corrupt("the dynamic header at %#x does not start with %s", f.dynamic, cookieDynamic)
	}
	if checksum(b, checksumDynamic) != be.Uint32(b[checksumDynamic:]) {
		return nil, corrupt("the dynamic header's checksum is wrong")
	}
	if f.kind == kindDifferencing {
		return nil, api.Errorf(api.Unsupported,
			"a differencing disk%s: make one image of both with: qemu-img convert -O vpc, or merge it in Hyper-V",
			parentName(b[64:576]))
	}
	if v := be.Uint32(b[24:]); v>>16 != 1 {
		return nil, api.Errorf(api.Unsupported, "dynamic header version %d.%d cannot be read, only 1", v>>16, v&0xffff)
	}
	h := &header{block: int64(be.Uint32(b[32:])), own: span{int64(f.dynamic), int64(f.dynamic) + dynamicSize}}
	switch {
	case h.block < sector || bits.OnesCount64(uint64(h.block)) != 1:
		return nil, corrupt("the block size is %d bytes: it must be a power of two, of 512 or more", h.block)
	case h.block > maxBlock:
		return nil, api.Errorf(api.OutOfRange, "the block size of %d bytes is above the limit of %d", h.block, maxBlock)
	}
	h.entries = (f.size + h.block - 1) / h.block
	if n := int64(be.Uint32(b[28:])); n < h.entries {
		return nil, corrupt("the allocation table has %d entries, the virtual size of %d bytes needs %d", n, f.size,
			h.entries)
	}
	if h.entries > maxBAT {
		return nil, api.Errorf(api.OutOfRange, "the allocation table of %d entries is above the limit of %d", h.entries,
			maxBAT)
	}
	off := be.Uint64(b[16:])
	if off > maxOffset {
		return nil, corrupt("the allocation table's offset %#x is outside of the file", off)
	}
	h.table = int64(off)
	return h, nil
}

// parentName returns the name of the parent for a message.
func parentName(b []byte) string {
	var s []uint16
	for ; len(b) >= 2 && (b[0] != 0 || b[1] != 0); b = b[2:] {
		s = append(s, be.Uint16(b))
	}
	if len(s) == 0 {
		return ""
	}
	return " over the parent " + strconv.Quote(string(utf16.Decode(s)))
}
