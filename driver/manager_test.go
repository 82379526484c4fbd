package driver

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestClientsKnowKindsOfKubernetes: clients make no discovery, so the mapper has all kinds of Kubernetes that Drover
// reads.
func TestClientsKnowKindsOfKubernetes(t *testing.T) {
	m, err := newRESTMapper(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"Secret", "PersistentVolumeClaim"} {
		k := corev1.SchemeGroupVersion.WithKind(kind)
		if _, err := m.RESTMapping(k.GroupKind(), k.Version); err != nil {
			t.Error(err)
		}
	}
}
