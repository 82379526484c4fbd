// Package restore opens backups for restores on this node.
//
// Invariants: an open backup holds a shared lock of its repository, so sweeps keep the blobs of the backup, in their
// packs or in others where the reader finds them, also if a user deletes the backup meanwhile. The lock names the
// snapshot: other clusters keep the snapshot. A backup in a store of Longhorn has no lock: package longhorn reads it. A
// Backup object names the snapshot, or the backup of Longhorn.
//
// Digests waits for its goroutines; the lock of the repository has one, which Close awaits.
package restore

import (
	"context"
	"errors"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block"
)

// closeTime bounds the deletion of the lock. A lock that stays is stale in 30 minutes.
const closeTime = time.Minute

// Backups opens backups by their URLs.
type Backups struct {
	Reader       client.Reader // of Backups and BackupBackingImages
	Repositories *targets.Repositories
}

// backup is an open backup.
type backup struct {
	name     string // of the object
	opened   *targets.Opened
	lock     *repo.Lock
	blobs    *repo.Blobs
	manifest *manifest.Manifest
	progress mover.Progress
	segments segmentCache
	checksum string // of an image
}

var (
	_ block.ChunkedBackup   = (*backup)(nil)
	_ block.ContinuedBackup = (*backup)(nil)
)

// Open opens the backup whose object has the URL. The context ends the use of the backup, too. Errors have the kinds of
// targets.Repositories.Open; NotFound: no completed backup has the URL, or the repository lost the backup; Corrupt: the
// repository damaged the backup's description.
func (b *Backups) Open(ctx context.Context, url string) (_ block.Backup, err error) {
	object, err := b.find(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = api.Errorf(api.KindOf(err), "backup %s: %w", object.GetName(), err)
		}
	}()
	id, err := blob.Parse(object.Common().SnapshotID)
	if err != nil {
		return nil, err
	}
	format, err := b.Repositories.Format(ctx, object.Target())
	if err != nil {
		return nil, err
	}
	if format == api.FormatLonghorn {
		return b.openLonghorn(ctx, object, id)
	}
	o := &backup{name: object.GetName()}
	if image, is := object.(*api.BackupBackingImage); is {
		o.checksum = image.Status.Checksum
	}
	if o.opened, err = b.Repositories.Open(ctx, object.Target()); err != nil {
		return nil, err
	}
	if err := o.load(ctx, id); err != nil {
		end := o.Leave // the caller tries again
		if api.Is(err, api.NotFound) || api.Is(err, api.Corrupt) {
			end = o.Close
		}
		return nil, errors.Join(err, end())
	}
	return o, nil
}

// openLonghorn opens a backup of a volume, or a backing image, in a store of Longhorn.
func (b *Backups) openLonghorn(ctx context.Context, object api.StoredBackup, id blob.ID) (block.Backup, error) {
	if image, is := object.(*api.BackupBackingImage); is {
		return b.Repositories.OpenLonghornImage(ctx, image.Target(), image.Spec.BackingImageName, id)
	}
	o, err := b.Repositories.OpenLonghorn(ctx, object.Target(), object.(*api.Backup).Spec.Volume, id)
	if err != nil {
		return nil, err
	}
	if err := learnRest(ctx, o); err != nil {
		return nil, errors.Join(api.Errorf(api.KindOf(err), "backup %s: %w", object.GetName(), err), o.Close())
	}
	return o, nil
}

// mostUnknown is the part of a backup's chunks, as a divisor, that is read twice so that the backup can be used at
// once: an incremental one, most of whose digests are known.
const mostUnknown = 4

// learnRest reads the chunks whose digests are not known, if most are: only changed chunks are fetched then. Otherwise
// the whole backup is read once, by the restore.
func learnRest(ctx context.Context, o *targets.LonghornBackup) error {
	known, total, err := o.Known()
	if err != nil || known == total || total-known > total/mostUnknown {
		return err
	}
	_, err = o.Verify(ctx, longhorn.VerifyOptions{})
	return err
}

// find finds the object of a backup.
func (b *Backups) find(ctx context.Context, url string) (api.StoredBackup, error) {
	ref, err := api.ParseBackupURL(url)
	if err != nil {
		return nil, err
	}
	if !ref.NamesBackup() {
		return nil, api.Errorf(api.Unavailable, "the URL %s names an image: the controller has not chosen a backup yet", url)
	}
	var list api.BackupList
	if err := b.Reader.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, api.Explain(err, "list backups")
	}
	for i := range list.Items {
		if o := &list.Items[i]; isFound(&o.Status.CommonBackupStatus, ref) {
			return o, nil
		}
	}
	var images api.BackupBackingImageList
	if err := b.Reader.List(ctx, &images, client.UnsafeDisableDeepCopy); err != nil {
		return nil, api.Explain(err, "list backups of images")
	}
	for i := range images.Items {
		if o := &images.Items[i]; isFound(&o.Status.CommonBackupStatus, ref) {
			return o, nil
		}
	}
	return nil, api.Errorf(api.NotFound, "no completed backup has the URL %s: compare with status.url of the Backups", url)
}

// isFound reports whether a status is that of a complete backup that ref names. The deletion of a backup waits for
// restores, which a restart of the node interrupts.
func isFound(s *api.CommonBackupStatus, ref api.BackupRef) bool {
	waits := s.State == api.BackupDeleting && s.SnapshotID != ""
	return (s.State == api.BackupCompleted || waits) && ref.Matches(s.URL)
}

// load locks the repository and reads the backup's description.
func (o *backup) load(ctx context.Context, id blob.ID) (err error) {
	r := o.opened.Repository
	if o.lock, err = r.LockSnapshot(ctx, id); err != nil {
		return err
	}
	session := o.lock.Context()
	if o.blobs, err = r.LoadIndex(session); err != nil {
		return err
	}
	file, err := r.FindSnapshot(session, id)
	if err != nil {
		return err
	}
	snapshot, err := r.LoadSnapshot(session, file)
	if err != nil {
		return err
	}
	o.manifest, err = manifest.Open(session, o.blobs, snapshot)
	return err
}

// Size implements block.Backup.
func (o *backup) Size() int64 { return o.manifest.Size }

// Checksum implements block.Backup.
func (o *backup) Checksum() string { return o.checksum }

// Restore implements block.Backup.
func (o *backup) Restore(ctx context.Context, sink block.Sink) error {
	_, err := o.restore(ctx, sink, mover.RestoreOptions{})
	return err
}

func (o *backup) restore(ctx context.Context, sink block.Sink, options mover.RestoreOptions) (
	damaged []int64, err error) {
	options.Progress = &o.progress
	err = o.inSession(ctx, func(ctx context.Context) (err error) {
		damaged, err = mover.Restore(ctx, o.blobs, o.manifest, sink, options)
		if err == nil && len(damaged) > 0 {
			err = o.lock.Confirm(ctx)
		}
		return err
	})
	return damaged, err
}

// inSession calls do with a context that ends with the lock: without the lock, a sweep may delete blobs. The store has
// damage only while the store has the lock, too: a share that was unmounted has neither.
func (o *backup) inSession(ctx context.Context, do func(context.Context) error) error {
	session := o.lock.Context()
	if session.Err() != nil {
		return context.Cause(session)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(session, func() { cancel(context.Cause(session)) })()
	err := do(ctx)
	if repo.IsDamage(err) {
		if gone := o.lock.Confirm(ctx); gone != nil {
			err = gone
		}
	}
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

// Restored implements block.Backup.
func (o *backup) Restored() (done, total int64) { return o.progress.Bytes() }

// Close implements block.Backup.
func (o *backup) Close() error {
	return o.end(func(l *repo.Lock) error {
		ctx, cancel := context.WithTimeout(context.Background(), closeTime)
		defer cancel()
		_ = l.Close(ctx) // a lock that stays is stale in 30 minutes
		return nil
	})
}

// Leave implements block.ContinuedBackup.
func (o *backup) Leave() error { return o.end((*repo.Lock).Leave) }

func (o *backup) end(endLock func(*repo.Lock) error) (err error) {
	if o.blobs != nil {
		err = o.blobs.Close()
	}
	if o.lock != nil {
		err = errors.Join(err, endLock(o.lock))
	}
	o.opened.Close()
	return err
}
