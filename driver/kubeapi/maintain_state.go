package kubeapi

import (
	"context"
	"sort"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
)

// maintainState keeps the state small and safe: only maintainState removes events, checks the quota and takes
// snapshots.
func (s *Server) maintainState(ctx context.Context, o Options) {
	tick := time.NewTicker(o.MaintainEvery)
	defer tick.Stop()
	for {
		if err := s.pruneEvents(ctx, o); err != nil && ctx.Err() == nil {
			s.log.Warn("old events stay for now", "err", err)
		}
		s.store.checkQuota(ctx)
		if err := s.store.takeSnapshot(time.Now()); err != nil {
			s.log.Error("no snapshot of the state database", "err", err)
		}
		if err := s.store.recordRevision(false); err != nil {
			s.log.Warn("the revision of the state database was not recorded", "err", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Healthy returns nil if the server can take writes now, and otherwise the cause.
func (s *Server) Healthy() error { return s.store.checkWritable() }

// pruneEvents removes events that are older than o.KeepEvents, and the oldest beyond o.MaxEvents.
func (s *Server) pruneEvents(ctx context.Context, o Options) error {
	cs, err := eventsclient.NewForConfig(s.Config)
	if err != nil {
		return err
	}
	type key struct {
		namespace, name string
		at              time.Time
	}
	var all []key
	opts := metav1.ListOptions{Limit: 500}
	for {
		list, err := cs.Events("").List(ctx, opts)
		if err != nil {
			return err
		}
		for i := range list.Items {
			e := &list.Items[i]
			all = append(all, key{e.Namespace, e.Name, lastSeen(e)})
		}
		if opts.Continue = list.Continue; opts.Continue == "" {
			break
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].at.After(all[j].at) })
	oldest := time.Now().Add(-o.KeepEvents)
	for i, k := range all {
		if i < o.MaxEvents && k.at.After(oldest) {
			continue
		}
		if err := cs.Events(k.namespace).Delete(ctx, k.name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	return nil
}

func lastSeen(e *eventsv1.Event) time.Time {
	at := e.CreationTimestamp.Time
	if e.EventTime.After(at) {
		at = e.EventTime.Time
	}
	if e.Series != nil && e.Series.LastObservedTime.After(at) {
		at = e.Series.LastObservedTime.Time
	}
	return at
}
