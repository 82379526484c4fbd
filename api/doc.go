// Package api is the contract that every other room of Drover imports, and imports no other room: the objects of
// storage.drover.io/v1alpha1, the ids that tie objects to bytes on a disk, their validation, and the kinds of error.
//
// Every spec is a wish and every status a fact, and each status has exactly one writer, named in the comment of the
// status's type. All objects are cluster-scoped. The package has no goroutines and no state.
//
// +kubebuilder:object:generate=true
// +groupName=storage.drover.io
// +versionName=v1alpha1
package api
