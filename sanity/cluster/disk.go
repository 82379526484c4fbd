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
	image string // file with the disk's own file system; empty: a folder
}

// addDisk creates a disk of a machine without processes.
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

// View returns the owner's path of the disk.
func (d *MachineDisk) View(elem ...string) string {
	return d.m.View(filepath.Join(append([]string{d.Path}, elem...)...))
}

// Fill takes all room of a disk with its own file system; Free returns the room.
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
	_ = f.Sync() // an error only means a full disk
	return f.Close()
}

// Free removes the file of Fill.
func (d *MachineDisk) Free() error { return os.Remove(d.View("filler")) }

// Immutable makes all files of the disk refuse changes, like a disk that became read-only below its file system.
func (d *MachineDisk) Immutable(on bool) error {
	return filepath.WalkDir(d.View(), func(path string, e os.DirEntry, err error) error {
		if err == nil && (e.IsDir() || e.Type().IsRegular()) {
			err = setImmutable(path, on)
		}
		return err
	})
}

// ReadOnly makes the file system of a disk (ext4) refuse writes until PowerOff, as after an error of the device.
func (d *MachineDisk) ReadOnly() error {
	_, err := d.m.Run(context.Background(), "mount", "-o", "remount,abort", d.Path)
	return err
}

// loseUnsynced stops the file system of a disk (ext4 or xfs) like a power loss: the device never gets the unwritten
// part of the journal.
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

// Remove removes the disk during use; Return brings the disk back.
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

// Corrupt changes n bytes in each file of the disk that matches a pattern, and returns the number of changed files.
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
