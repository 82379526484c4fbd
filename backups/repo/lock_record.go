package repo

import (
	"bufio"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// Bounds of the records of locks.
const (
	recordsFolder    = "sessions"
	recordLocksLimit = 1 << 16 // locks of one session, one for each refreshStep
	restorePrefix    = "restore "
)

// unnamedRecord is how long a record without a lock may be that of a session which begins.
const unnamedRecord = time.Minute

// lockRecord is a local file with the names of a session's locks: each name is durable before its lock exists. The
// session holds the file locked, so the kernel tells whether the process of the session is gone, and the next process
// deletes the locks at once. A session without a record leaves locks that others respect until they are stale.
type lockRecord struct{ file *os.File }

// recordsPath is the folder of this machine's records.
func (r *Repository) recordsPath() string {
	return filepath.Join(r.options.Cache, r.ID(), recordsFolder)
}

// newRecord makes the record of a session. Its first line names the snapshot that the session restores, if any. Without
// a cache the session has no record.
func (r *Repository) newRecord(session, restore string) (*lockRecord, error) {
	if r.options.Cache == "" {
		return nil, nil
	}
	if err := os.MkdirAll(r.recordsPath(), 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(r.recordsPath(), session), os.O_RDWR|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	rec := &lockRecord{f}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	if err == nil && restore != "" {
		_, err = f.WriteString(restorePrefix + restore + "\n")
	}
	if err != nil {
		return nil, errors.Join(err, rec.remove())
	}
	return rec, syncFolder(r.recordsPath())
}

// add notes a lock that is about to exist.
func (rec *lockRecord) add(id blob.ID) error {
	if rec == nil {
		return nil
	}
	if _, err := rec.file.WriteString(id.String() + "\n"); err != nil {
		return err
	}
	return rec.file.Sync()
}

// remove ends the record, after the deletion of all locks in it.
func (rec *lockRecord) remove() error {
	if rec == nil {
		return nil
	}
	err := os.Remove(rec.file.Name())
	if errors.Is(err, os.ErrNotExist) { // an administrator may delete a cache
		err = nil
	}
	return errors.Join(err, rec.file.Close())
}

// close ends the session, and leaves the record for ReleaseLeftLocks: some locks exist.
func (rec *lockRecord) close() error {
	if rec == nil {
		return nil
	}
	return rec.file.Close()
}

// HasLockRecords reports whether a cache has records of sessions, of this process or of ended ones.
func HasLockRecords(cache, repository string) bool {
	records, err := os.ReadDir(filepath.Join(cache, repository, recordsFolder))
	return err == nil && len(records) > 0
}

func syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// ReleaseLeftLocks deletes the locks that ended processes of this machine left, by their records, and returns how many
// records it removed. The caller calls ReleaseLeftLocks before the first session, so that sweeps and restic need not
// wait until the locks are stale. The locks of a restore stay until LockSnapshot locks the snapshot again, or until
// they are stale: other owners keep the snapshot meanwhile.
func (r *Repository) ReleaseLeftLocks(ctx context.Context) (released int, err error) {
	return r.releaseRecords(ctx, "")
}

// releaseRecords deletes the locks of ended sessions, of all that restored nothing or of those that restored a
// snapshot.
func (r *Repository) releaseRecords(ctx context.Context, restored string) (released int, err error) {
	if r.options.Cache == "" {
		return 0, nil
	}
	records, err := os.ReadDir(r.recordsPath())
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	for _, entry := range records {
		path := filepath.Join(r.recordsPath(), entry.Name())
		left, e := r.releaseLeft(ctx, path, restored)
		if e != nil {
			err = errors.Join(err, api.Errorf(api.KindOf(e), "repository %.8s: the locks of an ended process, in %s, "+
				"cannot be deleted: %w", r.ID(), path, e))
		}
		if left && e == nil {
			released++
		}
	}
	return released, err
}

// readRecord reads the names of a record's locks, and the snapshot of a restore. runs: the session runs.
func readRecord(path string) (restore string, runs bool, names []string, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		return "", true, nil, nil // the session ended meanwhile
	} else if err != nil {
		return "", false, nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if runs = errors.Is(err, unix.EWOULDBLOCK); err != nil && !runs {
		return "", false, nil, err
	}
	lines := bufio.NewScanner(f)
	for lines.Scan() && len(names) < recordLocksLimit {
		if of, is := strings.CutPrefix(lines.Text(), restorePrefix); is {
			restore = of
		}
		// A torn last line has no lock: the line was not durable.
		if id, err := blob.Parse(strings.TrimSpace(lines.Text())); err == nil {
			names = append(names, locksFolder+id.String())
		}
	}
	return restore, runs, names, lines.Err()
}

// releaseLeft deletes the locks of a record. left is false if the session runs or begins, or restored another snapshot
// than restored and its locks are not stale.
func (r *Repository) releaseLeft(ctx context.Context, path, restored string) (left bool, err error) {
	restore, runs, names, err := readRecord(path)
	if err != nil || runs {
		return err != nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return false, nil // released meanwhile
	}
	age := time.Since(info.ModTime())
	if restore != restored && age < lockStale || len(names) == 0 && age < unnamedRecord {
		return false, nil
	}
	if len(names) > 0 {
		if err := r.store.Delete(ctx, names...); err != nil && !api.Is(err, api.Denied) {
			return true, err
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return true, err
	}
	return true, nil
}
