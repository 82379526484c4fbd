package backups_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
)

// lockExclusively locks the repository of a world, as `restic check` on another machine does. refused is closed when
// sessions of Drover tried to begin a number of times.
func (w *world) lockExclusively(times int32) (refused chan struct{}, unlock func()) {
	w.T.Helper()
	r, err := repo.Open(w.Ctx, w.store.Store, api.PublishedPassword, repo.Options{Hostname: "elsewhere"})
	must(w.T, err)
	lock, err := r.Lock(w.Ctx, repo.Exclusive)
	must(w.T, err)
	refused = make(chan struct{})
	var locks atomic.Int32
	w.store.set(func(_ context.Context, operation, name string) error {
		if operation == "put" && strings.HasPrefix(name, "locks/") && locks.Add(1) == times {
			close(refused)
		}
		return nil
	}, nil)
	return refused, func() {
		w.store.set(nil, nil)
		must(w.T, lock.Close(w.Ctx))
	}
}

// TestBackupsAndCopiesOutlastAnExclusiveLock: while another program holds a repository exclusively, as `restic check`
// does for hours, a backup and copies from and into the repository try again and again, wait as pending, name the holder,
// and count no attempt. They are made after the end of the lock.
func TestBackupsAndCopiesOutlastAnExclusiveLock(t *testing.T) {
	const attempts = 11 // more than those that end a Backup
	w, offsite := newPair(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.start(nil)
	w.awaitAvailable("offsite")
	origin := w.newBackup("origin", v, 0)
	w.awaitState(origin, api.BackupCompleted)
	waits := func(b *api.Backup) {
		t.Helper()
		w.await(b, "waits", func(b *api.Backup) bool { return b.Status.State == api.BackupPending })
		if s := b.Status; s.Attempts > 0 || !strings.Contains(s.Message, "elsewhere") {
			t.Errorf("%s: %+v", b.Name, s.CommonBackupStatus)
		}
	}
	refused, unlock := w.lockExclusively(2 * attempts)
	refusedOffsite, unlockOffsite := offsite.lockExclusively(attempts)
	b, c := w.newBackup("b", v, 0), w.newCopy("c", "origin", "v", "offsite")
	w.receive(refused, "the backup and the copy are tried again and again")
	waits(b)
	waits(c)
	unlock()
	w.awaitState(b, api.BackupCompleted)
	w.receive(refusedOffsite, "the copy is tried again and again")
	waits(c)
	unlockOffsite()
	w.awaitState(c, api.BackupCompleted)
	w.check(2)
	offsite.check(1)
}
