package controller

import (
	"context"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"drover.io/drover/api"
)

// TestVolumeKnowsItsClaim: a volume has the names of its claim, its PersistentVolume and its StorageClass, as far as
// they are told and can be read. Names that no object has are left out.
func TestVolumeKnowsItsClaim(t *testing.T) {
	class := "fast"
	s := &Server{client: interceptor.NewClient(store, interceptor.Funcs{Get: func(ctx context.Context, c client.WithWatch,
		key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
		claim, is := o.(*corev1.PersistentVolumeClaim)
		if !is || key.Namespace != "db" {
			return c.Get(ctx, key, o, opts...) // an API server without claims
		}
		claim.Spec.StorageClassName = &class
		return nil
	}})}
	for name, x := range map[string]struct{ given, want map[string]string }{
		"all": {map[string]string{claimNameKey: "data", claimNamespaceKey: "db", persistentVolumeKey: "pvc-1"},
			map[string]string{api.AnnotationClaim: "db/data", api.AnnotationPersistentVolume: "pvc-1",
				api.AnnotationStorageClass: "fast"}},
		"no claims": {map[string]string{claimNameKey: "data", claimNamespaceKey: "x"},
			map[string]string{api.AnnotationClaim: "x/data"}},
		"no names": {map[string]string{claimNameKey: "a/b", claimNamespaceKey: "db", persistentVolumeKey: "a b"}, nil},
		"nothing":  {nil, nil},
	} {
		var v api.Volume
		if s.annotateClaim(t.Context(), &v, x.given); !maps.Equal(v.Annotations, x.want) {
			t.Errorf("%s: %v, want %v", name, v.Annotations, x.want)
		}
	}
}
