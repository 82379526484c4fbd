package replicas

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
)

// Indexes of the cache. The names are this package's own, so that others can index the same kinds.
const (
	byVolume = "replicas.volume"
	byDisk   = "replicas.disk"
	byNode   = "replicas.node"
	byImage  = "replicas.image"
	byLayer  = "replicas.layer"  // the topmost of a copy
	bySource = "replicas.source" // of a clone: the uid of a replica's snapshot, the data source of a volume
)

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

var indexed struct {
	sync.Mutex
	managers map[ctrl.Manager]bool
}

// index adds the indexes to a manager's cache, once, whatever roles run on it.
func index(mgr ctrl.Manager) error {
	indexed.Lock()
	defer indexed.Unlock()
	if indexed.managers[mgr] {
		return nil
	}
	fi := mgr.GetFieldIndexer()
	for _, ix := range []struct {
		kind  client.Object
		name  string
		value func(client.Object) string
	}{
		{&api.Replica{}, byVolume, func(o client.Object) string { return o.(*api.Replica).Spec.Volume }},
		{&api.Replica{}, byDisk, func(o client.Object) string { return string(o.(*api.Replica).Spec.Disk) }},
		{&api.Replica{}, byNode, func(o client.Object) string { return o.(*api.Replica).Spec.Node }},
		{&api.ImageCopy{}, byDisk, func(o client.Object) string { return string(o.(*api.ImageCopy).Spec.Disk) }},
		{&api.ImageCopy{}, byImage, func(o client.Object) string { return o.(*api.ImageCopy).Spec.Image }},
		{&api.ImageCopy{}, byLayer, func(o client.Object) string { return top(o.(*api.ImageCopy).Spec.Layers) }},
		{&api.Replica{}, bySource, func(o client.Object) string {
			if from := o.(*api.Replica).Spec.From; from != nil {
				return string(from.Snapshot)
			}
			return ""
		}},
		{&api.Snapshot{}, byVolume, func(o client.Object) string { return o.(*api.Snapshot).Spec.Volume }},
		{&api.Volume{}, bySource, func(o client.Object) string { return o.(*api.Volume).Spec.DataSource }},
		{&api.Volume{}, byImage, func(o client.Object) string { return o.(*api.Volume).Spec.BackingImage }},
	} {
		if err := fi.IndexField(context.Background(), ix.kind, ix.name, func(o client.Object) []string {
			if v := ix.value(o); v != "" {
				return []string{v}
			}
			return nil
		}); err != nil {
			return fmt.Errorf("index %s of %T: %w", ix.name, ix.kind, err)
		}
	}
	if indexed.managers == nil {
		indexed.managers = map[ctrl.Manager]bool{}
	}
	indexed.managers[mgr] = true
	return nil
}

func top(layers []api.UID) string {
	if len(layers) == 0 {
		return ""
	}
	return string(layers[len(layers)-1])
}

// limiter backs off after errors, but not for long: what fails is mostly another part that starts again.
func limiter() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](50*time.Millisecond, 15*time.Second)
}
