// Package await waits, by a watch and without polling, until an object has the state that a caller needs, or follows
// the objects of a list. The package also edits objects that other programs write too.
//
// The package starts no goroutines; the watch ends before a call returns. Errors are those of the Kubernetes client
// and of the context, unwrapped: the caller names the state that was awaited.
package await

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// margin is what Bound leaves the caller of a deadline.
const margin = 300 * time.Millisecond

// Bound ends a wait a little before the caller's deadline, so that the caller reads why instead of a bare time-out; a
// caller without a deadline gets limit.
func Bound(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if d, ok := ctx.Deadline(); ok {
		if time.Until(d) > 2*margin {
			d = d.Add(-margin)
		}
		return context.WithDeadline(ctx, d)
	}
	return context.WithTimeout(ctx, limit)
}

// Until returns the first version of the named object for which done returns true, or done's error. An object that
// does not exist, or is deleted meanwhile, is the client's NotFound.
func Until[T client.Object](ctx context.Context, c client.WithWatch, name string, done func(T) (bool, error)) (
	T, error) {
	var zero T
	for {
		obj := reflect.New(reflect.TypeFor[T]().Elem()).Interface().(T)
		if err := c.Get(ctx, client.ObjectKey{Name: name}, obj); err != nil {
			return zero, ended(ctx, err)
		}
		if ok, err := done(obj); ok || err != nil {
			return obj, err
		}
		obj, ok, err := next(ctx, c, obj, done)
		if ok || err != nil {
			return obj, err
		}
	}
}

// Gone returns once no object of that name and UID exists. Gone passes every version of the object meanwhile to see,
// which may be nil.
func Gone[T client.Object](ctx context.Context, c client.WithWatch, obj T, see func(T)) error {
	_, err := Until(ctx, c, obj.GetName(), func(now T) (bool, error) {
		if now.GetUID() != obj.GetUID() {
			return true, nil
		}
		if see != nil {
			see(now)
		}
		return false, nil
	})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// next watches from obj on. ok false without an error means that the watch ended and the caller must read again.
func next[T client.Object](ctx context.Context, c client.WithWatch, obj T, done func(T) (bool, error)) (
	T, bool, error) {
	var zero T
	gvk, err := apiutil.GVKForObject(obj, c.Scheme())
	if err != nil {
		return zero, false, err
	}
	made, err := c.Scheme().New(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
	if err != nil {
		return zero, false, err
	}
	list, isList := made.(client.ObjectList)
	if !isList {
		return zero, false, fmt.Errorf("%T is not a list of objects", made)
	}
	w, err := c.Watch(ctx, list, client.MatchingFields{"metadata.name": obj.GetName()},
		&client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: obj.GetResourceVersion()}})
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return zero, false, nil
	}
	if err != nil {
		return zero, false, ended(ctx, err)
	}
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return zero, false, ctx.Err()
		case e, open := <-w.ResultChan():
			if !open || e.Type == watch.Error {
				return zero, false, ctx.Err()
			}
			now, isT := e.Object.(T)
			if !isT || e.Type == watch.Bookmark {
				continue
			}
			if e.Type == watch.Deleted {
				return zero, false, nil // the next Get says NotFound, or finds a new object of the name
			}
			if ok, err := done(now); ok || err != nil {
				return now, ok, err
			}
		}
	}
}

// ended prefers the end of the context to the client's error for the same end.
func ended(ctx context.Context, err error) error {
	if c := ctx.Err(); c != nil && !errors.Is(err, c) {
		return c
	}
	return err
}
