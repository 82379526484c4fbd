package repo

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
)

// Times of a lock. restic has the same for refreshStep and lockStale.
const (
	refreshStep  = 5 * time.Minute
	refreshRetry = time.Minute
	lockLost     = 20 * time.Minute // without a refresh: well before others count the lock as stale
	lockStale    = 30 * time.Minute
)

// lockFile is the JSON of a lock.
type lockFile struct {
	Time      time.Time `json:"time"`
	Exclusive bool      `json:"exclusive"`
	Hostname  string    `json:"hostname"`
	Username  string    `json:"username"`
	PID       int       `json:"pid"`
	UID       uint32    `json:"uid,omitempty"`
	GID       uint32    `json:"gid,omitempty"`
}

// Lock is a session that uses the repository, alone or with others.
type Lock struct {
	r         *Repository
	exclusive bool
	session   context.Context
	end       context.CancelCauseFunc
	refresher sync.WaitGroup
	current   blob.ID   // the refresher's, until the refresher ended
	refreshed time.Time // when current was written, by this machine
	left      []string  // objects that could not be deleted
}

// Lock locks the repository. While another session holds the repository exclusively, or anybody does and exclusive is
// asked, Lock returns an error of kind Busy that names the holder; the caller tries again later. Lock deletes stale
// locks. The caller closes the lock.
func (r *Repository) Lock(ctx context.Context, exclusive bool) (*Lock, error) {
	l := &Lock{r: r, exclusive: exclusive, refreshed: time.Now()}
	var err error
	if l.current, err = r.saveLock(ctx, exclusive); err != nil {
		return nil, err
	}
	// Both of two sessions that lock at once see the lock of the other, because each writes before reading.
	if err := r.checkLocks(ctx, l.current, exclusive); err != nil {
		if e := r.store.Delete(context.WithoutCancel(ctx), locksFolder+l.current.String()); e != nil {
			err = api.Errorf(api.KindOf(err), "%w (lock %.8s stays until it is stale: %w)", err, l.current, e)
		}
		return nil, err
	}
	l.session, l.end = context.WithCancelCause(ctx)
	l.refresher.Go(l.refreshUntilEnd)
	return l, nil
}

// Context ends with the context that Lock was called with, with Close, and when the lock is lost: then somebody may
// delete packs.
func (l *Lock) Context() context.Context { return l.session }

// Close ends the session and deletes the lock. A store that permits no deletion keeps the lock until the lock is stale.
func (l *Lock) Close(ctx context.Context) error {
	l.end(api.Errorf(api.Unavailable, "repository %.8s: the session was closed", l.r.ID()))
	l.refresher.Wait()
	err := l.r.store.Delete(ctx, append(l.left, locksFolder+l.current.String())...)
	if err != nil && !api.Is(err, api.Denied) {
		return api.Errorf(api.KindOf(err), "repository %.8s: lock %.8s cannot be deleted: %w; "+
			"`restic unlock` removes the lock after 30 minutes", l.r.ID(), l.current, err)
	}
	return nil
}

func (r *Repository) saveLock(ctx context.Context, exclusive bool) (blob.ID, error) {
	content, err := json.Marshal(lockFile{time.Now(), exclusive, r.options.Hostname, r.options.Username, os.Getpid(),
		uint32(os.Getuid()), uint32(os.Getgid())})
	if err != nil {
		return blob.ID{}, err
	}
	id, err := r.saveFile(ctx, locksFolder, content)
	if err != nil {
		return id, api.Errorf(api.KindOf(err), "repository %.8s: a lock cannot be written: %w", r.ID(), err)
	}
	return id, nil
}

// checkLocks refuses to go along with other locks, and deletes stale ones. A lock that vanishes between List and Get
// was released or refreshed: only a new list tells.
func (r *Repository) checkLocks(ctx context.Context, mine blob.ID, exclusive bool) error {
	own, err := r.store.Stat(ctx, locksFolder+mine.String())
	if err != nil {
		return api.Errorf(api.KindOf(err), "repository %.8s: the new lock cannot be read: %w", r.ID(), err)
	}
	for range listAttempts {
		locks, err := listFolder(ctx, r.store, locksFolder)
		if err != nil {
			return err
		}
		vanished := false
		for _, f := range locks {
			if f.id == mine {
				continue
			}
			err := r.checkLock(ctx, f, own, exclusive)
			if vanished = vanished || api.Is(err, api.NotFound); err != nil && !api.Is(err, api.NotFound) {
				return err
			}
		}
		if !vanished {
			return nil
		}
	}
	return api.Errorf(api.Busy, "repository %.8s: the locks change all the time; try again", r.ID())
}

// isStale compares two times of the store's clock.
func isStale(o, own target.Object) bool {
	return !o.Modified.IsZero() && own.Modified.Sub(o.Modified) > lockStale
}

func (r *Repository) checkLock(ctx context.Context, f namedFile, own target.Object, exclusive bool) error {
	if isStale(f.Object, own) {
		if err := r.store.Delete(ctx, f.Name); err != nil && !api.Is(err, api.Denied) {
			return api.Errorf(api.KindOf(err), "repository %.8s: stale lock %.8s cannot be deleted: %w", r.ID(), f.id, err)
		}
		return nil
	}
	var other lockFile
	err := r.loadFile(ctx, f, smallFile, smallFile, func(plain io.Reader) error {
		if err := json.NewDecoder(plain).Decode(&other); err != nil {
			return api.Errorf(api.Corrupt, "no JSON of a lock: %w", err)
		}
		return nil
	})
	switch {
	case api.Is(err, api.Corrupt), api.Is(err, api.Unsupported):
		return api.Errorf(api.Busy, "repository %.8s: lock %.8s cannot be read, and may be exclusive: %w; "+
			"delete the object %s if no program uses the repository", r.ID(), f.id, err, f.Name)
	case err != nil:
		return api.Errorf(api.KindOf(err), "repository %.8s: lock %.8s: %w", r.ID(), f.id, err)
	case other.Exclusive:
		return api.Errorf(api.Busy, "repository %.8s: %s holds the repository exclusively: %s; "+
			"wait, or run `restic unlock` if the holder is dead", r.ID(), other.holder(), f.Name)
	case exclusive:
		return api.Errorf(api.Busy, "repository %.8s: %s uses the repository: %s; "+
			"wait, or run `restic unlock` if the holder is dead", r.ID(), other.holder(), f.Name)
	}
	return nil
}

// holder names a lock's session for messages.
func (f *lockFile) holder() string {
	return fmt.Sprintf("%.64q on host %.64q (pid %d, since %s)", f.Username, f.Hostname, f.PID,
		f.Time.Format(time.RFC3339))
}

// refreshUntilEnd is the refresher.
func (l *Lock) refreshUntilEnd() {
	pause := refreshStep
	for {
		timer := time.NewTimer(pause)
		select {
		case <-l.session.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		ctx, cancel := context.WithDeadline(l.session, l.refreshed.Add(lockLost))
		removed, err := l.refresh(ctx)
		cancel()
		switch {
		case removed:
			l.end(api.Errorf(api.Unavailable, "repository %.8s: the session's lock was removed: packs may be deleted; "+
				"start again", l.r.ID()))
			return
		case err != nil && time.Since(l.refreshed) >= lockLost-refreshRetry:
			l.end(api.Errorf(api.Unavailable, "repository %.8s: the session's lock was not refreshed for %v: %w; start again",
				l.r.ID(), time.Since(l.refreshed).Round(time.Second), err))
			return
		case err != nil:
			pause = refreshRetry
		default:
			pause = refreshStep
		}
	}
}

// refresh replaces the lock by a new one. removed says that somebody deleted the lock.
func (l *Lock) refresh(ctx context.Context) (removed bool, err error) {
	old := locksFolder + l.current.String()
	if _, err := l.r.store.Stat(ctx, old); err != nil {
		return api.Is(err, api.NotFound), err
	}
	written := time.Now()
	id, err := l.r.saveLock(ctx, l.exclusive)
	if err != nil {
		return false, err
	}
	l.current, l.refreshed = id, written
	if err := l.r.store.Delete(ctx, old); err != nil {
		l.left = append(l.left, old) // Close tries again
	}
	return false, nil
}
