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
	"drover.io/drover/driver/cli/localfile"
)

// secretNamespace is the namespace of Secrets without one.
const secretNamespace = "default"

// parseSecret reads [NAMESPACE/]NAME; nothing is no Secret.
func parseSecret(s string) (*api.SecretRef, error) {
	if s == "" {
		return nil, nil
	}
	ref := &api.SecretRef{Namespace: secretNamespace, Name: s}
	if namespace, name, ok := strings.Cut(s, "/"); ok {
		ref.Namespace, ref.Name = namespace, name
	}
	if ref.Name == "" || ref.Namespace == "" || strings.Contains(ref.Name, "/") {
		return nil, usagef("--secret %s: write NAME, or NAMESPACE/NAME", s)
	}
	return ref, nil
}

// readValues reads the files that the flags name, as the content of a Secret; no file is nil. Errors name files, lines
// and keys, and never print a value.
func (f *targetFlags) readValues() (map[string][]byte, error) {
	if f.password == "" && f.credentials == "" {
		return nil, nil
	}
	if f.secret != "" {
		return nil, usagef("--secret names a Secret, --password-file and --credentials-file make one: leave one of them out")
	}
	values := map[string][]byte{}
	if f.credentials != "" {
		text, err := localfile.ReadSecret(f.credentials)
		if err != nil {
			return nil, err
		}
		if values, err = localfile.ParseCredentials(f.credentials, text); err != nil {
			return nil, err
		}
	}
	if f.password == "" {
		return values, nil
	}
	for _, key := range []string{api.SecretBackupPassword,
		api.SecretResticPassword} {
		if _, has := values[key]; has {
			return nil, usagef("--password-file: %s has %s already: leave one of the two passwords out", f.credentials, key)
		}
	}
	text, err := localfile.ReadSecret(f.password)
	if err != nil {
		return nil, err
	}
	password := bytes.TrimSpace(text) // as restic does with the same file
	switch {
	case len(password) == 0:
		return nil, usagef("--password-file %s: the file has no password", f.password)
	case bytes.ContainsAny(password, "\r\n"):
		return nil, usagef("--password-file %s: the file has several lines: a password is one line", f.password)
	case string(password) == api.PublishedPassword:
		return nil, usagef("--password-file %s: this password is published and keeps nothing secret: choose another, or "+
			"leave --password-file out", f.password)
	}
	values[api.SecretBackupPassword] = password
	return values, nil
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
