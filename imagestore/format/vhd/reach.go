package vhd

import "drover.io/drover/block"

// Reach tells how far into the file a read of the virtual disk's bytes [off, off+n) goes: the first byte behind all
// that it needs of data. It waits for bitmaps only.
func (im *Image) Reach(off, n int64) (end int64, err error) {
	to := min(off+n, im.Size())
	if im.info.Fixed {
		return to, nil
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	for off < to {
		part, err := im.lookup(s, off, to-off)
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
