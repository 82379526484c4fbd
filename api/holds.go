package api

import "slices"

// HoldsImage tells whether a volume without a replica keeps its backing image from being deleted. One that was made
// before the deletion does, and may be placed; a later one does not, so that neither waits for the other for ever.
func HoldsImage(v *Volume, img *BackingImage) bool {
	return v.Spec.BackingImage == img.Name &&
		(img.DeletionTimestamp == nil || v.CreationTimestamp.Before(img.DeletionTimestamp))
}

// LendsLayers reports whether the copy is ready and has exactly these layers, so that a clone can share or copy them.
func (c *ImageCopy) LendsLayers(layers []UID) bool {
	return c.Status.State == ImageReady && slices.Equal(c.Spec.Layers, layers)
}
