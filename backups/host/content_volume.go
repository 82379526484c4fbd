package host

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/tags"
	"drover.io/drover/block"
)

// volumeSnapshot is the snapshot of a replica, of which a Backup is made.
type volumeSnapshot struct {
	*maker
	b *api.Backup
}

// hold implements content.
func (c *volumeSnapshot) hold(ctx context.Context, disk block.SnapshotDisk) (layers []string, size int64, err error) {
	src := c.b.Spec.Source
	cut, err := sourceCut(src)
	if err != nil {
		return nil, 0, err
	}
	return disk.HoldSnapshot(ctx, string(c.b.UID), c.b.Name, string(src.Replica), cut)
}

// explainHold implements content.
func (c *volumeSnapshot) explainHold(ctx context.Context, err error) error {
	if !api.Is(err, api.NotFound) {
		return err
	}
	var s api.Snapshot
	src := c.b.Spec.Source
	if e := c.live.Get(ctx, client.ObjectKey{Name: src.Snapshot}, &s); client.IgnoreNotFound(e) != nil {
		return e
	} else if e == nil && s.Status.UID == src.SnapshotUID && s.DeletionTimestamp.IsZero() {
		return api.Errorf(api.Unavailable, "replica %s: has no snapshot %s any more, another replica may: %w",
			src.Replica, src.Snapshot, err)
	}
	return api.Errorf(api.NotFound, "snapshot %s: does not exist any more; make another backup: %w", src.Snapshot, err)
}

// sourceCut is the snapshot of a source. Without the instant, the bytes of a backup could be those of another try.
func sourceCut(src *api.ExportFact) (block.SnapshotCut, error) {
	created, err := time.Parse(time.RFC3339, src.CreationTime)
	if err == nil && created.IsZero() {
		err = errors.New("the time is zero")
	}
	if err != nil {
		return block.SnapshotCut{}, api.Errorf(api.Invalid, "snapshot %s: the creation time is not valid: %w; make another "+
			"backup", src.Snapshot, err)
	}
	return block.SnapshotCut{UID: string(src.SnapshotUID), Created: created}, nil
}

// volumeDescription is the JSON of a volume in the description of a backup, from which a restore makes the volume
// again.
type volumeDescription struct {
	Name              string            `json:"name"`
	*api.VolumeRecord                   // nil: the volume is deleted
	Image             *imageDescription `json:"image,omitempty"`
}

type imageDescription struct {
	Name     string `json:"name"`
	Checksum string `json:"checksum,omitempty"` // SHA-512 of the source's bytes
}

// describe implements content. The volume is described as it is now.
func (c *volumeSnapshot) describe(ctx context.Context) (out described, err error) {
	src := c.b.Spec.Source
	cut, err := sourceCut(src)
	if err != nil {
		return out, err
	}
	out.at = cut.Created
	out.facts = tags.Facts{Volume: src.Volume, VolumeUID: src.VolumeUID, Snapshot: src.Snapshot,
		SnapshotCreated: src.CreationTime, SnapshotUID: src.SnapshotUID}
	d := volumeDescription{Name: src.Volume}
	var v api.Volume
	err = c.live.Get(ctx, client.ObjectKey{Name: src.Volume}, &v)
	if client.IgnoreNotFound(err) != nil {
		return out, err
	}
	if err == nil && v.Status.UID == src.VolumeUID {
		record, err := v.Record()
		if err == nil {
			err = json.Unmarshal(record, &d.VolumeRecord) // allocates
		}
		if err != nil {
			return out, err
		}
		out.facts.Image, out.facts.Record = v.Spec.BackingImage, api.RecordVolume(&v)
	}
	if out.facts.Image != "" {
		if err := c.describeImage(ctx, &out); err != nil {
			return out, err
		}
		d.Image = &imageDescription{out.facts.Image, out.facts.ImageChecksum}
	}
	text, err := json.Marshal(d)
	out.object = manifest.Description{Kind: manifest.Volume, Name: src.Volume, Object: text}
	return out, err
}

// describeImage describes the image below the volume, and notes that the target has no backup of it.
func (c *volumeSnapshot) describeImage(ctx context.Context, out *described) error {
	var i api.BackingImage
	if err := c.live.Get(ctx, client.ObjectKey{Name: out.facts.Image}, &i); client.IgnoreNotFound(err) != nil {
		return err
	}
	out.facts.ImageDigest, out.facts.ImageChecksum = i.ContentDigest(), i.Status.Checksum
	var backups api.BackupBackingImageList
	if err := c.List(ctx, &backups, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	for k := range backups.Items {
		b := &backups.Items[k]
		if b.IsOf(c.b.Target(), i.Name, out.facts.ImageDigest) && b.Status.State == api.BackupCompleted {
			return nil
		}
	}
	out.note = "backup target " + c.b.Target() + " has no backup of image " + out.facts.Image + ": a restore needs " +
		"none, and `drover image backup` makes one"
	return nil
}
