package localnode

import (
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api/watch"
)

// Waiters are names of objects that wait for a change of the node.
type Waiters struct {
	mu    sync.Mutex
	names map[string]bool
}

// Set notes whether an object waits.
func (w *Waiters) Set(name string, waits bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.names == nil {
		w.names = map[string]bool{}
	}
	if waits {
		w.names[name] = true
	} else {
		delete(w.names, name)
	}
}

// Requests are the objects that wait.
func (w *Waiters) Requests() []reconcile.Request {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]reconcile.Request, 0, len(w.names))
	for name := range w.names {
		all = append(all, watch.Requests(name)...)
	}
	return all
}
