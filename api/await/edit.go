package await

import (
	"context"
	"reflect"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Edit changes the named object and returns the new version. Edit calls change with the newest version, again after
// each conflict with another writer, and writes nothing where change returns false. Only the end of ctx bounds the
// tries, because nodes write volumes and snapshots all the time. (client-go's RetryOnConflict gives up after some
// tries and does not see ctx.)
func Edit[T client.Object](ctx context.Context, c client.Client, name string, change func(T) (bool, error)) (T, error) {
	return edit(ctx, c, name, change, func(obj T) error { return c.Update(ctx, obj) })
}

// EditStatus is Edit for the status of an object.
func EditStatus[T client.Object](ctx context.Context, c client.Client, name string, change func(T) (bool, error)) (
	T, error) {
	return edit(ctx, c, name, change, func(obj T) error { return c.Status().Update(ctx, obj) })
}

func edit[T client.Object](ctx context.Context, c client.Client, name string, change func(T) (bool, error),
	write func(T) error) (T, error) {
	var obj T
	pause := wait.Backoff{Duration: 5 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 7, Cap: 500 * time.Millisecond}
	err := pause.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		obj = reflect.New(reflect.TypeFor[T]().Elem()).Interface().(T)
		if err := c.Get(ctx, client.ObjectKey{Name: name}, obj); err != nil {
			return false, err
		}
		if do, err := change(obj); !do || err != nil {
			return true, err
		}
		err := write(obj)
		if apierrors.IsConflict(err) {
			return false, nil
		}
		return true, err
	})
	return obj, ended(ctx, err)
}
