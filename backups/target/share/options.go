package share

import (
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/moby/sys/mountinfo"

	"drover.io/drover/api"
)

// Kind is a kind of share, by the name that mount(8) has.
type Kind string

// The kinds of shares.
const (
	NFS  Kind = "nfs"
	CIFS Kind = "cifs"
)

// Share is a folder of a file server.
type Share struct {
	kind    Kind
	host    string // name or IP address
	path    string // absolute
	options string // of mount(8), joined by commas; empty: the defaults
}

var (
	hostName    = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?$`)
	optionValue = regexp.MustCompile(`^[A-Za-z0-9._:/@+-]{1,255}$`)
)

// allowed are the options of mount(8) that a URL may have, by kind. Not among them are options that run or trust files
// of the server (suid, dev, exec), that name files of the node (credentials), that mount later (bg), and passwords.
var allowed = map[Kind]map[string]bool{
	NFS: names("ac acdirmax acdirmin acl acregmax acregmin actimeo async clientaddr cto fg hard intr local_lock lock " +
		"lookupcache max_connect minorversion mounthost mountport mountproto mountvers nconnect nfsvers noac noacl noatime " +
		"nodiratime nolock nordirplus noresvport nosharecache port proto rdirplus relatime resvport retrans retry ro " +
		"rsize rw sec sharecache soft softerr softreval sync tcp timeo trunkdiscovery udp vers wsize xprtsec"),
	CIFS: names("acdirmax acregmax actimeo addr cache closetimeo dir_mode dom domain echo_interval esize file_mode gid " +
		"guest handletimeout hard iocharset ip mapchars mapposix max_channels max_credits mfsymlinks min_enc_offload " +
		"multichannel noatime nobrl nodfs nohandlecache nolease nomapposix noperm noresilienthandles noserverino " +
		"nosharesock nounix persistenthandles port rdma relatime resilienthandles retrans ro rsize rw seal sec serverino " +
		"servern sign soft uid vers workgroup wsize"),
}

func names(text string) map[string]bool {
	set := map[string]bool{}
	for _, name := range strings.Fields(text) {
		set[name] = true
	}
	return set
}

// New checks the parts of a share: a host without brackets and port, an absolute path, and options as mount(8) has
// them. Errors are of kind Invalid and repeat none of the parts.
func New(kind Kind, host, folder, options string) (Share, error) {
	if addr, err := netip.ParseAddr(host); (err != nil || addr.Zone() != "") && !hostName.MatchString(host) {
		return Share{}, invalid("names no host of a file server")
	}
	if len(folder) > 1 {
		folder = strings.TrimSuffix(folder, "/")
	}
	if !path.IsAbs(folder) || path.Clean(folder) != folder || strings.ContainsAny(folder, `,\`) ||
		strings.ContainsFunc(folder, unicode.IsControl) {
		return Share{}, invalid("the path of the share has an element '.' or '..', a double slash, a comma, a backslash or " +
			"a control character; write the plain path")
	}
	switch {
	case kind == CIFS && folder == "/":
		return Share{}, invalid("names no share of the server")
	case kind == CIFS && strings.Contains(host, ":"):
		return Share{}, invalid("has an IPv6 address; write the name of the server, and the address as the option ip")
	}
	return Share{kind: kind, host: host, path: folder, options: options}, checkOptions(kind, options)
}

func invalid(cause string) error { return api.Errorf(api.Invalid, "%s", cause) }

// checkOptions refuses options that are not allowed, and values that could end an option.
func checkOptions(kind Kind, options string) error {
	if options == "" {
		return nil
	}
	for i, option := range strings.Split(options, ",") {
		name, value, has := strings.Cut(option, "=")
		if why := explainStale(name, value); why != "" {
			return invalid(why)
		}
		if !allowed[kind][name] {
			return api.Errorf(api.Invalid, "option %d of the mount is not allowed; docs/backups.md lists the allowed options",
				i+1)
		}
		if has && !optionValue.MatchString(value) {
			return api.Errorf(api.Invalid, "option %d of the mount, %s, has a bad value; write letters, digits and '._:/@+-'",
				i+1, name)
		}
	}
	return nil
}

// longestCache is how many seconds a client may take attributes of files and folders from its cache. A session that
// slept would find its deleted lock for so long, and rely on packs that a sweep deletes.
const longestCache = 1

var cacheTimes = names("acdirmax acdirmin acregmax acregmin actimeo")

// explainStale says why an option makes answers of the file server older than sessions and sweeps bear; empty: it does
// not. Without close-to-open consistency, lists are as old as the attributes of the folder.
func explainStale(name, value string) string {
	seconds, err := strconv.Atoi(value)
	switch {
	case name == "nocto":
		return "the mount option nocto makes lists of a folder up to a minute old, and sweeps need the present one; remove " +
			"the option"
	case cacheTimes[name] && (err != nil || seconds < 0 || seconds > longestCache):
		return fmt.Sprintf("the mount option %s keeps attributes in the cache, at most %d second is allowed; remove the "+
			"option, or write %s=%d", name, longestCache, name, longestCache)
	}
	return ""
}

// ExplainStale says why the answers of a file server below a folder may be older than sessions and sweeps bear; empty:
// they are not. It reads the mount table alone, and follows no symbolic link, so no server can delay it.
func ExplainStale(folder string) (string, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(folder))
	if err != nil || len(mounts) == 0 {
		return "", err
	}
	top := mounts[0]
	for _, m := range mounts[1:] { // of two mounts at one place, the later one is on top
		if len(m.Mountpoint) >= len(top.Mountpoint) {
			top = m
		}
	}
	return explainMount(top), nil
}

// explainMount is ExplainStale for a mount. The table lists no times that are NFS's own defaults, of up to a minute.
func explainMount(m *mountinfo.Info) string {
	if m.FSType != "nfs" && m.FSType != "nfs4" {
		return ""
	}
	timed := false
	for option := range strings.SplitSeq(m.VFSOptions, ",") {
		name, value, _ := strings.Cut(option, "=")
		if why := explainStale(name, value); why != "" {
			return why
		}
		timed = timed || name == "noac" || name == "acdirmax"
	}
	if !timed {
		return fmt.Sprintf("NFS keeps attributes of the folder in the cache for up to a minute; mount it with actimeo=%d",
			longestCache)
	}
	return ""
}

// String names the share in errors.
func (s Share) String() string {
	if s.kind == CIFS {
		return "SMB share " + s.source()
	}
	return "NFS share " + s.source()
}

// Is reports whether a share is of a kind.
func (s Share) Is(kind Kind) bool { return s.kind == kind }

// source is the name of the share for mount(8).
func (s Share) source() string {
	switch {
	case s.kind == CIFS:
		return "//" + s.host + s.path
	case strings.Contains(s.host, ":"):
		return "[" + s.host + "]:" + s.path
	}
	return s.host + ":" + s.path
}

// mountOptions are the options without the version. Each call of a soft mount ends. retry=0, because a mount of a
// server that does not answer is tried again later by the caller, and mount(8) would only hide the reason.
func (s Share) mountOptions() []string {
	var options []string
	if s.kind == NFS && !s.has("actimeo", "noac") {
		options = append(options, fmt.Sprintf("actimeo=%d", longestCache)) // first: acdirmax and so on count after it
	}
	switch {
	case s.options != "":
		options = append(options, strings.Split(s.options, ",")...)
	case s.kind == NFS:
		options = append(options, "timeo=300")
	}
	if !s.has("soft", "softerr", "hard") {
		options = append(options, "soft")
	}
	if s.kind == NFS && !s.has("retry") {
		options = append(options, "retry=0")
	}
	return options
}

// versions are the further options to try in turn. Version 3 of NFS needs more servers on the node, and its options.
func (s Share) versions() [][]string {
	if s.kind != NFS || s.has("vers", "nfsvers", "minorversion") {
		return [][]string{nil}
	}
	return [][]string{{"vers=4.2"}, {"vers=4.1"}, {"vers=4.0"}}
}

// has reports whether one of the names is among the options of the URL.
func (s Share) has(names ...string) bool {
	return slices.ContainsFunc(strings.Split(s.options, ","), func(option string) bool {
		name, _, _ := strings.Cut(option, "=")
		return slices.Contains(names, name)
	})
}
