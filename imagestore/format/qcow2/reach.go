package qcow2

import "drover.io/drover/block"

// Reach returns the first byte of the file behind all data that a read of the virtual bytes [off, off+n) needs. Reach
// waits for tables only.
func (im *Image) Reach(off, n int64) (end int64, err error) {
	for to := min(off+n, im.h.size); off < to; {
		m, _, err := im.findMapping(off, to-off)
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
