package mover

import (
	"context"
	"errors"
	"runtime"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// Attempts and times of Backup.
const (
	attempts     = 4           // how often sweeps may take blobs away that a backup relies on
	closeTimeout = time.Minute // for the deletion of the lock
)

// BackupOptions describe a backup.
type BackupOptions struct {
	Description manifest.Description // Kind, Name and Object
	Snapshot    repo.Snapshot        // Time, Hostname, Username, Tags and Program
	// Tags, if set, returns the tags of the snapshot, right before the commit; its error ends the backup. The result has
	// no Snapshot yet.
	Tags func(context.Context, Result) ([]string, error)

	// Base is the snapshot of an earlier backup of the same volume, which ended without an error. Changed are the chunks,
	// in ascending order, that may differ from it. Without a base, Backup takes all chunks with data.
	Base    *blob.ID
	Changed []int64

	// FragmentSize is the size of the blobs of chunks that changed since the base, in bytes; 0: whole chunks.
	FragmentSize int
	// Reread reads and hashes every chunk with data, and uses neither a base nor digests of the source.
	Reread bool

	Workers  int // chunks that are read at once; 0: two for each processor
	Writer   repo.WriterOptions
	Progress *Progress
}

// Result tells what a Backup did.
type Result struct {
	Snapshot blob.ID
	Full     bool  // the backup has no base
	Read     int64 // bytes that Backup read from the source
	Added    int64 // bytes of chunks and fragments new in the repository
	repo.WriterStats
}

// Backup copies src into the repository. After an error, a Snapshot in the result exists, may lack blobs, and could not
// be deleted: the caller deletes it. Errors have the kinds of repo; an error of kind Busy says that another session
// holds the repository exclusively, or that sweeps took blobs away again and again: the caller tries again later.
func Backup(ctx context.Context, r *repo.Repository, src Source, o BackupOptions) (result Result, err error) {
	if err := manifest.Check(o.Description.Kind, o.Description.Name, o.FragmentSize); err != nil {
		return result, err
	}
	lock, err := r.Lock(ctx, repo.Shared)
	if err != nil {
		return result, err
	}
	defer func() {
		// A lock that stays is stale in 30 minutes. The backup is complete without this deletion.
		if closeErr := closeLock(ctx, lock); err != nil {
			err = errors.Join(err, closeErr)
		}
	}()
	if o.Workers == 0 {
		o.Workers = 2 * runtime.GOMAXPROCS(0)
	}
	if o.Progress == nil {
		o.Progress = &Progress{}
	}
	o.Writer.Lock = lock
	for range attempts {
		o.Progress.reset()
		result, err = attempt(lock.Context(), r, src, o)
		var damaged *manifest.BaseError
		switch {
		case errors.As(err, &damaged):
			o.Base = nil // verification reports a damaged backup
		case !errors.Is(err, errSwept):
			return result, err
		}
	}
	return result, api.Errorf(api.Busy, "backup of %s %s: sweeps took needed blobs away in each of %d attempts; try again",
		o.Description.Kind, o.Description.Name, attempts)
}

// Adopt commits the backup of a snapshot that a session without an end left, such as that of a process that was killed
// between the write of the snapshot and the checks of Backup. The new snapshot, id, has the same content and is this
// session's own: the other session may still run, and delete its snapshot. The caller deletes the other snapshot.
// complete is false if the repository lacks a blob.
func Adopt(ctx context.Context, r *repo.Repository, s repo.Snapshot) (id blob.ID, complete bool, err error) {
	lock, err := r.Lock(ctx, repo.Shared)
	if err != nil {
		return id, false, err
	}
	defer func() {
		if closeErr := closeLock(ctx, lock); err != nil {
			err = errors.Join(err, closeErr)
		}
	}()
	blobs, err := r.LoadIndex(lock.Context())
	if err != nil {
		return id, false, err
	}
	defer func() { err = errors.Join(err, blobs.Close()) }()
	s.Parent = nil // the base may be deleted
	if complete, err = isComplete(lock.Context(), blobs, s); err != nil || !complete {
		return id, false, err
	}
	id, err = commit(lock.Context(), r, lock, blobs, s)
	if errors.Is(err, errSwept) && id == (blob.ID{}) {
		return id, false, nil
	}
	return id, err == nil, err
}

// closeLock ends a session, even after the end of ctx.
func closeLock(ctx context.Context, lock *repo.Lock) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return lock.Close(ctx)
}

// errSwept says that the repository no longer has a blob of the manifest.
var errSwept = errors.New("a sweep took needed blobs away")

// attempt makes a backup with the index of now.
func attempt(ctx context.Context, r *repo.Repository, src Source, o BackupOptions) (result Result, err error) {
	blobs, err := r.LoadIndex(ctx)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, blobs.Close()) }()
	base, err := openBase(ctx, r, blobs, src.Size(), o)
	if err != nil {
		return result, err
	}
	w, err := repo.NewWriter(ctx, blobs, o.Writer)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	u := &upload{src: src, o: o, w: w, base: base}
	root, err := u.run(ctx)
	if err != nil {
		return result, err
	}
	if err := w.Flush(ctx); err != nil {
		return result, err
	}
	result = Result{Full: base == nil, Read: u.read.Load(), Added: u.added.Load(), WriterStats: w.Stats()}
	s := o.Snapshot
	if o.Tags != nil {
		if s.Tags, err = o.Tags(ctx, result); err != nil {
			return result, err
		}
	}
	s.Tree, s.Paths = &root, []string{manifest.Path(o.Description.Kind, o.Description.Name)}
	if base != nil {
		s.Parent = &base.Snapshot
	}
	if err := confirm(ctx, r, blobs, s); err != nil {
		return result, err
	}
	result.Snapshot, err = commit(ctx, r, o.Writer.Lock, blobs, s)
	return result, err
}

// commit saves the snapshot, and deletes the snapshot again unless all blobs are safe. However late the deletion comes,
// nobody relies on the snapshot: others adopt only its content (Adopt). A sweep that hid packs before it
// could list the snapshot replaced index files before confirm. A sweep that took the session for dead deleted the lock.
func commit(ctx context.Context, r *repo.Repository, lock *repo.Lock, blobs *repo.Blobs, s repo.Snapshot) (
	blob.ID, error) {
	id, err := r.SaveSnapshot(ctx, s) // the store may have the object although it reports an error
	if err == nil {
		err = lock.Confirm(ctx)
	}
	if err == nil {
		err = confirm(ctx, r, blobs, s)
	}
	if err == nil {
		return id, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if e := r.DeleteSnapshots(ctx, id); e != nil {
		return id, api.Errorf(api.KindOf(e), "snapshot %.8s may lack blobs (%v), and cannot be deleted: %w", id, err, e)
	}
	return blob.ID{}, err
}

// openBase opens the base, or returns nil if the backup has no usable base. The index has all blobs of a usable base:
// the session relies on these blobs as on others that the session finds in the index.
func openBase(ctx context.Context, r *repo.Repository, blobs *repo.Blobs, size int64, o BackupOptions) (
	*manifest.Manifest, error) {
	if o.Base == nil || o.Reread {
		return nil, nil
	}
	base, err := openSnapshot(ctx, r, blobs, *o.Base)
	switch {
	case repo.IsDamage(err), api.Is(err, api.Unsupported):
		return nil, nil // verification reports a damaged backup
	case err != nil:
		return nil, err
	case base.Kind != o.Description.Kind || base.Name != o.Description.Name || !manifest.Fits(base.Size, size):
		return nil, nil
	}
	err = base.CheckBlobs(ctx)
	if repo.IsDamage(err) { // the new backup would share blobs that the store lost
		return nil, nil
	}
	return base, err
}

func openSnapshot(ctx context.Context, r *repo.Repository, blobs *repo.Blobs, id blob.ID) (*manifest.Manifest, error) {
	file, err := r.FindSnapshot(ctx, id)
	if err != nil {
		return nil, err
	}
	s, err := r.LoadSnapshot(ctx, file)
	if err != nil {
		return nil, err
	}
	return manifest.Open(ctx, blobs, s)
}

// confirm returns nil when all blobs of the new snapshot are in an index that is current. When sweeps replaced index
// files meanwhile, or an index file was lost, confirm loads the index again, and looks for all blobs. Blobs that are
// gone are errSwept.
func confirm(ctx context.Context, r *repo.Repository, blobs *repo.Blobs, s repo.Snapshot) error {
	for {
		current, err := blobs.IsCurrent(ctx)
		if err != nil || current {
			return err
		}
		again, err := r.LoadIndex(ctx)
		if err != nil {
			return err
		}
		defer again.Close() //nolint:errcheck // a table that is only read
		complete, err := isComplete(ctx, again, s)
		if err != nil {
			return err
		}
		if !complete {
			return errSwept
		}
		blobs = again
	}
}

// isComplete reports whether blobs has all of a manifest.
func isComplete(ctx context.Context, blobs *repo.Blobs, s repo.Snapshot) (bool, error) {
	m, err := manifest.Open(ctx, blobs, s)
	if err == nil {
		err = m.CheckBlobs(ctx)
	}
	if repo.IsDamage(err) {
		return false, nil
	}
	return err == nil, err
}
