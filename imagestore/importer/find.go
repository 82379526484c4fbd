package importer

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Find looks for the image on the disk. Its own record counts; where that was lost, finished layers with the digest
// that the image is known to have are named again. Not there: an error of kind not found.
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
		if want.Object != nil && !bytes.Equal(want.Object, img.Object) { // it changed, or an older program wrote this
			img.Object = want.Object
			return Result{img, size}, on.PutImage(img)
		}
		return Result{img, size}, nil
	}
	if !api.Is(err, api.NotFound) && !api.Is(err, api.Corrupt) {
		return Result{}, err // a damaged record is as good as none
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

// readRecord is what the disk has recorded of an image. Not there: an error of kind not found.
func readRecord(on block.Layers, uid string) (block.Image, error) {
	if d, ok := on.(interface {
		Image(uid string) (block.Image, error)
	}); ok {
		return d.Image(uid) // there may be thousands
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

// touchDetector is a disk that knows when somebody changed a finished layer.
type touchDetector interface {
	Touched(uid string) (mark string, err error)
}

// Touched names a change that somebody made to the image's layers since they were sealed: the content is to be verified
// then. Empty: there was none. The mark differs from one change to the next.
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

// Verify reads all that the image has on the disk and compares it with its digests.
func Verify(ctx context.Context, on block.Layers, img block.Image) error {
	for _, l := range img.Layers {
		if err := on.Verify(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

// allocatedBytes is what the layers take; all of them must be there with all their files.
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

// Copy brings an image from another disk, of this node or another. The digest of each layer is compared.
func Copy(ctx context.Context, from, on block.Layers, want Spec, p *Progress) (Result, error) {
	src, err := readRecord(from, string(want.UID))
	if err != nil {
		found, err := Find(from, want)
		if err != nil {
			return Result{}, err
		}
		src = found.Image
	}
	if want.Object != nil {
		src.Object = want.Object
	}
	return copyLayers(ctx, from, on, src, want.CheckpointEvery, p)
}

// Share brings an image from another disk that has its layers, but under the name of another image. What
// is known of it (Want) must be all of it.
func Share(ctx context.Context, from, on block.Layers, want Spec, p *Progress) (Result, error) {
	if root, _, err := from.Digest(string(want.Layers[len(want.Layers)-1])); err != nil || root != want.Digest {
		return Result{}, errors.Join(api.Errorf(api.NotFound, "disk %s does not have the layers of image %s", from.UID(),
			want.Name), err)
	}
	return copyLayers(ctx, from, on, want.record(), want.CheckpointEvery, p)
}

// record is what is known of it.
func (w Spec) record() block.Image {
	return block.Image{UID: string(w.UID), Name: w.Name, Layers: layerNames(w.Layers), Format: w.Format,
		VirtualSize: w.VirtualSize, Checksum: w.Checksum, Digest: w.Digest, Object: w.Object}
}

func copyLayers(ctx context.Context, from, on block.Layers, img block.Image, keepEvery time.Duration,
	p *Progress) (Result, error) {
	got := Result{Image: img}
	var total int64
	for _, l := range img.Layers {
		s, err := from.Open(l)
		if err != nil {
			return Result{}, err
		}
		size := s.Size()
		_ = s.Close()
		if img.VirtualSize > 0 && size > api.RoundSize(img.VirtualSize) {
			return Result{}, api.Errorf(api.Corrupt, "layer %s on disk %s: it has %d bytes, more than its image %s with %d", l,
				from.UID(), size, img.Name, img.VirtualSize)
		}
		total += size
	}
	p.readTotal.Store(total)
	var before int64
	for _, l := range img.Layers {
		n, size, err := copyLayer(ctx, from, on, l, keepEvery, func(done int64) { p.read.Store(before + done) })
		if err != nil {
			return Result{}, explainDiskError(on, err)
		}
		got.Allocated += n
		before += size
	}
	p.sealing.Store(true)
	if err := on.PutImage(got.Image); err != nil {
		return Result{}, explainDiskError(on, err)
	}
	return got, nil
}

// createLayer starts a layer. A finished one of that UID that no image names was left by a crash between its end and
// the image's record: it goes, unless a replica names it.
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

// removeLayer removes a finished layer that no image names.
func removeLayer(on block.Layers, uid string) error {
	// What no image names cannot be removed: so it is named, and the name removed with all that it held.
	if err := on.PutImage(block.Image{UID: uid, Name: "left over", Layers: []string{uid}}); err != nil {
		return err
	}
	return on.RemoveImage(uid)
}

// Remove makes sure that nothing of the image is on the disk: no record, no layer that only it named, nothing half
// made. Layers that a replica names: an error of kind in use.
func Remove(ctx context.Context, on block.Layers, want Spec) error {
	if x, ok := on.(block.Exporter); ok && want.Export {
		return x.Forget(string(want.UID))
	}
	if err := on.RemoveImage(string(want.UID)); err != nil {
		return err
	}
	for _, l := range layerNames(want.Layers) {
		if _, _, err := on.Digest(l); err == nil { // finished: another image's too, or left over
			imgs, err := on.Images()
			if err != nil && !api.Is(err, api.Corrupt) {
				return err
			}
			if slices.ContainsFunc(imgs, func(m block.Image) bool { return slices.Contains(m.Layers, l) }) {
				continue
			}
		}
		// Making a layer removes a half-made one of that name.
		w, err := createLayer(ctx, on, api.UID(l), block.Size)
		if err != nil {
			return err
		}
		if err := w.Abort(); err != nil {
			return err
		}
	}
	return nil
}
