package stack

import (
	"fmt"
	"runtime/debug"
	"sync"
)

// worker runs functions that may block, one after the other, outside of the loop's thread.
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

// do runs fn in the worker and waits for fn. If fn panics, do panics, too, and the caller can end its call alone.
func (w *worker) do(fn func()) {
	ran := make(chan any, 1)
	w.put(func() { ran <- panicOf(fn) })
	if p := <-ran; p != nil {
		panic(p)
	}
}

// panicOf runs fn and returns the panic with its stack; nil: no panic.
func panicOf(fn func()) (panicked any) {
	defer func() {
		if p := recover(); p != nil {
			panicked = fmt.Sprintf("%v in a worker:\n%s", p, debug.Stack())
		}
	}()
	fn()
	return nil
}

// close runs all functions that were put before, and waits.
func (w *worker) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.more.Signal()
	<-w.ended
}
