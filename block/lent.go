package block

// Lent is memory of a request that was answered although a disk that hangs may still read it or write to it. It is
// neither used nor given back until then. All of it is the loop thread's.
type Lent struct {
	back bool
	then []func()
}

// Until calls fn once nobody uses the memory any more, at once if that is so already.
func (l *Lent) Until(fn func()) {
	if l.back {
		fn()
		return
	}
	l.then = append(l.then, fn)
}

// Back reports whether nobody uses the memory any more. Without a Lent nobody does.
func (l *Lent) Back() bool { return l == nil || l.back }

// Return says that nobody uses the memory any more.
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

// LentTo is memory that is back once each of some is.
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
