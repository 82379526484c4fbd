package engine

// ranges keep operations on overlapping ranges apart. Loop thread.
type ranges struct {
	e     *Engine
	busy  list // writes, zeros, discards and flushes with their range held, in the order of admission
	queue list // operations that wait for a range
	locks int  // operations in busy that only keep the guest from a range
	slow  int  // operations in busy and queue that wait for each other, and writes for them
}

// admit starts an operation that changes a range, or queues the operation behind conflicting ones.
func (r *ranges) admit(o *op) {
	if o.slow {
		r.slow++
	}
	if r.conflicts(o, nil) {
		r.queue.push(o)
		return
	}
	r.busy.push(o)
	o.firstStep()
}

// conflicts reports whether o must wait for an operation in busy, or in queue before upTo.
func (r *ranges) conflicts(o *op, upTo *op) bool {
	if r.slow == 0 && len(r.e.cfg.Members) == 1 {
		return false // whole blocks, one member: the guest orders its overlapping writes
	}
	for b := r.busy.head; b != nil; b = b.next {
		if r.clash(o, b) {
			return true
		}
	}
	for b := r.queue.head; b != nil && b != upTo; b = b.next {
		if r.clash(o, b) {
			return true
		}
	}
	return false
}

func (r *ranges) clash(a, b *op) bool {
	return a != b && a.lo < b.hi && b.lo < a.hi && (a.slow || b.slow || len(r.e.cfg.Members) > 1)
}

// startQueued starts the operations that need not wait any more, in order.
func (r *ranges) startQueued() {
	for o := r.queue.head; o != nil; {
		next := o.next
		if !r.conflicts(o, o) {
			r.queue.remove(o)
			r.busy.push(o)
			o.firstStep()
			// firstStep may have finished operations at once and so changed the queue: start from its head again.
			next = r.queue.head
		}
		o = next
	}
}

// removeBusy removes an operation from busy.
func (r *ranges) removeBusy(o *op) {
	r.busy.remove(o)
	if o.slow {
		r.slow--
	}
}

// listWaiting lists the operations that wait for a drop.
func (r *ranges) listWaiting() []*op {
	var ops []*op
	for o := r.busy.head; o != nil; o = o.next {
		if o.waiting {
			ops = append(ops, o)
		}
	}
	return ops
}

// list of operations, linked through the operations.
type list struct{ head, tail *op }

func (l *list) push(o *op) {
	o.prev, o.next = l.tail, nil
	if l.tail == nil {
		l.head = o
	} else {
		l.tail.next = o
	}
	l.tail = o
}

func (l *list) remove(o *op) {
	if o.prev == nil {
		l.head = o.next
	} else {
		o.prev.next = o.next
	}
	if o.next == nil {
		l.tail = o.prev
	} else {
		o.next.prev = o.prev
	}
	o.next, o.prev = nil, nil
}
