package mover

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
	"drover.io/drover/block/suite"
)

// pausedStore is the store of a machine that sleeps once: at the n-th call from the first pack on, before the call or
// before its answer. All calls wait meanwhile.
type pausedStore struct {
	target.Store
	pause  func()
	n      int
	answer bool // the call has an effect before the pause

	mu    sync.Mutex
	begun bool
	calls int
	at    string // the call of the pause; empty: none
}

func (s *pausedStore) call(operation, name string, do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.begun = s.begun || operation == "put" && strings.HasPrefix(name, "data/"); s.begun {
		s.calls++
	}
	pauses := s.begun && s.calls == s.n
	if pauses && !s.answer {
		s.pause()
	}
	do()
	if pauses && s.answer {
		s.pause()
	}
	if pauses {
		s.at = operation + " " + name
	}
}

func (s *pausedStore) Put(ctx context.Context, name string, body []byte) (err error) {
	s.call("put", name, func() { err = s.Store.Put(ctx, name, body) })
	return err
}

func (s *pausedStore) Get(ctx context.Context, name string, off, n int64) (b []byte, err error) {
	s.call("get", name, func() { b, err = s.Store.Get(ctx, name, off, n) })
	return b, err
}

func (s *pausedStore) Stat(ctx context.Context, name string) (o target.Object, err error) {
	s.call("stat", name, func() { o, err = s.Store.Stat(ctx, name) })
	return o, err
}

func (s *pausedStore) List(ctx context.Context, prefix string, each func(target.Object) error) (err error) {
	s.call("list", prefix, func() { err = s.Store.List(ctx, prefix, each) })
	return err
}

func (s *pausedStore) Delete(ctx context.Context, names ...string) (err error) {
	s.call("delete", strings.Join(names, " "), func() { err = s.Store.Delete(ctx, names...) })
	return err
}

// adopt is what the next node does with the snapshots that an attempt without an end left.
func (w *world) adopt(left []blob.ID) (own blob.ID, found bool) {
	w.Helper()
	for _, id := range left {
		s := w.snapshot(id)
		if !found {
			var err error
			own, found, err = Adopt(w.Context(), w.r, s)
			must(w, err)
		}
	}
	must(w, w.r.DeleteSnapshots(w.Context(), left...))
	return own, found
}

// TestPausedSessionTakesNothingFromOthers: the machine of a backup sleeps at each call of the store in turn, from the
// first pack on, for longer than a lock lives. Meanwhile sweeps run, another node adopts the snapshot or makes the
// backup itself, and a backup of another volume finds the chunks of both. Then the machine continues. All backups of
// the others restore, and the repository has no damage.
func TestPausedSessionTakesNothingFromOthers(t *testing.T) {
	suite.Slow(t)
	for i := range 4 {
		answer, sweptFirst := i&1 > 0, i&2 > 0
		for n := 1; ; n++ {
			at := ""
			t.Run(fmt.Sprintf("answer %v, swept first %v, call %d", answer, sweptFirst, n), func(t *testing.T) {
				at = testPause(t, n, answer, sweptFirst)
			})
			if at == "" || t.Failed() {
				break
			}
		}
	}
}

// testPause returns the call of the pause; empty: the backup has fewer calls.
func testPause(t *testing.T, n int, answer, sweptFirst bool) (at string) {
	w := newWorld(t)
	old := newDisk(4 * chunkSize)
	old.fill(1, 0, 1)
	base := w.backup(old, options("v")).Snapshot
	v := old.copy(old.size)
	v.fill(2, 1, 2)

	sleeper := *w
	sleeper.store = &hookedStore{counts: map[string]int{}}
	store := &pausedStore{Store: w.store.Store, n: n, answer: answer}
	sleeper.store.Store = store
	sleeper.open()
	var own, other blob.ID
	store.pause = func() {
		w.ageLocks()
		if sweptFirst {
			w.sweep()
		}
		files, err := w.r.ListSnapshots(t.Context())
		must(t, err)
		var left []blob.ID
		for _, f := range files {
			if f.ID != base {
				left = append(left, f.ID)
			}
		}
		var found bool
		if own, found = w.adopt(left); !found {
			own = w.backup(v, options("v")).Snapshot
		}
		other = w.backup(v, options("w")).Snapshot
		w.sweep()
	}
	o := options("v")
	o.Base, o.Changed, o.Workers = &base, []int64{1, 2}, 1
	_, err := Backup(t.Context(), sleeper.r, v, o)
	if store.at == "" {
		must(t, err)
		return ""
	}
	t.Logf("%s: %v", store.at, err)
	w.open()
	w.compare(base, old)
	w.compare(own, v)
	w.compare(other, v)
	damage, err := w.r.Check(t.Context(), repo.WriterOptions{})
	must(t, err)
	if !damage.IsZero() {
		t.Errorf("after a pause at %s, damage: %+v", store.at, damage)
	}
	w.sweep()
	w.compare(own, v)
	w.compare(other, v)
	return store.at
}
