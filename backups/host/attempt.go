package host

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/tags"
	"drover.io/drover/block"
)

const (
	fragmentSize = 128 << 10
	busyPause    = 200 * time.Millisecond
	// mergeTimeout bounds the wait for a merge of layers, or for a replica that fetches layers. Then the attempt fails,
	// and gives its place back.
	mergeTimeout = time.Minute
)

// attempt makes a backup.
type attempt struct {
	*maker
	b      *api.Backup
	again  bool // an earlier attempt may have a snapshot in the repository
	places int
}

// run is the workFunc.
func (a *attempt) run(ctx context.Context, w *work) error {
	opened, err := a.openTarget(ctx, a.b)
	if api.Is(err, api.NotFound) { // a target of the name may come again
		err = api.Errorf(api.Unavailable, "%w", err)
	}
	if err != nil {
		return err
	}
	defer opened.Close()
	w.made.target = opened.Target.Spec.BackupTargetURL
	if a.again {
		w.setPhase("looks for the snapshot of an earlier attempt in the backup target")
		if found, err := adoptSnapshot(ctx, opened.Repository, a.b, &w.made); found || err != nil {
			return err
		}
	}
	disk, err := a.disks(w.source.Disk)
	if err != nil {
		return err
	}
	layers, size, err := a.holdSnapshot(ctx, disk, &w.source)
	if err != nil {
		return err
	}
	w.setPhase("makes the digests of the snapshot's layers")
	err = retryBusy(ctx, 0, func() error { return disk.MakeDigests(ctx, layers) })
	if err != nil {
		return err
	}
	w.setPhase("")
	return a.upload(ctx, w, opened.Repository, disk, layers, size)
}

// openTarget opens the repository of a Backup's target for a write; the caller closes it. A BackupTarget that does not
// exist is an error of kind NotFound.
func (m *maker) openTarget(ctx context.Context, b *api.Backup) (*targets.Opened, error) {
	opened, err := m.repositories.Open(ctx, b.Target())
	switch {
	case api.Is(err, api.Denied) || api.Is(err, api.Invalid): // a person corrects the target or its Secret
		return nil, api.Errorf(api.Unavailable, "%w", err)
	case err != nil:
		return nil, err
	case opened.Target.ExplainReadOnly() != "":
		opened.Close()
		return nil, api.Errorf(api.Unavailable, "backup target %s: %s", b.Target(), opened.Target.ExplainReadOnly())
	}
	return opened, nil
}

// holdSnapshot holds the layers of the snapshot for the Backup.
func (a *attempt) holdSnapshot(ctx context.Context, disk block.SnapshotDisk, src *api.ExportFact) (layers []string,
	size int64, err error) {
	cut, err := sourceCut(src)
	if err != nil {
		return nil, 0, err
	}
	err = retryBusy(ctx, mergeTimeout, func() (err error) {
		a.holding.RLock()
		defer a.holding.RUnlock()
		layers, size, err = disk.HoldSnapshot(ctx, string(a.b.UID), a.b.Name, string(src.Replica), cut)
		return err
	})
	if !api.Is(err, api.NotFound) {
		return layers, size, err
	}
	var s api.Snapshot
	if e := a.live.Get(ctx, client.ObjectKey{Name: src.Snapshot}, &s); client.IgnoreNotFound(e) != nil {
		return nil, 0, e
	} else if e == nil && s.Status.UID == src.SnapshotUID && s.DeletionTimestamp.IsZero() {
		return nil, 0, api.Errorf(api.Unavailable, "replica %s: has no snapshot %s any more, another replica may: %w",
			src.Replica, src.Snapshot, err)
	}
	return nil, 0, api.Errorf(api.NotFound, "snapshot %s: does not exist any more; make another backup: %w", src.Snapshot,
		err)
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

// retryBusy calls do again after each error of kind busy, at most for limit, if limit is not 0; then the last error
// counts.
func retryBusy(ctx context.Context, limit time.Duration, do func() error) error {
	var end <-chan time.Time
	if limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		end = timer.C
	}
	for {
		err := do()
		if !api.Is(err, api.Busy) {
			return err
		}
		pause := time.NewTimer(busyPause)
		select {
		case <-pause.C:
		case <-end:
			pause.Stop()
			return err
		case <-ctx.Done():
			pause.Stop()
			return context.Cause(ctx)
		}
	}
}

// upload copies the layers into the repository.
func (a *attempt) upload(ctx context.Context, w *work, r *repo.Repository, disk block.SnapshotDisk, layers []string,
	size int64) (err error) {
	opened, err := disk.OpenStack(layers, size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, opened.Close()) }()
	src, ok := opened.(block.DigestSource)
	if !ok {
		return api.Errorf(api.Unsupported, "disk %s: has no digests", w.source.Disk)
	}
	o, err := a.options(ctx, w, size)
	if err != nil {
		return err
	}
	if o.Reread = a.b.Spec.BackupMode == api.BackupFull; !o.Reread {
		if o.Base, o.Changed, err = a.findBase(ctx, r, disk, &w.source); err != nil {
			return err
		}
	}
	result, err := mover.Backup(ctx, r, src, o)
	if err != nil {
		return err // the next attempt looks for a snapshot that the mover could not delete
	}
	backupBytes.WithLabelValues("read").Add(float64(result.Read))
	backupBytes.WithLabelValues("uploaded").Add(float64(result.StoredBytes))
	w.made.snapshot = result.Snapshot
	return nil
}

// options describe the backup. The facts are complete when the mover asks for the tags.
func (a *attempt) options(ctx context.Context, w *work, size int64) (o mover.BackupOptions, err error) {
	b, src := a.b, &w.source
	cut, err := sourceCut(src)
	if err != nil {
		return o, err
	}
	object, image, err := a.describeVolume(ctx, src)
	if err != nil {
		return o, err
	}
	w.made.facts = tags.Facts{Backup: b.Name, Volume: src.Volume, Object: api.UID(b.UID), VolumeUID: src.VolumeUID,
		Snapshot: src.Snapshot, SnapshotCreated: src.CreationTime, SnapshotUID: src.SnapshotUID, VolumeSize: size,
		Image: image, Labels: b.Spec.Labels}
	o = mover.BackupOptions{
		Description: manifest.Description{Kind: manifest.Volume, Name: src.Volume, Object: object},
		Snapshot: repo.Snapshot{Time: cut.Created, Hostname: a.node, Username: "drover",
			Program: "drover " + a.opts.Version},
		Tags: func(ctx context.Context, result mover.Result) ([]string, error) {
			if err := a.confirmSource(ctx, w); err != nil {
				return nil, err
			}
			f := &w.made.facts
			if f.Mode = api.BackupIncremental; result.Full {
				f.Mode = api.BackupFull
			}
			f.Uploaded = result.StoredBytes
			return f.Tags(), nil
		},
		FragmentSize: fragmentSize,
		Progress:     &w.progress,
	}
	shareMemory(&o, a.opts.Memory, a.places)
	return o, nil
}

// confirmSource returns an error if the Backup has ended, or another node makes it. A node that was cut off from the API
// server may not know: its snapshot would be a second one of the Backup.
func (a *attempt) confirmSource(ctx context.Context, w *work) error {
	now := &api.Backup{}
	if err := a.live.Get(ctx, client.ObjectKeyFromObject(a.b), now); err != nil {
		return api.Explain(err, "backup %s: read the object before the commit", a.b.Name)
	}
	if !w.serves(now, a.node) {
		return api.Errorf(api.Busy, "backup %s: this node does not make the backup any more", a.b.Name)
	}
	return nil
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

// describeVolume describes the volume as it is now, and names its image.
func (a *attempt) describeVolume(ctx context.Context, src *api.ExportFact) (_ json.RawMessage, image string,
	err error) {
	d := volumeDescription{Name: src.Volume}
	var v api.Volume
	err = a.live.Get(ctx, client.ObjectKey{Name: src.Volume}, &v)
	if client.IgnoreNotFound(err) != nil {
		return nil, "", err
	}
	if err == nil && v.Status.UID == src.VolumeUID {
		record, err := v.Record()
		if err == nil {
			err = json.Unmarshal(record, &d.VolumeRecord) // allocates
		}
		if err != nil {
			return nil, "", err
		}
		image = v.Spec.BackingImage
	}
	if image != "" {
		var i api.BackingImage
		if err := a.live.Get(ctx, client.ObjectKey{Name: image}, &i); client.IgnoreNotFound(err) != nil {
			return nil, "", err
		}
		d.Image = &imageDescription{image, i.Status.Checksum}
	}
	text, err := json.Marshal(d)
	return text, image, err
}
