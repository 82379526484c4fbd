package cli

import (
	"bytes"
	"context"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// parseSecret reads [NAMESPACE/]NAME; nothing is no Secret.
func parseSecret(s string) (*api.SecretRef, error) {
	if s == "" {
		return nil, nil
	}
	ref := &api.SecretRef{Namespace: api.DefaultSecretNamespace, Name: s}
	if namespace, name, ok := strings.Cut(s, "/"); ok {
		ref.Namespace, ref.Name = namespace, name
	}
	if ref.Name == "" || ref.Namespace == "" || strings.Contains(ref.Name, "/") {
		return nil, usagef("--secret %s: write NAME, or NAMESPACE/NAME", s)
	}
	return ref, nil
}

// ensureSecret creates a Secret. ensureSecret never replaces a Secret: the password there may be the only copy.
func ensureSecret(ctx context.Context, c client.Client, ref api.SecretRef, values map[string][]byte) error {
	s := &corev1.Secret{Type: corev1.SecretTypeOpaque, Data: values}
	s.Namespace, s.Name = ref.Namespace, ref.Name
	err := c.Create(ctx, s)
	if !apierrors.IsAlreadyExists(err) {
		return explain(ctx, err)
	}
	var have corev1.Secret
	if err := c.Get(ctx, client.ObjectKeyFromObject(s), &have); err != nil {
		return explain(ctx, err)
	}
	if maps.EqualFunc(have.Data, values, bytes.Equal) {
		return nil
	}
	return api.Errorf(api.Exists, "secret %s/%s exists already with other values: use this Secret with --secret %[2]s, "+
		"or, if no backup needs its password, remove it with `kubectl -n %[1]s delete secret %[2]s`", ref.Namespace, ref.Name)
}
