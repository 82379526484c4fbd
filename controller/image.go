package controller

import (
	"context"
	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// imageSize is the size of the disk in the wish's backing image, 0 without an image. imageSize creates a missing
// image from the parameters; an existing image must match them. imageSize waits for a size that is not known yet.
func (s *Server) imageSize(ctx context.Context, w *wish) (int64, error) {
	if w.image.name == "" {
		return 0, nil
	}
	img, err := s.ensureImage(ctx, &w.image)
	if err != nil {
		return 0, err
	}
	progress := ""
	img, err = await.Until(ctx, s.client, img.Name, func(i *api.BackingImage) (bool, error) {
		progress = string(i.Status.State)
		if i.DeletionTimestamp != nil {
			return false, api.Errorf(api.Busy, "the image is being deleted: try again")
		}
		if i.Status.State == api.ImageFailed {
			return false, api.Errorf(api.Unavailable, "the import failed: %s", i.Status.Message)
		}
		if !i.CanRead() || i.Status.VirtualSize == 0 {
			return false, nil // not known for sure before
		}
		return true, w.image.matches(i) // the image's checksum is known only now
	})
	if err != nil {
		return 0, api.Explain(err, "backing image %s (%s)", w.image.name, progress)
	}
	return img.Status.VirtualSize, nil
}

func (s *Server) ensureImage(ctx context.Context, want *imageWish) (*api.BackingImage, error) {
	img := &api.BackingImage{}
	err := s.client.Get(ctx, client.ObjectKey{Name: want.name}, img)
	if err == nil {
		return img, want.matches(img)
	}
	if !apierrors.IsNotFound(err) {
		return nil, api.Explain(err, "read backing image %s", want.name)
	}
	if want.source == "" {
		return nil, api.Errorf(api.NotFound, "backing image %s does not exist: create the image, or give the address of "+
			"a download in backingImageURL", want.name)
	}
	if err := api.ValidateImageName(want.name); err != nil {
		return nil, err
	}
	img = &api.BackingImage{
		ObjectMeta: metav1.ObjectMeta{Name: want.name},
		Spec: api.BackingImageSpec{
			SourceType: want.source, SourceParameters: want.parameters, Checksum: want.checksum,
			MinNumberOfCopies: max(want.copies, 1), NodeSelector: want.nodeSelector, DiskSelector: want.diskSelector,
		},
	}
	if want.secret.Name != "" {
		img.Spec.SecretRef = &want.secret
	}
	if err := img.Spec.Validate(); err != nil {
		return nil, api.Errorf(api.Invalid, "backing image %s: %w", want.name, err)
	}
	if err = s.client.Create(ctx, img); apierrors.IsAlreadyExists(err) {
		img = &api.BackingImage{}
		if err = s.client.Get(ctx, client.ObjectKey{Name: want.name}, img); err == nil {
			return img, want.matches(img)
		}
	}
	return img, api.Explain(err, "create backing image %s", want.name)
}

// matches compares the parameters with the existing image. An absent parameter matches anything.
func (i *imageWish) matches(img *api.BackingImage) error {
	differs := ""
	switch {
	case i.source != "" && i.source != img.Spec.SourceType:
		differs = "its source is " + string(img.Spec.SourceType)
	case i.parameters != nil && !maps.Equal(i.parameters, img.Spec.SourceParameters):
		differs = "its source's parameters differ"
	case i.checksum != "" && img.Spec.Checksum != "" && i.checksum != img.Spec.Checksum:
		differs = "another checksum is expected of it"
	case i.checksum != "" && img.Spec.Checksum == "" && img.Status.Checksum != "" && i.checksum != img.Status.Checksum:
		differs = "its checksum is " + img.Status.Checksum
	}
	if differs != "" {
		return api.Errorf(api.Invalid, "backing image %s exists but does not match the parameters: %s", img.Name,
			differs)
	}
	return nil
}
