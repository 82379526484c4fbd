// Package volumelock serialises the operations on a volume. It owns one lock per volume, while a caller has or
// wants the lock, and has no goroutine.
//
// Invariants: no worker waits for a lock whose owner may wait for a disk that hangs, except the owner's first waiter,
// for a bounded time; a background operation gives its lock way as soon as another caller wants it.
//
// Lock order: a volume's lock comes before every mutex of the data role. A caller takes the locks of several
// volumes in the order of their names.
package volumelock

import (
	"context"
	"sync"
	"time"
)

// Locks of volumes, by name.
type Locks struct {
	mu  sync.Mutex
	all map[string]*lock
}

// lock of one volume.
type lock struct {
	turn  chan struct{} // the owner has put a token into it
	users int           // the owner and the waiters
	late  time.Time     // from then on no caller waits for the owner
	yield context.CancelFunc
}

const (
	// Again is when a caller of LockSoon that got no lock tries again.
	Again = time.Second

	stallTimeout = 2 * time.Second
	yieldTimeout = 30 * time.Second // with an owner that was asked to give way
)

// New has no lock yet.
func New() *Locks { return &Locks{all: map[string]*lock{}} }

// Lock takes the lock of a volume, and waits for its owner as long as it takes.
func (l *Locks) Lock(volume string) (unlock func()) {
	v, _ := l.registerCaller(volume)
	v.turn <- struct{}{}
	return l.noteOwner(volume, v)
}

// LockSoon takes the lock of a volume. False: the owner has the lock for long, and may wait for a disk that hangs.
func (l *Locks) LockSoon(volume string) (unlock func(), ok bool) {
	v, late := l.registerCaller(volume)
	select {
	case v.turn <- struct{}{}:
		return l.noteOwner(volume, v), true
	default:
	}
	enough := time.NewTimer(time.Until(late))
	defer enough.Stop()
	select {
	case v.turn <- struct{}{}:
		return l.noteOwner(volume, v), true
	case <-enough.C:
		l.unregisterCaller(volume, v)
		return nil, false
	}
}

// LockYielding takes the lock of a volume as LockSoon does, for an operation that gives way: the context ends when
// another caller wants the lock.
func (l *Locks) LockYielding(ctx context.Context, volume string) (_ context.Context, unlock func(), ok bool) {
	release, ok := l.LockSoon(volume)
	if !ok {
		return ctx, nil, false
	}
	ctx, cancel := context.WithCancel(ctx)
	l.mu.Lock()
	v := l.all[volume]
	v.yield = cancel
	if v.users > 1 {
		v.giveWay()
	}
	l.mu.Unlock()
	return ctx, func() {
		l.mu.Lock()
		v.yield = nil
		l.mu.Unlock()
		cancel()
		release()
	}, true
}

// Disturb asks the owner of a lock to give way. False: the owner does not.
func (l *Locks) Disturb(volume string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := l.all[volume]
	if v == nil {
		return true // the owner has just ended
	}
	if v.yield == nil {
		return false
	}
	v.yield()
	return true
}

// Taken reports whether a caller has the lock of a volume.
func (l *Locks) Taken(volume string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := l.all[volume]
	return v != nil && len(v.turn) > 0
}

// registerCaller registers a caller, asks the owner to give way, and returns until when the caller waits for the owner.
func (l *Locks) registerCaller(volume string) (*lock, time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := l.all[volume]
	if v == nil {
		v = &lock{turn: make(chan struct{}, 1), late: time.Now().Add(stallTimeout)}
		l.all[volume] = v
	}
	v.users++
	v.giveWay()
	return v, v.late
}

// giveWay asks the owner to give way, once. The caller has Locks.mu.
func (v *lock) giveWay() {
	if v.yield != nil {
		v.yield()
		v.yield, v.late = nil, time.Now().Add(yieldTimeout)
	}
}

func (l *Locks) unregisterCaller(volume string, v *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if v.users--; v.users == 0 {
		delete(l.all, volume)
	}
}

// noteOwner notes that the caller is the owner now.
func (l *Locks) noteOwner(volume string, v *lock) (unlock func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v.late = time.Now().Add(stallTimeout)
	return func() {
		<-v.turn
		l.unregisterCaller(volume, v)
	}
}
