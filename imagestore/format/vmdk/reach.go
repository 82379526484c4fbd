package vmdk

import "drover.io/drover/block"

// Reach tells how far into the file a read of the virtual disk's bytes [off, off+n) goes: the first byte behind all
// that it needs of data. It waits for tables and for the markers of compressed grains only.
func (im *Image) Reach(off, n int64) (end int64, err error) {
	u := unpackers.Get().(*unpacker)
	defer unpackers.Put(u)
	for to := min(off+n, im.h.size); off < to; {
		part, err := im.lookup(u, off, to-off)
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
