package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"drover.io/drover/api"
)

// What a manifest may be. Registries allow 4 MiB, container runtimes 127 layers.
const (
	maxManifest = 4 << 20
	maxEntries  = 1000
	maxLayers   = 128
)

// accepted are the manifests that can be read, as the registry is told.
var accepted = strings.Join([]string{
	string(types.OCIManifestSchema1), string(types.DockerManifestSchema2),
	string(types.OCIImageIndex), string(types.DockerManifestList),
}, ",")

// layerTypes are archives of files; how they are packed is seen in their first bytes.
var layerTypes = []types.MediaType{types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer, types.DockerLayer,
	types.DockerUncompressedLayer, "application/vnd.docker.image.rootfs.diff.tar.zstd"}

// manifest is what is needed of an image's manifest, or of an index of several.
type manifest struct {
	SchemaVersion int                `json:"schemaVersion"`
	MediaType     types.MediaType    `json:"mediaType"`
	Layers        capped[descriptor] `json:"layers"`
	Manifests     capped[descriptor] `json:"manifests"`
	FSLayers      capped[struct{}]   `json:"fsLayers"` // schema 1
}

type descriptor struct {
	MediaType types.MediaType `json:"mediaType"`
	Size      int64           `json:"size"`
	Digest    v1.Hash         `json:"digest"`
	Platform  struct {
		OS           string `json:"os"`
		Architecture string `json:"architecture"`
		Variant      string `json:"variant"`
	} `json:"platform"`
}

func (d descriptor) platform() string {
	p := d.Platform.OS + "/" + d.Platform.Architecture
	if d.Platform.Variant != "" {
		p += "/" + d.Platform.Variant
	}
	return clip(p)
}

// capped is a list that stops growing while it is read: four million bytes can hold a million entries.
type capped[T any] []T

var errTooMany = errors.New("too many entries")

// UnmarshalJSON reads one entry after the other.
func (l *capped[T]) UnmarshalJSON(b []byte) error {
	*l = nil // of a list that is there twice, the last counts, as for other readers
	if string(b) == "null" {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	if t, err := dec.Token(); err != nil || t != json.Delim('[') {
		return errors.New("not a list")
	}
	for dec.More() {
		if len(*l) == maxEntries {
			return errTooMany
		}
		var v T
		if err := dec.Decode(&v); err != nil {
			return err
		}
		*l = append(*l, v)
	}
	return nil
}

// layers are those of the image that a tag or a digest names, for one architecture; the lowest first.
func (c *client) layers(ctx context.Context, identifier string) ([]descriptor, error) {
	m, digest, err := c.manifest(ctx, identifier)
	if err != nil {
		return nil, err
	}
	if len(m.Manifests) > 0 {
		one, err := c.choose(m.Manifests)
		if err != nil {
			return nil, err
		}
		if m, digest, err = c.manifest(ctx, one.Digest.String()); err != nil {
			return nil, err
		}
		if len(m.Manifests) > 0 {
			return nil, api.Errorf(api.Unsupported, "%s: its index names another index instead of an image", c.name)
		}
	}
	switch {
	case len(m.Layers) == 0:
		return nil, c.foreign("the image has no layers")
	case len(m.Layers) > maxLayers:
		return nil, api.Errorf(api.OutOfRange, "%s: the image has %d layers, more than %d", c.name, len(m.Layers), maxLayers)
	}
	for _, l := range m.Layers {
		if !slices.Contains(layerTypes, l.MediaType) {
			return nil, c.foreign(fmt.Sprintf("it holds a layer of type %q", clip(string(l.MediaType))))
		}
		if l.Size < 0 || l.Size > api.MaxVolumeSize || l.Digest.Hex == "" {
			return nil, api.Errorf(api.Corrupt, "%s: the manifest names a layer of %d bytes with digest %q", c.name, l.Size,
				l.Digest)
		}
	}
	if c.opts.Resolved != nil {
		c.opts.Resolved(digest.String())
	}
	return m.Layers, nil
}

// foreign is the error for what is no containerDisk.
func (c *client) foreign(why string) error {
	return api.Errorf(api.Invalid, "%s is not a containerDisk, an image that holds one disk file in /disk/: %s", c.name,
		why)
}

// choose takes the image of this architecture from an index, else the only one that there is.
func (c *client) choose(all []descriptor) (descriptor, error) {
	// Signatures and build records are listed beside the images, for no platform.
	all = slices.DeleteFunc(slices.Clone(all), func(d descriptor) bool { return d.Platform.OS == "unknown" })
	var names []string
	found := -1
	for i, d := range all {
		names = append(names, d.platform())
		if d.Platform.OS == "linux" && d.Platform.Architecture == c.opts.Arch &&
			(found < 0 || d.Platform.Variant == "" && all[found].Platform.Variant != "") {
			found = i
		}
	}
	switch {
	case found < 0 && len(all) == 1:
		found = 0
	case found < 0:
		return descriptor{}, api.Errorf(api.NotFound, "%s: there is no image for linux/%s, only for: %s", c.name, c.opts.Arch,
			clip(strings.Join(names, ", ")))
	}
	if all[found].Digest.Hex == "" {
		return descriptor{}, api.Errorf(api.Corrupt, "%s: its index names an image without a digest", c.name)
	}
	return all[found], nil
}

// manifest fetches one; where a digest names it, it is compared.
func (c *client) manifest(ctx context.Context, identifier string) (m manifest, digest v1.Hash, err error) {
	resp, err := c.get(ctx, "manifests/"+identifier, http.Header{"Accept": {accepted}})
	if err != nil {
		return m, digest, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return m, digest, c.refused(resp.StatusCode, clip(identifier))
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxManifest+1))
	if err != nil {
		return m, digest, c.failed(ctx, err)
	}
	if len(body) > maxManifest {
		return m, digest, api.Errorf(api.OutOfRange, "%s: its manifest is larger than %d MiB", c.name, maxManifest>>20)
	}
	digest, err = digestOf(body, identifier)
	if err != nil {
		return m, digest, api.Errorf(api.Corrupt, "%s: manifest: %w", c.name, err)
	}
	m, err = c.understand(body, resp.Header.Get("Content-Type"))
	return m, digest, err
}

// understand reads a manifest; it says what it is itself, or else the registry does.
func (c *client) understand(body []byte, contentType string) (m manifest, err error) {
	if err := json.Unmarshal(body, &m); errors.Is(err, errTooMany) {
		return m, api.Errorf(api.OutOfRange, "%s: its manifest has a list of more than %d entries", c.name, maxEntries)
	} else if err != nil {
		return m, api.Errorf(api.Corrupt, "%s: its manifest cannot be read: %s", c.name, clip(err.Error()))
	}
	if m.MediaType == "" {
		kind, _, _ := strings.Cut(contentType, ";")
		m.MediaType = types.MediaType(strings.TrimSpace(kind))
	}
	switch {
	case m.SchemaVersion == 1 || len(m.FSLayers) > 0:
		return m, api.Errorf(api.Unsupported, "%s: its manifest has schema 1, long out of use: push the image again",
			c.name)
	case !m.MediaType.IsIndex() && !m.MediaType.IsImage():
		return m, c.foreign(fmt.Sprintf("its manifest is of type %q", clip(string(m.MediaType))))
	case m.MediaType.IsIndex() && len(m.Layers) > 0, m.MediaType.IsImage() && len(m.Manifests) > 0:
		// Readers that look at different halves of it would see different images.
		return m, api.Errorf(api.Corrupt, "%s: its manifest is both an image and an index", c.name)
	case m.MediaType.IsIndex() && len(m.Manifests) == 0:
		return m, c.foreign("its index names no image")
	}
	return m, nil
}

// digestOf is the digest of bytes; where the name is a digest it must be that one.
func digestOf(body []byte, name string) (v1.Hash, error) {
	want, err := v1.NewHash(name)
	if err != nil { // a tag
		got, _, err := v1.SHA256(bytes.NewReader(body))
		return got, err
	}
	h, err := v1.Hasher(want.Algorithm)
	if err != nil {
		return want, err
	}
	_, _ = h.Write(body)
	if got := fmt.Sprintf("%x", h.Sum(nil)); got != want.Hex {
		return want, fmt.Errorf("its digest is %s:%s instead of %s", want.Algorithm, got, want)
	}
	return want, nil
}
