package share

import (
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"

	"drover.io/drover/api"
)

// TestDangerousOptionsAreRefused: options that run or trust files of a server, that name files of the node, that hold
// secrets or that end an option are refused, and the error repeats no value.
func TestDangerousOptionsAreRefused(t *testing.T) {
	for _, c := range []struct {
		kind    Kind
		options string
	}{
		{NFS, "suid"}, {NFS, "dev"}, {NFS, "exec"}, {NFS, "soft,exec"}, {NFS, "defaults"}, {NFS, "user"}, {NFS, "bg"},
		{NFS, ","}, {NFS, "soft,"}, {NFS, "soft,,hard"}, {NFS, "x-hush"}, {NFS, "vers="}, {NFS, "vers=4 hush"},
		{NFS, "vers=4\nhush"}, {NFS, "vers=4\x00"}, {NFS, "vers=4\\,exec"}, {NFS, `vers="4,exec"`}, {NFS, "vers=4,exec"},
		{NFS, "remount"}, {NFS, "bind"}, {NFS, "loop"}, {NFS, "seal"}, {NFS, "SOFT"}, {NFS, " soft"},
		{CIFS, "credentials=/etc/hush"}, {CIFS, "cred=/hush"}, {CIFS, "password=hush"}, {CIFS, "pass=hush"},
		{CIFS, "user=hush"}, {CIFS, "username=hush"}, {CIFS, "unc=//hush/a"}, {CIFS, "prefixpath=hush"}, {CIFS, "setuids"},
		{CIFS, "vers=3,suid"}, {CIFS, "nfsvers=4"}, {CIFS, "iocharset=" + strings.Repeat("a", 256)},
	} {
		_, err := New(c.kind, "server", "/a", c.options)
		if !api.Is(err, api.Invalid) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%s %q: %v", c.kind, c.options, err)
		}
	}
	for _, c := range []struct {
		kind    Kind
		options string
	}{
		{NFS, "soft,timeo=330,retrans=3"}, {NFS, "vers=3,nolock,proto=tcp6,clientaddr=fe80::1"}, {NFS, "sec=krb5p"},
		{CIFS, "vers=3.1.1,seal,file_mode=0600,dir_mode=0700,ip=192.0.2.1"},
	} {
		if _, err := New(c.kind, "server", "/a", c.options); err != nil {
			t.Errorf("%s %q: %v", c.kind, c.options, err)
		}
	}
}

// TestStaleAnswersAreRefused: options that make lists or lookups older than sweeps bear are refused by name, and NFS has
// a short cache whatever other options the URL has.
func TestStaleAnswersAreRefused(t *testing.T) {
	for _, c := range []struct {
		kind    Kind
		options string
		want    string // the first options of the mount; empty: refused
	}{
		{NFS, "nocto", ""}, {NFS, "soft,nocto", ""}, {NFS, "actimeo=2", ""}, {NFS, "actimeo=600", ""}, {NFS, "actimeo", ""},
		{NFS, "acdirmin=30", ""}, {NFS, "acdirmax=60", ""}, {NFS, "acregmin=3", ""}, {NFS, "acregmax=60", ""},
		{NFS, "actimeo=-1", ""}, {NFS, "actimeo=0x7", ""}, {CIFS, "actimeo=60", ""}, {CIFS, "acdirmax=60", ""},
		{NFS, "", "actimeo=1,timeo=300,soft,"}, {NFS, "timeo=330,hard", "actimeo=1,timeo=330,hard,"},
		{NFS, "acdirmax=0", "actimeo=1,acdirmax=0,"}, {NFS, "actimeo=0", "actimeo=0,soft,"}, {NFS, "noac", "noac,soft,"},
		{CIFS, "actimeo=1", "actimeo=1,soft"}, {CIFS, "", "soft"},
	} {
		s, err := New(c.kind, "server", "/a", c.options)
		if c.want == "" {
			if name, _, _ := strings.Cut(c.options[strings.LastIndex(c.options, ",")+1:], "="); !api.Is(err, api.Invalid) ||
				!strings.Contains(err.Error(), "option "+name+" ") {
				t.Errorf("%s %q: %v", c.kind, c.options, err)
			}
		} else if got := strings.Join(s.mountOptions(), ","); err != nil || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s %q: %q, %v; want %q", c.kind, c.options, got, err, c.want)
		}
	}
}

// TestStaleMountsAreFound: by the mount table, as the kernel writes it.
func TestStaleMountsAreFound(t *testing.T) {
	for _, c := range []struct{ kind, options, want string }{
		{"nfs4", "rw,vers=4.2,rsize=1048576,hard,nocto,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1", "nocto"},
		{"nfs4", "rw,vers=4.2,hard", "actimeo=1"},
		{"nfs", "rw,vers=3,acregmin=1,acregmax=1,acdirmin=1,acdirmax=30", "acdirmax"},
		{"nfs4", "rw,vers=4.2,soft,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1", ""}, {"nfs", "rw,sync,noac", ""},
		{"ext4", "rw", ""},
	} {
		why := explainMount(&mountinfo.Info{FSType: c.kind, VFSOptions: c.options})
		if !strings.Contains(why, c.want) || (why == "") != (c.want == "") {
			t.Errorf("%s %s: %q, want %q", c.kind, c.options, why, c.want)
		}
	}
	if why, err := ExplainStale(t.TempDir()); why != "" || err != nil {
		t.Errorf("a local folder: %q, %v", why, err)
	}
}

// TestSourcesOfShares: a host and a path are one source for mount(8), or refused.
func TestSourcesOfShares(t *testing.T) {
	for _, c := range []struct {
		kind       Kind
		host, path string
		want       string // empty: refused
	}{
		{NFS, "server", "/exports/a", "server:/exports/a"}, {NFS, "server.example", "/", "server.example:/"},
		{NFS, "192.0.2.1", "/a/", "192.0.2.1:/a"}, {NFS, "2001:db8::1", "/a", "[2001:db8::1]:/a"},
		{NFS, "server", "/my exports", "server:/my exports"},
		{CIFS, "server", "/share", "//server/share"}, {CIFS, "192.0.2.1", "/share/a b/c/", "//192.0.2.1/share/a b/c"},
		{NFS, "", "/a", ""}, {NFS, "-server", "/a", ""}, {NFS, "a,b", "/a", ""}, {NFS, "a b", "/a", ""},
		{NFS, "fe80::1%a", "/a", ""},
		{NFS, "UUID=a", "/a", ""}, {NFS, strings.Repeat("a", 300), "/a", ""}, {NFS, "server", "", ""},
		{NFS, "server", "a", ""},
		{NFS, "server", "/../a", ""}, {NFS, "server", "/a//b", ""}, {NFS, "server", "/a\n", ""}, {NFS, "server", "/a,b", ""},
		{CIFS, "server", "/", ""}, {CIFS, "server", `/a\b`, ""}, {CIFS, "server", "/a,suid", ""}, {CIFS, "::1", "/a", ""},
	} {
		s, err := New(c.kind, c.host, c.path, "")
		if c.want == "" {
			if !api.Is(err, api.Invalid) {
				t.Errorf("%s %q %q: %v, %v", c.kind, c.host, c.path, s, err)
			}
		} else if err != nil || s.source() != c.want {
			t.Errorf("%s %q %q: %q, %v; want %q", c.kind, c.host, c.path, s.source(), err, c.want)
		}
	}
}
