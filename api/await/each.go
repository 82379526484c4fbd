package await

import (
	"context"
	"maps"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Each lists, then watches, and calls see for every object and every change, in the caller's goroutine, until see
// returns true. After the end of a watch (server restart, expired version) Each lists again.
func Each(ctx context.Context, c client.WithWatch, list client.ObjectList,
	see func(client.Object) (bool, error), opts ...client.ListOption) error {
	return EachAndGone(ctx, c, list, map[string]client.Object{}, func(o client.Object, gone bool) (bool, error) {
		if gone {
			return false, nil
		}
		return see(o)
	}, opts...)
}

// EachAndGone is Each, and also reports deleted objects: seen objects, and known objects, by name.
func EachAndGone(ctx context.Context, c client.WithWatch, list client.ObjectList, known map[string]client.Object,
	see func(o client.Object, gone bool) (bool, error), opts ...client.ListOption) error {
	saw := func(o client.Object, gone bool) (bool, error) {
		known[o.GetName()] = o
		if gone {
			delete(known, o.GetName())
		}
		return see(o, gone)
	}
	for {
		if err := c.List(ctx, list, opts...); err != nil {
			return ended(ctx, err)
		}
		objs, err := meta.ExtractList(list)
		if err != nil {
			return err
		}
		missing := maps.Clone(known)
		for _, o := range objs {
			delete(missing, o.(client.Object).GetName())
		}
		for _, o := range missing {
			if stop, err := saw(o, true); stop || err != nil {
				return err
			}
		}
		for _, o := range objs {
			if stop, err := saw(o.(client.Object), false); stop || err != nil {
				return err
			}
		}
		if stop, err := watchList(ctx, c, list, saw, opts); stop || err != nil {
			return err
		}
	}
}

func watchList(ctx context.Context, c client.WithWatch, list client.ObjectList,
	see func(o client.Object, gone bool) (bool, error), opts []client.ListOption) (stop bool, err error) {
	from := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}}
	w, err := c.Watch(ctx, list, append(slices.Clone(opts), from)...)
	if err != nil {
		if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			return false, nil
		}
		return false, ended(ctx, err)
	}
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case e, ok := <-w.ResultChan():
			if !ok || e.Type == watch.Error {
				return false, nil
			}
			if obj, ok := e.Object.(client.Object); ok && e.Type != watch.Bookmark {
				if stop, err := see(obj, e.Type == watch.Deleted); stop || err != nil {
					return stop, err
				}
			}
		}
	}
}
