// Package heal finds lost chunks of a backup target on the node's disks, so that the mover writes the chunks into the
// repository again: first in the snapshots of the backup's volume, or the copies of the backup's image, then in all
// layers of the disks. A chunk whose blocks lie in several layers is found in a snapshot or copy alone. A layer has the
// chunks of a restored backup, whatever volume or image the layer belongs to, and at whatever place.
//
// Invariants: one source is open at a time, for moments, and nothing holds its layers: an open layer stays readable,
// and a merge begins when the layer is closed. A disk lacks a snapshot, image or layer only if the disk says so: each
// other failure is an error of the heal.
//
// The package starts no goroutines of its own.
package heal

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
	"drover.io/drover/block/pace"
)

// Disks are the disks of a node.
type Disks struct {
	Live  client.Reader // without a cache
	Node  string
	Disk  func(api.UID) (block.SnapshotDisk, error)
	Pacer *pace.Pacer // of the node; nil: heals never wait for guests
}

// Heal writes the chunks again that snapshots of a repository lost and the disks have, as mover.Heal does.
func (d *Disks) Heal(ctx context.Context, r *repo.Repository, snapshots []blob.ID, o repo.WriterOptions) (int64,
	error) {
	o.Pacer = d.Pacer
	return mover.Heal(ctx, r, snapshots, o, mover.Sources{AtPlaces: d.atPlaces, Disks: d.readyDisks})
}

// candidate is a snapshot or image on a disk.
type candidate struct {
	disk api.UID
	name string // for people
	open func(disk block.SnapshotDisk) (block.Source, error)
}

// atPlaces yields the snapshots of a volume, the newest first, or the copies of an image.
func (d *Disks) atPlaces(ctx context.Context, of manifest.Description) iter.Seq2[mover.OpenSource, error] {
	return func(yield func(mover.OpenSource, error) bool) {
		list := d.listCopies
		if of.Kind == manifest.Volume {
			list = d.listSnapshots
		}
		candidates, err := list(ctx, of.Name)
		if err != nil {
			yield(nil, err)
			return
		}
		for _, c := range candidates {
			if !yield(func(context.Context) (block.Source, error) { return d.openCandidate(c) }, nil) {
				return
			}
		}
	}
}

// openCandidate opens the layers of a candidate.
func (d *Disks) openCandidate(c candidate) (src block.Source, err error) {
	disk, err := d.Disk(c.disk)
	if err == nil {
		src, err = c.open(disk)
	}
	if err != nil {
		return nil, api.Errorf(api.KindOf(err), "%s on disk %s: cannot be read for damaged backups: %w", c.name, c.disk, err)
	}
	return src, nil
}

// readyDisks yields the node's disks. A disk that is not ready is left out: the next look for damage asks for a heal
// again.
func (d *Disks) readyDisks(ctx context.Context) iter.Seq2[block.LayerReader, error] {
	return func(yield func(block.LayerReader, error) bool) {
		var node api.Node
		if err := d.Live.Get(ctx, client.ObjectKey{Name: d.Node}, &node); err != nil {
			yield(nil, api.Explain(err, "node %s", d.Node))
			return
		}
		for i := range node.Status.Disks {
			s := &node.Status.Disks[i]
			if !s.Ready {
				continue
			}
			disk, err := d.Disk(s.UID)
			if err != nil {
				err = api.Errorf(api.KindOf(err), "disk %s: cannot be read for damaged backups: %w", s.UID, err)
			}
			if !yield(disk, err) {
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
				func(disk block.SnapshotDisk) (block.Source, error) { return disk.OpenSnapshot(string(rep.UID), cut) }})
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
			func(disk block.SnapshotDisk) (block.Source, error) { return disk.OpenStack(layers, size) }})
	}
	return list, nil
}
