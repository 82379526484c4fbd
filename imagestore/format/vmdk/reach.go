package vmdk

import "drover.io/drover/block"

// Reach returns the first byte of the file behind all data that a read of the virtual bytes [off, off+n) needs. Reach
// waits for tables and the markers of compressed grains only.
func (im *Image) Reach(off, n int64) (end int64, err error) {
	u := unpackers.Get().(*unpacker)
	defer unpackers.Put(u)
	for to := min(off+n, im.h.size); off < to; {
		part, err := im.lookupEntries(u, off, to-off)
		if err != nil {
			return end, err
		}
		for off = part.end; part.left(); {
			run := part.next(true)
			switch {
			case run.kind != block.Data:
			case im.h.compressed:
				if err := im.readFull(u.mark[:], run.host, "a grain's marker"); err != nil {
					return end, err
				}
				end = max(end, run.host+markSize+int64(le.Uint32(u.mark[8:])))
			default:
				end = max(end, run.host+run.n)
			}
		}
	}
	return min(end, im.fileSize), nil
}
