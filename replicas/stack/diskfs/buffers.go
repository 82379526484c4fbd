package diskfs

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// PunchMode is the mode of fallocate that gives space back and keeps the size.
const PunchMode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE

// AlignedBuffer allocates n bytes that direct I/O accepts.
func AlignedBuffer(n int) []byte {
	b := make([]byte, n+int(blockSize))
	skip := int(-uintptr(unsafe.Pointer(&b[0])) & uintptr(blockSize-1))
	return b[skip : skip+n : skip+n]
}

// Aligned reports whether direct I/O accepts b at off.
func Aligned(b []byte, off int64) bool {
	return len(b) > 0 && (uintptr(unsafe.Pointer(&b[0]))|uintptr(len(b))|uintptr(off))&uintptr(blockSize-1) == 0
}
