package registry

import (
	"context"
	"encoding/json"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// Options configure access to a registry; the zero value: anonymous, over TLS, on the public internet.
type Options struct {
	// Username and Password for the registry or its token service; empty: anonymous.
	Username, Password string
	// CA holds certificates (PEM) of further trusted authorities.
	CA []byte
	// PlainHTTP allows a registry without TLS. A registry on a loopback address needs no permission.
	PlainHTTP bool
	// Allow accepts addresses outside the public internet; nil: none.
	Allow func(netip.Addr) bool
	// Arch is the architecture to select from an index, in the words of Go; default: of this node.
	Arch string

	// Start is how long the registry may take until the first byte of an answer; 30 s.
	Start time.Duration
	// Stall is how long the registry may be silent in the middle of an answer; 60 s. Then the connection counts as cut.
	Stall time.Duration
	// Resumes is how many cuts in a row, without a byte between them, are followed by a request for the rest, and how
	// often a busy registry is asked again; 5.
	Resumes int
	// Pause before a resume; doubles with each cut in a row. 500 ms.
	Pause time.Duration
	// From is where an earlier transfer of the same image stopped. The zero value is the start.
	From From
	// Resumed is called before every resume with the number of received bytes and the cause. May be nil.
	Resumed func(off int64, cause error)
	// Resolved is called with the digest of the manifest behind the reference. May be nil.
	Resolved func(digest string)
}

// From is a place in the disk file: a Mark of the Stream, and the state from Stream.At.
type From struct {
	Mark  origin.Mark
	State json.RawMessage
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.Start, 30*time.Second)
	def(&o.Stall, 60*time.Second)
	def(&o.Pause, 500*time.Millisecond)
	if o.Resumes == 0 {
		o.Resumes = 5
	}
	if o.Arch == "" {
		o.Arch = runtime.GOARCH
	}
	return o
}

// Scheme begins a reference.
const Scheme = "docker://"

// parseReference reads docker://host[:port]/repo[:tag|@digest]. The host is mandatory: a name with a different meaning
// on each node is no address of an image.
func parseReference(ref string, plain bool) (name.Reference, error) {
	const form = Scheme + "HOST[:PORT]/REPOSITORY[:TAG or @DIGEST]"
	rest, ok := strings.CutPrefix(ref, Scheme)
	if !ok {
		return nil, api.Errorf(api.Invalid, "the address of a registry's image has the form %s", form)
	}
	host, _, slash := strings.Cut(rest, "/")
	if strings.Contains(host, "@") {
		// The message does not repeat the host: the part before the @ may be a password.
		return nil, api.Errorf(api.Invalid, "the address has credentials; put them into a Secret")
	}
	if !slash || host != "localhost" && !strings.ContainsAny(host, ".:") {
		return nil, api.Errorf(api.Invalid, "%q names no registry: write %s", clipText(ref), form)
	}
	var opts []name.Option
	if plain || isLoopback(host) {
		opts = append(opts, name.Insecure)
	}
	parsed, err := name.ParseReference(rest, opts...)
	if err != nil {
		return nil, api.Errorf(api.Invalid, "%q is no reference of an image: write %s", clipText(ref), form)
	}
	return parsed, nil
}

// isLoopback reports whether a host, with or without a port, is this machine.
func isLoopback(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && addr.Unmap().IsLoopback()
}

// Check reports whether a reference is valid; Check opens no connection.
func Check(ref string) error {
	_, err := parseReference(ref, false)
	return err
}

// Open finds the disk in the image of ref and returns its bytes once the first bytes are near; Size is the size of the
// file. A cut connection is continued where it stopped. ctx covers reading as well.
func Open(ctx context.Context, ref string, opts Options) (*origin.Stream, error) {
	opts = opts.withDefaults()
	parsed, err := parseReference(ref, opts.PlainHTTP)
	if err != nil {
		return nil, err
	}
	c, err := connectRegistry(ctx, ref, parsed, opts)
	if err != nil {
		return nil, err
	}
	layers, err := c.imageLayers(ctx, parsed)
	if err != nil {
		c.close()
		return nil, err
	}
	d := &diskStream{ctx: ctx, c: c, all: layers, layers: layers}
	var size int64
	if opts.From.State != nil {
		size, err = d.resumeDisk()
	} else {
		size, err = d.findDisk()
	}
	if err != nil {
		_ = d.Close()
		return nil, err
	}
	s := &origin.Stream{ReadCloser: d, Size: size, Name: c.name, Settled: d.checkEnd}
	if d.resumable != nil {
		st := &d.resumable.state
		s.Mark = &origin.Mark{Off: opts.From.Mark.Off, Size: size, Validator: st.Layers[st.Open]}
		s.At = d.resumable.stateAt
	}
	return s, nil
}

// clipText prepares text of the other side for a message.
func clipText(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	if len(s) > 200 {
		s = strings.ToValidUTF8(s[:200], "") + "..."
	}
	return s
}
