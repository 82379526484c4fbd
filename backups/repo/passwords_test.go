package repo

import (
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestPasswordChangeSurvivesAKillAtEachOperation: a change of the password, with a recovery password, is killed at each
// operation of the store. The old or the new password always opens the repository, and the next attempt completes the
// change: the new and the recovery password open, the old one does not.
func TestPasswordChangeSurvivesAKillAtEachOperation(t *testing.T) {
	suite.Slow(t)
	origin := newMemoryStore()
	newRepository(t, origin)
	p := Passwords{Current: "new one", Old: []string{password}, Recovery: "in the safe"}
	opens := func(store *memoryStore, password string) bool {
		_, err := Open(t.Context(), store, password, Options{})
		if err != nil && !IsWrongPassword(err) {
			t.Fatal(err)
		}
		return err == nil
	}
	killed := 0
	for kill := 0; ; kill++ {
		store, writes := origin.clone(), 0
		fail := func(operation, _ string) error {
			if operation != "put" && operation != "delete" {
				return nil
			}
			if writes++; writes > kill {
				return api.Errorf(api.Unavailable, "killed")
			}
			return nil
		}
		store.before = fail
		_, err := openRepository(t, store).UpdateKeys(t.Context(), p)
		store.before = nil
		if !opens(store, p.Current) && !opens(store, password) {
			t.Fatalf("killed at write %d: no password opens the repository", kill)
		}
		if err == nil {
			break
		}
		killed++
	}
	if killed < 3 { // two key files are written, one is deleted
		t.Errorf("%d writes were killed", killed)
	}
	r, err := OpenAny(t.Context(), origin, p, Options{})
	must(t, err)
	if n, err := r.UpdateKeys(t.Context(), p); n != 2 || err != nil {
		t.Errorf("%d key files, %v", n, err)
	}
	if n, err := r.UpdateKeys(t.Context(), p); n != 2 || err != nil {
		t.Errorf("the second time: %d key files, %v", n, err)
	}
	if !opens(origin, p.Current) || !opens(origin, p.Recovery) || opens(origin, password) {
		t.Error("after the change, other passwords open the repository than the new and the recovery password")
	}
}

// TestOldKeyStaysWithoutANewOne: the store loses the new key file at once, or does not list it. The old one stays.
func TestOldKeyStaysWithoutANewOne(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	before := store.names(keysFolder)
	store.after = func(operation, name string) error {
		if operation == "put" {
			store.mu.Lock()
			defer store.mu.Unlock()
			delete(store.objects, name)
		}
		return nil
	}
	if _, err := r.UpdateKeys(t.Context(), Passwords{Current: "new", Old: []string{password}}); err == nil {
		t.Error("the change succeeds")
	}
	if now := store.names(keysFolder); len(now) != 1 || now[0] != before[0] {
		t.Errorf("key files %v, want %v", now, before)
	}
	if _, err := Open(t.Context(), store, password, Options{}); err != nil {
		t.Error(err)
	}
}

// TestOppositePasswordChangesLeaveAKey: another cluster changes the password back at the same moment, and deletes the
// new key file while the old one is deleted here. The new password opens the repository in the end, and the key file of
// a third password, which a person made, stays.
func TestOppositePasswordChangesLeaveAKey(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	must(t, r.AddPassword(t.Context(), "of a person"))
	person, err := r.keyFilesOf(t.Context(), "of a person")
	must(t, err)
	deleted := false
	store.after = func(operation, _ string) error {
		if operation == "delete" && !deleted {
			deleted = true
			for _, name := range store.names(keysFolder) {
				if name != person[0].Name {
					must(t, store.Delete(t.Context(), name))
				}
			}
		}
		return nil
	}
	n, err := r.UpdateKeys(t.Context(), Passwords{Current: "new", Old: []string{password}})
	if n != 2 || err != nil || !deleted {
		t.Errorf("%d key files, %v", n, err)
	}
	for _, p := range []string{"new", "of a person"} {
		if _, err := Open(t.Context(), store, p, Options{}); err != nil {
			t.Errorf("%q: %v", p, err)
		}
	}
}
