// Package registry opens the disk inside an OCI containerDisk as a origin.Stream: an image of a registry, as KubeVirt
// knows it, whose layers hold one file in /disk/ (qcow2 or raw). The file's bytes stream out of the layer's blob while
// it comes: nothing is unpacked onto a disk, and names inside the archive are compared and shown, never used as paths.
//
//	docker://registry.example.com/disks/fedora:42
//	   index ---> manifest ---> layers, the topmost first ---> blob ---> gzip | zstd | as it is ---> tar ---> /disk/x
//
// What is trusted is the digest alone: manifests and blobs are compared with theirs. A blob's digest is known to be
// right only at its end, so the last Read (and Settled) says it; who uses the bytes commits nothing before that. All
// layers are read to their end, because only then it is known that there is one disk and which one; upper layers hide
// files of lower ones as they do in a container.
//
// Registries are hostile input: sizes and numbers are limited, messages show no credentials and no query, credentials
// go to the registry and to the token service that it names over TLS, and addresses inside the network are refused
// (origin.GuardTransport). A Stream belongs to one goroutine; those of the readers that unpack (package archive) and of
// the connections end with Close.
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

// Options say how a registry may be used; the zero value: anonymously, over TLS, on the public internet.
type Options struct {
	// Username and Password for the registry or its token service; none: anonymous.
	Username, Password string
	// CA holds certificates (PEM) that are trusted besides those of the system.
	CA []byte
	// PlainHTTP lets a registry without TLS be used. On this host (a loopback address) it may be without anyway.
	PlainHTTP bool
	// Allow names the addresses outside the public internet that may be connected to; nil: none.
	Allow func(netip.Addr) bool
	// Arch is the architecture to take from an image of several, as Go calls it; this node's.
	Arch string

	// Start is how long the registry may take until the first byte of an answer; 30 s.
	Start time.Duration
	// Stall is how long it may be silent in the middle; 60 s. Then the connection counts as cut.
	Stall time.Duration
	// Resumes is how many cuts in a row, without a byte between them, are healed by asking for the rest, and how often
	// a busy registry is asked again; 5.
	Resumes int
	// Pause before a resume; doubles with each cut in a row. 500 ms.
	Pause time.Duration
	// From is where an earlier transfer of the same image stopped. The zero value is the beginning.
	From From
	// Resumed is told of every resume, for the log: the bytes of the blob that are there, and why. May be nil.
	Resumed func(off int64, cause error)
	// Resolved is told the digest of the manifest that the reference meant, for the log. May be nil.
	Resolved func(digest string)
}

// From is a place in the disk file: a Mark of the Stream, and the state that its At returned there.
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

// parse reads docker://host[:port]/repo[:tag|@digest]. The host must be there: a name that means one thing here and
// another there is no address of a golden image.
func parse(ref string, plain bool) (name.Reference, error) {
	const form = Scheme + "HOST[:PORT]/REPOSITORY[:TAG or @DIGEST]"
	rest, ok := strings.CutPrefix(ref, Scheme)
	if !ok {
		return nil, api.Errorf(api.Invalid, "a registry's image is written %s", form)
	}
	host, _, slash := strings.Cut(rest, "/")
	if strings.Contains(host, "@") {
		// Not repeated: what stands before the @ may be a password.
		return nil, api.Errorf(api.Invalid, "no credentials in the reference: they belong in a Secret")
	}
	if !slash || host != "localhost" && !strings.ContainsAny(host, ".:") {
		return nil, api.Errorf(api.Invalid, "%q names no registry: write %s", clip(ref), form)
	}
	var opts []name.Option
	if plain || loopback(host) {
		opts = append(opts, name.Insecure)
	}
	parsed, err := name.ParseReference(rest, opts...)
	if err != nil {
		return nil, api.Errorf(api.Invalid, "%q is no reference of an image: write %s", clip(ref), form)
	}
	return parsed, nil
}

// loopback reports whether a host, with or without a port, is this machine.
func loopback(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && addr.Unmap().IsLoopback()
}

// Check says whether a reference can be read at all; no connection is made.
func Check(ref string) error {
	_, err := parse(ref, false)
	return err
}

// Open finds the disk in the image that ref names and returns its bytes, once the first of them are near: Size is the
// file's. A connection that is cut is continued where it stopped. ctx holds for reading, too.
func Open(ctx context.Context, ref string, opts Options) (*origin.Stream, error) {
	opts = opts.withDefaults()
	parsed, err := parse(ref, opts.PlainHTTP)
	if err != nil {
		return nil, err
	}
	c, err := connect(ctx, ref, parsed, opts)
	if err != nil {
		return nil, err
	}
	layers, err := c.layers(ctx, parsed.Identifier())
	if err != nil {
		c.close()
		return nil, err
	}
	d := &disk{ctx: ctx, c: c, all: layers, layers: layers}
	var size int64
	if opts.From.State != nil {
		size, err = d.again()
	} else {
		size, err = d.find()
	}
	if err != nil {
		_ = d.Close()
		return nil, err
	}
	s := &origin.Stream{ReadCloser: d, Size: size, Name: c.name, Settled: d.settled}
	if d.origin != nil {
		st := &d.origin.state
		s.Mark = &origin.Mark{Off: opts.From.Mark.Off, Size: size, Validator: st.Layers[st.Open]}
		s.At = d.origin.place
	}
	return s, nil
}

// clip makes a text of the other side fit for a message.
func clip(s string) string {
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
