package kubeapi

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/apiserver/pkg/storage/storagebackend"
)

// Drover's objects refer to Secrets and to no other built-in kind, so this server serves Secrets too: the same
// manifests, `kubectl create secret` and the same code work here and in a cluster. The stored version of Secrets is
// also the internal version; secretStrategy does the rest of the cluster server's work. The core group also has events,
// as a view.

func installCore(srv *genericapiserver.GenericAPIServer, etcd string, events eventView) error {
	sch := runtime.NewScheme()
	v1 := schema.GroupVersion{Version: "v1"}
	for _, gv := range []schema.GroupVersion{v1, {Version: runtime.APIVersionInternal}} {
		sch.AddKnownTypes(gv, &corev1.Secret{}, &corev1.SecretList{})
	}
	metav1.AddToGroupVersion(sch, v1)
	if err := addEvents(sch, v1); err != nil {
		return fmt.Errorf("events: %w", err)
	}
	if err := sch.SetVersionPriority(v1); err != nil {
		return err
	}
	codecs := serializer.NewCodecFactory(sch)

	opts := genericoptions.NewEtcdOptions(storagebackend.NewDefaultConfig("/registry", codecs.LegacyCodec(v1)))
	opts.StorageConfig.Transport.ServerList = []string{etcd}
	opts.StorageConfig.CountMetricPollPeriod = 0
	opts.EnableWatchCache = false
	strategy := secretStrategy{sch, names.SimpleNameGenerator}
	resource := schema.GroupResource{Resource: "secrets"}
	store := &genericregistry.Store{
		NewFunc:                   func() runtime.Object { return &corev1.Secret{} },
		NewListFunc:               func() runtime.Object { return &corev1.SecretList{} },
		DefaultQualifiedResource:  resource,
		SingularQualifiedResource: schema.GroupResource{Resource: "secret"},
		CreateStrategy:            strategy,
		UpdateStrategy:            strategy,
		DeleteStrategy:            strategy,
		TableConvertor:            rest.NewDefaultTableConvertor(resource),
	}
	getter := &genericoptions.StorageFactoryRestOptionsFactory{Options: *opts, StorageFactory: factory{opts.StorageConfig}}
	if err := store.CompleteWithOptions(&generic.StoreOptions{RESTOptions: getter}); err != nil {
		return fmt.Errorf("secrets: %w", err)
	}
	info := genericapiserver.NewDefaultAPIGroupInfo("", sch, metav1.ParameterCodec, codecs)
	info.VersionedResourcesStorageMap["v1"] = map[string]rest.Storage{"secrets": store, "events": events}
	return srv.InstallLegacyAPIGroup(genericapiserver.DefaultLegacyAPIPrefix, &info)
}

// factory gives every resource the same storage.
type factory struct{ config storagebackend.Config }

func (f factory) NewConfig(r schema.GroupResource, _ runtime.Object) (*storagebackend.ConfigForResource, error) {
	return f.config.ForResource(r), nil
}
func (f factory) ResourcePrefix(r schema.GroupResource) string { return r.Resource }
func (f factory) Configs() []storagebackend.Config             { return []storagebackend.Config{f.config} }
func (f factory) Backends() []storage.Backend                  { return nil }

// secretStrategy prepares and validates a secret before the server stores the secret.
type secretStrategy struct {
	runtime.ObjectTyper
	names.NameGenerator
}

var (
	_ rest.RESTCreateStrategy = secretStrategy{}
	_ rest.RESTUpdateStrategy = secretStrategy{}
)

func (secretStrategy) NamespaceScoped() bool { return true }

// mergeStringData moves the write-only stringData to data.
func mergeStringData(obj runtime.Object) {
	s := obj.(*corev1.Secret)
	if s.Type == "" {
		s.Type = corev1.SecretTypeOpaque
	}
	if len(s.StringData) == 0 {
		return
	}
	s.Data = maps.Clone(s.Data)
	if s.Data == nil {
		s.Data = map[string][]byte{}
	}
	for k, v := range s.StringData {
		s.Data[k] = []byte(v)
	}
	s.StringData = nil
}

func (secretStrategy) PrepareForCreate(_ context.Context, obj runtime.Object) { mergeStringData(obj) }
func (secretStrategy) PrepareForUpdate(_ context.Context, obj, _ runtime.Object) {
	mergeStringData(obj)
}

func (secretStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	size := 0
	for _, v := range obj.(*corev1.Secret).Data {
		size += len(v)
	}
	if size > corev1.MaxSecretSize {
		return field.ErrorList{field.TooLong(field.NewPath("data"), "", corev1.MaxSecretSize)}
	}
	return nil
}

func (v secretStrategy) ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	now, was := obj.(*corev1.Secret), old.(*corev1.Secret)
	errs := v.Validate(ctx, obj)
	if now.Type != was.Type {
		errs = append(errs, field.Invalid(field.NewPath("type"), now.Type, "cannot change"))
	}
	if was.Immutable != nil && *was.Immutable &&
		(now.Immutable == nil || !*now.Immutable || !equality.Semantic.DeepEqual(now.Data, was.Data)) {
		errs = append(errs, field.Forbidden(field.NewPath("data"), "the secret is immutable"))
	}
	return errs
}

func (secretStrategy) Canonicalize(runtime.Object)                               {}
func (secretStrategy) AllowCreateOnUpdate(context.Context) bool                  { return false }
func (secretStrategy) AllowUnconditionalUpdate(context.Context) bool             { return true }
func (secretStrategy) WarningsOnCreate(context.Context, runtime.Object) []string { return nil }
func (secretStrategy) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}
