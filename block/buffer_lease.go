package block

// BufferLease is memory of a request that was answered although a hanging disk may still read or write the memory.
// Nobody uses or frees the memory before the release. A BufferLease belongs to the loop's thread.
type BufferLease struct {
	released bool
	then     []func()
}

// OnRelease calls fn once the memory is unused, at once if it is unused already.
func (l *BufferLease) OnRelease(fn func()) {
	if l.released {
		fn()
		return
	}
	l.then = append(l.then, fn)
}

// Released reports whether the memory is unused. Without a lease the memory is unused.
func (l *BufferLease) Released() bool { return l == nil || l.released }

// Release says that the memory is unused from now on.
func (l *BufferLease) Release() {
	if l.released {
		return
	}
	l.released = true
	for _, fn := range l.then {
		fn()
	}
	l.then = nil
}

// JoinLeases returns a lease that is released once each of some leases is.
func JoinLeases(list ...*BufferLease) *BufferLease {
	all := &BufferLease{}
	left := len(list)
	if left == 0 {
		all.released = true
	}
	for _, l := range list {
		l.OnRelease(func() {
			if left--; left == 0 {
				all.Release()
			}
		})
	}
	return all
}
