package holders

import (
	"testing"
	"testing/synctest"
)

// TestHoldsOfWorksStay: a hold is released when no work uses the hold.
func TestHoldsOfWorksStay(t *testing.T) {
	var s Set
	used, other := Hold{"d", "a"}, Hold{"d", "b"}
	released := 0
	release := func() error { released++; return nil }
	leave, err := s.Enter(t.Context(), used)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Release(used, release); err != nil || released != 0 {
		t.Errorf("a hold with a work: released %d times, %v", released, err)
	}
	if err := s.Release(other, release); err != nil || released != 1 {
		t.Errorf("a hold without a work: released %d times, %v", released, err)
	}
	leave()
	if err := s.Release(used, release); err != nil || released != 2 {
		t.Errorf("a hold whose work has ended: released %d times, %v", released, err)
	}
}

// TestReleaseThatHangsDelaysItsHoldAlone: while a disk hangs in the release of a hold, works with other holds begin, of
// the same holder on another disk, too. The work with that hold begins after the release.
func TestReleaseThatHangsDelaysItsHoldAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Set
		hangs, entered := make(chan struct{}), make(chan struct{})
		h := Hold{"d", "a"}
		go func() { _ = s.Release(h, func() error { <-hangs; return nil }) }()
		synctest.Wait()
		for _, other := range []Hold{{"d", "b"}, {"e", "a"}} {
			leave, err := s.Enter(t.Context(), other)
			if err != nil {
				t.Fatal(err)
			}
			leave()
		}
		go func() {
			defer close(entered)
			if leave, err := s.Enter(t.Context(), h); err == nil {
				leave()
			}
		}()
		synctest.Wait()
		select {
		case <-entered:
			t.Error("a work uses a hold in release")
		default:
		}
		close(hangs)
		<-entered
	})
}
