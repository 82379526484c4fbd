package controller

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// Keys that the provisioner adds to the parameters of a StorageClass with --extra-create-metadata.
const (
	claimNameKey        = sidecarPrefix + "pvc/name"
	claimNamespaceKey   = sidecarPrefix + "pvc/namespace"
	persistentVolumeKey = sidecarPrefix + "pv/name"
)

// annotateClaim notes on a new volume its names in Kubernetes, as far as the provisioner tells them. They are for
// people, who look for a backup by them, so a claim that cannot be read fails no volume.
func (s *Server) annotateClaim(ctx context.Context, vol *api.Volume, parameters map[string]string) {
	name, namespace, pv := parameters[claimNameKey], parameters[claimNamespaceKey], parameters[persistentVolumeKey]
	if areNames(pv) {
		metav1.SetMetaDataAnnotation(&vol.ObjectMeta, api.AnnotationPersistentVolume, pv)
	}
	if !areNames(name, namespace) {
		return
	}
	metav1.SetMetaDataAnnotation(&vol.ObjectMeta, api.AnnotationClaim, namespace+"/"+name)
	var claim corev1.PersistentVolumeClaim
	if err := s.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &claim); err != nil {
		return
	}
	if class := claim.Spec.StorageClassName; class != nil && areNames(*class) {
		metav1.SetMetaDataAnnotation(&vol.ObjectMeta, api.AnnotationStorageClass, *class)
	}
}

// areNames reports whether objects of Kubernetes can have all the names.
func areNames(names ...string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { return len(validation.IsDNS1123Subdomain(name)) > 0 })
}
