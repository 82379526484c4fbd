package longhorn

import (
	"context"
	"errors"
	"math/bits"
	"strconv"
	"strings"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Bounds of a block and of a cfg, in bytes.
const (
	smallestBlock = block.ChunkSize
	largestBlock  = 16 << 20
	// cfgLimit is the size of the list of all blocks of the largest volume: an entry has less than 128 bytes.
	cfgLimit = api.MaxVolumeSize/smallestBlock*128 + valueLimit
)

// Volume is the description of a volume.
type Volume struct {
	Name          string
	Size          int64 // bytes
	Image         string
	ImageChecksum string // SHA-512 of the image's file; empty: not known
	StorageClass  string // name
}

// Backup is the description of a backup of a volume.
type Backup struct {
	Name
	Snapshot        string
	SnapshotCreated time.Time // zero: not known
	Created         time.Time // end of the backup
	Incremental     bool
	Uploaded        int64 // bytes that the backup added to the store
	Labels          map[string]string
	blockSize       int64
	method          string
}

// Image is the description of a backing image: of a file in any format.
type Image struct {
	Name      string
	Size      int64  // bytes of the file
	Checksum  string // SHA-512 of the file
	Completed time.Time
	Labels    map[string]string
	Encrypted bool // by a Secret of Longhorn's cluster
	method    string
}

// ReadVolume reads the description of a volume.
func (s *Store) ReadVolume(ctx context.Context, name string) (v Volume, err error) {
	if !longhornName.MatchString(name) {
		return v, api.Errorf(api.Invalid, "volume %.64q: not a name of Longhorn", name)
	}
	err = decodeObject(ctx, s.store, volumeFolder(name)+volumeFile, valueLimit, func(d *decoder, key string) error {
		switch key {
		case "Name":
			return d.Decode(&v.Name)
		case "Size":
			return d.number(&v.Size)
		case "BackingImageName":
			return d.nested(&v.Image)
		case "BackingImageChecksum":
			err := d.nested(&v.ImageChecksum)
			if v.ImageChecksum = strings.ToLower(v.ImageChecksum); !fileChecksum.MatchString(v.ImageChecksum) {
				v.ImageChecksum = ""
			}
			return err
		case "StorageClassName":
			return d.nested(&v.StorageClass)
		}
		return d.skip()
	})
	if err == nil {
		err = checkSize(v.Size)
	}
	if err == nil && v.Name != name {
		err = api.Errorf(api.Corrupt, "%s names another volume, %.64q", volumeFile, v.Name)
	}
	if err != nil {
		return v, api.Errorf(api.KindOf(err), "Longhorn's volume %s: %w", name, err)
	}
	return v, nil
}

func checkSize(size int64) error {
	if size <= 0 || size > api.MaxVolumeSize {
		return api.Errorf(api.Corrupt, "a size of %d bytes is not allowed; 1 to %d are", size, api.MaxVolumeSize)
	}
	return nil
}

// ReadBackup reads the description of a backup. A backup in progress is an error of kind Busy.
func (s *Store) ReadBackup(ctx context.Context, n Name) (Backup, error) {
	return s.readBackup(ctx, n, nil)
}

// readBackup also calls each with all blocks. Without each, the list of blocks is not read if Longhorn wrote the cfg:
// the list comes last.
func (s *Store) readBackup(ctx context.Context, n Name, each func(b *Backup, offset int64, sum string) error) (
	b Backup, err error) {
	if !longhornName.MatchString(n.Volume) || !longhornName.MatchString(n.Backup) {
		return b, api.Errorf(api.Invalid, "backup %.64q of volume %.64q: not names of Longhorn", n.Backup, n.Volume)
	}
	c := backupDecoder{b: &b, each: each}
	if err = decodeObject(ctx, s.store, backupFile(n), cfgLimit, c.decode); err == nil {
		err = c.check(n)
	}
	if err != nil {
		return b, api.Errorf(api.KindOf(err), "Longhorn's backup %s of volume %s: %w", n.Backup, n.Volume, err)
	}
	return b, nil
}

// backupDecoder decodes the cfg of a backup.
type backupDecoder struct {
	b       *Backup
	each    func(b *Backup, offset int64, sum string) error
	created string // of the end
	ended   bool   // created was read
	blocks  bool   // the list was read
	size    int64  // of blocks, when the list was read
	file    string // of a backup of a single file
}

func (c *backupDecoder) decode(d *decoder, key string) error {
	b := c.b
	switch key {
	case "Name":
		return d.Decode(&b.Backup)
	case "VolumeName":
		return d.Decode(&b.Volume)
	case "SnapshotName":
		return d.Decode(&b.Snapshot)
	case "SnapshotCreatedAt":
		var text string
		err := d.Decode(&text)
		b.SnapshotCreated, _ = parseTime(text) // zero: not known
		return err
	case "CreatedTime":
		c.ended = true
		return d.Decode(&c.created)
	case "Labels":
		return d.labels(&b.Labels)
	case "Parameters":
		var parameters map[string]string
		err := d.labels(&parameters)
		if err == nil {
			b.blockSize, err = parseBlockSize(parameters["backup-block-size"])
		}
		return err
	case "IsIncremental":
		return d.Decode(&b.Incremental)
	case "CompressionMethod":
		return d.Decode(&b.method)
	case "NewlyUploadedDataSize":
		return d.number(&b.Uploaded)
	case "Blocks":
		return c.decodeBlocks(d)
	case "SingleFile":
		return d.object(func(d *decoder, key string) error {
			if key == "FilePath" {
				return d.Decode(&c.file)
			}
			return d.skip()
		})
	}
	return d.skip()
}

// blockEntry is an entry of the list of blocks.
type blockEntry struct {
	Offset        int64
	BlockChecksum string
}

func (c *backupDecoder) decodeBlocks(d *decoder) error {
	if c.each == nil && c.ended {
		return errStop
	}
	c.blocks, c.size = true, c.b.size()
	return d.list(func() error {
		var e blockEntry
		if err := d.Decode(&e); err != nil || c.each == nil {
			return err
		}
		return c.each(c.b, e.Offset, e.BlockChecksum)
	})
}

// size is the size of blocks; a cfg of an older Longhorn names none.
func (b *Backup) size() int64 {
	if b.blockSize == 0 {
		return smallestBlock
	}
	return b.blockSize
}

// check checks the cfg of the backup n.
func (c *backupDecoder) check(n Name) error {
	b := c.b
	switch {
	case b.Name != n:
		return api.Errorf(api.Corrupt, "the cfg names another backup, %.64q of volume %.64q", b.Backup, b.Volume)
	case c.created == "":
		return api.Errorf(api.Busy, "the backup is in progress, or was interrupted")
	case c.file != "":
		return api.Errorf(api.Unsupported, "the backup is of a single file; only backups of blocks can be read")
	case c.blocks && c.size != b.size():
		return api.Errorf(api.Corrupt, "the cfg has its list of blocks before the size of the blocks")
	}
	b.blockSize = b.size()
	var err error
	b.Created, err = parseTime(c.created)
	return err
}

// parseTime reads the time of a backup. Errors are of kind Corrupt.
func parseTime(text string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return time.Time{}, api.Errorf(api.Corrupt, "the time of the backup is not valid: %w", err)
	}
	return api.BoundTime(t), nil
}

// parseBlockSize reads a number of bytes as Kubernetes writes quantities; none, or 0, is 2 MiB.
func parseBlockSize(text string) (int64, error) {
	digits, unit := strings.TrimSuffix(text, "Mi"), int64(1)
	if digits != text {
		unit = 1 << 20
	}
	if digits == "" && unit == 1 {
		return smallestBlock, nil
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	size := int64(n) * unit
	switch {
	case err != nil:
		return 0, api.Errorf(api.Unsupported, "blocks of %.32q bytes are not supported; 2 to 16 MiB are", text)
	case n == 0:
		return smallestBlock, nil
	case size < smallestBlock || size > largestBlock || bits.OnesCount64(uint64(size)) != 1:
		return 0, api.Errorf(api.Unsupported, "blocks of %d bytes are not supported; 2 to 16 MiB are", size)
	}
	return size, nil
}

// ReadImage reads the description of a backing image. An image in progress is an error of kind Busy.
func (s *Store) ReadImage(ctx context.Context, name string) (Image, error) {
	return s.readImage(ctx, name, nil)
}

// readImage also calls each with all blocks.
func (s *Store) readImage(ctx context.Context, name string, each func(offset int64, sum string) error) (
	img Image, err error) {
	if !longhornName.MatchString(name) {
		return img, api.Errorf(api.Invalid, "backing image %.64q: not a name of Longhorn", name)
	}
	var completed, secret string
	err = decodeObject(ctx, s.store, imageFileOf(name), cfgLimit, func(d *decoder, key string) error {
		switch key {
		case "Name":
			return d.Decode(&img.Name)
		case "Size":
			return d.number(&img.Size)
		case "Checksum":
			return d.Decode(&img.Checksum)
		case "Labels":
			return d.labels(&img.Labels)
		case "CompressionMethod":
			return d.Decode(&img.method)
		case "CompleteTime":
			return d.Decode(&completed)
		case "Secret":
			return d.Decode(&secret)
		case "Blocks":
			return d.list(func() error {
				var e blockEntry
				if err := d.Decode(&e); err != nil || each == nil {
					return err
				}
				return each(e.Offset, e.BlockChecksum)
			})
		}
		return d.skip()
	})
	switch {
	case err != nil:
	case img.Name != name:
		err = api.Errorf(api.Corrupt, "%s names another image, %.64q", imageFile, img.Name)
	case completed == "":
		err = api.Errorf(api.Busy, "the backup is in progress, or was interrupted")
	default:
		img.Completed, err = parseTime(completed)
		err = errors.Join(err, checkSize(img.Size))
	}
	if err != nil {
		return img, api.Errorf(api.KindOf(err), "Longhorn's backing image %s: %w", name, err)
	}
	img.Encrypted = secret != ""
	return img, nil
}
