package longhorn

import (
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"io"
	"regexp"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// A backup of a volume with a backing image has the blocks that were written above the image, whole, as the volume read
// them; all other bytes of the volume are those of the image. Behind the end of the image they are zeros.

// Images finds the disks of the backing images below volumes. Methods are safe for concurrent use.
type Images struct {
	// Disk opens the disk inside the file of a backing image, which is raw or qcow2. The disk owns the file; after an
	// error the caller does.
	Disk func(file block.Source) (block.Source, error)
	// Local opens the disk of an image outside of the store, by the SHA-512 of the image's file. An error of kind
	// NotFound: there is no such image. nil: there are none.
	Local func(ctx context.Context, checksum string) (block.Source, error)

	mu       sync.Mutex
	verified map[verifiedImage]struct{}
}

// verifiedImage is a list of blocks whose bytes have a SHA-512.
type verifiedImage struct {
	list     [sha256.Size]byte
	checksum string
}

const mostVerified = 1024

// hashedAtOnce is how many blocks of an image are read at once to verify its checksum.
const hashedAtOnce = 8

var fileChecksum = regexp.MustCompile(`^[0-9a-f]{128}$`)

// openBase opens the disk below the blocks of a volume; nil: the volume has no backing image.
func (s *Store) openBase(ctx context.Context, v *Volume, images *Images) (block.Source, error) {
	if v.Image == "" {
		return nil, nil
	}
	sum := v.ImageChecksum
	switch {
	case images == nil:
		return nil, api.Errorf(api.Unsupported, "the volume has backing image %.64q, whose bytes the backup lacks", v.Image)
	case sum == "":
		return nil, api.Errorf(api.Unsupported, "the backup lacks the bytes of the volume's backing image %.64q, and the "+
			"store does not tell the SHA-512 of the image, so that no image can be taken; restore the volume in Longhorn",
			v.Image)
	}
	stored, err := s.openStoredBase(ctx, v.Image, sum, images)
	switch api.KindOf(err) {
	case api.NotFound, api.Invalid, api.Busy, api.Corrupt, api.Unsupported, api.OutOfRange:
	default: // no error, or one that passes
		return stored, err
	}
	if images.Local != nil {
		local, localErr := images.Local(ctx, sum)
		if localErr == nil {
			return local, nil
		}
		err = errors.Join(err, localErr)
	}
	return nil, api.Errorf(api.NotFound, "the backup lacks the bytes of the volume's backing image %.64q with SHA-512 "+
		"%s; back the image up in Longhorn, or import its file into this cluster: %w", v.Image, sum, err)
}

// openStoredBase opens the disk of a backing image in the store, after a comparison of its file with a SHA-512.
func (s *Store) openStoredBase(ctx context.Context, name, sum string, images *Images) (block.Source, error) {
	file, err := s.OpenImage(ctx, name)
	if err != nil {
		return nil, err
	}
	file.cache.most = cachedBaseBlocks
	if !strings.EqualFold(file.checksum, sum) {
		err = otherImage(file.checksum)
	} else {
		err = images.verify(ctx, file, sum)
	}
	if err == nil {
		var disk block.Source
		if disk, err = images.Disk(file); err == nil {
			return disk, nil
		}
	}
	return nil, errors.Join(api.Errorf(api.KindOf(err), "%s: %w", file.object, err), file.Close())
}

func otherImage(sum string) error {
	return api.Errorf(api.NotFound, "the store has another image of this name, with SHA-512 %.16q...", sum)
}

// verify compares the file of an image with a SHA-512, once for each list of blocks: each read of a block compares the
// block with the list.
func (i *Images) verify(ctx context.Context, file *Opened, sum string) error {
	key := verifiedImage{file.list, sum}
	i.mu.Lock()
	_, known := i.verified[key]
	i.mu.Unlock()
	if known {
		return nil
	}
	got, err := hashFile(ctx, file)
	if err != nil {
		return err
	}
	if got != sum {
		return otherImage(got)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.verified == nil || len(i.verified) == mostVerified {
		i.verified = map[verifiedImage]struct{}{}
	}
	i.verified[key] = struct{}{}
	return nil
}

// hashFile is the SHA-512 of a file.
func hashFile(ctx context.Context, file *Opened) (string, error) {
	sum, size := sha512.New(), file.Size()
	buffer := make([]byte, min(hashedAtOnce*smallestBlock, size))
	for off := int64(0); off < size; off += int64(len(buffer)) {
		part := buffer[:min(int64(len(buffer)), size-off)]
		group, work := errgroup.WithContext(ctx)
		for at := 0; at < len(part) && work.Err() == nil; at += smallestBlock {
			group.Go(func() error { return readFull(file, part[at:min(at+smallestBlock, len(part))], off+int64(at)) })
		}
		if err := group.Wait(); err != nil {
			return "", err
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		sum.Write(part)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// readFull fills p.
func readFull(from io.ReaderAt, p []byte, off int64) error {
	if n, err := from.ReadAt(p, off); n < len(p) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	return nil
}

// eachBaseChunk calls each with the chunks of a range in which the base may have other bytes than zeros. The range
// begins with a chunk.
func (o *Opened) eachBaseChunk(off, end int64, each func(off, n int64) error) error {
	if o.base == nil {
		return nil
	}
	dataEnd := off // of the last extent of data
	for bound := min(end, o.base.Size()); off < bound; {
		if off >= dataEnd {
			e, err := o.base.Next(off)
			if err != nil {
				return o.baseError(off, err)
			}
			if dataEnd = e.End(); e.Kind != block.Data {
				off = e.End()
				continue
			}
		}
		off -= off % block.ChunkSize
		n := min(block.ChunkSize, end-off)
		if err := each(off, n); err != nil {
			return err
		}
		off += n
	}
	return nil
}

// baseEnd is where the base's bytes end.
func (o *Opened) baseEnd() int64 {
	if o.base == nil {
		return 0
	}
	return o.base.Size()
}

// readBaseChunk fills p with a chunk that has no block, and notes the digest, as read does.
func (o *Opened) readBaseChunk(p []byte, off int64, mark uint64) error {
	if err := o.readBase(p, off); err != nil || off >= o.baseEnd() {
		return err
	}
	return o.note(off, p, mark)
}

// readBase fills p with bytes that have no block.
func (o *Opened) readBase(p []byte, off int64) error {
	n := int64(0)
	if o.base != nil {
		n = min(max(o.base.Size()-off, 0), int64(len(p)))
	}
	clear(p[n:])
	if n == 0 {
		return nil
	}
	return o.baseError(off, readFull(o.base, p[:n], off))
}

// baseError names the backup in an error of its base.
func (o *Opened) baseError(off int64, err error) error {
	if err == nil {
		return nil
	}
	return api.Errorf(api.KindOf(err), "%s: backing image at offset %d: %w", o.object, off, err)
}
