package device

import "unsafe"

// The FUSE protocol (include/uapi/linux/fuse.h), as far as one file with direct I/O needs the protocol.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opSetattr     = 4
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opStatfs      = 17
	opRelease     = 18
	opFsync       = 20
	opFlush       = 25
	opInit        = 26
	opOpendir     = 27
	opReleasedir  = 29
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
	opFallocate   = 43

	capAsyncRead = 1 << 0
	capBigWrites = 1 << 5
	capAsyncDIO  = 1 << 15
	capMaxPages  = 1 << 22
	capInitExt   = 1 << 30
	capResend    = 1 << 39

	openDirectIO       = 1 << 0
	openNoFlush        = 1 << 5
	openParallelWrites = 1 << 6

	setattrSize = 1 << 3

	notifyResend = 7

	nodeRoot = 1
	nodeFile = 2

	protoMajor, protoMinor = 7, 41
)

type inHeader struct {
	length, opcode uint32
	unique, node   uint64
	uid, gid, pid  uint32
	extLen, _      uint16
}

type outHeader struct {
	length uint32
	err    int32
	unique uint64
}

type initIn struct {
	major, minor, readahead, flags, flags2 uint32
	_                                      [11]uint32
}

type initOut struct {
	major, minor, readahead, flags uint32
	background, congestion         uint16
	maxWrite, timeGran             uint32
	maxPages, mapAlign             uint16
	flags2, stackDepth             uint32
	_                              [12]uint16
}

type attr struct {
	ino, size, blocks, atime, mtime, ctime                                   uint64
	atimeNs, mtimeNs, ctimeNs, mode, nlink, uid, gid, rdev, blockSize, flags uint32
}

type attrOut struct {
	valid      uint64
	validNs, _ uint32
	attr       attr
}

type entryOut struct {
	node, generation, entryValid, attrValid uint64
	entryNs, attrNs                         uint32
	attr                                    attr
}

type setattrIn struct {
	valid, _ uint32
	fh, size uint64
}

type openOut struct {
	fh       uint64
	flags, _ uint32
}

type ioIn struct { // READ and WRITE
	fh, offset  uint64
	size, flags uint32
	lockOwner   uint64
	openFlags   uint32
	_           uint32
}

type writeOut struct{ size, _ uint32 }

type fallocateIn struct {
	fh, offset, length uint64
	mode, _            uint32
}

type statfsOut struct {
	blocks, free, available, files, filesFree uint64
	blockSize, nameLen, fragSize, _           uint32
	_                                         [6]uint32
}

const (
	inSize    = int(unsafe.Sizeof(inHeader{}))
	outSize   = int(unsafe.Sizeof(outHeader{}))
	ioSize    = int(unsafe.Sizeof(ioIn{}))
	writeSize = int(unsafe.Sizeof(writeOut{}))
)

// view reads mem as a T. mem is page-aligned or follows a header, and so aligned well enough.
func view[T any](mem []byte) *T {
	_ = mem[unsafe.Sizeof(*new(T))-1]
	return (*T)(unsafe.Pointer(&mem[0]))
}

func put[T any](mem []byte, v T) int {
	*view[T](mem) = v
	return int(unsafe.Sizeof(v))
}
