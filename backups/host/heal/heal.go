// Package heal finds the snapshots and images on the node's disks that may have lost chunks of a backup target, so that
// the mover writes the chunks into the repository again.
//
// Invariants: one source is open at a time, and a hold keeps its layers; after a kill, the collector of holds releases
// the hold. A disk lacks a snapshot or image only if the disk says so: each other failure is an error of the heal.
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

// sources are mover.Sources: the snapshots of a volume, the newest first, or the copies of an image.
func (d *Disks) sources(ctx context.Context, of manifest.Description) iter.Seq2[block.DigestSource, error] {
	list := d.listCopies
	if of.Kind == manifest.Volume {
		list = d.listSnapshots
	}
	return func(yield func(block.DigestSource, error) bool) {
		candidates, err := list(ctx, of.Name)
		if err != nil {
			yield(nil, err)
			return
		}
		for _, c := range candidates {
			src, err := d.openCandidate(ctx, c)
			if api.Is(err, api.NotFound) || api.Is(err, api.Corrupt) { // the disk says that it has no such chunks
				d.Log.Debug("no source for a damaged backup", "of", c.name, "disk", c.disk, "err", err)
				continue
			}
			if err != nil {
				err = api.Errorf(api.KindOf(err), "%s on disk %s: cannot be read for damaged backups: %w", c.name, c.disk, err)
				if !yield(nil, err) {
					return
				}
				continue
			}
			more := yield(src, nil)
			if err := src.Close(); err != nil {
				d.Log.Warn("a source that was read for a damaged backup cannot be released", "of", c.name, "disk", c.disk,
					"err", err)
			}
			if !more {
				return
			}
		}
	}
}

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
func (d *Disks) openCandidate(ctx context.Context, c candidate) (_ *heldSource, err error) {
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
