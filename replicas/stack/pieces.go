package stack

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/file"
)

// A process that is killed ends when the system calls that its threads are in have ended, and its successor, for which
// all I/O waits, begins then. To free a large file of many fragments takes a file system seconds, and longer where it
// tells the disk of each of them (the mount option discard): so files are emptied piece by piece.

// emptier knows how much can be freed at once.
type emptier struct{ piece int64 }

const (
	leastPiece = int64(64) << 10
	mostPiece  = int64(64) << 20
	pieceLong  = 20 * time.Millisecond // what one call is to take at most; half of it is not worth a smaller piece
	largeFile  = int64(1) << 20        // what is smaller is removed as it is
)

// punch frees a range of a file.
func (e *emptier) punch(h file.Handle, off, n int64) error {
	for end := off + n; off < end; {
		e.piece = min(max(e.piece, leastPiece), mostPiece)
		k := min(e.piece, end-off)
		began := time.Now()
		if err := h.Punch(off, k); err != nil {
			return err
		}
		off += k
		switch took := time.Since(began); {
		case took > pieceLong:
			e.piece /= 2
		case took < pieceLong/4 && k == e.piece:
			e.piece *= 2
		}
	}
	return nil
}

// emptyTrash removes what is in the trash under a name.
func (d *Disk) emptyTrash(name string) error {
	dir := d.path(trashDir, name)
	entries, err := d.fs.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return file.RemoveAll(d.fs, dir)
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		if err := d.removeLarge(dir + "/" + e.Name()); err != nil {
			return err
		}
	}
	return file.RemoveAll(d.fs, dir)
}

// removeLarge empties a large file that nobody else has, and removes it. Who reads a layer holds a lock on its file,
// and one who opened it before it came here and had no lock yet finds it without a name (openData).
func (d *Disk) removeLarge(name string) error {
	st, err := os.Lstat(name)
	if err != nil || allocated(st) < largeFile {
		return nil
	}
	h, err := d.fs.Open(name, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer h.Close()
	if err := flock(h, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil // it is freed when its readers have closed it
	}
	if st, err = h.Stat(); err != nil {
		return err
	}
	if names(st) != 1 {
		return nil
	}
	e := emptier{piece: leastPiece}
	for off := int64(0); off < st.Size(); {
		from, _, err := file.NextData(int(h.Fd()), off, st.Size())
		if err != nil || from >= st.Size() {
			break // the rest goes with the file
		}
		n := min(max(e.piece, leastPiece), st.Size()-from)
		if err := e.punch(h, from, n); err != nil {
			return err
		}
		off = from + n
	}
	return file.RemoveAll(d.fs, name)
}

// names is how many names a file has.
func names(st fs.FileInfo) uint64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return uint64(s.Nlink) //nolint:unconvert // it has 32 bits elsewhere
	}
	return 0
}
