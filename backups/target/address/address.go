// Package address turns the URL and the Secret of a BackupTarget into a store. Users of Longhorn know the URLs:
// file:///PATH (or vfs:///PATH) for a folder that every node has, and s3://BUCKET@REGION/PATH.
//
// Invariants: no error holds a value of the Secret, nor user information of the URL; Parse reaches no network and no
// file; the store of Open answers or fails in time, also on the share of a dead file server. The package starts no
// goroutines; those of a store end with its Close.
package address

import (
	"context"
	"net/netip"
	"net/url"
	"path"
	"regexp"
	"strings"
	"unicode"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/bounded"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/backups/target/s3"
)

// Address is a checked URL of a BackupTarget.
type Address struct {
	folder string // of a folder store; empty for S3

	bucket, region, prefix string
}

// Parse checks the URL of a BackupTarget. Errors are of kind Invalid, or Unsupported for a store that Drover does not
// have yet.
func Parse(text string) (Address, error) {
	u, err := url.Parse(text)
	if err != nil { // the text of err repeats the URL
		return Address{}, invalid("not a URL; write file:///PATH or s3://BUCKET@REGION/PATH")
	}
	switch u.Scheme {
	case "file", "vfs", "s3":
	case "":
		return Address{}, invalid("has no scheme; write file:///PATH or s3://BUCKET@REGION/PATH")
	case "nfs", "cifs", "smb":
		return Address{}, api.Errorf(api.Unsupported, "URL of the backup target: %s:// is not supported; mount the share "+
			"in the same folder of every node, and write file:///PATH", u.Scheme)
	case "azblob", "sftp":
		return Address{}, api.Errorf(api.Unsupported, "URL of the backup target: %s:// is not supported yet; use "+
			"file:///PATH or s3://BUCKET@REGION/PATH", u.Scheme)
	default:
		return Address{}, api.Errorf(api.Unsupported, "URL of the backup target: the scheme is not supported; use "+
			"file:///PATH or s3://BUCKET@REGION/PATH")
	}
	if strings.ContainsAny(text, "?#") {
		return Address{}, invalid("has a query or a fragment; remove the part from '?' or '#' on")
	}
	if _, has := u.User.Password(); has {
		return Address{}, invalid("has a password; write credentials into the target's Secret")
	}
	if u.Scheme == "s3" {
		return parseBucket(u)
	}
	return parseFolder(u)
}

func invalid(cause string) error {
	return api.Errorf(api.Invalid, "URL of the backup target: %s", cause)
}

func parseFolder(u *url.URL) (Address, error) {
	if u.User != nil {
		return Address{}, invalid("has a user; a folder needs none")
	}
	if u.Host != "" || u.Opaque != "" {
		return Address{}, invalid("names a host; write three slashes before the folder: file:///PATH")
	}
	root := u.Path
	if len(root) > 1 {
		root = strings.TrimSuffix(root, "/")
	}
	switch {
	case root == "" || root == "/":
		return Address{}, invalid("names no folder below /; write file:///PATH")
	case !path.IsAbs(root) || path.Clean(root) != root || strings.ContainsFunc(root, unicode.IsControl):
		return Address{}, invalid("the path of the folder has an element '.' or '..', a double slash or a control " +
			"character; write the plain path")
	}
	return Address{folder: root}, nil
}

var (
	bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
	regionName = regexp.MustCompile(`^[A-Za-z0-9_-]{0,64}$`)
)

// parseBucket parses s3://BUCKET@REGION/PATH, which has the bucket in place of a user, and s3://BUCKET/PATH.
func parseBucket(u *url.URL) (Address, error) {
	if u.Opaque != "" {
		return Address{}, invalid("has no bucket; write s3://BUCKET@REGION/PATH")
	}
	a := Address{bucket: u.Host, prefix: strings.Trim(u.Path, "/")}
	if u.User != nil {
		a.bucket, a.region = u.User.Username(), u.Host
	}
	_, notIP := netip.ParseAddr(a.bucket)
	switch {
	case strings.Contains(u.Host, ":"):
		return Address{}, invalid("has a port; write s3://BUCKET@REGION/PATH, and the server as " + api.SecretEndpoints +
			" into the target's Secret")
	case !bucketName.MatchString(a.bucket) || notIP == nil || strings.Contains(a.bucket, ".."):
		return Address{}, invalid("the bucket has a name that S3 does not allow; write 3 to 63 small letters, digits, " +
			"'.' and '-'")
	case !regionName.MatchString(a.region):
		return Address{}, invalid("the region has a name that S3 does not allow; write letters, digits, '_' and '-'")
	}
	if a.prefix != "" {
		if err := target.CheckPrefix(a.prefix + "/"); err != nil {
			return Address{}, api.Errorf(api.Invalid, "URL of the backup target: the path in the bucket is refused: %w", err)
		}
	}
	return a, nil
}

// Open opens the store with the Secret of the target, which may be nil. The caller closes the store if it is an
// io.Closer. A folder must exist; S3 sends no request.
func (a Address) Open(ctx context.Context, secret map[string][]byte) (target.Store, error) {
	if a.folder == "" {
		config, err := a.bucketConfig(secret)
		if err != nil {
			return nil, err
		}
		store, err := s3.New(config)
		if err != nil {
			return nil, err // not the nil *s3.Store
		}
		return store, nil
	}
	store, err := bounded.Open(ctx, "folder store "+a.folder, func(ctx context.Context) (target.Store, error) {
		return folder.Open(ctx, a.folder)
	})
	if err != nil {
		return nil, err
	}
	return store, nil
}
