package importer

import (
	"context"
	"errors"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// createLayer starts a layer. A crash between the seal of a layer and the record of its image leaves a sealed layer
// without an image; createLayer removes such a layer, unless a replica names the layer.
func createLayer(ctx context.Context, on block.Layers, uid api.UID, size int64) (block.LayerWriter, error) {
	w, err := on.Create(ctx, string(uid), size)
	if !api.Is(err, api.Exists) {
		return w, err
	}
	if err := removeLayer(on, string(uid)); err != nil {
		return nil, err
	}
	return on.Create(ctx, string(uid), size)
}

// removeLayer removes a sealed layer without an image.
func removeLayer(on block.Layers, uid string) error {
	// A disk removes layers with their last image: so the layer gets an image first.
	if err := on.PutImage(block.Image{UID: uid, Name: "left over", Layers: []string{uid}}); err != nil {
		return err
	}
	return on.RemoveImage(uid)
}

// Remove removes everything of the image from the disk: the record, layers of this image alone, unfinished layers.
// Layers below a replica are an error of kind in use, unless the layers may belong to replicas.
func Remove(ctx context.Context, on block.Layers, want Spec) error {
	x, ok := on.(block.Exporter)
	removeImage := on.RemoveImage
	if ok && (want.Export || want.Left) {
		removeImage = x.Forget
	}
	if err := removeImage(string(want.UID)); err != nil || ok && want.Export {
		return err
	}
	for _, l := range layerNames(want.Layers) {
		if _, _, err := on.Digest(l); err == nil && ok && want.Left { // of a replica, or left over
			err := on.PutImage(block.Image{UID: l, Name: "left over", Layers: []string{l}})
			if err = errors.Join(err, x.Forget(l)); err != nil {
				return err
			}
			continue
		} else if err == nil { // sealed: of another image too, or left over
			imgs, err := on.Images()
			if err != nil && !api.Is(err, api.Corrupt) {
				return err
			}
			if slices.ContainsFunc(imgs, func(m block.Image) bool { return slices.Contains(m.Layers, l) }) {
				continue
			}
		}
		// The start of a layer removes an unfinished layer of the same name.
		w, err := createLayer(ctx, on, api.UID(l), block.Size)
		if api.Is(err, api.Exists) { // a backup reads the layer, and removes the layer at its end
			continue
		}
		if err != nil {
			return err
		}
		if err := w.Abort(); err != nil {
			return err
		}
	}
	return nil
}
