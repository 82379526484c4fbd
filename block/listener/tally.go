package listener

import (
	"sync"
	"time"
)

// tallyEvery is the time between two reports of a Tally.
const tallyEvery = time.Minute

// Tally counts events that may be too frequent for a report each: the caller reports the first event at once, and later
// events once a minute as a number. The zero value is ready.
type Tally struct {
	mu   sync.Mutex
	last time.Time // of the last report, or zero
	n    int       // events since
}

// Count adds an event. If the caller should report now, n is the number of events since the last report.
func (t *Tally) Count() (n int, report bool) { return t.count(time.Now()) }

func (t *Tally) count(now time.Time) (n int, report bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n++
	if !t.last.IsZero() && now.Sub(t.last) < tallyEvery {
		return 0, false
	}
	n, t.n, t.last = t.n, 0, now
	return n, true
}
