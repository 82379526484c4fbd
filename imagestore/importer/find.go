package importer

import (
	"bytes"
	"context"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Find finds the image on the disk by its record. Without a record, sealed layers with the known digest of the image
// get a new record. A missing image is an error of kind not found.
func Find(on block.Layers, want Spec) (Result, error) {
	img, err := readRecord(on, string(want.UID))
	if err == nil {
		var size int64
		if x, ok := on.(block.Exporter); ok && img.Digest == "" {
			size, err = x.Taken(img)
		} else {
			size, err = allocatedBytes(on, img.Layers)
		}
		if err != nil {
			return Result{}, api.Errorf(api.Corrupt, "image %s is recorded on disk %s, but not whole: %w", want.Name,
				on.UID(), err)
		}
		if want.Object != nil && !bytes.Equal(want.Object, img.Object) {
			// The object changed, or an older version wrote the record.
			img.Object = want.Object
			return Result{img, size}, on.PutImage(img)
		}
		return Result{img, size}, nil
	}
	if !api.Is(err, api.NotFound) && !api.Is(err, api.Corrupt) {
		return Result{}, err // a damaged record counts as none
	}
	missing := api.Errorf(api.NotFound, "image %s is not on disk %s", want.Name, on.UID())
	if want.Digest == "" || want.VirtualSize == 0 || len(want.Layers) == 0 {
		return Result{}, missing
	}
	top := string(want.Layers[len(want.Layers)-1])
	if root, _, err := on.Digest(top); err != nil || root != want.Digest {
		return Result{}, missing
	}
	size, err := allocatedBytes(on, layerNames(want.Layers))
	if err != nil {
		return Result{}, missing
	}
	img = block.Image{UID: string(want.UID), Name: want.Name, Layers: layerNames(want.Layers), Format: want.Format,
		VirtualSize: want.VirtualSize, Checksum: want.Checksum, Digest: want.Digest, Object: want.Object}
	return Result{img, size}, on.PutImage(img)
}

// readRecord returns the record of an image. A missing record is an error of kind not found.
func readRecord(on block.Layers, uid string) (block.Image, error) {
	if d, ok := on.(interface {
		Image(uid string) (block.Image, error)
	}); ok {
		return d.Image(uid) // without a list of thousands
	}
	imgs, err := on.Images()
	if i := slices.IndexFunc(imgs, func(m block.Image) bool { return m.UID == uid }); i >= 0 {
		return imgs[i], nil
	}
	if err != nil && !api.Is(err, api.Corrupt) {
		return block.Image{}, err
	}
	return block.Image{}, api.Errorf(api.NotFound, "image %s is not on disk %s", uid, on.UID())
}

// touchDetector is a disk that notices changes of sealed layers.
type touchDetector interface {
	Touched(uid string) (mark string, err error)
}

// Touched returns a mark of changes to the image's layers since they were sealed, which call for a verification; ""
// without a change. Each change has another mark.
func Touched(on block.Layers, img block.Image) (mark string, err error) {
	t, ok := on.(touchDetector)
	if !ok {
		return "", nil
	}
	for _, l := range img.Layers {
		m, err := t.Touched(l)
		if err != nil {
			return "", err
		}
		if m != "" {
			mark += l + " " + m + "\n"
		}
	}
	return mark, nil
}

// Verify compares all layers of the image on the disk with their digests.
func Verify(ctx context.Context, on block.Layers, img block.Image) error {
	for _, l := range img.Layers {
		if err := on.Verify(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

// allocatedBytes returns the bytes of the layers on the disk. A missing file of a layer is an error.
func allocatedBytes(on block.Layers, layers []string) (sum int64, err error) {
	if _, err := Touched(on, block.Image{Layers: layers}); err != nil {
		return 0, err
	}
	for _, l := range layers {
		_, n, err := on.Digest(l)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}
