package watch

import (
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
)

// Request asks for a reconcile of a cluster-scoped object.
func Request(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
}

// Requests is Request for map functions.
func Requests(name string) []reconcile.Request { return []reconcile.Request{Request(name)} }

// Named passes events of the named objects only.
func Named(names ...string) builder.Predicates {
	return builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool {
		return slices.Contains(names, o.GetName())
	}))
}

// Updates passes an update only if it matters; it passes every creation and every deletion.
func Updates(matters func(old, now client.Object) bool) builder.Predicates {
	return builder.WithPredicates(predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return matters(e.ObjectOld, e.ObjectNew)
	}})
}

// WishChanged reports whether the spec changed or a user deleted the object.
func WishChanged(old, now client.Object) bool {
	return old.GetGeneration() != now.GetGeneration() || !old.GetDeletionTimestamp().Equal(now.GetDeletionTimestamp())
}

// DisksChanged reports whether a change of a Node can affect placement or open disks; a heartbeat alone cannot.
func DisksChanged(old, now client.Object) bool {
	a, b := old.(*api.Node), now.(*api.Node)
	if a.Generation != b.Generation || len(a.Status.Disks) != len(b.Status.Disks) {
		return true
	}
	for i := range a.Status.Disks {
		x, y := a.Status.Disks[i], b.Status.Disks[i]
		if x.Ready != y.Ready || x.Gone != y.Gone || x.UID != y.UID || x.Available/(64<<20) != y.Available/(64<<20) {
			return true
		}
	}
	return false
}

// IgnoreConflict returns nil for a conflict: the write that won brings an event, and the event the next reconcile.
func IgnoreConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return err
}
