package vhdx

import (
	"math/bits"

	"drover.io/drover/block"
)

// States of a block, in the lower bits of its entry. Only an existing block has an offset in its entry.
const (
	stateNotPresent   = 0
	stateUndefined    = 1
	stateZero         = 2
	stateUnmapped     = 3
	stateUnmappedOld  = 5 // as written before the format was final
	stateFullyPresent = 6
	statePartly       = 7 // parts are in the parent

	stateMask  = 7
	offsetMask = ^uint64(mib - 1)
	maxVisits  = 64 // parts of the table per call of Next
)

func kindOf(entry uint64) block.Kind {
	switch entry & stateMask {
	case stateFullyPresent:
		return block.Data
	case stateZero:
		return block.Zero
	}
	return block.Hole
}

func hostOf(entry uint64) int64 { return int64(entry & offsetMask) }

// entryAt returns the place of a block's entry: each ratio entries of blocks are followed by an entry of a sector
// bitmap, which only disks with a parent use.
func (im *Image) entryAt(number int64) int64 { return im.table + (number+number>>im.ratioBits)*8 }

// readEntries reads the entries of the blocks from off to end, as many as fit and are adjacent.
func (im *Image) readEntries(s *scratch, off, end int64) ([]byte, error) {
	first, last := off>>im.blockBits, (end-1)>>im.blockBits
	last = min(last, first|(1<<im.ratioBits-1), first+int64(len(s.entries))/8-1)
	b := s.entries[:(last-first+1)*8]
	return b, im.readFull(b, im.entryAt(first), "the block allocation table")
}

// checkBlocks walks the block allocation table. Afterwards every block is known to be inside the file, to exist once,
// and to be outside of metadata.
func (im *Image) checkBlocks(table span, own []span) error {
	size, length := im.info.VirtualSize, int64(1)<<im.blockBits
	im.table = table.from
	blocks := (size + length - 1) >> im.blockBits
	if blocks == 0 {
		return nil
	}
	if need := im.entryAt(blocks-1) + 8; need > table.to {
		return corrupt("the block allocation table of %d bytes is too small: the virtual size of %d bytes needs %d",
			table.to-table.from, size, need-table.from)
	}
	used := make([]uint64, im.fileSize/mib/64+1) // a bit per MiB of the file
	var s scratch
	for off := int64(0); off < size; {
		entries, err := im.readEntries(&s, off, size)
		if err != nil {
			return err
		}
		for ; len(entries) > 0; entries = entries[8:] {
			entry, number := le.Uint64(entries), off>>im.blockBits
			n := min(length, size-off)
			off += n
			switch state := entry & stateMask; state {
			case stateNotPresent, stateUndefined, stateZero, stateUnmapped, stateUnmappedOld:
				continue
			case stateFullyPresent:
			case statePartly:
				return corrupt("block %d is only partly there, and the rest has no parent to be in", number)
			default:
				return corrupt("block %d has the unknown state %d", number, state)
			}
			host := span{hostOf(entry), hostOf(entry) + n}
			if host.from < 0 || host.to < host.from || host.to > im.fileSize {
				return corrupt("block %d at %#x is not within the file of %d bytes: it was cut off", number,
					entry&offsetMask, im.fileSize)
			}
			for _, o := range own {
				if host.hits(o) {
					return corrupt("block %d at %#x lies in the image's headers, log or tables", number, host.from)
				}
			}
			if !markBits(used, host.from/mib, (host.to-1)/mib) {
				return corrupt("block %d at %#x overlaps another block", number, host.from)
			}
			im.info.Data += n
		}
	}
	return nil
}

// markBits sets the bits from first to last, and reports whether all were clear.
func markBits(used []uint64, first, last int64) bool {
	for first <= last {
		word, bit := first/64, uint(first%64)
		n := min(last-first+1, int64(64-bit))
		set := ^uint64(0) >> (64 - uint(n)) << bit
		if bits.OnesCount64(used[word]&set) > 0 {
			return false
		}
		used[word] |= set
		first += n
	}
	return true
}
