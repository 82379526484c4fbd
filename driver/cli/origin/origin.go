// Package origin finds out how the bytes of an imported disk come to a node, from the URL or the path that a command
// names: a node fetches the bytes, reads a file of its own, or gets the file from the command. The package starts no
// goroutines; the caller closes an Origin.
package origin

import (
	"context"
	"net/url"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/localfile"
	"drover.io/drover/driver/cli/machine"
)

// Origin is where a disk is imported from.
type Origin struct {
	Name       string // a path whose last part names the disk
	Type       api.SourceType
	Parameters map[string]string
	File       *os.File // nil: the bytes come from a server
}

// Options are the flags that some origins alone have.
type Options struct {
	PlainHTTP bool // a registry without TLS
	Secret    bool // credentials are given
}

// Close closes the file.
func (o *Origin) Close() error {
	if o.File == nil {
		return nil
	}
	return o.File.Close()
}

// Find finds the origin that a URL or path names. Errors of the API server are not explained.
func Find(ctx context.Context, c client.Client, text string, options Options) (*Origin, error) {
	if rest, ok := strings.CutPrefix(text, api.RegistryScheme); ok {
		o := &Origin{Name: repositoryName(rest), Type: api.SourceRegistry, Parameters: map[string]string{"url": text}}
		if options.PlainHTTP {
			o.Parameters["plainHTTP"] = "true"
		}
		return o, nil
	}
	if options.PlainHTTP {
		return nil, api.Errorf(api.Invalid, "--plain-http is for images of a registry (%s...)", api.RegistryScheme)
	}
	if u, err := url.Parse(text); err == nil && u.Host != "" {
		if u.Scheme != "http" && u.Scheme != "https" {
			return nil, api.Errorf(api.Invalid, "%s: images are fetched by http, https or docker, not %q", text, u.Scheme)
		}
		return &Origin{Name: u.Path, Type: api.SourceDownload, Parameters: map[string]string{"url": text}}, nil
	}
	if strings.Contains(text, "://") {
		return nil, api.Errorf(api.Invalid, "%s is no address that images are fetched from: write http://HOST/..., "+
			"https://HOST/..., docker://HOST/..., or the path of a file", text)
	}
	if options.Secret {
		return nil, api.Errorf(api.Invalid, "--secret is for images of a server: a file needs none")
	}
	o, err := Upload(text)
	if err != nil {
		return nil, err
	}
	local, err := machine.IsOnlyNode(ctx, c)
	if err != nil {
		_ = o.Close()
		return nil, err
	}
	if local {
		o.Type, o.Parameters = api.SourceFile, map[string]string{"path": o.File.Name()}
	}
	return o, nil
}

// Upload is a file that the command sends to a node.
func Upload(path string) (*Origin, error) {
	file, err := localfile.OpenImage(path)
	if err != nil {
		return nil, err
	}
	st, err := file.Stat()
	if err != nil {
		_ = file.Close()
		return nil, api.Errorf(api.Other, "image file %s: %w", path, err)
	}
	return &Origin{Name: file.Name(), Type: api.SourceUpload, File: file,
		Parameters: map[string]string{"size": strconv.FormatInt(st.Size(), 10)}}, nil
}

// repositoryName returns the name of an image in a registry, without host, tag and digest.
func repositoryName(ref string) string {
	ref, _, _ = strings.Cut(ref, "@")
	ref = ref[strings.LastIndex(ref, "/")+1:]
	ref, _, _ = strings.Cut(ref, ":")
	return ref
}

var notInNames = regexp.MustCompile(`[^a-z0-9.-]+`)

// NameFrom derives an image's name from the last part of a path or URL: "…/Debian_12.qcow2.xz" becomes debian-12.
func NameFrom(source string) string {
	base := strings.ToLower(path.Base(strings.SplitN(strings.SplitN(source, "?", 2)[0], "#", 2)[0]))
	for {
		cut := base
		for _, ext := range []string{".qcow2", ".img", ".raw", ".qcow", ".vmdk", ".vhd", ".vhdx", ".gz", ".xz",
			".zst"} {
			cut = strings.TrimSuffix(cut, ext)
		}
		if cut == base {
			break
		}
		base = cut
	}
	base = notInNames.ReplaceAllString(base, "-")
	return api.LabelValue(strings.Trim(base, "-."))
}
