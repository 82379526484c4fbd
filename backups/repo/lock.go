package repo

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
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

	// Fields of Drover, which other programs ignore.
	Session string    `json:"droverSession,omitempty"` // the same in all locks of a session
	Sweep   bool      `json:"droverSweep,omitempty"`
	Since   time.Time `json:"droverSince,omitzero"` // begin of the session; Time is that of the last refresh
	Owner   string    `json:"droverOwner,omitempty"`
	Restore string    `json:"droverRestore,omitempty"` // the snapshot that the session restores
}

// closeLockTimeout bounds what a session that ends still deletes.
const closeLockTimeout = time.Minute

// LockMode says which other sessions a session goes along with.
type LockMode int

// Lock modes.
const (
	Shared    LockMode = iota // all but exclusive ones
	Exclusive                 // none
	Sweeping                  // all but exclusive ones and other sweeps
)

// Lock is a session that uses the repository, alone or with others.
type Lock struct {
	r         *Repository
	mode      LockMode
	restore   string // the snapshot that the session restores; empty: none
	id        string
	began     time.Time
	session   context.Context
	end       context.CancelCauseFunc
	refresher sync.WaitGroup
	unlocked  bool      // the store takes no lock
	refreshed time.Time // when current was written, by this machine; the refresher's
	record    *lockRecord

	mu      sync.Mutex
	current blob.ID
	left    []string // objects that could not be deleted
}

// Lock locks the repository. While a session holds the repository in a mode that does not go along with mode, Lock
// returns an error of kind Busy that names the holder; the caller tries again later. Lock deletes stale locks. The
// caller closes the lock.
func (r *Repository) Lock(ctx context.Context, mode LockMode) (*Lock, error) {
	return r.lock(ctx, mode, "")
}

// LockSnapshot is Lock in the mode Shared, for a session that reads the blobs of one snapshot alone, by Blobs.Read or
// ReadMany, as a restore does. RestoredByOthers tells other owners. No sweep waits for the session while the snapshot
// exists. The locks of an earlier restore that was left are deleted. A store that refuses writes, or has no room, takes
// no lock: then the session has none, and a restore fails if others delete the snapshot meanwhile.
func (r *Repository) LockSnapshot(ctx context.Context, id blob.ID) (*Lock, error) {
	l, err := r.lock(ctx, Shared, id.String())
	if api.Is(err, api.Denied) || api.Is(err, api.Full) {
		return r.beginUnlocked(ctx)
	} else if err != nil {
		return nil, err
	}
	_, _ = r.releaseRecords(ctx, l.restore) // after an error the locks stay until they are stale
	return l, nil
}

// beginUnlocked begins a session without a lock. Others do not know of the session.
func (r *Repository) beginUnlocked(ctx context.Context) (*Lock, error) {
	l := &Lock{r: r, mode: Shared, unlocked: true, id: rand.Text(), began: time.Now()}
	if err := l.Confirm(ctx); err != nil {
		return nil, err
	}
	l.session, l.end = context.WithCancelCause(ctx)
	return l, nil
}

// checkExclusive returns an error if another session holds the repository exclusively. Without an object of its own,
// the session knows only the clock of this machine, so a lock is stale after twice the time. No lock is deleted.
func (r *Repository) checkExclusive(ctx context.Context) error {
	locks, err := listFolder(ctx, r.store, locksFolder)
	if err != nil {
		return err
	}
	for _, f := range locks {
		if !f.Modified.IsZero() && time.Since(f.Modified) > 2*lockStale {
			continue
		}
		if err := r.checkLock(ctx, f, target.Object{}, Shared); err != nil && !api.Is(err, api.NotFound) {
			return err
		}
	}
	return nil
}

func (r *Repository) lock(ctx context.Context, mode LockMode, restore string) (*Lock, error) {
	l, err := r.newLock(ctx, mode, restore)
	if err != nil {
		return nil, err
	}
	// Both of two sessions that lock at once see the lock of the other, because each writes before reading.
	if err := r.checkLocks(ctx, l.current, mode); err != nil {
		if e := l.withdraw(ctx); e != nil {
			err = api.Errorf(api.KindOf(err), "%w (%w)", err, e)
		}
		return nil, err
	}
	l.session, l.end = context.WithCancelCause(ctx)
	l.refresher.Go(l.refreshUntilEnd)
	return l, nil
}

// newLock writes the first lock of a session.
func (r *Repository) newLock(ctx context.Context, mode LockMode, restore string) (*Lock, error) {
	now := time.Now()
	l := &Lock{r: r, mode: mode, restore: restore, id: rand.Text(), began: now, refreshed: now}
	var err error
	if l.record, err = r.newRecord(l.id, restore); err != nil {
		return nil, api.Errorf(api.KindOf(err), "repository %.8s: the record of a session cannot be written: %w", r.ID(), err)
	}
	if l.current, err = l.save(ctx); err != nil {
		return nil, errors.Join(err, l.record.close()) // the store may have the lock although it reports an error
	}
	return l, nil
}

// withdraw deletes the lock of a session that does not begin.
func (l *Lock) withdraw(ctx context.Context) error {
	if err := l.r.store.Delete(context.WithoutCancel(ctx), locksFolder+l.current.String()); err != nil {
		err = api.Errorf(api.KindOf(err), "lock %.8s stays until it is stale: %w", l.current, err)
		return errors.Join(err, l.record.close())
	}
	return l.record.remove()
}

// ID names the session. The locks and index files of the session have the ID.
func (l *Lock) ID() string { return l.id }

// Context ends with the context that Lock was called with, with Close, and when the lock is lost: then somebody may
// delete packs.
func (l *Lock) Context() context.Context { return l.session }

// Leave ends the session without the deletion of the lock: the next process of the machine continues the restore.
func (l *Lock) Leave() error {
	l.end(api.Errorf(api.Unavailable, "repository %.8s: the session was left", l.r.ID()))
	l.refresher.Wait()
	return l.record.close()
}

// Close ends the session and deletes the lock. A store that permits no deletion keeps the lock until the lock is stale.
func (l *Lock) Close(ctx context.Context) error {
	l.end(api.Errorf(api.Unavailable, "repository %.8s: the session was closed", l.r.ID()))
	l.refresher.Wait()
	if l.unlocked {
		return nil
	}
	l.mu.Lock()
	names := append(l.left, locksFolder+l.current.String())
	l.mu.Unlock()
	err := l.r.store.Delete(ctx, names...)
	if err == nil || api.Is(err, api.Denied) {
		return l.record.remove()
	}
	if err := errors.Join(err, l.record.close()); err != nil {
		return api.Errorf(api.KindOf(err), "repository %.8s: lock %.8s cannot be deleted: %w; "+
			"`restic unlock` removes the lock after 30 minutes", l.r.ID(), l.current, err)
	}
	return nil
}

// Confirm returns nil if the lock exists: so far, no other session has taken this one for dead. After a pause of the
// machine, or a step of the store's clock, Confirm finds a loss that Context does not know of yet. A session without a
// lock is confirmed if the store has the repository, and no other session holds the repository exclusively.
func (l *Lock) Confirm(ctx context.Context) error {
	if l.unlocked {
		if err := l.r.CheckStore(ctx); err != nil {
			return err
		}
		return l.r.checkExclusive(ctx)
	}
	_, err := l.own(ctx)
	return err
}

// own describes the object of the lock.
func (l *Lock) own(ctx context.Context) (target.Object, error) {
	for {
		current := l.name()
		o, err := l.r.store.Stat(ctx, current)
		switch {
		case err == nil:
			return o, nil
		case !api.Is(err, api.NotFound):
			return o, api.Errorf(api.KindOf(err), "repository %.8s: the session's lock cannot be read: %w", l.r.ID(), err)
		case l.name() == current:
			return o, l.lost()
		}
	}
}

func (l *Lock) name() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return locksFolder + l.current.String()
}

func (l *Lock) lost() error {
	return api.Errorf(api.Unavailable, "repository %.8s: the session's lock was removed: packs may be deleted; "+
		"start again", l.r.ID())
}

// deleteLater lets Close delete an object.
func (l *Lock) deleteLater(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = append(l.left, name)
}

func (l *Lock) save(ctx context.Context) (blob.ID, error) {
	r := l.r
	content, err := json.Marshal(lockFile{time.Now(), l.mode == Exclusive, r.options.Hostname, r.options.Username,
		os.Getpid(), uint32(os.Getuid()), uint32(os.Getgid()), l.id, l.mode == Sweeping, l.began.UTC(), r.options.Owner,
		l.restore})
	if err != nil {
		return blob.ID{}, err
	}
	id, sealed := r.sealFile(content)
	if err = l.record.add(id); err == nil {
		err = r.store.Put(ctx, locksFolder+id.String(), sealed)
	}
	if err != nil {
		return id, api.Errorf(api.KindOf(err), "repository %.8s: a lock cannot be written: %w", r.ID(), err)
	}
	return id, nil
}

// checkLocks refuses to go along with other locks, and deletes stale ones. A lock that vanishes between List and Get
// was released or refreshed: only a new list tells.
func (r *Repository) checkLocks(ctx context.Context, mine blob.ID, mode LockMode) error {
	own, err := r.store.Stat(ctx, locksFolder+mine.String())
	if err != nil {
		return api.Errorf(api.KindOf(err), "repository %.8s: the new lock cannot be read: %w", r.ID(), err)
	}
	// A list may miss a lock that its session refreshes meanwhile; the second list then has the new one.
	for list := range listAttempts {
		locks, err := listFolder(ctx, r.store, locksFolder)
		if err != nil {
			return err
		}
		vanished := list == 0
		for _, f := range locks {
			if f.id == mine {
				continue
			}
			err := r.checkLock(ctx, f, own, mode)
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

func (r *Repository) checkLock(ctx context.Context, f namedFile, own target.Object, mode LockMode) error {
	if isStale(f.Object, own) {
		if err := r.store.Delete(ctx, f.Name); err != nil && !api.Is(err, api.Denied) {
			return api.Errorf(api.KindOf(err), "repository %.8s: stale lock %.8s cannot be deleted: %w", r.ID(), f.id, err)
		}
		return nil
	}
	other, err := r.readLock(ctx, f)
	switch {
	case api.Is(err, api.Corrupt), api.Is(err, api.Unsupported):
		return lockedf("repository %.8s: lock %.8s cannot be read, and may be exclusive: %w; "+
			"delete the object %s if no program uses the repository", r.ID(), f.id, err, f.Name)
	case err != nil:
		return api.Errorf(api.KindOf(err), "repository %.8s: lock %.8s: %w", r.ID(), f.id, err)
	case other.Exclusive:
		return lockedf("repository %.8s: %s holds the repository exclusively: %s; "+
			"wait, or run `restic unlock` if the holder is dead", r.ID(), other.holder(), f.Name)
	case mode == Exclusive, mode == Sweeping && other.Sweep:
		return lockedf("repository %.8s: %s uses the repository: %s; "+
			"wait, or run `restic unlock` if the holder is dead", r.ID(), other.holder(), f.Name)
	}
	return nil
}

// lockedError says that the lock of another session delays a session; the text names the holder.
type lockedError struct{ error }

func (e lockedError) Unwrap() error { return e.error }

// IsLocked reports whether another session's lock is the cause of err, which has the kind Busy.
func IsLocked(err error) bool {
	var locked lockedError
	return errors.As(err, &locked)
}

func lockedf(format string, args ...any) error {
	return lockedError{api.Errorf(api.Busy, format, args...)}
}

func (r *Repository) readLock(ctx context.Context, f namedFile) (l lockFile, err error) {
	err = r.loadFile(ctx, f, smallFile, smallFile, func(plain io.Reader) error {
		if err := json.NewDecoder(plain).Decode(&l); err != nil {
			return api.Errorf(api.Corrupt, "no JSON of a lock: %w", err)
		}
		l.Time, l.Since = api.BoundTime(l.Time), api.BoundTime(l.Since)
		return nil
	})
	return l, err
}

// session names the session of a lock: that of another program by its process.
func (f *lockFile) session() (name string, drover bool) {
	if f.Session != "" {
		return f.Session, true
	}
	return fmt.Sprintf("%.64q on %.64q %d", f.Username, f.Hostname, f.PID), false
}

// runningSession is a session that holds a lock.
type runningSession struct {
	drover bool   // not another program
	holder string // for messages
	lock   *lockFile
}

// otherSessions returns the sessions but l that hold a lock, and deletes stale locks: a session that runs after all
// then finds its lock gone (Confirm). If the store permits no deletion, the session of a stale lock counts. A list may
// miss a lock that its session refreshes meanwhile; the next list then has the new one.
func (l *Lock) otherSessions(ctx context.Context) (map[string]runningSession, error) {
	sessions := map[string]runningSession{}
	for list, deleted := 0, false; list < 2 || deleted; list++ {
		deleted = false
		own, err := l.own(ctx)
		if err != nil {
			return nil, err
		}
		locks, err := listFolder(ctx, l.r.store, locksFolder)
		if err != nil {
			return nil, err
		}
		for _, f := range locks {
			if isStale(f.Object, own) {
				err := l.r.store.Delete(ctx, f.Name)
				if err != nil && !api.Is(err, api.Denied) {
					return nil, api.Errorf(api.KindOf(err), "repository %.8s: stale lock %.8s cannot be deleted: %w", l.r.ID(),
						f.id, err)
				}
				if err == nil {
					deleted = true
					continue
				}
			}
			if err := l.addSession(ctx, sessions, f); err != nil {
				return nil, err
			}
		}
	}
	return sessions, nil
}

// addSession adds the session of a lock, unless that is l.
func (l *Lock) addSession(ctx context.Context, sessions map[string]runningSession, f namedFile) error {
	lock, err := l.r.readLock(ctx, f)
	name, drover := lock.session()
	switch {
	case api.Is(err, api.NotFound): // released or refreshed
		return nil
	case api.Is(err, api.Corrupt), api.Is(err, api.Unsupported):
		name, drover, lock.Hostname = f.Name, false, "unknown"
	case err != nil:
		return api.Errorf(api.KindOf(err), "repository %.8s: lock %.8s: %w", l.r.ID(), f.id, err)
	}
	if name != l.id {
		sessions[name] = runningSession{drover, lock.holder(), &lock}
	}
	return nil
}

// holder names a lock's session for messages.
func (f *lockFile) holder() string {
	return fmt.Sprintf("%.64q on host %.64q (pid %d, since %s)", f.Username, f.Hostname, f.PID,
		f.begin().Format(time.RFC3339))
}

// begin is the begin of the session, or, for another program, of the time that its lock is known.
func (f *lockFile) begin() time.Time {
	if f.Since.IsZero() {
		return f.Time
	}
	return f.Since
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
			l.end(l.lost())
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

// refresh replaces the lock by a new one. removed says that somebody deleted the lock. The look at the old lock comes
// after the write of the new one: a session that deletes the old one as stale lists the locks again, and finds the new
// one.
func (l *Lock) refresh(ctx context.Context) (removed bool, err error) {
	old := l.name()
	written := time.Now()
	id, err := l.save(ctx)
	if err != nil {
		return false, err
	}
	if _, err := l.r.store.Stat(ctx, old); err != nil {
		if e := l.r.store.Delete(ctx, locksFolder+id.String()); e != nil {
			l.deleteLater(locksFolder + id.String())
		}
		return api.Is(err, api.NotFound), err
	}
	l.mu.Lock()
	l.current = id
	l.mu.Unlock()
	l.refreshed = written
	if err := l.r.store.Delete(ctx, old); err != nil {
		l.deleteLater(old)
	}
	return false, nil
}
