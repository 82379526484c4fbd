package targets

import (
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
)

// TestWaitsForALockAreNoAttempts: the tenth failure without progress ends a backup; the lock of another session never
// does, is tried again after a bounded pause, and keeps what the status says of earlier attempts.
func TestWaitsForALockAreNoAttempts(t *testing.T) {
	s := newShelf(t, "x")
	lock, err := s.r.Lock(t.Context(), repo.Exclusive)
	must(t, err)
	_, locked := s.r.Lock(t.Context(), repo.Shared)
	must(t, lock.Close(t.Context()))
	away := api.Errorf(api.Unavailable, "away")
	st := &api.CommonBackupStatus{}
	for range 30 {
		if CountAttempt(st, locked, false, false) || st.Attempts != 0 {
			t.Fatalf("the lock of another session: %+v", st)
		}
	}
	if CountAttempt(st, locked, false, true); st.Attempts != 1 {
		t.Errorf("the status forgets an earlier attempt: %+v", st)
	}
	st.Attempts = 0
	for i := range int32(mostAttempts) {
		CountAttempt(st, locked, false, false)
		if last := CountAttempt(st, away, false, true); last != (i == mostAttempts-1) || st.Attempts != i+1 {
			t.Errorf("failure %d: last %v, %+v", i, last, st)
		}
	}
	if CountAttempt(st, away, true, true) || st.Attempts != 1 {
		t.Errorf("after progress: %+v", st)
	}
	if !CountAttempt(st, api.Errorf(api.Invalid, "wrong"), true, true) {
		t.Error("a failure for good is tried again")
	}
	for attempts, want := range map[int32]time.Duration{0: 5 * time.Second, 1: 5 * time.Second, 2: 10 * time.Second,
		7: 5 * time.Minute, 100: 5 * time.Minute} {
		if got := PauseAfter(attempts, away, 5*time.Second, 5*time.Minute); got != want {
			t.Errorf("pause after %d attempts: %v, want %v", attempts, got, want)
		}
		if got := PauseAfter(attempts, locked, 5*time.Second, 5*time.Minute); got != lockedPause {
			t.Errorf("pause for a lock after %d attempts: %v", attempts, got)
		}
	}
	if got := PauseAfter(1, locked, time.Second, time.Second); got != time.Second {
		t.Errorf("the longest pause is %v", got)
	}
}
