package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// Probe checks that the file system at path keeps a map that a head can be recovered from: 4 KiB of zeros written into
// a hole must be reported as exactly 4 KiB of data, and a punched hole as a hole. File systems with large blocks or
// clusters, and those that compress, fail this; a head on them would lose or invent blocks. On a new disk the file
// system has to report the same once it has read the map from its device again: the kernel drops its unused inodes for
// that.
func Probe(ctx context.Context, path string) error {
	_, err := os.Lstat(filepath.Join(path, diskFile))
	if errors.Is(err, fs.ErrNotExist) {
		return probe(ctx, path, evictInodes)
	}
	return probe(ctx, path, func() error { return nil })
}

const (
	probeSize = int64(1) << 40
	probeAt   = int64(12) << 20
)

// probe is Probe with the call that makes the file system forget a closed file's map.
func probe(ctx context.Context, path string, evict func() error) (err error) {
	name := filepath.Join(path, fmt.Sprintf(".probe-%d", os.Getpid()))
	_ = os.Remove(name)
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return classify(err)
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(name)) }()
	if err := f.Truncate(probeSize); err != nil {
		return api.Errorf(api.Unsupported, "the file system cannot hold a sparse file of 1 TiB: %w", err)
	}
	zeros := alignedBuffer(int(blockSize))
	// A block that is half written when the power goes must not become half a block of data over lower data.
	if _, err := unix.Pwrite(int(f.Fd()), zeros[:512], probeAt); err != nil {
		return classify(fmt.Errorf("write 512 bytes: %w", err))
	}
	if err := f.Sync(); err != nil {
		return classify(err)
	}
	if err := expectBlock(f, "the file system's blocks are not of 4 KiB: 512 bytes at %d are reported as [%d, %d); make "+
		"it with 4 KiB blocks"); err != nil {
		return err
	}
	if err := expectHole(f); err != nil {
		return err
	}
	for _, direct := range []bool{false, true} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if direct {
			if _, err := unix.FcntlInt(f.Fd(), unix.F_SETFL, unix.O_DIRECT); err != nil {
				return api.Errorf(api.Unsupported, "the file system has no direct I/O: %w", err)
			}
		}
		if _, err := unix.Pwrite(int(f.Fd()), zeros, probeAt); err != nil {
			return classify(fmt.Errorf("write 4 KiB: %w", err))
		}
		if err := f.Sync(); err != nil {
			return classify(err)
		}
		if err := expectBlock(f, noBlockMap); err != nil {
			return err
		}
		if f, err = reopen(f, name, evict); err != nil {
			return err
		}
		if err := expectBlock(f, noBlockMap); err != nil {
			return err
		}
		if err := expectHole(f); err != nil {
			return err
		}
	}
	return nil
}

const noBlockMap = "the file system does not keep a map of 4 KiB blocks: 4 KiB of zeros at %d are reported as " +
	"[%d, %d); use ext4 without bigalloc, xfs or btrfs, with 4 KiB blocks and no compression"

// reopen closes a file and opens it again, so that the file system reads the file's map from the device. On an error
// the file that was passed is still the one to close.
func reopen(f *os.File, name string, evict func() error) (*os.File, error) {
	if err := f.Close(); err != nil {
		return f, classify(err)
	}
	if err := evict(); err != nil {
		return f, err
	}
	again, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return f, classify(err)
	}
	return again, nil
}

// evictInodes asks the kernel to drop the inodes that no process uses (Documentation/admin-guide/sysctl/vm.rst). Where
// the process may not ask, as in a container with a read-only /proc/sys, the maps in memory have to do.
func evictInodes() error {
	err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// expectBlock checks that the file holds exactly the block that was written; refusal takes three offsets.
func expectBlock(f *os.File, refusal string) error {
	from, to, err := file.NextData(int(f.Fd()), 0, probeSize)
	if err != nil {
		return api.Errorf(api.Unsupported, "the file system does not report holes: %w", err)
	}
	if from != probeAt || to != probeAt+blockSize {
		return api.Errorf(api.Unsupported, refusal, probeAt, from, to)
	}
	return nil
}

// expectHole punches the block out, and checks that the file holds nothing.
func expectHole(f *os.File) error {
	if err := unix.Fallocate(int(f.Fd()), punchMode, probeAt, blockSize); err != nil {
		return api.Errorf(api.Unsupported, "the file system cannot punch holes: %w", err)
	}
	from, _, err := file.NextData(int(f.Fd()), 0, probeSize)
	if err != nil {
		return err
	}
	if from != probeSize {
		return api.Errorf(api.Unsupported, "the file system still reports data at %d after a hole was punched", from)
	}
	return nil
}

const punchMode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE

// alignedBuffer is n bytes that direct I/O accepts.
func alignedBuffer(n int) []byte {
	b := make([]byte, n+int(blockSize))
	skip := int(-uintptr(unsafe.Pointer(&b[0])) & uintptr(blockSize-1))
	return b[skip : skip+n : skip+n]
}

func aligned(b []byte, off int64) bool {
	return len(b) > 0 && (uintptr(unsafe.Pointer(&b[0]))|uintptr(len(b))|uintptr(off))&uintptr(blockSize-1) == 0
}
