package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
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

// secretKeys are the keys that a file of credentials may have, besides longKeys.
var secretKeys = []string{api.SecretAccessKey, api.SecretSecretKey, api.SecretSessionToken, api.SecretEndpoints,
	api.SecretVirtualHost, api.SecretHTTPProxy, api.SecretHTTPSProxy, api.SecretNoProxy, api.SecretRole,
	api.SecretAzureAccount, api.SecretAzureKey, api.SecretAzureEndpoint, api.SecretCIFSUser, api.SecretCIFSPassword,
	api.SecretSFTPPassword, api.SecretSFTPPassphrase, api.SecretKnownHosts, api.SecretBackupPassword,
	api.SecretResticPassword}

// longKeys are the keys whose values have several lines.
var longKeys = []string{api.SecretCert, api.SecretAzureCert, api.SecretSFTPKey}

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
		text, err := readSecretFile(f.credentials)
		if err != nil {
			return nil, err
		}
		if values, err = parseCredentials(f.credentials, text); err != nil {
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
	text, err := readSecretFile(f.password)
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

// readSecretFile reads a short file: a pipe is possible, and an endless device is refused.
func readSecretFile(path string) ([]byte, error) {
	const most = 64 << 10
	f, err := os.Open(path)
	if err != nil {
		return nil, fileError("file", path, err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && len(text) > most {
		err = fmt.Errorf("the file has more than %s", api.SizeText(most))
	}
	if err != nil {
		return nil, fileError("file", path, err)
	}
	return text, nil
}

// parseCredentials reads lines KEY=VALUE. Empty lines and lines that begin with # are skipped.
func parseCredentials(path string, text []byte) (map[string][]byte, error) {
	values := map[string][]byte{}
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		refuse := func(format string, args ...any) error {
			return usagef("--credentials-file %s: line %d %s", path, i+1, fmt.Sprintf(format, args...))
		}
		key, value, ok := strings.Cut(line, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		_, twice := values[key]
		switch {
		case !ok:
			return nil, refuse("is not KEY=VALUE")
		case slices.Contains(longKeys, key):
			return nil, refuse("is %s, which has several lines: make the Secret with kubectl, and name it with --secret", key)
		case !slices.Contains(secretKeys, key):
			return nil, refuse("has an unknown key: the keys are %s", strings.Join(secretKeys, ", "))
		case twice:
			return nil, refuse("has %s again", key)
		case value == "":
			return nil, refuse("has no value for %s: leave the line out", key)
		case len(value) > 1 && (value[0] == '"' || value[0] == '\'') && value[0] == value[len(value)-1]:
			return nil, refuse("has %s in quotes: leave the quotes out", key)
		}
		values[key] = []byte(value)
	}
	if len(values) == 0 {
		return nil, usagef("--credentials-file %s: the file has no line KEY=VALUE", path)
	}
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
