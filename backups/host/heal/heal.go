// Package heal finds lost chunks of a backup target in the snapshots and images on the node's disks, and writes the
// chunks into the repository again.
//
// Invariants: heal writes only bytes with the digest of the lost chunk. A hold keeps the layers of an open source
// until the heal ends, however long that takes; after a kill, the collector of holds releases the hold.
//
// The package starts no goroutines of its own.
package heal

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/holders"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// healSnapshots is how many snapshots of a volume a heal looks at on each disk, the newest first.
const healSnapshots = 64

// holdName tells people who holds layers.
const holdName = "verification"

// Disks are the disks of a node.
type Disks struct {
	Live client.Reader // without a cache
	Node string
	Disk func(api.UID) (block.SnapshotDisk, error)
	// Holders has the heals' holds, so that the collector leaves them.
	Holders *holders.Set
	Log     *slog.Logger
}

// Heal writes the chunks again that snapshots of a repository lost and the disks have, and returns their number.
func (d *Disks) Heal(ctx context.Context, r *repo.Repository, snapshots []blob.ID, o repo.WriterOptions) (int64, error) {
	f := &chunkFinder{Disks: d, held: map[subject][]*heldSource{}}
	defer f.close()
	return mover.Heal(ctx, r, snapshots, o, f.find)
}

// chunkFinder finds chunks of volumes in the snapshots on the node's disks, and chunks of images in their copies there.
// One goroutine uses it.
type chunkFinder struct {
	*Disks
	held map[subject][]*heldSource
}

// subject is the volume or image of a backup.
type subject struct {
	kind manifest.Kind
	name string
}

// heldSource is an open snapshot or image. A hold keeps the layers.
type heldSource struct {
	block.DigestSource
	disk   block.SnapshotDisk
	holder string
}

// find is a mover.FindChunk.
func (f *chunkFinder) find(ctx context.Context, d manifest.Description, number int64, digest blob.ID, b []byte) (
	bool, error) {
	of := subject{d.Kind, d.Name}
	held, opened := f.held[of]
	if !opened {
		var err error
		if d.Kind == manifest.Volume {
			held, err = f.openVolume(ctx, d.Name)
		} else {
			held, err = f.openImage(ctx, d.Name)
		}
		if f.held[of] = held; err != nil { // close releases the ones that were opened
			return false, err
		}
	}
	for _, s := range held {
		if number*block.ChunkSize+int64(len(b)) > s.Size() {
			continue
		}
		// The last chunk of an image is shorter than that of the image's layers.
		if sum, known := s.Digest(number); known && len(b) == block.ChunkSize && blob.ID(sum) != digest {
			continue
		}
		n, err := s.ReadAt(b, number*block.ChunkSize)
		if n < len(b) || err != nil && !errors.Is(err, io.EOF) {
			continue // the disk has damage of its own, which its scrub reports
		}
		if blob.Sum(b) == digest {
			return true, nil
		}
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
	}
	return false, nil
}

// openVolume opens the snapshots of a volume on the disks of the node. A snapshot that cannot be opened is no source.
func (f *chunkFinder) openVolume(ctx context.Context, volume string) (held []*heldSource, err error) {
	var replicas api.ReplicaList
	var snapshots api.SnapshotList
	if err := f.Live.List(ctx, &replicas); err != nil {
		return nil, api.Explain(err, "list replicas")
	}
	if err := f.Live.List(ctx, &snapshots); err != nil {
		return nil, api.Explain(err, "list snapshots")
	}
	of := slices.DeleteFunc(snapshots.Items, func(s api.Snapshot) bool {
		return s.Spec.Volume != volume || s.Status.UID == "" || s.Status.CreationTime == ""
	})
	slices.SortFunc(of, func(x, y api.Snapshot) int { // the times are RFC 3339 in UTC
		return cmp.Compare(y.Status.CreationTime, x.Status.CreationTime)
	})
	for i := range replicas.Items {
		rep := &replicas.Items[i].Spec
		if rep.Volume != volume || rep.Node != f.Node {
			continue
		}
		disk, err := f.Disk(rep.Disk)
		if err != nil {
			continue // the disk's own condition says why
		}
		for j := range of[:min(len(of), healSnapshots)] {
			s, err := f.hold(disk, func(holder string) ([]string, int64, error) {
				return holdSnapshot(ctx, disk, holder, rep, &of[j].Status)
			})
			if ctx.Err() != nil {
				return held, context.Cause(ctx)
			}
			if err != nil {
				f.Log.Info("a snapshot is no source for a damaged backup", "volume", volume, "snapshot", of[j].Name, "err", err)
				continue
			}
			held = append(held, s)
		}
	}
	return held, nil
}

func holdSnapshot(ctx context.Context, disk block.SnapshotDisk, holder string, rep *api.ReplicaSpec,
	s *api.SnapshotStatus) (layers []string, size int64, err error) {
	created, err := time.Parse(time.RFC3339, s.CreationTime)
	if err != nil {
		return nil, 0, err
	}
	return disk.HoldSnapshot(ctx, holder, holdName, string(rep.UID),
		block.SnapshotCut{UID: string(s.UID), Created: created})
}

// openImage opens the copies of an image on the disks of the node. A copy that cannot be opened is no source.
func (f *chunkFinder) openImage(ctx context.Context, name string) (held []*heldSource, err error) {
	var img api.BackingImage
	var copies api.ImageCopyList
	if err := f.Live.Get(ctx, client.ObjectKey{Name: name}, &img); err != nil {
		return nil, client.IgnoreNotFound(api.Explain(err, "image %s", name))
	}
	if err := f.Live.List(ctx, &copies); err != nil {
		return nil, api.Explain(err, "list image copies")
	}
	var layers []string
	for _, uid := range img.Status.Layers {
		layers = append(layers, string(uid))
	}
	size := (img.Status.VirtualSize + block.Size - 1) / block.Size * block.Size
	for i := range copies.Items {
		c := &copies.Items[i].Spec
		if c.Image != name || c.UUID != img.Status.UUID || c.Node != f.Node {
			continue
		}
		disk, err := f.Disk(c.Disk)
		if err != nil {
			continue // the disk's own condition says why
		}
		s, err := f.hold(disk, func(holder string) ([]string, int64, error) {
			return layers, size, disk.HoldLayers(ctx, holder, holdName, layers)
		})
		if ctx.Err() != nil {
			return held, context.Cause(ctx)
		}
		if err != nil {
			f.Log.Info("a copy is no source for a damaged backup", "image", name, "disk", c.Disk, "err", err)
			continue
		}
		held = append(held, s)
	}
	return held, nil
}

// hold opens the layers that take holds for a new holder.
func (f *chunkFinder) hold(disk block.SnapshotDisk, take func(holder string) ([]string, int64, error)) (
	*heldSource, error) {
	holder := string(api.NewUID())
	f.Holders.Add(holder)
	layers, size, err := take(holder)
	if err != nil {
		return nil, errors.Join(err, f.release(disk, holder)) // the disk may have the hold nevertheless
	}
	source, err := disk.OpenStack(layers, size)
	if err != nil {
		return nil, errors.Join(err, f.release(disk, holder))
	}
	digests, ok := source.(block.DigestSource)
	if !ok {
		return nil, errors.Join(api.Errorf(api.Unsupported, "the disk has no digests"), source.Close(),
			f.release(disk, holder))
	}
	return &heldSource{digests, disk, holder}, nil
}

// release ends a hold. The collector tries again after an error.
func (f *chunkFinder) release(disk block.SnapshotDisk, holder string) error {
	defer f.Holders.Remove(holder)
	return disk.ReleaseSnapshot(holder)
}

// close releases all sources.
func (f *chunkFinder) close() {
	for _, held := range f.held {
		for _, s := range held {
			if err := errors.Join(s.Close(), f.release(s.disk, s.holder)); err != nil {
				f.Log.Warn("a source that was read for a damaged backup cannot be released", "err", err)
			}
		}
	}
}
