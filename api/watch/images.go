package watch

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// FindImage finds the image of a value of LabelImage: the image of this name, or else an image whose longer name has
// this value. Nil: no such image exists.
func FindImage(ctx context.Context, r client.Reader, label string) (*api.BackingImage, error) {
	img := &api.BackingImage{}
	err := r.Get(ctx, client.ObjectKey{Name: label}, img)
	if err == nil {
		return img, nil
	}
	if !apierrors.IsNotFound(err) {
		return nil, err
	}
	var list api.BackingImageList
	if err := r.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	for i := range list.Items {
		if api.LabelValue(list.Items[i].Name) == label {
			return list.Items[i].DeepCopy(), nil
		}
	}
	return nil, nil
}
