package stack

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
)

// A process that is killed ends when the system calls that its threads are in have ended, and its successor, for which
// all I/O waits, begins then. To free a large file of many fragments takes a file system seconds, and longer where it
// tells the disk of each of them (the mount option discard): so files are emptied piece by piece.

// emptyTrash removes what is in the trash under a name.
func (d *Disk) emptyTrash(name string) error {
	dir := d.Join(trashDir, name)
	entries, err := d.FS.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return file.RemoveAll(d.FS, dir)
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		if err := d.removeLarge(dir + "/" + e.Name()); err != nil {
			return err
		}
	}
	return file.RemoveAll(d.FS, dir)
}

// removeLarge empties a large file that nobody else has, and removes it. Who reads a layer holds a lock on its file,
// and one who opened it before it came here and had no lock yet finds it without a name (openData).
func (d *Disk) removeLarge(name string) error {
	st, err := os.Lstat(name)
	if err != nil || diskfs.Allocated(st) < diskfs.LargeFile {
		return nil
	}
	h, err := d.FS.Open(name, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer h.Close()
	if err := diskfs.Flock(h, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil // it is freed when its readers have closed it
	}
	if st, err = h.Stat(); err != nil {
		return err
	}
	if diskfs.LinkCount(st) != 1 {
		return nil
	}
	e := diskfs.Emptier{Piece: diskfs.LeastPiece}
	for off := int64(0); off < st.Size(); {
		from, _, err := file.NextData(int(h.Fd()), off, st.Size())
		if err != nil || from >= st.Size() {
			break // the rest goes with the file
		}
		n := min(max(e.Piece, diskfs.LeastPiece), st.Size()-from)
		if err := e.Punch(h, from, n); err != nil {
			return err
		}
		off = from + n
	}
	return file.RemoveAll(d.FS, name)
}
