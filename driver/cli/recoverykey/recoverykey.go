// Package recoverykey writes the file that opens a repository of backups without Drover and without its cluster. The
// file is text for a person, with a line for each value. The package starts no goroutines.
package recoverykey

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/url"
	"path"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/keys"
)

// Key is what a person needs to open a repository.
type Key struct {
	Target     string // name of the backup target
	URL        string // of the store
	Repository string // id
	Password   string
	Name       string // of the key file in the folder keys, which is the SHA-256 of Content
	Content    []byte
	Written    time.Time
}

// Check refuses a key file that arrived damaged, or that the password does not open.
func (k *Key) Check() error {
	if sum := sha256.Sum256(k.Content); hex.EncodeToString(sum[:]) != k.Name {
		return api.Errorf(api.Corrupt, "target %q: the key file does not match its name %.64q; try again", k.Target, k.Name)
	}
	if _, err := keys.Unwrap(k.Content, k.Password); err != nil {
		return api.Errorf(api.KindOf(err), "target %q: %w; try again, because the Secret may have changed", k.Target, err)
	}
	return nil
}

// CheckPassword refuses a password that a person cannot copy from the file, or that restic reads as another one: restic
// drops white space around the password in a file.
func CheckPassword(password string) error {
	if password == "" || strings.Trim(password, " ") != password || !utf8.ValidString(password) ||
		strings.ContainsFunc(password, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return api.Errorf(api.Invalid, "the recovery password is empty, has white space around it, or is no line of "+
			"printable text; choose another %s", api.SecretRecoveryPassword)
	}
	return nil
}

// Text is the content of the file.
func (k *Key) Text() []byte {
	place, keyPath := k.resticAddress(), "keys/"+k.Name
	if strings.HasPrefix(place, "/") {
		keyPath = path.Join(place, keyPath)
	}
	return fmt.Appendf(nil, `# Recovery key of the backups in target %q of Drover, written on %s.
# Everybody with this file and the store can read and delete all backups in it.
# Keep the file outside of the cluster, and not in the store.
#
# To read the backups, install restic 0.14 or later, and give it the password below:
#
#   sed -n 's/^password: //p' THIS_FILE > password
#   restic -r %s --password-file password snapshots
#
# If the folder "keys" of the store is lost, write the key file back first, under exactly this name in the folder:
#
#   sed -n 's/^keyFile: //p' THIS_FILE | base64 -d > %s
#
# A new Drover uses the store with this password, too: drover target create URL --password-file password
url: %s
repository: %s
password: %s
keyName: %s
keyFile: %s
`, k.Target, k.Written.UTC().Format(time.RFC3339), place, keyPath, k.URL, k.Repository, k.Password, k.Name,
		base64.StdEncoding.EncodeToString(k.Content))
}

// resticAddress is the store for restic's option -r, as far as the URL of the target tells.
func (k *Key) resticAddress() string {
	u, err := url.Parse(k.URL)
	switch {
	case err != nil:
	case u.Scheme == "file", u.Scheme == "vfs":
		return u.Path
	case u.Scheme == "s3":
		bucket := u.Host
		if u.User != nil {
			bucket = u.User.Username()
		}
		return "s3:https://SERVER/" + bucket + strings.TrimRight(u.Path, "/")
	case u.Scheme == "sftp":
		return "sftp://" + u.Host + "/" + u.Path
	}
	return "REPOSITORY"
}
