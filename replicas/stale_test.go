package replicas

import (
	"context"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// TestRecordThatTheCacheLacks: what a disk keeps of a new volume is there, also where the cache does not have it yet.
func TestRecordThatTheCacheLacks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := volume("stale", 16<<20)
	v.Spec.FSType = "xfs"
	w.create(v)
	behind := interceptor.NewClient(w.c, interceptor.Funcs{Get: func(_ context.Context, _ client.WithWatch,
		key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}})
	d := &Data{client: behind, reader: w.c}
	if object, err := d.record(w.ctx, "stale"); err != nil || !strings.Contains(string(object), `"fsType":"xfs"`) {
		t.Errorf("%s, %v", object, err)
	}
	if object, err := d.record(w.ctx, "none"); err != nil || object != nil {
		t.Errorf("of no volume: %s, %v", object, err)
	}
}
