package copies

import (
	"context"
	"encoding/json"
	"errors"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
	"drover.io/drover/block"
)

// readers is how many chunks of a backup of Longhorn are read at once.
const readers = 4

// outcome is the result of a work.
type outcome struct {
	snapshot blob.ID
	facts    tags.Facts
	url      string // of the target
	err      error
}

// attempt makes a copy.
type attempt struct {
	*reconciler
	b, origin api.StoredBackup
	begun     bool // an earlier attempt may have a snapshot in the repository
	progress  *mover.Progress
}

func (a *attempt) run(ctx context.Context) (o outcome) {
	o.err = a.copy(ctx, &o)
	return o
}

func (a *attempt) copy(ctx context.Context, o *outcome) (err error) {
	opened, err := a.openTarget(ctx, a.b)
	if api.Is(err, api.NotFound) { // a target of the name may come again
		err = api.Errorf(api.Unavailable, "%w", err)
	}
	if err != nil {
		return err
	}
	defer opened.Close()
	defer func() { opened.ReportWrite(ctx, err) }()
	o.url = opened.Target.Spec.BackupTargetURL
	if a.begun {
		adopted, err := targets.AdoptSnapshot(ctx, opened.Repository, api.UID(a.b.GetUID()), a.confirmOwner,
			mover.Adopt)
		if err != nil {
			return err
		}
		if adopted != nil {
			o.snapshot, o.facts = adopted.Snapshot, adopted.Facts
			o.facts.Backup = a.b.GetName()
			return nil
		}
	}
	id, err := blob.Parse(a.origin.Common().SnapshotID)
	if err != nil {
		return err
	}
	format, err := a.repositories.Format(ctx, a.origin.Target())
	if err != nil {
		return err
	}
	var result mover.Result
	if format == api.FormatLonghorn {
		result, err = a.copyLonghorn(ctx, id, opened.Repository, o)
	} else {
		result, err = a.copyRepository(ctx, id, opened.Repository, o)
	}
	if err != nil {
		return err // the next attempt looks for a snapshot that could not be deleted
	}
	copyBytes.WithLabelValues("read").Add(float64(result.Read))
	copyBytes.WithLabelValues("uploaded").Add(float64(result.StoredBytes))
	o.snapshot = result.Snapshot
	return nil
}

// openTarget opens the repository of a copy's target for a write; the caller closes it.
func (r *reconciler) openTarget(ctx context.Context, b api.StoredBackup) (*targets.Opened, error) {
	format, err := r.repositories.Format(ctx, b.Target())
	if err == nil && format == api.FormatLonghorn {
		return nil, api.Errorf(api.Invalid, "backup target %s: is a store of Longhorn, which Drover only reads; name "+
			"another target", b.Target())
	}
	return r.repositories.OpenToWrite(ctx, b.Target())
}

// writer bounds the packs of the copy. The copy has buffers of beside bytes that hold no packs.
func (a *attempt) writer(beside int64) repo.WriterOptions {
	memory := a.repositories.Memory().Copies
	return targets.WriterOf(memory, memory.Size(), beside, repo.DefaultPackSize)
}

// finishFacts makes the facts of the origin those of the copy, whose name other clusters give their objects, and
// confirms that this node still makes the copy.
func (a *attempt) finishFacts(ctx context.Context, f *tags.Facts, result mover.Result) ([]string, error) {
	if !a.kind.isOf(a.b, f) {
		return nil, api.Errorf(api.Corrupt, "backup %s: the store names volume %.64q and image %.64q", a.origin.GetName(),
			f.Volume, f.Image)
	}
	f.Backup, f.Origin, f.Object = a.b.GetName(), a.origin.GetName(), api.UID(a.b.GetUID())
	f.Node, f.Uploaded = a.node, result.StoredBytes
	if err := a.confirmOwner(ctx); err != nil {
		return nil, err
	}
	return f.Tags(), nil
}

// confirmOwner returns an error if the copy has ended, or another node makes it.
func (a *attempt) confirmOwner(ctx context.Context) error {
	now := a.kind.newObject()
	if err := a.live.Get(ctx, client.ObjectKeyFromObject(a.b), now); err != nil {
		return api.Explain(err, "backup %s: read the object before the commit", a.b.GetName())
	}
	if s := now.Common(); now.GetUID() != a.b.GetUID() || now.GetDeletionTimestamp() != nil || s.OwnerID != a.node ||
		s.State != api.BackupInProgress {
		return api.Errorf(api.Busy, "backup %s: this node does not make the copy any more", a.b.GetName())
	}
	return nil
}

// copyRepository copies the snapshot id of the origin's repository.
func (a *attempt) copyRepository(ctx context.Context, id blob.ID, to *repo.Repository, o *outcome) (
	result mover.Result, err error) {
	from, err := a.repositories.Open(ctx, a.origin.Target())
	if api.Is(err, api.Denied) || api.Is(err, api.Invalid) { // a person corrects the target or its Secret
		err = api.Errorf(api.Unavailable, "%w", err)
	}
	if err != nil {
		return result, err
	}
	defer from.Close()
	result, err = mover.Copy(ctx, from.Repository, id, to, mover.CopyOptions{Program: "drover " + a.opts.Version,
		Writer: a.writer(0), Progress: a.progress,
		Tags: func(ctx context.Context, origin repo.Snapshot, result mover.Result) ([]string, error) {
			facts, ok := tags.Parse(origin.Tags)
			if !ok {
				return nil, api.Errorf(api.Unsupported, "backup %s: its snapshot has no tags of a backup of Drover",
					a.origin.GetName())
			}
			o.facts = facts
			return a.finishFacts(ctx, &o.facts, result)
		}})
	if err != nil {
		return result, api.Errorf(api.KindOf(err), "backup %s in target %s: %w", a.origin.GetName(), a.origin.Target(), err)
	}
	return result, nil
}

// description is the JSON of a volume of Longhorn, as the description of each backup has it.
type description struct {
	Name  string `json:"name"`
	Image *image `json:"image,omitempty"`
}

type image struct {
	Name     string `json:"name"`
	Checksum string `json:"checksum,omitempty"` // SHA-512 of the source's bytes
}

// copyLonghorn copies a backup of Longhorn: the mover reads the backup as a volume, and hashes its chunks.
func (a *attempt) copyLonghorn(ctx context.Context, id blob.ID, to *repo.Repository, o *outcome) (
	result mover.Result, err error) {
	origin, is := a.origin.(*api.Backup)
	if !is {
		return result, api.Errorf(api.Unsupported, "backup %s: is an image of Longhorn; restore the image, and back it up "+
			"into the other target", a.origin.GetName())
	}
	from, err := a.repositories.OpenLonghorn(ctx, origin.Target(), origin.Spec.Volume, id)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	cluster, err := targets.ClusterName(ctx, a.Client, a.live, a.node)
	if err != nil {
		return result, err
	}
	o.facts = from.Facts
	o.facts.Cluster = cluster
	o.facts.ImageDigest = "" // names the image's file, and in a repository the disk inside
	d := description{Name: o.facts.Volume}
	if o.facts.Image != "" {
		d.Image = &image{o.facts.Image, from.ImageChecksum}
	}
	object, err := json.Marshal(d)
	if err != nil {
		return result, err
	}
	return mover.Backup(ctx, to, from, mover.BackupOptions{
		Description: manifest.Description{Kind: manifest.Volume, Name: o.facts.Volume, Object: object},
		Snapshot: repo.Snapshot{Time: from.Created, Hostname: cluster, Username: "drover",
			Program: "drover " + a.opts.Version},
		Tags: func(ctx context.Context, result mover.Result) ([]string, error) {
			return a.finishFacts(ctx, &o.facts, result)
		},
		Workers: readers, Writer: a.writer(readers * block.ChunkSize), Progress: a.progress})
}

// removal removes what an unfinished copy left in the repository.
type removal struct {
	*reconciler
	b     api.StoredBackup
	begun bool
}

func (d *removal) run(ctx context.Context) outcome { return outcome{err: d.deleteSnapshots(ctx)} }

func (d *removal) deleteSnapshots(ctx context.Context) error {
	if !d.begun {
		return nil
	}
	opened, err := d.openTarget(ctx, d.b)
	if api.Is(err, api.NotFound) || api.Is(err, api.Invalid) { // the store has no trace, or keeps the snapshots
		return nil
	} else if err != nil {
		return err
	}
	defer opened.Close()
	list, err := targets.SnapshotsOf(ctx, opened.Repository, api.UID(d.b.GetUID()))
	if err != nil {
		return err
	}
	for _, s := range list {
		if err := opened.Repository.DeleteSnapshots(ctx, s.ID); err != nil {
			return err
		}
	}
	return targets.RequestSweep(ctx, d.Client, opened.Target)
}
