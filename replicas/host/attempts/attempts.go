// Package attempts owns the record of a repeated operation on objects: for each object one attempt at a time, and the
// time before which the next attempt must not begin. Rebuilds of detached volumes and repairs of members use it.
//
// Invariants: no object has two attempts in progress; a Log has an entry only for objects with an attempt that began
// and was not forgotten.
//
// The package starts no goroutine. Log.mu is held for moments only and comes after every other mutex of the data role.
package attempts

import (
	"sync"
	"time"
)

// Log of the attempts, by object. The zero value is ready.
type Log[K comparable] struct {
	mu      sync.Mutex
	running map[K]bool
	next    map[K]time.Time // before which no attempt begins; of objects whose last attempt ended
}

// Begin begins an attempt, unless one is in progress, most are in progress for other objects, or the pause after the
// last attempt is not over. The caller ends the attempt with End.
func (l *Log[K]) Begin(object K, most int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running[object] || len(l.running) >= most || time.Now().Before(l.next[object]) {
		return false
	}
	if l.running == nil {
		l.running, l.next = map[K]bool{}, map[K]time.Time{}
	}
	l.running[object] = true
	return true
}

// End ends an attempt. The next one may begin after the pause.
func (l *Log[K]) End(object K, pause time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.running, object)
	l.next[object] = time.Now().Add(pause)
}

// Forget forgets the attempts that ended.
func (l *Log[K]) Forget(object K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.next, object)
}

// InProgress reports whether an attempt is in progress.
func (l *Log[K]) InProgress(object K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running[object]
}

// Ended reports whether an attempt has ended, with whatever outcome.
func (l *Log[K]) Ended(object K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ended := l.next[object]
	return ended
}
