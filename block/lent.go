package block

// Lent is a buffer lease: memory of a request that was answered although a hanging disk may still read or write the
// memory. Nobody uses or frees the memory until then. A Lent belongs to the loop's thread.
type Lent struct {
	back bool
	then []func()
}

// Until calls fn once the memory is unused, at once if it is unused already.
func (l *Lent) Until(fn func()) {
	if l.back {
		fn()
		return
	}
	l.then = append(l.then, fn)
}

// Back reports whether the memory is unused. Without a Lent the memory is unused.
func (l *Lent) Back() bool { return l == nil || l.back }

// Return says that the memory is unused from now on.
func (l *Lent) Return() {
	if l.back {
		return
	}
	l.back = true
	for _, fn := range l.then {
		fn()
	}
	l.then = nil
}

// LentTo is memory that is back once each of some parts is.
func LentTo(list ...*Lent) *Lent {
	all := &Lent{}
	left := len(list)
	if left == 0 {
		all.back = true
	}
	for _, l := range list {
		l.Until(func() {
			if left--; left == 0 {
				all.Return()
			}
		})
	}
	return all
}
