package qcow2

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strings"

	"drover.io/drover/api"
)

const (
	magic = 0x514649fb // "QFI\xfb"

	// HeadSize is how many bytes of a file's start ReadHeader can make use of.
	HeadSize = 64 << 10

	headerV2    = 72
	headerV3    = 104
	maxL1       = 32 << 20 // bytes; the reference implementation's limit
	maxBacking  = 1023
	extFeatures = 0x6803f857

	incompatDirty      = 1 << 0
	incompatCorrupt    = 1 << 1
	incompatDataFile   = 1 << 2
	incompatCompressed = 1 << 3
	incompatExtendedL2 = 1 << 4
	incompatKnown      = 1<<5 - 1

	compatLazy = 1 << 0
)

// Compression types, as in the header.
const (
	compressZlib = 0
	compressZstd = 1
)

// Info describes an image.
type Info struct {
	Version       int
	VirtualSize   int64 // bytes
	ClusterSize   int64 // bytes
	Compression   string
	ExtendedL2    bool
	LazyRefcounts bool
	// Dirty: the writer did not close the image, so its reference counts may be wrong. They say what may be
	// overwritten; reading goes by the L1 and L2 tables alone, which such a writer keeps right.
	Dirty     bool
	Snapshots int // internal snapshots, which are ignored
	// Data is how many bytes of the virtual disk are data, and Compressed how many of them are in compressed clusters.
	// Open knows both; ReadHeader leaves them 0.
	Data, Compressed int64
}

// Limits bound the demands of an image. The zero value of a field means its default.
type Limits struct {
	VirtualSize int64 // bytes; default 64 TiB
	// Ratio bounds the bytes of data per byte of the file, once there are more than 64 MiB of data; default 2000.
	Ratio int64
	// Memory bounds the cached tables and clusters, besides the L1 table and the buffers of running reads; default 16 MiB.
	Memory int64
	// Lazy moves the check of each L2 table to its first use, for an image in transfer behind an io.ReaderAt that waits.
	// The size may be -1: unknown.
	Lazy bool
}

func (l Limits) withDefaults() Limits {
	if l.VirtualSize <= 0 {
		l.VirtualSize = 64 << 40
	}
	if l.Ratio <= 0 {
		l.Ratio = 2000
	}
	if l.Memory <= 0 {
		l.Memory = 16 << 20
	}
	return l
}

type header struct {
	version     uint32
	clusterBits uint
	size        int64
	l1Entries   int64 // entries for the virtual size
	l1Offset    int64
	compression uint8
	extended    bool
	info        Info
}

// Detect reports whether a file with the first bytes head is a qcow2 image of any version. Eight bytes are enough.
func Detect(head []byte) bool {
	return len(head) >= 8 && binary.BigEndian.Uint32(head) == magic
}

// ReadHeader describes the image in a file with the first bytes head, or returns why Open will refuse it, before the
// rest of the file exists. HeadSize bytes are always enough; a shorter file is passed whole.
func ReadHeader(head []byte, lim Limits) (Info, error) {
	h, err := parseHeader(head, lim.withDefaults())
	if err != nil {
		return Info{}, fmt.Errorf("qcow2: %w", err)
	}
	return h.info, nil
}

func corrupt(format string, args ...any) error { return api.Errorf(api.Corrupt, format, args...) }

func unsupported(format string, args ...any) error {
	return api.Errorf(api.Unsupported, format, args...)
}

func parseHeader(head []byte, lim Limits) (*header, error) {
	if !Detect(head) {
		return nil, api.Errorf(api.Invalid, "not a qcow2 image: it does not start with QFI\\xfb")
	}
	be := binary.BigEndian
	h := &header{version: be.Uint32(head[4:])}
	if h.version != 2 && h.version != 3 {
		return nil, unsupported("version %d cannot be read, only 2 and 3; convert it with: qemu-img convert -O qcow2",
			h.version)
	}
	length := headerV2
	if h.version == 3 {
		length = headerV3
	}
	if len(head) < length {
		return nil, corrupt("the file ends inside the header, at byte %d of %d: it was cut off", len(head), length)
	}
	if cb := be.Uint32(head[20:]); cb < 9 || cb > 21 {
		return nil, corrupt("cluster_bits is %d: it must be 9 to 21 (512 bytes to 2 MiB)", cb)
	}
	h.clusterBits = uint(be.Uint32(head[20:]))
	// The available part of the first cluster.
	first := head[:min(len(head), 1<<h.clusterBits)]

	var incompat, compat uint64
	if h.version == 3 {
		incompat, compat = be.Uint64(head[72:]), be.Uint64(head[80:])
		l := be.Uint32(head[100:])
		if l < headerV3 || l%8 != 0 || int64(l) > 1<<h.clusterBits {
			return nil, corrupt("header_length is %d: it must be a multiple of 8 from %d to the cluster size", l, headerV3)
		}
		if int(l) > len(first) {
			return nil, corrupt("the file ends inside the header, at byte %d of %d: it was cut off", len(first), l)
		}
		length = int(l)
		if order := be.Uint32(head[96:]); order > 6 {
			return nil, corrupt("refcount_order is %d: it must be at most 6", order)
		}
		if length > headerV3 {
			h.compression = head[headerV3]
		}
	}
	if incompat&incompatCorrupt != 0 {
		return nil, corrupt("the image is marked corrupt by its last writer; repair it with: qemu-img check -r all")
	}
	if unknown := incompat &^ incompatKnown; unknown != 0 {
		return nil, unsupported("the image needs %s; convert it with: qemu-img convert -O qcow2",
			featureNames(first, length, unknown))
	}
	if err := refuseFeatures(head, incompat); err != nil {
		return nil, err
	}
	switch typed := incompat&incompatCompressed != 0; {
	case typed != (h.compression != compressZlib):
		return nil, corrupt("compression type %d contradicts the compression type feature bit", h.compression)
	case h.compression > compressZstd:
		return nil, unsupported("compression type %d cannot be read, only zlib (0) and zstd (1); "+
			"convert it with: qemu-img convert -O qcow2", h.compression)
	}
	h.extended = incompat&incompatExtendedL2 != 0
	if h.extended && h.clusterBits < 14 {
		return nil, corrupt("extended L2 entries need clusters of 16 KiB or more, these have %d bytes", 1<<h.clusterBits)
	}
	if err := h.parseSizes(head, lim); err != nil {
		return nil, err
	}
	h.info = Info{
		Version: int(h.version), VirtualSize: h.size, ClusterSize: 1 << h.clusterBits, Compression: "zlib",
		ExtendedL2: h.extended, LazyRefcounts: compat&compatLazy != 0, Dirty: incompat&incompatDirty != 0,
		Snapshots: int(be.Uint32(head[60:])),
	}
	if h.compression == compressZstd {
		h.info.Compression = "zstd"
	}
	return h, nil
}

// refuseFeatures refuses features that the format allows but a self-contained image may not have.
func refuseFeatures(head []byte, incompat uint64) error {
	be := binary.BigEndian
	switch m := be.Uint32(head[32:]); m {
	case 0:
	case 1, 2:
		return unsupported("the image is encrypted (%s): give a decrypted one, made with: qemu-img convert",
			[]string{"", "AES", "LUKS"}[m])
	default:
		return unsupported("the image is encrypted with unknown method %d: give a decrypted one", m)
	}
	if incompat&incompatDataFile != 0 {
		return unsupported("the image keeps its data in an external data file: " +
			"make one file of it with: qemu-img convert -O qcow2")
	}
	if off := be.Uint64(head[8:]); off != 0 {
		name, n := "", be.Uint32(head[16:])
		if n > 0 && n <= maxBacking && off < uint64(len(head)) && uint64(len(head))-off >= uint64(n) {
			name = fmt.Sprintf(" %q", head[off:off+uint64(n)])
		}
		return unsupported("the image has a backing file%s: make one image of both with: qemu-img convert -O qcow2", name)
	}
	return nil
}

func (h *header) parseSizes(head []byte, lim Limits) error {
	be := binary.BigEndian
	size := be.Uint64(head[24:])
	if size > uint64(lim.VirtualSize) {
		return api.Errorf(api.OutOfRange, "the virtual size of %d bytes is above the limit of %d bytes", size,
			lim.VirtualSize)
	}
	h.size = int64(size)
	perTable := int64(1) << h.tableBits()
	h.l1Entries = h.size / perTable
	if h.size%perTable != 0 {
		h.l1Entries++
	}
	// The table may be longer: saved machine states lie behind the end of the disk.
	entries := int64(be.Uint32(head[36:]))
	if entries < h.l1Entries {
		return corrupt("the L1 table has %d entries, the virtual size of %d bytes needs %d", entries, h.size, h.l1Entries)
	}
	if entries*8 > maxL1 {
		return api.Errorf(api.OutOfRange, "the L1 table of %d entries is above the limit of %d", entries, maxL1/8)
	}
	off := be.Uint64(head[40:])
	if off>>56 != 0 || h.l1Entries > 0 && (off == 0 || off&(1<<h.clusterBits-1) != 0) {
		return corrupt("the L1 table's offset %#x is not that of a cluster behind the header", off)
	}
	h.l1Offset = int64(off)
	return nil
}

// tableBits is the log of the bytes of the disk that one L2 table maps.
func (h *header) tableBits() uint { return h.clusterBits + h.clusterBits - h.entryBits() }

// entryBits is the log of the size of an L2 entry.
func (h *header) entryBits() uint {
	if h.extended {
		return 4
	}
	return 3
}

// featureNames names the incompatible features in set, by the image's own table if it exists.
func featureNames(first []byte, at int, set uint64) string {
	be := binary.BigEndian
	names := map[int]string{}
	for at+8 <= len(first) {
		kind, n := be.Uint32(first[at:]), int64(be.Uint32(first[at+4:]))
		at += 8
		if kind == 0 || n > int64(len(first)-at) {
			break
		}
		if kind == extFeatures {
			for e := first[at : at+int(n)]; len(e) >= 48; e = e[48:] {
				if name, _, _ := strings.Cut(string(e[2:48]), "\x00"); e[0] == 0 && name != "" {
					names[int(e[1])] = name
				}
			}
		}
		at += int(n+7) &^ 7
	}
	var s []string
	for ; set != 0; set &= set - 1 {
		bit := bits.TrailingZeros64(set)
		if name, ok := names[bit]; ok {
			s = append(s, fmt.Sprintf("the unknown feature %q (bit %d)", name, bit))
		} else {
			s = append(s, fmt.Sprintf("the unknown feature of bit %d", bit))
		}
	}
	return strings.Join(s, " and ")
}
