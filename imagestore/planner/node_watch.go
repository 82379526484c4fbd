package planner

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"drover.io/drover/api"
)

// nodeWatch wakes all images after a change of a node that matters to placement or to the status of copies. A heartbeat
// or a change of free room wakes no image; a missing heartbeat does.
type nodeWatch struct {
	client.Client
	wake chan event.GenericEvent

	mu   sync.Mutex
	seen map[string]string // by node
}

func (w *nodeWatch) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var n api.Node
	err := w.Get(ctx, req.NamespacedName, &n)
	if err != nil && !apierrors.IsNotFound(err) {
		return ctrl.Result{}, err
	}
	looks, wait := "", time.Duration(0)
	if err == nil {
		disks, alive := disksOfNodes([]api.Node{n}, time.Now())
		var all []string
		for _, d := range disks {
			d.available = min(d.available, 1) // only zero or not matters
			all = append(all, fmt.Sprintf("%+v", d))
		}
		slices.Sort(all)
		looks = fmt.Sprint(alive[n.Name], strings.Join(all, " "))
		if alive[n.Name] {
			wait = time.Until(n.Status.Heartbeat.Add(n.SilentAfter())) + time.Second
		}
	}
	w.mu.Lock()
	changed := w.seen[req.Name] != looks
	w.seen[req.Name] = looks
	if looks == "" {
		delete(w.seen, req.Name)
	}
	w.mu.Unlock()
	if changed {
		select {
		case w.wake <- event.GenericEvent{Object: &n}:
		case <-ctx.Done():
		}
	}
	return ctrl.Result{RequeueAfter: wait}, nil
}
