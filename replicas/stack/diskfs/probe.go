package diskfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// PunchMode is the mode of fallocate that gives space back and keeps the size.
const PunchMode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE

// Probe checks that the file system at path keeps a map for the recovery of heads: the file system must report 4 KiB
// of zeros in a hole as exactly 4 KiB of data, and a punched hole as a hole. File systems with other blocks, and those
// that store no zeros, fail the probe; a head on such a file system would lose or invent blocks.
//
// The probe does not mount the file system again, because programs may use it: see HolesFile.
func Probe(ctx context.Context, path string) (err error) {
	name := filepath.Join(path, fmt.Sprintf(".probe-%d", os.Getpid()))
	_ = os.Remove(name)
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return Classify(err)
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(name)) }()
	fd := int(f.Fd())
	const size, at = int64(1) << 40, int64(12) << 20
	if err := f.Truncate(size); err != nil {
		return api.Errorf(api.Unsupported, "the file system cannot hold a sparse file of 1 TiB: %w", err)
	}
	zeros := block.AlignedBuffer(block.Size)
	// A block that a loss of power leaves half written must not become half a block of data over lower data.
	if _, err := unix.Pwrite(fd, zeros[:512], at); err != nil {
		return Classify(fmt.Errorf("write 512 bytes: %w", err))
	}
	if err := f.Sync(); err != nil {
		return Classify(err)
	}
	if from, to, err := file.NextData(fd, 0, size); err != nil {
		return api.Errorf(api.Unsupported, "the file system does not report holes: %w", err)
	} else if from != at || to != at+blockSize {
		return api.Errorf(api.Unsupported, "the file system's blocks are not of 4 KiB: 512 bytes at %d are reported as "+
			"[%d, %d); make the file system with 4 KiB blocks", at, from, to)
	}
	if err := unix.Fallocate(fd, PunchMode, at, blockSize); err != nil {
		return api.Errorf(api.Unsupported, "the file system cannot punch holes: %w", err)
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
		if _, err := unix.Pwrite(fd, zeros, at); err != nil {
			return Classify(fmt.Errorf("write 4 KiB: %w", err))
		}
		if err := f.Sync(); err != nil {
			return Classify(err)
		}
		from, to, err := file.NextData(fd, 0, size)
		if err != nil {
			return api.Errorf(api.Unsupported, "the file system does not report holes: %w", err)
		}
		if from != at || to != at+blockSize {
			return api.Errorf(api.Unsupported, "the file system does not keep a map of 4 KiB blocks: 4 KiB of zeros at %d "+
				"are reported as [%d, %d); use ext4, xfs or btrfs with 4 KiB blocks",
				at, from, to)
		}
		if err := unix.Fallocate(fd, PunchMode, at, blockSize); err != nil {
			return api.Errorf(api.Unsupported, "the file system cannot punch holes: %w", err)
		}
		if from, _, err = file.NextData(fd, 0, size); err != nil {
			return err
		} else if from != size {
			return api.Errorf(api.Unsupported, "the file system still reports data at %d after a hole was punched", from)
		}
	}
	return nil
}
