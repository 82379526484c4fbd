package block

import "unsafe"

// AlignedBuffer allocates n bytes that direct I/O accepts.
func AlignedBuffer(n int) []byte {
	b := make([]byte, n+Size)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (Size - 1))
	return b[skip : skip+n : skip+n]
}

// Aligned reports whether direct I/O accepts b at off.
func Aligned(b []byte, off int64) bool {
	return len(b) > 0 && (uintptr(unsafe.Pointer(unsafe.SliceData(b)))|uintptr(len(b))|uintptr(off))&(Size-1) == 0
}
