package listener

import (
	"sync"
	"time"
)

// tallyEvery is how often a Tally has the same event reported.
const tallyEvery = time.Minute

// Tally counts events that may come too often to report each of them: the first is reported at once, those after it
// once a minute as a number. The zero value is ready.
type Tally struct {
	mu   sync.Mutex
	last time.Time // of the last report; zero: there was none
	n    int       // events since
}

// Count adds an event. Where it is to be reported, n is how many there were since the last report.
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
