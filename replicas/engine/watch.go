package engine

import (
	"sync"
	"sync/atomic"
	"time"
)

// watchTick is how fine a Watch measures time.
const watchTick = 250 * time.Millisecond

// Watch measures how long the members of a process take to answer, in ticks: no tick passes while the process itself
// stands still, or has no member. The Watch has a goroutine, which Close ends.
type Watch struct {
	ticks atomic.Int64
	some  chan struct{} // there is a member again
	stop  chan struct{}
	ended chan struct{}
	wg    sync.WaitGroup // replicas that are being closed

	mu        sync.Mutex
	members   map[*WatchedMember]bool
	abandoned map[string]bool // abandoned replicas that are not closed yet
}

// NewWatch starts a Watch.
func NewWatch() *Watch {
	w := &Watch{some: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{}),
		members: map[*WatchedMember]bool{}, abandoned: map[string]bool{}}
	go func() {
		defer close(w.ended)
		tick := time.NewTicker(watchTick)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				w.ticks.Add(1)
				if w.checkMembers() == 0 {
					tick.Stop() // an idle process is not woken for nothing
				}
			case <-w.some:
				tick.Reset(watchTick)
			case <-w.stop:
				return
			}
		}
	}()
	return w
}

func (w *Watch) now() time.Duration { return time.Duration(w.ticks.Load()) * watchTick }

// addMember includes a member in the checks.
func (w *Watch) addMember(m *WatchedMember) {
	w.mu.Lock()
	w.members[m] = true
	first := len(w.members) == 1
	w.mu.Unlock()
	if first {
		select {
		case w.some <- struct{}{}:
		default: // the goroutine has not taken the last one yet
		}
	}
}

// removeMember excludes a member.
func (w *Watch) removeMember(m *WatchedMember) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.members, m)
}

// checkMembers checks the stall timeouts of all members, and returns the number of members.
func (w *Watch) checkMembers() int {
	w.mu.Lock()
	list := make([]*WatchedMember, 0, len(w.members))
	for m := range w.members {
		list = append(list, m)
	}
	w.mu.Unlock()
	for _, m := range list {
		m.checkStall(w.now())
	}
	return len(list)
}

// Abandoned reports whether a replica was abandoned and is not closed yet, because its disk has requests: no process
// can open the replica.
func (w *Watch) Abandoned(replica string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.abandoned[replica]
}

// Waits is the number of abandoned replicas that are not closed yet.
func (w *Watch) Waits() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.abandoned)
}

// Close ends the goroutine, and waits for replicas that are being closed. No replica may be abandoned.
func (w *Watch) Close() {
	close(w.stop)
	<-w.ended
	w.wg.Wait()
}
