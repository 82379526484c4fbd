package host

import (
	"context"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
	"drover.io/drover/block"
)

// content is what a backup is made of: the snapshot of a replica, or the copy of an image.
type content interface {
	// hold keeps the layers on the disk for the backup, and returns the layers, bottom first, with the bytes of the
	// content. An error of kind busy: try again later.
	hold(ctx context.Context, disk block.SnapshotDisk) (layers []string, size int64, err error)
	// explainHold is the error of a backup whose layers cannot be held.
	explainHold(ctx context.Context, err error) error
	// findBase finds the snapshot of an earlier backup, with the chunks that may differ from it; nil: none. With reread,
	// the backup trusts no earlier backup and no digest.
	findBase(ctx context.Context, r *repo.Repository, disk block.SnapshotDisk) (base *blob.ID, changed []int64,
		reread bool, err error)
	// describe describes the content as the objects have it now.
	describe(ctx context.Context) (described, error)
}

// described is a content in words.
type described struct {
	object manifest.Description
	facts  tags.Facts // without those of the object of the backup
	at     time.Time  // instant of the content
	note   string     // for the user, when the backup is complete
}

func (m *maker) contentOf(b api.StoredBackup) content {
	if b, is := b.(*api.BackupBackingImage); is {
		return &imageCopy{m, b}
	}
	return &volumeSnapshot{m, b.(*api.Backup)}
}

// openLayers opens layers as a source of exactly size bytes. Layers have whole blocks, an image need not.
func openLayers(disk block.SnapshotDisk, layers []string, size int64) (block.DigestSource, error) {
	padded := (size + block.Size - 1) / block.Size * block.Size
	opened, err := disk.OpenStack(layers, padded)
	if err != nil {
		return nil, err
	}
	if s, ok := opened.(block.CacheBypasser); ok {
		s.BypassCache()
	}
	src, ok := opened.(block.DigestSource)
	switch {
	case !ok:
		_ = opened.Close()
		return nil, api.Errorf(api.Unsupported, "the disk has no digests of layers")
	case padded > size:
		return shortened{src, size}, nil
	}
	return src, nil
}

// shortened is a source without the bytes behind size.
type shortened struct {
	block.DigestSource
	size int64
}

// Size implements block.Source.
func (s shortened) Size() int64 { return s.size }

// Digest implements block.DigestSource. The last chunk of the layers has more bytes than that of the content.
func (s shortened) Digest(chunk int64) (sum [32]byte, known bool) {
	if (chunk+1)*block.ChunkSize > s.size {
		return sum, false
	}
	return s.DigestSource.Digest(chunk)
}
