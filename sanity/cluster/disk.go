package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// MachineDisk is a disk of a machine.
type MachineDisk struct {
	Path  string // on the machine
	Tags  []string
	m     *Machine
	image string // of a file system of its own; empty: a folder
}

// addDisk makes a disk of a machine that runs nothing yet.
func (m *Machine) addDisk(o Disk) error {
	n := strconv.Itoa(len(m.Disks) + 1)
	d := &MachineDisk{Path: filepath.Join(m.Dir, "disk"+n), Tags: o.Tags, m: m}
	if err := os.MkdirAll(d.Path, 0o700); err != nil {
		return err
	}
	if o.Size > 0 {
		d.image = d.Path + ".img"
		f, err := os.Create(d.image)
		if err == nil {
			err = errors.Join(f.Truncate(o.Size), f.Close())
		}
		if err != nil {
			return err
		}
		argv := []string{"mkfs.ext4", "-q", "-F", "-b4096", d.image}
		if o.FS == "xfs" {
			argv = []string{"mkfs.xfs", "-q", "-f", d.image}
		}
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", argv, err, out)
		}
		if _, err := m.Run(context.Background(), "mount", "-o", "loop", d.image, d.Path); err != nil {
			return err
		}
	}
	m.Disks = append(m.Disks, d)
	return nil
}

// View is where the owner sees the disk.
func (d *MachineDisk) View(elem ...string) string {
	return d.m.View(filepath.Join(append([]string{d.Path}, elem...)...))
}

// Fill takes all the room of a disk that is a file system of its own; Free gives it back.
func (d *MachineDisk) Fill() error {
	if d.image == "" {
		return errors.New("a folder is not filled: others have their files there too")
	}
	f, err := os.OpenFile(d.View("filler"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	chunk := make([]byte, 1<<20)
	for size := len(chunk); err == nil || size > 4096; {
		if err != nil {
			size /= 2
		}
		_, err = f.Write(chunk[:size])
	}
	if !errors.Is(err, unix.ENOSPC) {
		return errors.Join(err, f.Close())
	}
	_ = f.Sync() // what did not fit is not there
	return f.Close()
}

// Free gives back the room that Fill took.
func (d *MachineDisk) Free() error { return os.Remove(d.View("filler")) }

// Immutable makes all files of the disk refuse changes, as a disk does that went read-only beneath its file system.
func (d *MachineDisk) Immutable(on bool) error {
	return filepath.WalkDir(d.View(), func(path string, e os.DirEntry, err error) error {
		if err == nil && (e.IsDir() || e.Type().IsRegular()) {
			err = setImmutable(path, on)
		}
		return err
	})
}

// ReadOnly makes the file system of a disk of its own (ext4) refuse writes, as after an error of its device. It stays
// so until the machine is turned off.
func (d *MachineDisk) ReadOnly() error {
	_, err := d.m.Run(context.Background(), "mount", "-o", "remount,abort", d.Path)
	return err
}

// loseUnsynced stops the file system of a disk (ext4 or xfs) as a loss of power does: what is not in its journal on the
// device by now never gets there.
func (d *MachineDisk) loseUnsynced() error {
	fd, err := unix.Open(d.View(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	const goingDown, noLogFlush = 0x8004587d, 2 // FS_IOC_SHUTDOWN
	if err := unix.IoctlSetPointerInt(fd, goingDown, noLogFlush); err != nil {
		return fmt.Errorf("shut down the file system of %s: %w", d.Path, err)
	}
	return nil
}

// Remove takes the disk away under those who use it; Return brings it back.
func (d *MachineDisk) Remove() error {
	if d.image == "" {
		return os.Rename(d.Path, d.Path+".away")
	}
	_, err := d.m.Run(context.Background(), "umount", "-l", d.Path)
	return err
}

// Return brings a removed disk back.
func (d *MachineDisk) Return() error {
	if d.image == "" {
		return os.Rename(d.Path+".away", d.Path)
	}
	_, err := d.m.Run(context.Background(), "mount", "-o", "loop", d.image, d.Path)
	return err
}

// Corrupt changes n bytes of the files on the disk that match a pattern, and returns how many files it changed.
func (d *MachineDisk) Corrupt(pattern string, off int64, n int) (int, error) {
	files, err := filepath.Glob(d.View(pattern))
	if err != nil {
		return 0, err
	}
	for _, path := range files {
		if err := corrupt(path, off, n); err != nil {
			return 0, fmt.Errorf("corrupt %s: %w", path, err)
		}
	}
	return len(files), nil
}

func corrupt(path string, off int64, n int) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	b := make([]byte, n)
	k, err := f.ReadAt(b, off)
	if k < n {
		return errors.Join(err, f.Close())
	}
	for i := range b {
		b[i] ^= 0xff
	}
	_, err = f.WriteAt(b, off)
	return errors.Join(err, f.Sync(), f.Close())
}
