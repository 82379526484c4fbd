package peer

import (
	"context"
	"testing"
	"time"

	"drover.io/drover/api"
)

// TestAdoptBesideAPreparedCut: a session prepares a cut, and calls seal and drop-snapshot, which change layers. The
// next session is still adopted.
func TestAdoptBesideAPreparedCut(t *testing.T) {
	f := newFar(t, 64<<20, nil)
	d, loop := newDialer(t, f.at), startLoop(t)
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 1, 1, "other")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	s := newSnapshot("s")
	s.Layer = string(api.NewUID())
	if err := m.PrepareCut(ctx, s); err != nil {
		t.Fatal(err)
	}
	s.Name, s.Layer = "t", string(api.NewUID())
	if err := m.Seal(ctx, s); !api.Is(err, api.Busy) {
		t.Errorf("seal: %v", err)
	}
	if err := m.Forget(ctx, s.UID); !api.Is(err, api.Busy) {
		t.Errorf("drop-snapshot: %v", err)
	}
	next := member(t, d, f, loop, nil)
	if err := next.Adopt(ctx, 2, 1, []string{f.uid}); err != nil {
		t.Fatal(err)
	}
	if err := next.Forget(ctx, s.UID); err != nil {
		t.Error(err)
	}
}
