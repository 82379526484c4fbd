// Package longhorn reads the backups of volumes and the backing images that Longhorn keeps in a store. It never writes.
//
//	backupstore/volumes/AB/CD/VOLUME/volume.cfg               the volume; ABCD begins the SHA-512 of its name
//	backupstore/volumes/AB/CD/VOLUME/backups/backup_NAME.cfg  a backup: its description, and the offset of each block
//	backupstore/volumes/AB/CD/VOLUME/blocks/AB/CD/SUM.blk     a block, compressed; SUM is half of its bytes' SHA-512
//	backupstore/backing-images/backing-images/NAME/backing-image.cfg
//	backupstore/backing-images/blocks/AB/CD/SUM.blk
//
// Invariants:
//
//   - All objects of the store are hostile: names are checked before the store is asked, sizes before a read, lengths
//     before an allocation, and offsets before a block is used.
//   - No byte is returned that was not compared with its block's checksum. Blocks that a backup does not list are
//     zeros, or the bytes of the volume's backing image, whose file was compared with the SHA-512 that the volume
//     names. Without the image a backup is not opened.
//   - The memory of an open backup does not depend on its size: the list of blocks lies in a local file without a name.
//   - A backup that is in progress (its cfg has no CreatedTime) is an error of kind Busy.
//   - A digest in Options.Digests is of bytes that were compared with a checksum. Each later read of the bytes compares
//     them with checksum and digest.
//
// Goroutines: Restore, Verify, OpenBackup and the lists wait for all that they start. Methods are safe for concurrent
// use, except Close.
//
// Lock order: blockCache.mu comes before Memory.mu; Images.mu and the locks of package digests are leaves. No request
// to the store runs with a lock held.
package longhorn

import (
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/digests"
	"drover.io/drover/backups/target"
	"drover.io/drover/block/budget"
)

// Folders and names of a store.
const (
	rootFolder    = "backupstore/"
	volumesFolder = "backupstore/volumes/"
	imagesFolder  = "backupstore/backing-images/backing-images/"
	imageBlocks   = "backupstore/backing-images/blocks/"

	volumeFile   = "volume.cfg"
	imageFile    = "backing-image.cfg"
	backupPrefix = "backup_"
	fileSuffix   = ".cfg"
)

const (
	parallelLists = 8
	listLimit     = 1 << 18 // volumes, backups of all volumes, or images
)

// Store reads what Longhorn wrote into a store.
type Store struct {
	store target.Store
	opts  Options
}

// Options of a Store.
type Options struct {
	Cache   string         // folder for the lists of blocks of open backups, which are files without a name
	Digests *digests.Table // of the chunks of blocks; nil: none is known
	Memory  *Memory        // for blocks that several chunks lie in; nil: each open backup has its own
	Reads   *budget.Part   // for the blocks of restores and verifications; nil: no bound but that of each of them
}

// New returns the reader of a store.
func New(store target.Store, o Options) *Store { return &Store{store, o} }

// Name names a backup of a volume.
type Name struct{ Volume, Backup string }

// ID stands for the backup where Drover names a backup by 32 bytes: SHA-256 of volume, '/' and backup. No name has a
// '/'.
func (n Name) ID() [sha256.Size]byte { return sha256.Sum256([]byte(n.Volume + "/" + n.Backup)) }

// ImageID is ID for a backing image: SHA-256 of its name, which has no '/'.
func ImageID(name string) [sha256.Size]byte { return sha256.Sum256([]byte(name)) }

var longhornName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$`)

// IsLonghorn reports whether Longhorn uses the store.
func IsLonghorn(ctx context.Context, store target.Store) (found bool, err error) {
	err = target.ListFolders(ctx, store, rootFolder, func(string) error {
		found = true
		return errStop
	})
	if found {
		err = nil
	}
	return found, err
}

// ListBackups lists the backups of all volumes, in any order, also those in progress.
func (s *Store) ListBackups(ctx context.Context) (all []Name, err error) {
	volumes, err := s.listVolumes(ctx)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallelLists)
	for _, v := range volumes {
		group.Go(func() error {
			names, err := s.ListBackupsOf(ctx, v)
			mu.Lock()
			defer mu.Unlock()
			if all = append(all, names...); err == nil && len(all) > listLimit {
				err = tooMany("backups")
			}
			return err
		})
	}
	return all, group.Wait()
}

func tooMany(what string) error {
	return api.Errorf(api.Unsupported, "Longhorn's store has more than %d %s", listLimit, what)
}

// listVolumes lists the volumes with a folder in its right place.
func (s *Store) listVolumes(ctx context.Context) ([]string, error) {
	folders := []string{""}
	for _, depth := range []string{"first", "second", "volume"} {
		var mu sync.Mutex
		var below []string
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(parallelLists)
		for _, folder := range folders {
			group.Go(func() error {
				return target.ListFolders(ctx, s.store, volumesFolder+folder, func(name string) error {
					mu.Lock()
					defer mu.Unlock()
					if len(below) == listLimit {
						return tooMany("folders")
					}
					if depth == "volume" || len(name) == 2 {
						below = append(below, folder+name+"/")
					}
					return nil
				})
			})
		}
		if err := group.Wait(); err != nil {
			return nil, err
		}
		folders = below
	}
	var volumes []string
	for _, folder := range folders {
		name := folder[len("ab/cd/") : len(folder)-1]
		if longhornName.MatchString(name) && volumeFolder(name) == volumesFolder+folder {
			volumes = append(volumes, name)
		}
	}
	return volumes, nil
}

// ListBackupsOf is ListBackups for one volume.
func (s *Store) ListBackupsOf(ctx context.Context, volume string) (names []Name, err error) {
	if !longhornName.MatchString(volume) {
		return nil, api.Errorf(api.Invalid, "volume %.64q: not a name of Longhorn", volume)
	}
	prefix := volumeFolder(volume) + "backups/" + backupPrefix
	err = s.store.List(ctx, prefix, func(o target.Object) error {
		name, ok := strings.CutSuffix(strings.TrimPrefix(o.Name, prefix), fileSuffix)
		if !ok || !longhornName.MatchString(name) {
			return nil
		}
		if len(names) == listLimit {
			return tooMany("backups")
		}
		names = append(names, Name{volume, name})
		return nil
	})
	return names, err
}

// ListImages lists the names of the backing images, in order, also those in progress.
func (s *Store) ListImages(ctx context.Context) (names []string, err error) {
	err = target.ListFolders(ctx, s.store, imagesFolder, func(name string) error {
		if !longhornName.MatchString(name) {
			return nil
		}
		if len(names) == listLimit {
			return tooMany("images")
		}
		names = append(names, name)
		return nil
	})
	slices.Sort(names)
	return names, err
}

// HasBackup reports whether the store has a backup, also one in progress. It asks for the very object, not for a list.
func (s *Store) HasBackup(ctx context.Context, n Name) (bool, error) {
	if !longhornName.MatchString(n.Volume) || !longhornName.MatchString(n.Backup) {
		return false, nil
	}
	return s.has(ctx, backupFile(n))
}

// HasImage is HasBackup for a backing image.
func (s *Store) HasImage(ctx context.Context, name string) (bool, error) {
	if !longhornName.MatchString(name) {
		return false, nil
	}
	return s.has(ctx, imageFileOf(name))
}

func (s *Store) has(ctx context.Context, object string) (bool, error) {
	_, err := s.store.Stat(ctx, object)
	if api.Is(err, api.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// volumeFolder is the folder of a volume.
func volumeFolder(volume string) string {
	sum := checksum([]byte(volume))
	return volumesFolder + sum[:2] + "/" + sum[2:4] + "/" + volume + "/"
}

// backupFile is the cfg of a backup.
func backupFile(n Name) string {
	return volumeFolder(n.Volume) + "backups/" + backupPrefix + n.Backup + fileSuffix
}

// imageFileOf is the cfg of a backing image.
func imageFileOf(name string) string { return imagesFolder + name + "/" + imageFile }

// checksum is half of the SHA-512, in hexadecimal digits.
func checksum(b []byte) string {
	sum := sha512.Sum512(b)
	return hex.EncodeToString(sum[:len(sum)/2])
}
