package peer

import (
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/replicas/engine"
)

var (
	_ engine.Remote   = (*Member)(nil)
	_ engine.Repairer = (*Member)(nil)
	_ engine.Repairer = (*Backend)(nil)
)

// endless is for tests in which no member stalls.
const endless = 5 * time.Minute

// stalls is the stall timeout of a test's members: endless, unless the test is about stalls. A busy machine must not
// count as a stall.
type stalls struct {
	is atomic.Pointer[engine.StallTimeout]
}

func (s *stalls) set(least, most time.Duration) {
	s.is.Store(&engine.StallTimeout{Min: least, Max: most})
}

func (s *stalls) get() engine.StallTimeout {
	if t := s.is.Load(); t != nil {
		return *t
	}
	return engine.StallTimeout{Min: endless, Max: endless}
}

func newWatch(t testing.TB) *engine.Watch {
	w := engine.NewWatch()
	t.Cleanup(w.Close)
	return w
}
