package stack

import "sync"

// worker runs what may block, one after the other, off the loop's thread.
type worker struct {
	mu     sync.Mutex
	more   sync.Cond
	todo   []func()
	closed bool
	ended  chan struct{}
}

func newWorker() *worker {
	w := &worker{ended: make(chan struct{})}
	w.more.L = &w.mu
	go w.run()
	return w
}

func (w *worker) put(fn func()) {
	w.mu.Lock()
	w.todo = append(w.todo, fn)
	w.mu.Unlock()
	w.more.Signal()
}

func (w *worker) run() {
	defer close(w.ended)
	for {
		w.mu.Lock()
		for len(w.todo) == 0 && !w.closed {
			w.more.Wait()
		}
		todo := w.todo
		w.todo = nil
		w.mu.Unlock()
		if len(todo) == 0 {
			return
		}
		for _, fn := range todo {
			fn()
		}
	}
}

// do runs fn in the worker and waits for it.
func (w *worker) do(fn func()) {
	ran := make(chan struct{})
	w.put(func() { fn(); close(ran) })
	<-ran
}

// close runs what was put before, and waits.
func (w *worker) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.more.Signal()
	<-w.ended
}
