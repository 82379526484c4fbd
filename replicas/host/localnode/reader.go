package localnode

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// sureReader reads from the API itself. A new API server answers for a moment that it does not know the kind:
// sureReader does not take the answer for the end of an object, which would take devices down.
type sureReader struct{ client.Reader }

// Get implements client.Reader.
func (r sureReader) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return checkNotFound(r.Reader.Get(ctx, key, o, opts...))
}

// List implements client.Reader.
func (r sureReader) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return checkNotFound(r.Reader.List(ctx, list, opts...))
}

func checkNotFound(err error) error {
	if apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) {
		return api.Errorf(api.Unavailable, "the API server does not know its objects yet: %s", err)
	}
	return err
}
