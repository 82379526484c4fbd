package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"drover.io/drover/api"
)

// maxLayers bounds the layers of an image; container runtimes allow 127.
const maxLayers = 128

// layerTypes are archives of files; the first bytes of a layer show the packing.
var layerTypes = []types.MediaType{types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer, types.DockerLayer,
	types.DockerUncompressedLayer, "application/vnd.docker.image.rootfs.diff.tar.zstd"}

// manifest is the needed part of an image's manifest, or of an index of several images.
type manifest struct {
	SchemaVersion int             `json:"schemaVersion"`
	MediaType     types.MediaType `json:"mediaType"`
	Layers        []v1.Descriptor `json:"layers"`
	Manifests     []v1.Descriptor `json:"manifests"`
	FSLayers      []struct{}      `json:"fsLayers"` // schema 1
}

// imageLayers returns the layers of the image that a tag or a digest names, for one architecture, the lowest layer
// first.
func (c *client) imageLayers(ctx context.Context, ref name.Reference) ([]v1.Descriptor, error) {
	m, digest, err := c.fetchManifest(ctx, ref)
	if err != nil {
		return nil, err
	}
	if len(m.Manifests) > 0 {
		image, err := c.selectImage(m.Manifests)
		if err != nil {
			return nil, err
		}
		if m, digest, err = c.fetchManifest(ctx, c.repo.Digest(image.Digest.String())); err != nil {
			return nil, err
		}
		if len(m.Manifests) > 0 {
			return nil, api.Errorf(api.Unsupported, "%s: its index names another index instead of an image", c.name)
		}
	}
	switch {
	case len(m.Layers) == 0:
		return nil, c.notContainerDisk("the image has no layers")
	case len(m.Layers) > maxLayers:
		return nil, api.Errorf(api.OutOfRange, "%s: the image has %d layers, more than %d", c.name, len(m.Layers), maxLayers)
	}
	for _, l := range m.Layers {
		if !slices.Contains(layerTypes, l.MediaType) {
			return nil, c.notContainerDisk(fmt.Sprintf("the image holds a layer of type %q", clipText(string(l.MediaType))))
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

// notContainerDisk is the error for an image of another kind.
func (c *client) notContainerDisk(why string) error {
	return api.Errorf(api.Invalid, "%s is not a containerDisk, an image that holds one disk file in /disk/: %s", c.name,
		why)
}

// selectImage selects the image of this architecture from an index, else the only image of the index.
func (c *client) selectImage(all []v1.Descriptor) (v1.Descriptor, error) {
	// An index lists signatures and build records beside the images, for an unknown platform.
	all = slices.DeleteFunc(slices.Clone(all), func(d v1.Descriptor) bool { return platformOf(d).OS == "unknown" })
	var platforms []string
	found := -1
	for i, d := range all {
		p := platformOf(d)
		platforms = append(platforms, p.String())
		if p.OS == "linux" && p.Architecture == c.opts.Arch &&
			(found < 0 || p.Variant == "" && platformOf(all[found]).Variant != "") {
			found = i
		}
	}
	switch {
	case found < 0 && len(all) == 1:
		found = 0
	case found < 0:
		return v1.Descriptor{}, api.Errorf(api.NotFound, "%s: the index has no image for linux/%s, only for: %s", c.name,
			c.opts.Arch, clipText(strings.Join(platforms, ", ")))
	}
	if all[found].Digest.Hex == "" {
		return v1.Descriptor{}, api.Errorf(api.Corrupt, "%s: its index names an image without a digest", c.name)
	}
	return all[found], nil
}

func platformOf(d v1.Descriptor) v1.Platform {
	if d.Platform == nil {
		return v1.Platform{}
	}
	return *d.Platform
}

// fetchManifest fetches a manifest. The library compares the digest of a reference by digest; manifestGuard bounds the
// size before the library reads the manifest.
func (c *client) fetchManifest(ctx context.Context, ref name.Reference) (m manifest, digest v1.Hash, err error) {
	got, err := remote.Get(ref, remote.WithContext(guardManifests(ctx)), remote.WithTransport(c.http.Transport))
	var answer *transport.Error
	var request *url.Error
	switch {
	case err == nil:
	case errors.As(err, &answer):
		return m, digest, c.statusError(answer.StatusCode, clipText(ref.Identifier()))
	case errors.As(err, &request) || ctx.Err() != nil:
		return m, digest, c.explainFailure(ctx, err)
	default: // the content is not the content of the digest
		return m, digest, api.Errorf(api.Corrupt, "%s: %s", c.name, clipText(err.Error()))
	}
	m, err = c.parseManifest(got.Manifest, string(got.MediaType))
	return m, got.Digest, err
}

// parseManifest reads a manifest. The type in the manifest counts more than the type in the registry's answer.
func (c *client) parseManifest(body []byte, contentType string) (m manifest, err error) {
	if err := checkEntries(body); err != nil {
		return m, api.Errorf(api.OutOfRange, "%s: its manifest %w", c.name, err)
	}
	if err := json.Unmarshal(body, &m); err != nil {
		return m, api.Errorf(api.Corrupt, "%s: its manifest cannot be read: %s", c.name, clipText(err.Error()))
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
		return m, c.notContainerDisk(fmt.Sprintf("the manifest is of type %q", clipText(string(m.MediaType))))
	case m.MediaType.IsIndex() && len(m.Layers) > 0, m.MediaType.IsImage() && len(m.Manifests) > 0:
		// Readers of different halves of the manifest would see different images.
		return m, api.Errorf(api.Corrupt, "%s: its manifest is both an image and an index", c.name)
	case m.MediaType.IsIndex() && len(m.Manifests) == 0:
		return m, c.notContainerDisk("the index names no image")
	}
	return m, nil
}
