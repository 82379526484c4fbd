// Package images opens images of the cluster on the disks of this node. It starts no goroutine and has no lock.
//
// Invariant: the disk has all of an open image, and compares each chunk that is read with the chunk's digest. The files
// of the layers stay open, so a reader reads a deleted image to the end.
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
	Reader client.Reader // of ImageCopies and BackingImages
	Node   string
	Disk   func(api.UID) (block.SnapshotDisk, error)
}

// Open opens the disk of an image, by the SHA-512 of the image's file, raw or qcow2, that this cluster computed. The
// checksum of a restored image is a claim of a store. An error of kind NotFound: no disk of the node has the image.
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
		case c.Status.State != api.ImageReady || c.Status.Checksum != checksum || c.DeletionTimestamp != nil ||
			c.Status.Format != "raw" && c.Status.Format != "qcow2" || !d.isComputed(ctx, c):
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

// isComputed reports whether a node computed the checksum of a copy.
func (d *Disks) isComputed(ctx context.Context, c *api.ImageCopy) bool {
	var img api.BackingImage
	err := d.Reader.Get(ctx, client.ObjectKey{Name: c.Spec.Image}, &img)
	of := img.Spec.SourceType // a clone has the checksum of its source, which may be restored
	return err == nil && img.Status.UUID == c.Spec.UUID && of != api.SourceRestore && of != api.SourceClone
}

// open opens the layers of a copy, without the rest of the last block.
func (d *Disks) open(c *api.ImageCopy) (block.Source, error) {
	disk, err := d.Disk(c.Spec.Disk)
	if err != nil {
		return nil, err
	}
	var layers []string
	for _, uid := range c.Spec.Layers {
		layers = append(layers, string(uid))
	}
	size := c.Status.VirtualSize
	opened, err := disk.OpenStack(layers, (size+block.Size-1)/block.Size*block.Size)
	if err != nil {
		return nil, err
	}
	return shortened{opened, size}, nil
}

// shortened is a source without the bytes behind size.
type shortened struct {
	block.Source
	size int64
}

// Size implements block.Source.
func (s shortened) Size() int64 { return s.size }

// Next implements block.Source.
func (s shortened) Next(off int64) (block.Extent, error) {
	e, err := s.Source.Next(off)
	e.Len = min(e.Len, s.size-e.Off)
	return e, err
}
