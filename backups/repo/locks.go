package repo

import (
	"context"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// LockInfo describes a lock in the store.
type LockInfo struct {
	Name      string // of the object
	Hostname  string
	Username  string
	PID       int
	Since     time.Time // begin of the session; zero: restic does not tell
	Refreshed time.Time // by the store's clock
	Exclusive bool
	Drover    bool // not another program
	Sweep     bool // of Drover
	Stale     bool // by the clock of this machine
	Err       error
}

// ListLocks describes the locks in the store, the newest limit of them, and counts all. It writes nothing. The strings
// come from the store, and are not checked.
func (r *Repository) ListLocks(ctx context.Context, limit int) (locks []LockInfo, total int, err error) {
	files, err := listFolder(ctx, r.store, locksFolder)
	if err != nil {
		return nil, 0, err
	}
	slices.SortFunc(files, func(a, b namedFile) int { return b.Modified.Compare(a.Modified) })
	for _, f := range files[:min(limit, len(files))] {
		l, err := r.readLock(ctx, f)
		switch {
		case api.Is(err, api.NotFound): // released or refreshed
			continue
		case err != nil && !api.Is(err, api.Corrupt) && !api.Is(err, api.Unsupported):
			return nil, 0, api.Errorf(api.KindOf(err), "repository %.8s: lock %.8s: %w", r.ID(), f.id, err)
		}
		info := LockInfo{Name: f.id.String(), Hostname: l.Hostname, Username: l.Username, PID: l.PID, Since: l.Since,
			Refreshed: f.Modified, Exclusive: l.Exclusive, Drover: l.Session != "", Sweep: l.Sweep, Err: err}
		if info.Refreshed.IsZero() {
			info.Refreshed = l.Time
		}
		info.Stale = !info.Refreshed.IsZero() && time.Since(info.Refreshed) > lockStale
		locks = append(locks, info)
	}
	return locks, len(files), nil
}

// RestoredByOthers returns the snapshots that sessions of other owners restore, and names a holder of each. A restore
// of Drover continues after a restart of its machine, so an owner keeps the snapshots that others restore.
func (r *Repository) RestoredByOthers(ctx context.Context) (holders map[blob.ID]string, err error) {
	files, err := listFolder(ctx, r.store, locksFolder)
	if err != nil || len(files) == 0 {
		return nil, err
	}
	l, err := r.newLock(ctx, Shared, "") // its time is the store's
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := l.withdraw(ctx); e != nil && err == nil {
			err = e
		}
	}()
	sessions, err := l.otherSessions(ctx)
	if err != nil {
		return nil, err
	}
	holders = map[blob.ID]string{}
	for _, s := range sessions {
		if id, err := blob.Parse(s.lock.Restore); err == nil && s.lock.Owner != r.options.Owner {
			holders[id] = s.holder
		}
	}
	return holders, nil
}

// RemoveStaleLocks deletes the locks that are stale by the store's clock, and returns how many.
func (r *Repository) RemoveStaleLocks(ctx context.Context) (removed int, err error) {
	l, err := r.newLock(ctx, Shared, "") // its time is the store's
	if err != nil {
		return 0, err
	}
	defer func() {
		if e := l.withdraw(ctx); e != nil && err == nil {
			err = e
		}
	}()
	own, err := l.own(ctx)
	if err != nil {
		return 0, err
	}
	files, err := listFolder(ctx, r.store, locksFolder)
	if err != nil {
		return 0, err
	}
	for _, f := range files {
		if f.id == l.current || !isStale(f.Object, own) {
			continue
		}
		if err := r.store.Delete(ctx, f.Name); err != nil {
			return removed, api.Errorf(api.KindOf(err), "repository %.8s: stale lock %.8s cannot be deleted: %w", r.ID(), f.id,
				err)
		}
		removed++
	}
	return removed, nil
}
