package host

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
)

// imagesNamespace is the namespace of the maker's requests for BackupBackingImages. The objects have none, and a Backup
// may have the same name.
const imagesNamespace = "images"

// keyOf is the name of an object in a request of the maker.
func keyOf(b client.Object) types.NamespacedName {
	key := types.NamespacedName{Name: b.GetName()}
	if _, is := b.(*api.BackupBackingImage); is {
		key.Namespace = imagesNamespace
	}
	return key
}

func requestImage(_ context.Context, o client.Object) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: keyOf(o)}}
}

// findBackup reads the object of a key; nil: it does not exist.
func findBackup(ctx context.Context, r client.Reader, key types.NamespacedName) (api.StoredBackup, error) {
	var b api.StoredBackup = &api.Backup{}
	if key.Namespace == imagesNamespace {
		b = &api.BackupBackingImage{}
	}
	if err := r.Get(ctx, client.ObjectKey{Name: key.Name}, b); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return b, nil
}

// copyOf is a deep copy.
func copyOf(b api.StoredBackup) api.StoredBackup { return b.DeepCopyObject().(api.StoredBackup) }

// sourceOf is spec.source, or nil.
func sourceOf(b api.StoredBackup) any {
	switch b := b.(type) {
	case *api.Backup:
		if b.Spec.Source != nil {
			return *b.Spec.Source
		}
	case *api.BackupBackingImage:
		if b.Spec.Source != nil {
			return *b.Spec.Source
		}
	}
	return nil
}

// newWork is a work for a backup with a source.
func newWork(b api.StoredBackup) *work {
	_, disk := b.SourceDisk()
	return &work{backup: keyOf(b), object: b.GetUID(), source: sourceOf(b), disk: disk}
}
