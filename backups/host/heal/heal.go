// Package heal finds lost chunks of a backup target on the node's disks, so that the mover writes the chunks into the
// repository again: first in the snapshots of the backup's volume, or the copies of the backup's image, then in all
// layers of the disks. A chunk whose blocks lie in several layers is found in a snapshot or copy alone. A layer has the
// chunks of a restored backup, whatever volume or image the layer belongs to.
//
// Invariants: one source is open at a time. A hold keeps the layers of a snapshot or copy; after a kill, the collector
// of holds releases the hold. An open layer stays readable without a hold. A disk lacks a snapshot, image or layer only
// if the disk says so: each other failure is an error of the heal.
//
// The package starts no goroutines of its own.
package heal

import (
	"cmp"
	"context"
	"errors"
	"iter"
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
	"drover.io/drover/block/pace"
)

// holdName tells people who holds layers.
const holdName = "verification"

// Disks are the disks of a node.
type Disks struct {
	Live client.Reader // without a cache
	Node string
	Disk func(api.UID) (block.SnapshotDisk, error)
	// Holders has the heals' holds, so that the collector leaves them.
	Holders *holders.Set
	Pacer   *pace.Pacer // of the node; nil: heals never wait for guests
	Log     *slog.Logger
}

// Heal writes the chunks again that snapshots of a repository lost and the disks have, as mover.Heal does.
func (d *Disks) Heal(ctx context.Context, r *repo.Repository, snapshots []blob.ID, o repo.WriterOptions) (int64,
	error) {
	o.Pacer = d.Pacer
	return mover.Heal(ctx, r, snapshots, o, d.sources)
}

// candidate is a snapshot or image on a disk.
type candidate struct {
	disk api.UID
	name string // for people
	// hold holds the layers.
	hold func(disk block.SnapshotDisk, holder string) (layers []string, size int64, err error)
}

// yieldSource takes a source, or the error of one, and reports whether the loop continues.
type yieldSource func(block.DigestSource, error) bool

// sources are mover.Sources: the snapshots of a volume, the newest first, or the copies of an image, and then the
// layers of all disks.
func (d *Disks) sources(ctx context.Context, of manifest.Description) iter.Seq2[block.DigestSource, error] {
	return func(yield func(block.DigestSource, error) bool) {
		_ = d.yieldNamed(ctx, of, yield) && d.yieldLayers(ctx, of, yield)
	}
}

// yieldNamed yields the snapshots of a volume, or the copies of an image.
func (d *Disks) yieldNamed(ctx context.Context, of manifest.Description, yield yieldSource) (more bool) {
	list := d.listCopies
	if of.Kind == manifest.Volume {
		list = d.listSnapshots
	}
	candidates, err := list(ctx, of.Name)
	if err != nil {
		return yield(nil, err)
	}
	for _, c := range candidates {
		src, err := d.openCandidate(ctx, c)
		if !d.yieldOpened(src, err, c.name, c.disk, yield) {
			return false
		}
	}
	return true
}

// yieldOpened yields a source, or the error of its opening, unless the disk says that it has no such chunks, and closes
// the source.
func (d *Disks) yieldOpened(src block.DigestSource, err error, name string, disk api.UID, yield yieldSource) (
	more bool) {
	if api.Is(err, api.NotFound) || api.Is(err, api.Corrupt) {
		d.Log.Debug("no source for a damaged backup", "of", name, "disk", disk, "err", err)
		return true
	}
	if err != nil {
		err = api.Errorf(api.KindOf(err), "%s on disk %s: cannot be read for damaged backups: %w", name, disk, err)
		return yield(nil, err)
	}
	more = yield(src, nil)
	if err := src.Close(); err != nil {
		d.Log.Warn("a source that was read for a damaged backup cannot be released", "of", name, "disk", disk, "err", err)
	}
	return more
}

// yieldLayers yields the layers of the node's disks. A disk that is not ready is left out: the next look for damage
// asks for a heal again.
func (d *Disks) yieldLayers(ctx context.Context, of manifest.Description, yield yieldSource) (more bool) {
	var node api.Node
	if err := d.Live.Get(ctx, client.ObjectKey{Name: d.Node}, &node); err != nil {
		return yield(nil, api.Explain(err, "node %s", d.Node))
	}
	for i := range node.Status.Disks {
		if s := &node.Status.Disks[i]; s.Ready && !d.yieldLayersOf(ctx, s.UID, of, yield) {
			return false
		}
	}
	return true
}

// yieldLayersOf yields the layers of a disk.
func (d *Disks) yieldLayersOf(ctx context.Context, uid api.UID, of manifest.Description, yield yieldSource) (
	more bool) {
	disk, err := d.Disk(uid)
	var layers []string
	if err == nil {
		layers, err = disk.LayerNames()
	}
	if err != nil {
		return yield(nil, api.Errorf(api.KindOf(err), "disk %s: cannot be read for damaged backups: %w", uid, err))
	}
	for _, layer := range layers {
		src, err := d.openLayer(ctx, disk, layer, of.Size)
		if !d.yieldOpened(src, err, "layer "+layer, uid, yield) {
			return false
		}
	}
	return true
}

// openLayer opens a layer for a backup of size bytes. The last chunk of the backup, if it is short, is searched for in
// layers of the backup's size alone: the digest of a longer chunk says nothing of the short one.
func (d *Disks) openLayer(ctx context.Context, disk block.LayerReader, uid string, size int64) (block.DigestSource,
	error) {
	leave, err := d.Pacer.Enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	src, err := block.OpenLayer(disk, uid)
	if err != nil {
		return nil, err
	}
	if whole := size / block.ChunkSize * block.ChunkSize; src.Size() >= size+block.Size {
		return shortened{src, whole}, nil
	}
	return src, nil
}

// shortened is a layer without the bytes behind size.
type shortened struct {
	block.DigestSource
	size int64
}

// Size implements block.Source.
func (s shortened) Size() int64 { return s.size }

// listSnapshots lists the snapshots of a volume on the disks of the node.
func (d *Disks) listSnapshots(ctx context.Context, volume string) (list []candidate, err error) {
	var replicas api.ReplicaList
	var snapshots api.SnapshotList
	if err := d.Live.List(ctx, &replicas); err != nil {
		return nil, api.Explain(err, "list replicas")
	}
	if err := d.Live.List(ctx, &snapshots); err != nil {
		return nil, api.Explain(err, "list snapshots")
	}
	of := slices.DeleteFunc(snapshots.Items, func(s api.Snapshot) bool {
		return s.Spec.Volume != volume || s.Status.UID == "" || s.Status.CreationTime == ""
	})
	slices.SortFunc(of, func(x, y api.Snapshot) int { // the times are RFC 3339 in UTC
		return cmp.Compare(y.Status.CreationTime, x.Status.CreationTime)
	})
	for i := range of {
		s := &of[i]
		created, err := time.Parse(time.RFC3339, s.Status.CreationTime)
		if err != nil {
			continue // no disk has a snapshot without an instant
		}
		cut := block.SnapshotCut{UID: string(s.Status.UID), Created: created}
		for k := range replicas.Items {
			rep := &replicas.Items[k].Spec
			if rep.Volume != volume || rep.Node != d.Node {
				continue
			}
			list = append(list, candidate{rep.Disk, "snapshot " + s.Name,
				func(disk block.SnapshotDisk, holder string) ([]string, int64, error) {
					return disk.HoldSnapshot(ctx, holder, holdName, string(rep.UID), cut)
				}})
		}
	}
	return list, nil
}

// listCopies lists the copies of an image on the disks of the node.
func (d *Disks) listCopies(ctx context.Context, name string) (list []candidate, err error) {
	var img api.BackingImage
	var copies api.ImageCopyList
	if err := d.Live.Get(ctx, client.ObjectKey{Name: name}, &img); err != nil {
		return nil, client.IgnoreNotFound(api.Explain(err, "image %s", name))
	}
	if err := d.Live.List(ctx, &copies); err != nil {
		return nil, api.Explain(err, "list image copies")
	}
	var layers []string
	for _, uid := range img.Status.Layers {
		layers = append(layers, string(uid))
	}
	size := (img.Status.VirtualSize + block.Size - 1) / block.Size * block.Size
	for i := range copies.Items {
		c := &copies.Items[i].Spec
		if c.Image != name || c.UUID != img.Status.UUID || c.Node != d.Node {
			continue
		}
		list = append(list, candidate{c.Disk, "image " + name,
			func(disk block.SnapshotDisk, holder string) ([]string, int64, error) {
				return layers, size, disk.HoldLayers(ctx, holder, holdName, layers)
			}})
	}
	return list, nil
}

// heldSource is an open snapshot or image. A hold keeps the layers until Close.
type heldSource struct {
	block.DigestSource
	release func() error
}

// Close implements io.Closer.
func (s *heldSource) Close() error { return errors.Join(s.DigestSource.Close(), s.release()) }

// openCandidate holds and opens the layers of a candidate, for a new holder.
func (d *Disks) openCandidate(ctx context.Context, c candidate) (_ block.DigestSource, err error) {
	disk, err := d.Disk(c.disk)
	if err != nil {
		return nil, err
	}
	holder := string(api.NewUID())
	leave, err := d.Holders.Enter(ctx, holders.Hold{Disk: c.disk, Holder: holder})
	if err != nil {
		return nil, err
	}
	release := func() error { // the collector tries again after an error
		defer leave()
		return disk.ReleaseSnapshot(holder)
	}
	layers, size, err := c.hold(disk, holder)
	if err != nil {
		return nil, errors.Join(err, release()) // the disk may have the hold nevertheless
	}
	src, err := disk.OpenStack(layers, size)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	digests, ok := src.(block.DigestSource)
	if !ok {
		return nil, errors.Join(api.Errorf(api.Unsupported, "the disk has no digests"), src.Close(), release())
	}
	return &heldSource{digests, release}, nil
}
