package cluster

import (
	"context"
	"errors"
	"net"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// patient returns a client that retries while an API server is busy or unreachable: on a busy computer the server's
// database is late now and then. An answer about an object is final.
func patient(c client.WithWatch) client.WithWatch {
	return interceptor.NewClient(c, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object,
			opts ...client.GetOption) error {
			_, err := tries(ctx, func() error { return c.Get(ctx, key, obj, opts...) })
			return err
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			_, err := tries(ctx, func() error { return c.List(ctx, list, opts...) })
			return err
		},
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			again, err := tries(ctx, func() error { return c.Create(ctx, obj, opts...) })
			if again && apierrors.IsAlreadyExists(err) { // the first request succeeded after its timeout
				err = c.Get(ctx, client.ObjectKeyFromObject(obj), obj)
			}
			return err
		},
		Update: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			_, err := tries(ctx, func() error { return c.Update(ctx, obj, opts...) })
			return err
		},
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch,
			opts ...client.PatchOption) error {
			_, err := tries(ctx, func() error { return c.Patch(ctx, obj, patch, opts...) })
			return err
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, obj client.Object,
			opts ...client.SubResourceUpdateOption) error {
			_, err := tries(ctx, func() error { return c.SubResource(sub).Update(ctx, obj, opts...) })
			return err
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, obj client.Object, patch client.Patch,
			opts ...client.SubResourcePatchOption) error {
			_, err := tries(ctx, func() error { return c.SubResource(sub).Patch(ctx, obj, patch, opts...) })
			return err
		},
		Delete: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.DeleteOption) error {
			again, err := tries(ctx, func() error { return c.Delete(ctx, obj, opts...) })
			if again && apierrors.IsNotFound(err) {
				err = nil
			}
			return err
		},
		Watch: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) (
			w watch.Interface, err error) {
			_, err = tries(ctx, func() error {
				w, err = c.Watch(ctx, list, opts...)
				return err
			})
			return w, err
		},
	})
}

// tries calls do until the server has answered, and reports a second call.
func tries(ctx context.Context, do func() error) (again bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	for {
		if err = do(); err == nil || !passing(err) {
			return again, err
		}
		again = true
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			return again, err
		}
	}
}

// passing reports an error that says nothing about the object.
func passing(err error) bool {
	var u *url.Error
	var op *net.OpError
	return apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsTooManyRequests(err) ||
		apierrors.IsServiceUnavailable(err) || errors.As(err, &op) ||
		errors.As(err, &u) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) ||
		apierrors.IsInternalError(err) && strings.Contains(err.Error(), "etcdserver")
}
