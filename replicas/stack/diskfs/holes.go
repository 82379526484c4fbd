package diskfs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// HolesFile is a file of a disk with one block between two holes. The probe of a new disk cannot mount the file system
// again, because programs may use it; each later open of the disk, hence each open after a mount, compares the map of
// this file with the map that the file was made with. A disk whose files were copied by a tool that fills holes has
// another map: in a head, each filled hole would hide the data of a lower layer behind zeros.
const HolesFile = "holes"

const (
	holesSize = int64(1) << 20
	holesData = int64(512) << 10 // where the block is
)

// WriteHoles makes the holes file of the disk in dir, unless the file exists.
func WriteHoles(fsys file.FS, dir string) error {
	name := filepath.Join(dir, HolesFile)
	h, err := fsys.Open(name, os.O_RDONLY, 0)
	if err == nil {
		return h.Close()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	h, err = fsys.Open(name+".tmp", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	buf := block.AlignedBuffer(block.Size)
	copy(buf, "Drover compares which parts of this file are holes. Keep holes when you copy a disk.\n")
	// The size first: a file system may allocate blocks ahead behind a write at the end of a file.
	if err = h.Truncate(holesSize); err == nil {
		_, err = h.WriteAt(buf, holesData)
	}
	if err == nil {
		err = h.Datasync()
	}
	if err = errors.Join(err, h.Close()); err != nil {
		return errors.Join(err, fsys.Remove(name+".tmp"))
	}
	if err := fsys.Rename(name+".tmp", name); err != nil {
		return err
	}
	return fsys.SyncDir(dir)
}

// CheckHoles returns an error of kind corrupt if the map of the holes file in dir has changed, and fs.ErrNotExist for a
// disk of an earlier version, which has no such file.
func CheckHoles(fsys file.FS, dir string) (err error) {
	h, err := fsys.Open(filepath.Join(dir, HolesFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	from, to, err := file.NextData(int(h.Fd()), 0, holesSize)
	if err != nil {
		return err
	}
	next, _, err := file.NextData(int(h.Fd()), to, holesSize)
	if err != nil {
		return err
	}
	if from != holesData || to != holesData+blockSize || next != holesSize {
		return api.Errorf(api.Corrupt, "the holes of file %s have changed: bytes %d to %d are reported as data, not %d "+
			"to %d; a copy of a disk needs a tool that keeps holes, such as cp --archive --sparse=auto: copy the disk again",
			HolesFile, from, to, holesData, holesData+blockSize)
	}
	return nil
}
