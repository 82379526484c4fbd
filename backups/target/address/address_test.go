package address

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/share"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/block/suite"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestURLsOfStores: Parse reads the forms of URLs that Drover and Longhorn have.
func TestURLsOfStores(t *testing.T) {
	for text, want := range map[string]Address{
		"file:///mnt/backups":                   {folder: "/mnt/backups"},
		"vfs:///mnt/backups/":                   {folder: "/mnt/backups"},
		"FILE:///mnt/my%20share":                {folder: "/mnt/my share"},
		"s3://backups@eu-central-1/":            {bucket: "backups", region: "eu-central-1"},
		"s3://backups@us-east-1/a/b/":           {bucket: "backups", region: "us-east-1", prefix: "a/b"},
		"s3://backups@RegionOne":                {bucket: "backups", region: "RegionOne"},
		"s3://back.ups-2/a":                     {bucket: "back.ups-2", prefix: "a"},
		"s3://backups":                          {bucket: "backups"},
		"s3://backups@/a":                       {bucket: "backups", prefix: "a"},
		"azblob://backups@core.windows.net/":    {container: "backups", cloud: "core.windows.net"},
		"azblob://b-1@core.chinacloudapi.cn/a/": {container: "b-1", cloud: "core.chinacloudapi.cn", prefix: "a"},
		"sftp://me@server:2222/srv/a/":          {host: "server", port: "2222", user: "me", root: "/srv/a"},
		"sftp://u123@nas.example/":              {host: "nas.example", user: "u123", root: "/"},
		"sftp://me@[2001:db8::1]/a%20b":         {host: "2001:db8::1", user: "me", root: "/a b"},
		"s3://" + strings.Repeat("a", 63) + "/": {bucket: strings.Repeat("a", 63)},
	} {
		if got, err := Parse(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", text, got, err, want)
		}
	}
}

// TestBadURLsAreRefused: Parse refuses URLs that name no folder or bucket, that lead elsewhere or that have
// credentials, and repeats no part of a URL that may be a password.
func TestBadURLsAreRefused(t *testing.T) {
	for text, kind := range map[string]api.Kind{
		"":                                      api.Invalid,
		"/mnt/hush":                             api.Invalid,
		"http://hush/a":                         api.Unsupported,
		"hush://a/b":                            api.Unsupported,
		"nfs://hush/a?x=y":                      api.Invalid,
		"nfs://hush/a?nfsOptions=suid":          api.Invalid,
		"nfs://hush/a?nfsOptions=a&nfsOptions=": api.Invalid,
		"nfs://hush/a?cifsOptions=soft":         api.Invalid,
		"nfs://hush/a?nfsOptions=soft;":         api.Invalid,
		"nfs://hush/a?nfsOptions=soft%2Cexec":   api.Invalid,
		"nfs://hush/a?nfsOptions=vers=4%0a":     api.Invalid,
		"nfs://hush/a#b":                        api.Invalid,
		"nfs://hush:2049/a":                     api.Invalid,
		"nfs://hush":                            api.Invalid,
		"nfs://hush:/a/../b":                    api.Invalid,
		"nfs:///hush":                           api.Invalid,
		"nfs:hush:/a":                           api.Invalid,
		"nfs://hush@server/a":                   api.Invalid,
		"cifs://user:hush@server/a":             api.Invalid,
		"cifs://hush@server/a":                  api.Invalid,
		"cifs://hush/":                          api.Invalid,
		"smb://server/a?cifsOptions=pass=hush":  api.Invalid,
		"azblob://hush/a":                       api.Invalid,
		"azblob://user:hush@core.windows.net/a": api.Invalid,
		"azblob://hush--a@core.windows.net/a":   api.Invalid,
		"azblob://HUSH@core.windows.net/a":      api.Invalid,
		"azblob://hush@localhost/a":             api.Invalid,
		"azblob://hush@core.windows.net:1/a":    api.Invalid,
		"azblob://hush@core.windows.net/../a":   api.Invalid,
		"azblob://hush@core.windows.net/a?b":    api.Invalid,
		"sftp://user:hush@server/a":             api.Invalid,
		"sftp://hush/a":                         api.Invalid,
		"sftp://hush@server":                    api.Invalid,
		"sftp://hush@server/../a":               api.Invalid,
		"sftp://hush@server/a%00":               api.Invalid,
		"sftp://hu%20sh@server/a":               api.Invalid,
		"sftp://-hush@server/a":                 api.Invalid,
		"sftp://hush@-server/a":                 api.Invalid,
		"sftp://hush@/a":                        api.Invalid,
		"%hush://":                              api.Invalid,
		"s3://user:hush@back ups/":              api.Invalid,
		"file:///a%zzhush":                      api.Invalid,
		"file:///mnt/a?x=hush":                  api.Invalid,
		"s3://backups@r/a?backup=hush":          api.Invalid,
		"s3://backups@r/a#hush":                 api.Invalid,
		"file://hush/mnt/a":                     api.Invalid,
		"file://user@/hush":                     api.Invalid,
		"file://user:hush@/a":                   api.Invalid,
		"file:hush":                             api.Invalid,
		"file:///":                              api.Invalid,
		"file://":                               api.Invalid,
		"file:////":                             api.Invalid,
		"file:///hush/../etc":                   api.Invalid,
		"file:///hush/./a":                      api.Invalid,
		"file:///hush//a":                       api.Invalid,
		"file:///a%2f%2e%2e%2fhush":             api.Invalid,
		"file:///hush%00":                       api.Invalid,
		"file:///hush%0a":                       api.Invalid,
		"s3://":                                 api.Invalid,
		"s3:///hush":                            api.Invalid,
		"s3:hush":                               api.Invalid,
		"s3://@region/hush":                     api.Invalid,
		"s3://user:hush@backups/":               api.Invalid,
		"s3://user:hush@backups@region/":        api.Invalid,
		"s3://HUSH@region/hush":                 api.Invalid,
		"s3://hush.hush..a@region/":             api.Invalid,
		"s3://-hush@region/":                    api.Invalid,
		"s3://hu/":                              api.Invalid,
		"s3://192.168.0.1/hush":                 api.Invalid,
		"s3://hush@host:9000/":                  api.Invalid,
		"s3://hush:9000/a":                      api.Invalid,
		"s3://hush@re.gion/":                    api.Invalid,
		"s3://" + strings.Repeat("a", 64) + "/": api.Invalid,
		"s3://backups/../a":                     api.Invalid,
		"s3://backups/a//b":                     api.Invalid,
		"s3://backups/.a":                       api.Invalid,
		"s3://backups/a%00":                     api.Invalid,
	} {
		got, err := Parse(text)
		if !api.Is(err, kind) {
			t.Errorf("%q: %+v, %v of kind %v, want kind %v", text, got, err, api.KindOf(err), kind)
		}
		if err != nil && (strings.Contains(strings.ToLower(err.Error()), "hush") ||
			!strings.HasPrefix(err.Error(), "URL of the backup target: ")) {
			t.Errorf("%q: the error repeats the URL or does not name it: %v", text, err)
		}
	}
}

// TestURLsOfShares: Parse reads Longhorn's URLs of NFS exports and SMB shares.
func TestURLsOfShares(t *testing.T) {
	for text, want := range map[string]struct {
		kind                share.Kind
		host, path, options string
	}{
		"nfs://server:/exports/a":                           {share.NFS, "server", "/exports/a", ""},
		"nfs://server/exports/a/":                           {share.NFS, "server", "/exports/a", ""},
		"nfs://[2001:db8::1]:/a":                            {share.NFS, "2001:db8::1", "/a", ""},
		"nfs://server:/a?nfsOptions=soft,timeo=330":         {share.NFS, "server", "/a", "soft,timeo=330"},
		"nfs://server:/a?nfsOptions=soft%2Cretrans%3D3":     {share.NFS, "server", "/a", "soft,retrans=3"},
		"cifs://server/share/a%20b":                         {share.CIFS, "server", "/share/a b", ""},
		"smb://192.0.2.1/share?cifsOptions=vers=3.1.1,seal": {share.CIFS, "192.0.2.1", "/share", "vers=3.1.1,seal"},
	} {
		s, err := share.New(want.kind, want.host, want.path, want.options)
		must(t, err)
		if got, err := Parse(text); err != nil || got != (Address{share: s}) {
			t.Errorf("%s: %+v, %v; want %+v", text, got, err, s)
		}
	}
}

// TestFolderMustExist: Open opens a folder that exists, as a store that keeps objects there, and never makes a missing
// folder.
func TestFolderMustExist(t *testing.T) {
	root := t.TempDir()
	for _, scheme := range []string{"file", "vfs"} {
		a, err := Parse(scheme + "://" + root)
		must(t, err)
		store, err := a.Open(t.Context(), nil, nil)
		must(t, err)
		must(t, store.Put(t.Context(), scheme+"/a", []byte("a")))
		if _, err := os.Stat(filepath.Join(root, scheme, "a")); err != nil {
			t.Errorf("the object is not in the folder: %v", err)
		}
		must(t, store.(interface{ Close() error }).Close())
	}
	a, err := Parse("file://" + root + "/missing")
	must(t, err)
	if store, err := a.Open(t.Context(), nil, nil); store != nil || !api.Is(err, api.Unavailable) {
		t.Errorf("open of a missing folder: %v, %v", store, err)
	}
	if _, err := os.Stat(root + "/missing"); !os.IsNotExist(err) {
		t.Errorf("the missing folder exists: %v", err)
	}
	a, err = Parse("file://" + root)
	must(t, err)
	store, err := a.Open(t.Context(), nil, nil)
	must(t, err)
	if got := targettest.List(t, store, ""); len(got) != 2 {
		t.Errorf("the folder has %v, want two objects", got)
	}
}

// TestHangingMountIsUnavailable: Open of a folder on a mount whose server does not answer ends with the context,
// although the system call hangs; when the mount breaks, the next Open has the error of the system call.
func TestHangingMountIsUnavailable(t *testing.T) {
	suite.System(t)
	root := t.TempDir()
	server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	closeServer := sync.OnceFunc(func() { _ = unix.Close(server) })
	t.Cleanup(closeServer)
	must(t, unix.Mount("test", root, "fuse", unix.MS_NODEV|unix.MS_NOSUID,
		fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)))
	t.Cleanup(func() {
		closeServer() // ends the system call
		_ = unix.Unmount(root, unix.MNT_DETACH)
	})
	a, err := Parse("file://" + root + "/backups")
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := a.Open(ctx, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("open while the server hangs: %v", err)
	}
	closeServer()
	if _, err := a.Open(t.Context(), nil, nil); !api.Is(err, api.Unavailable) || !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("open on a broken mount: %v", err)
	}
}
