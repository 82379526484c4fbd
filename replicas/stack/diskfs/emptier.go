package diskfs

import (
	"time"

	"drover.io/drover/block/file"
)

// Emptier frees ranges of files in pieces that the file system frees quickly. A killed process ends only after the
// system calls of its threads, and its successor, for which all I/O waits, begins then. A file system may take seconds
// to free a large file of many fragments, and longer if it passes each discard to the device.
type Emptier struct{ Piece int64 }

// Bounds of one call that frees a part of a file.
const (
	LeastPiece = int64(64) << 10
	mostPiece  = int64(64) << 20
	PieceLong  = 20 * time.Millisecond // how long one call may take
	LargeFile  = int64(1) << 20        // smaller files are removed at once
)

// Punch frees a range of a file.
func (e *Emptier) Punch(h file.Handle, off, n int64) error {
	for end := off + n; off < end; {
		e.Piece = min(max(e.Piece, LeastPiece), mostPiece)
		k := min(e.Piece, end-off)
		began := time.Now()
		if err := h.Punch(off, k); err != nil {
			return err
		}
		off += k
		switch took := time.Since(began); {
		case took > PieceLong:
			e.Piece /= 2
		case took < PieceLong/4 && k == e.Piece:
			e.Piece *= 2
		}
	}
	return nil
}
