package kubeapi

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
)

// untracked is the admission that creates objects without managed fields, unless the object is created by a server-side
// apply. The server keeps no managed fields of an object without them until the first server-side apply, which takes
// all fields of the object for those of one manager, before-first-apply. Managed fields would be half of an object, and
// a good part of the work for each write, and no client of Drover reads them.
type untracked struct{}

var _ admission.MutationInterface = untracked{}

// Handles implements admission.Interface.
func (untracked) Handles(op admission.Operation) bool { return op == admission.Create }

// Admit implements admission.MutationInterface.
func (untracked) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	o, err := meta.Accessor(a.GetObject())
	if err != nil {
		return nil //nolint:nilerr // an object without metadata has no managed fields
	}
	if !slices.ContainsFunc(o.GetManagedFields(), func(f metav1.ManagedFieldsEntry) bool {
		return f.Operation == metav1.ManagedFieldsOperationApply
	}) {
		o.SetManagedFields(nil)
	}
	return nil
}
