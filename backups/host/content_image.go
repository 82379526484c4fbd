package host

import (
	"context"
	"encoding/json"
	"net/url"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
	"drover.io/drover/block"
)

// imageCopy is the copy of an image, of which a BackupBackingImage is made.
type imageCopy struct {
	*maker
	b *api.BackupBackingImage
}

// hold implements content.
func (c *imageCopy) hold(ctx context.Context, disk block.SnapshotDisk) (layers []string, size int64, err error) {
	src := c.b.Spec.Source
	for _, uid := range src.Layers {
		layers = append(layers, string(uid))
	}
	if len(layers) == 0 || src.VirtualSize <= 0 {
		return nil, 0, api.Errorf(api.Invalid, "image %s: the source has no layers; make another backup",
			c.b.Spec.BackingImageName)
	}
	err = disk.HoldLayers(ctx, string(c.b.UID), c.b.Name, layers)
	if api.Is(err, api.Busy) { // the layers of an image are never merged
		err = api.Errorf(api.Unavailable, "image %s: this copy is being removed, another copy may stay: %w",
			c.b.Spec.BackingImageName, err)
	}
	return layers, src.VirtualSize, err
}

// explainHold implements content.
func (c *imageCopy) explainHold(_ context.Context, err error) error { return err }

// findBase implements content. An image never changes, so no earlier backup has other chunks of it.
func (c *imageCopy) findBase(context.Context, *repo.Repository, block.SnapshotDisk) (*blob.ID, []int64, bool, error) {
	return nil, nil, false, nil
}

// describedImage is the JSON of an image in the description of a backup.
type describedImage struct {
	Name             string `json:"name"`
	*api.ImageRecord        // nil: the image is deleted
	Checksum         string `json:"checksum,omitempty"` // SHA-512 of the source's bytes
	Digest           string `json:"digest"`
}

// describe implements content. The image is described as it is now.
func (c *imageCopy) describe(ctx context.Context) (out described, err error) {
	src, name := c.b.Spec.Source, c.b.Spec.BackingImageName
	out.at = c.b.CreationTimestamp.Time
	out.facts = tags.Facts{Image: name, ImageDigest: c.b.Spec.Digest, ImageChecksum: src.Checksum}
	d := describedImage{Name: name, Checksum: src.Checksum, Digest: c.b.Spec.Digest}
	var i api.BackingImage
	err = c.live.Get(ctx, client.ObjectKey{Name: name}, &i)
	if client.IgnoreNotFound(err) != nil {
		return out, err
	}
	if err == nil && i.Status.UUID == src.UUID {
		out.facts.ImageRecord = api.RecordImage(&i)
		i.Spec.SecretRef = nil
		i.Spec.SourceParameters = publicParameters(i.Spec.SourceParameters)
		record, err := i.Record()
		if err == nil {
			err = json.Unmarshal(record, &d.ImageRecord) // allocates
		}
		if err != nil {
			return out, err
		}
	}
	text, err := json.Marshal(d)
	out.object = manifest.Description{Kind: manifest.Image, Name: name, Object: text}
	return out, err
}

// publicParameters leaves out the parts of URLs that may be secret: a user with a password, and the query, which may be
// a signature.
func publicParameters(parameters map[string]string) map[string]string {
	public := map[string]string{}
	for key, value := range parameters {
		if key == "url" {
			u, err := url.Parse(value)
			if err != nil {
				continue
			}
			u.User, u.RawQuery, u.Fragment = nil, "", ""
			value = u.String()
		}
		public[key] = value
	}
	return public
}
