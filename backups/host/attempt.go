package host

import (
	"context"
	"errors"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
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
	b      api.StoredBackup
	places int
}

// run is the workFunc.
func (a *attempt) run(ctx context.Context, w *work) (err error) {
	opened, err := a.repositories.OpenToWrite(ctx, a.b.Target())
	if api.Is(err, api.NotFound) { // a target of the name may come again
		err = api.Errorf(api.Unavailable, "%w", err)
	}
	if err != nil {
		return err
	}
	defer opened.Close()
	defer func() { opened.ReportWrite(ctx, err) }()
	w.made.target = opened.Target.Spec.BackupTargetURL
	if w.begun {
		w.setPhase("looks for the snapshot of an earlier attempt in the backup target")
		adopted, err := targets.AdoptSnapshot(ctx, opened.Repository, api.UID(a.b.GetUID()),
			func(ctx context.Context) error { return a.confirmSource(ctx, w) }, mover.Adopt)
		if err != nil {
			return err
		}
		if adopted != nil {
			w.made.adopted, w.made.snapshot, w.made.facts = true, adopted.Snapshot, adopted.Facts
			return nil
		}
		w.setPhase("")
	}
	disk, err := a.disks(w.disk)
	if err != nil {
		return err
	}
	leave, err := a.holders.Enter(ctx, w.hold())
	if err != nil {
		return err
	}
	defer leave()
	of := a.contentOf(a.b)
	var layers []string
	var size int64
	err = retryBusy(ctx, mergeTimeout, func() (err error) {
		layers, size, err = of.hold(ctx, disk)
		return err
	})
	if err != nil {
		return of.explainHold(ctx, err)
	}
	return a.upload(ctx, w, opened, of, disk, layers, size)
}

// retryBusy calls do again after each error of kind busy, at most for limit; then the last error counts.
func retryBusy(ctx context.Context, limit time.Duration, do func() error) error {
	end := time.NewTimer(limit)
	defer end.Stop()
	for {
		err := do()
		if !api.Is(err, api.Busy) {
			return err
		}
		pause := time.NewTimer(busyPause)
		select {
		case <-pause.C:
		case <-end.C:
			pause.Stop()
			return err
		case <-ctx.Done():
			pause.Stop()
			return context.Cause(ctx)
		}
	}
}

// upload copies the layers into the repository. Layers of a new snapshot have no digests yet: the mover hashes what it
// reads, so nothing waits for the digests, which the disk makes in the background.
func (a *attempt) upload(ctx context.Context, w *work, opened *targets.Opened, of content, disk block.SnapshotDisk,
	layers []string, size int64) (err error) {
	var src block.DigestSource
	err = retryBusy(ctx, mergeTimeout, func() (err error) {
		src, err = openLayers(disk, layers, size)
		return err
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	o, err := a.options(ctx, w, of, size)
	if err != nil {
		return err
	}
	if o.Base, o.Changed, o.Reread, err = of.findBase(ctx, opened.Repository, disk); err != nil {
		return err
	}
	defer a.pacer.Begin()()
	result, err := mover.Backup(ctx, opened.Repository, src, o)
	if err != nil {
		return err // the next attempt looks for a snapshot that the mover could not delete
	}
	backupBytes.WithLabelValues("read").Add(float64(result.Read))
	backupBytes.WithLabelValues("uploaded").Add(float64(result.StoredBytes))
	w.made.snapshot, w.made.added = result.Snapshot, result.Added
	if b, is := a.b.(*api.Backup); is && o.Reread {
		if err := a.healVolume(ctx, opened, b, src, o.Writer); err != nil {
			a.log.Warn("damaged backups of the volume cannot be healed", "backup", b.Name, "err", err)
		}
	}
	return nil
}

// options describe the backup. The facts are complete when the mover asks for the tags.
func (a *attempt) options(ctx context.Context, w *work, of content, size int64) (o mover.BackupOptions, err error) {
	described, err := of.describe(ctx)
	if err != nil {
		return o, err
	}
	w.made.facts, w.made.note = described.facts, described.note
	cluster, err := targets.ClusterName(ctx, a.Client, a.live, a.node)
	if err != nil {
		return o, err
	}
	f := &w.made.facts
	f.Cluster, f.Node = cluster, a.node
	f.Backup, f.Object, f.Labels, f.VolumeSize = a.b.GetName(), api.UID(a.b.GetUID()), a.b.BackupLabels(), size
	o = mover.BackupOptions{
		Description: described.object,
		Snapshot: repo.Snapshot{Time: described.at, Hostname: cluster, Username: "drover",
			Program: "drover " + a.opts.Version},
		Tags: func(ctx context.Context, result mover.Result) ([]string, error) {
			if err := a.confirmSource(ctx, w); err != nil {
				return nil, err
			}
			switch {
			case f.IsImage():
			case result.Full:
				f.Mode = api.BackupFull
			default:
				f.Mode = api.BackupIncremental
			}
			f.Uploaded = result.StoredBytes
			return f.Tags(), nil
		},
		FragmentSize: fragmentSize,
		Progress:     &w.progress,
	}
	shareMemory(&o, a.repositories.Memory().Backups, a.places)
	o.Writer.Pacer = a.pacer
	return o, nil
}

// confirmSource returns an error if the Backup has ended, or another node makes it, or has begun it since. A node that
// was cut off from the API server may not know: its snapshot would be a second one of the Backup.
func (a *attempt) confirmSource(ctx context.Context, w *work) error {
	now, err := findBackup(ctx, a.live, keyOf(a.b))
	switch {
	case err != nil:
		return api.Explain(err, "backup %s: read the object before the commit", a.b.GetName())
	case now == nil:
		return api.Errorf(api.NotFound, "backup %s: the object was deleted before the commit", a.b.GetName())
	case !w.serves(now, a.node) || now.Common().OwnerID != a.node:
		return api.Errorf(api.Busy, "backup %s: this node does not make the backup any more", a.b.GetName())
	}
	return nil
}
