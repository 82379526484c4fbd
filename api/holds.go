package api

import "slices"

// HoldsImage tells whether a volume without a replica keeps its backing image from being deleted. A volume older than
// the deletion does, and may be placed; a later volume does not, so that neither waits for the other for ever.
func HoldsImage(v *Volume, img *BackingImage) bool {
	return v.Spec.BackingImage == img.Name &&
		(img.DeletionTimestamp == nil || v.CreationTimestamp.Before(img.DeletionTimestamp))
}

// LendsLayers reports whether the copy is ready and has exactly the given layers, so that a clone can share or copy
// the layers.
func (c *ImageCopy) LendsLayers(layers []UID) bool {
	return c.Status.State == ImageReady && slices.Equal(c.Spec.Layers, layers)
}
