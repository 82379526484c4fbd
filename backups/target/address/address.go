// Package address turns the URL and the Secret of a BackupTarget into a store. Users of Longhorn know the URLs:
// file:///PATH (or vfs:///PATH) for a folder that every node has, nfs://HOST:/PATH, cifs://HOST/SHARE/PATH,
// s3://BUCKET@REGION/PATH and azblob://CONTAINER@core.windows.net/PATH. sftp://USER@HOST:PORT/PATH is Drover's own.
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
	"drover.io/drover/backups/target/azure"
	"drover.io/drover/backups/target/bounded"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/backups/target/s3"
	"drover.io/drover/backups/target/sftp"
	"drover.io/drover/backups/target/share"
)

// Address is a checked URL of a BackupTarget.
type Address struct {
	folder string      // of a folder store
	share  share.Share // of a store on a file server

	bucket, region string

	container string // of an Azure store
	cloud     string // suffix of the names of Azure's servers

	prefix string // in the bucket or container

	host, port, user, root string // of an SSH server
}

// Parse checks the URL of a BackupTarget. Errors are of kind Invalid, or Unsupported for a store that Drover does not
// have yet.
func Parse(text string) (Address, error) {
	u, err := url.Parse(text)
	if err != nil { // the text of err repeats the URL
		return Address{}, invalid("not a URL; write " + api.TargetURLs)
	}
	parse := map[string]func(*url.URL) (Address, error){"file": parseFolder, "vfs": parseFolder, "nfs": parseShare,
		"cifs": parseShare, "smb": parseShare, "s3": parseBucket, "azblob": parseContainer, "sftp": parseServer}[u.Scheme]
	switch _, hasPassword := u.User.Password(); {
	case u.Scheme == "":
		return Address{}, invalid("has no scheme; write " + api.TargetURLs)
	case parse == nil:
		return Address{}, api.Errorf(api.Unsupported, "URL of the backup target: the scheme is not supported; use "+
			api.TargetURLs)
	case hasPassword:
		return Address{}, invalid("has a password; write credentials into the target's Secret")
	case optionsKeys[u.Scheme] == "" && strings.ContainsAny(text, "?#"):
		return Address{}, invalid("has a query or a fragment; remove the part from '?' or '#' on")
	}
	return parse(u)
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

// optionsKeys has the parameters of URLs with options of the mount.
var optionsKeys = map[string]string{"nfs": "nfsOptions", "cifs": "cifsOptions", "smb": "cifsOptions"}

// parseShare parses nfs://HOST:/PATH?nfsOptions=OPTIONS and cifs://HOST/SHARE/PATH?cifsOptions=OPTIONS.
func parseShare(u *url.URL) (Address, error) {
	key, kind := optionsKeys[u.Scheme], share.NFS
	if u.Scheme != "nfs" {
		kind = share.CIFS
	}
	query, err := url.ParseQuery(u.RawQuery)
	switch {
	case u.User != nil:
		return Address{}, invalid("has a user; write credentials into the target's Secret")
	case u.Opaque != "" || u.Port() != "":
		return Address{}, invalid("has no host, or a port; write " + api.TargetURLs + ", and a port as " + key + "=port=PORT")
	case err != nil || u.Fragment != "" || len(query) > 1 || len(query) == 1 && len(query[key]) != 1:
		return Address{}, invalid("has a query or a fragment that is not allowed; write at most ?" + key + "=OPTION,OPTION")
	}
	s, err := share.New(kind, u.Hostname(), u.Path, query.Get(key))
	if err != nil {
		return Address{}, api.Errorf(api.Invalid, "URL of the backup target: %w", err)
	}
	return Address{share: s}, nil
}

var (
	bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
	regionName = regexp.MustCompile(`^[A-Za-z0-9_-]{0,64}$`)

	containerName = regexp.MustCompile(`^[a-z0-9](-?[a-z0-9])+$`)
	cloudName     = regexp.MustCompile(`^[a-z0-9-]+(\.[a-z0-9-]+)+$`)

	hostName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?$`)
	userName = regexp.MustCompile(`^[A-Za-z0-9._][A-Za-z0-9._@-]{0,127}$`)

	accountName = regexp.MustCompile(`^[a-z0-9]{3,24}$`)
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
	return a, a.checkPrefix()
}

// parseContainer parses azblob://CONTAINER@core.windows.net/PATH.
func parseContainer(u *url.URL) (Address, error) {
	a := Address{container: u.User.Username(), cloud: u.Host, prefix: strings.Trim(u.Path, "/")}
	switch {
	case u.Opaque != "" || !containerName.MatchString(a.container) || len(a.container) < 3 ||
		len(a.container) > 63:
		return Address{}, invalid("names no container of Azure; write azblob://CONTAINER@core.windows.net/PATH, with 3 to " +
			"63 small letters, digits and single '-'")
	case len(a.cloud) > 100 || !cloudName.MatchString(a.cloud):
		return Address{}, invalid("names no cloud of Azure, or a port; write azblob://CONTAINER@core.windows.net/PATH, and " +
			"another server as " + api.SecretAzureEndpoint + " into the target's Secret")
	}
	return a, a.checkPrefix()
}

// parseServer parses sftp://USER@HOST:PORT/PATH.
func parseServer(u *url.URL) (Address, error) {
	a := Address{host: u.Hostname(), port: u.Port(), user: u.User.Username(), root: u.Path}
	if len(a.root) > 1 {
		a.root = strings.TrimSuffix(a.root, "/")
	}
	_, notIP := netip.ParseAddr(a.host)
	switch {
	case u.Opaque != "" || notIP != nil && !hostName.MatchString(a.host):
		return Address{}, invalid("names no host; write sftp://USER@HOST:PORT/PATH")
	case !userName.MatchString(a.user):
		return Address{}, invalid("has no user, or one with other than letters, digits and '._@-'; write " +
			"sftp://USER@HOST:PORT/PATH")
	case !path.IsAbs(a.root) || path.Clean(a.root) != a.root || strings.ContainsFunc(a.root, unicode.IsControl):
		return Address{}, invalid("the path of the folder has an element '.' or '..', a double slash or a control " +
			"character, or no slash at the begin; write the plain path")
	}
	return a, nil
}

// checkPrefix refuses a path in a bucket or container that is no prefix of names.
func (a Address) checkPrefix() error {
	if a.prefix == "" {
		return nil
	}
	if err := target.CheckPrefix(a.prefix + "/"); err != nil {
		return api.Errorf(api.Invalid, "URL of the backup target: the path in the bucket is refused: %w", err)
	}
	return nil
}

// Open opens the store with the Secret of the target, which may be nil. The caller closes the store if it is an
// io.Closer. A folder must exist; a share is mounted by mounts; an SSH server
// is asked; S3 and Azure send no request.
func (a Address) Open(ctx context.Context, secret map[string][]byte, mounts *share.Mounts) (target.Store, error) {
	switch {
	case a.bucket != "":
		config, err := a.bucketConfig(secret)
		if err != nil {
			return nil, err
		}
		return opened(s3.New(config))
	case a.container != "":
		config, err := a.containerConfig(secret)
		if err != nil {
			return nil, err
		}
		return opened(azure.New(config))
	case a.host != "":
		config, err := a.serverConfig(secret)
		if err != nil {
			return nil, err
		}
		return opened(sftp.Open(ctx, config))
	case a.share != share.Share{}:
		login, err := a.shareLogin(secret)
		if err != nil {
			return nil, err
		}
		return opened(bounded.Open(ctx, a.share.String(), func(ctx context.Context) (target.Store, error) {
			return opened(mounts.Open(ctx, a.share, login))
		}))
	}
	return opened(bounded.Open(ctx, "folder store "+a.folder, func(ctx context.Context) (target.Store, error) {
		return opened(folder.Open(ctx, a.folder))
	}))
}

// ExplainStale says why a folder is on a mount whose answers are older than sweeps bear; empty: no such mount is known.
// A share never is: its options are checked.
func (a Address) ExplainStale() string {
	if a.folder == "" {
		return ""
	}
	why, _ := share.ExplainStale(a.folder) // without a mount table there is nothing to warn of
	return why
}

// opened is a store, or nil, and not a nil pointer in the interface.
func opened[S target.Store](store S, err error) (target.Store, error) {
	if err != nil {
		return nil, err
	}
	return store, nil
}
