// Package images opens images of the cluster on the disks of this node. It starts no goroutine and has no lock.
//
// Invariant: an open image is whole on its disk, whose reads compare each chunk with its digest. The files of its layers
// stay open, so an image that is deleted meanwhile is read to its end.
package images

import (
	"context"
	"errors"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Disks are the disks of a node.
type Disks struct {
	Reader client.Reader // of ImageCopies
	Node   string
	Disk   func(api.UID) (block.SnapshotDisk, error)
}

// Open opens the disk of an image, by the SHA-512 of the file that the image was made of. An error of kind NotFound: no
// disk of the node has the image.
func (d *Disks) Open(ctx context.Context, checksum string) (block.Source, error) {
	var copies api.ImageCopyList
	if err := d.Reader.List(ctx, &copies, client.UnsafeDisableDeepCopy); err != nil {
		return nil, api.Explain(err, "list copies of images")
	}
	var failed error
	elsewhere := ""
	for i := range copies.Items {
		c := &copies.Items[i]
		switch {
		case c.Status.State != api.ImageReady || c.Status.Checksum != checksum || c.DeletionTimestamp != nil:
		case c.Spec.Node != d.Node:
			elsewhere = c.Spec.Image
		default:
			src, err := d.open(c)
			if err == nil {
				return src, nil
			}
			failed = errors.Join(failed, api.Errorf(api.KindOf(err), "image %s: %w", c.Spec.Image, err))
		}
	}
	switch {
	case failed != nil:
		return nil, failed
	case elsewhere != "":
		return nil, api.Errorf(api.NotFound, "image %s of the cluster has no ready copy on node %s; raise its "+
			"minNumberOfCopies", elsewhere, d.Node)
	}
	return nil, api.Errorf(api.NotFound, "no ready image of the cluster has this checksum")
}

func (d *Disks) open(c *api.ImageCopy) (block.Source, error) {
	disk, err := d.Disk(c.Spec.Disk)
	if err != nil {
		return nil, err
	}
	var layers []string
	for _, uid := range c.Spec.Layers {
		layers = append(layers, string(uid))
	}
	return disk.OpenStack(layers, c.Status.VirtualSize)
}
