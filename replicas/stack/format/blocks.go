package format

import "unsafe"

// IsZero reports whether b holds only zeros. The length of b is a multiple of 8, and b is aligned to 8 bytes.
func IsZero(b []byte) bool {
	w := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
	for len(w) >= 8 {
		if w[0]|w[1]|w[2]|w[3]|w[4]|w[5]|w[6]|w[7] != 0 {
			return false
		}
		w = w[8:]
	}
	for _, x := range w {
		if x != 0 {
			return false
		}
	}
	return true
}
