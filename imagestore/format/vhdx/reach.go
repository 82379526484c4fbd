package vhdx

import "drover.io/drover/block"

// Reach returns the first byte of the file behind all data that a read of the virtual bytes [off, off+n) needs. Reach
// waits for tables only.
func (im *Image) Reach(off, n int64) (end int64, err error) {
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	for to := min(off+n, im.Size()); off < to; {
		entries, err := im.readEntries(s, off, to)
		if err != nil {
			return end, err
		}
		for ; len(entries) > 0; entries = entries[8:] {
			in := off & (1<<im.blockBits - 1)
			length := min(1<<im.blockBits-in, to-off)
			if entry := le.Uint64(entries); kindOf(entry) == block.Data {
				end = max(end, hostOf(entry)+in+length)
			}
			off += length
		}
	}
	return min(end, im.realSize), nil
}
