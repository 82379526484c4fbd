package vhd

import "drover.io/drover/block"

// Reach returns the first byte of the file behind all data that a read of the virtual bytes [off, off+n) needs. Reach
// waits for bitmaps only.
func (im *Image) Reach(off, n int64) (end int64, err error) {
	to := min(off+n, im.Size())
	if im.info.Fixed {
		return to, nil
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	for off < to {
		part, err := im.lookupBlock(s, off, to-off)
		if err != nil {
			return end, err
		}
		for off = part.end; part.left(); {
			if kind, host, n := part.next(); kind == block.Data {
				end = max(end, host+n)
			}
		}
	}
	return end, nil
}
