package holders

import "testing"

// TestHoldsOfWorksStay: the hold of a holder is released when none of the holder's works is left.
func TestHoldsOfWorksStay(t *testing.T) {
	var s Set
	released := 0
	release := func(string) error { released++; return nil }
	s.Add("a")
	s.Add("a")
	s.Remove("a")
	if err := s.Release("a", release); err != nil || released != 0 {
		t.Errorf("a hold with a work: released %d times, %v", released, err)
	}
	if err := s.Release("b", release); err != nil || released != 1 {
		t.Errorf("a hold without a work: released %d times, %v", released, err)
	}
	s.Remove("a")
	if err := s.Release("a", release); err != nil || released != 2 {
		t.Errorf("a hold whose works have ended: released %d times, %v", released, err)
	}
}
