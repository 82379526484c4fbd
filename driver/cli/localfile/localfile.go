// Package localfile reads and writes the files of this machine named in commands. Errors name files, lines and
// keys, and never print a secret. The package starts no goroutines.
package localfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"drover.io/drover/api"
)

// secretKeys are the possible keys in a file of credentials, besides longKeys.
var secretKeys = []string{api.SecretAccessKey, api.SecretSecretKey, api.SecretSessionToken, api.SecretEndpoints,
	api.SecretVirtualHost, api.SecretHTTPProxy, api.SecretHTTPSProxy, api.SecretNoProxy, api.SecretRole,
	api.SecretAzureAccount, api.SecretAzureKey, api.SecretAzureEndpoint, api.SecretCIFSUser, api.SecretCIFSPassword,
	api.SecretSFTPPassword, api.SecretSFTPPassphrase, api.SecretKnownHosts, api.SecretBackupPassword,
	api.SecretResticPassword}

// longKeys are the keys whose values have several lines.
var longKeys = []string{api.SecretCert, api.SecretAzureCert, api.SecretSFTPKey}

// OpenImage opens a regular file under its absolute, real path, the path for the node.
func OpenImage(path string) (*os.File, error) {
	abs, err := filepath.Abs(path)
	if err == nil {
		abs, err = filepath.EvalSymlinks(abs)
	}
	if err != nil {
		return nil, failure("image file", path, err)
	}
	f, err := os.Open(abs)
	if err != nil {
		return nil, failure("image file", path, err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("not a regular file")
	} else if err == nil && st.Size() == 0 {
		err = errors.New("the file is empty")
	}
	if err != nil {
		f.Close()
		return nil, failure("image file", path, err)
	}
	return f, nil
}

// failure is the error of a file, with its name.
func failure(noun, path string, err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	kind := api.Invalid
	if errors.Is(err, os.ErrNotExist) {
		kind = api.NotFound
	}
	return api.Errorf(kind, "%s %s: %w", noun, path, err)
}

// ReadSecret reads a short file: a pipe is possible, and an endless device is refused.
func ReadSecret(path string) ([]byte, error) {
	const most = 64 << 10
	f, err := os.Open(path)
	if err != nil {
		return nil, failure("file", path, err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && len(text) > most {
		err = fmt.Errorf("the file has more than %s", api.SizeText(most))
	}
	if err != nil {
		return nil, failure("file", path, err)
	}
	return text, nil
}

// ParseCredentials reads the lines KEY=VALUE of a file. Empty lines and comments (#) are skipped.
func ParseCredentials(path string, text []byte) (map[string][]byte, error) {
	values := map[string][]byte{}
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		refuse := func(format string, args ...any) error {
			return api.Errorf(api.Invalid, "--credentials-file %s: line %d %s", path, i+1, fmt.Sprintf(format, args...))
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
		return nil, api.Errorf(api.Invalid, "--credentials-file %s: the file has no line KEY=VALUE", path)
	}
	return values, nil
}

// ReadValues reads a file of credentials and a file of a password, as the content of a Secret; no file is nil.
func ReadValues(credentials, password string) (map[string][]byte, error) {
	if password == "" && credentials == "" {
		return nil, nil
	}
	values := map[string][]byte{}
	if credentials != "" {
		text, err := ReadSecret(credentials)
		if err != nil {
			return nil, err
		}
		if values, err = ParseCredentials(credentials, text); err != nil {
			return nil, err
		}
	}
	if password == "" {
		return values, nil
	}
	for _, key := range []string{api.SecretBackupPassword, api.SecretResticPassword} {
		if _, has := values[key]; has {
			return nil, api.Errorf(api.Invalid, "--password-file: %s has %s already: leave one of the two passwords out",
				credentials, key)
		}
	}
	text, err := ReadSecret(password)
	if err != nil {
		return nil, err
	}
	line := bytes.TrimSpace(text) // as restic does with the same file
	switch {
	case len(line) == 0:
		return nil, api.Errorf(api.Invalid, "--password-file %s: the file has no password", password)
	case bytes.ContainsAny(line, "\r\n"):
		return nil, api.Errorf(api.Invalid, "--password-file %s: the file has several lines: a password is one line",
			password)
	case string(line) == api.PublishedPassword:
		return nil, api.Errorf(api.Invalid, "--password-file %s: this password is published and keeps nothing secret: "+
			"choose another, or leave --password-file out", password)
	}
	values[api.SecretBackupPassword] = line
	return values, nil
}

// WriteSecret writes a new file, durably, for the eyes of its owner alone. An existing file stays as it is.
func WriteSecret(path string, content []byte) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return api.Errorf(api.Exists, "file %s exists already: choose another name", path)
	} else if err != nil {
		return failure("file", path, err)
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = syncFolder(filepath.Dir(path))
	}
	if err != nil { // a part of a secret is of no help
		return failure("file", path, errors.Join(err, os.Remove(path)))
	}
	return nil
}

func syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
