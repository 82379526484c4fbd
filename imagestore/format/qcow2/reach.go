package qcow2

import "drover.io/drover/block"

// Reach tells how far into the file a read of the virtual disk's bytes [off, off+n) goes: the first byte behind all
// that it needs of data. It waits for tables only.
func (im *Image) Reach(off, n int64) (end int64, err error) {
	for to := min(off+n, im.h.size); off < to; {
		m, _, err := im.span(off, to-off)
		if err != nil {
			return end, err
		}
		switch {
		case m.packed:
			end = max(end, m.host+m.bytes)
		case m.kind == block.Data:
			end = max(end, m.host+m.n)
		}
		off += m.n
	}
	return end, nil
}
