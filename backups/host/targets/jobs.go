package targets

import (
	"context"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"drover.io/drover/api"
)

// jobSet owns the goroutines that work with stores: at most one for each key. It cancels them when the manager stops,
// and waits for all of them. The end of a job wakes the reconciler of the job's target.
type jobSet struct {
	wake    chan event.GenericEvent
	started chan struct{} // closed once ctx is set
	ctx     context.Context

	mu      sync.Mutex
	running map[string]bool
	done    bool
	wg      sync.WaitGroup
}

func newJobSet() *jobSet {
	return &jobSet{wake: make(chan event.GenericEvent, 16), started: make(chan struct{}), running: map[string]bool{}}
}

// Start runs until ctx and then all jobs end.
func (s *jobSet) Start(ctx context.Context) error {
	s.ctx = ctx
	close(s.started)
	<-ctx.Done()
	s.mu.Lock()
	s.done = true
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// NeedLeaderElection is false: every node runs its own jobs.
func (s *jobSet) NeedLeaderElection() bool { return false }

// begin reserves the key for a job.
func (s *jobSet) begin(ctx context.Context, key string) bool {
	select {
	case <-s.started:
	case <-ctx.Done():
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done || s.running[key] {
		return false
	}
	s.running[key] = true
	s.wg.Add(1)
	return true
}

// end frees the key and wakes the reconciler of the target, unless the manager stops.
func (s *jobSet) end(key, target string) {
	defer s.wg.Done()
	s.mu.Lock()
	delete(s.running, key)
	s.mu.Unlock()
	s.wakeTarget(target)
}

// wakeTarget wakes the reconciler of a job's target, unless the manager stops.
func (s *jobSet) wakeTarget(target string) {
	select {
	case s.wake <- event.GenericEvent{Object: &api.BackupTarget{ObjectMeta: metav1.ObjectMeta{Name: target}}}:
	case <-s.ctx.Done():
	}
}

// job is a piece of work with a store. A nil job never ran.
type job[T any] struct {
	cancel context.CancelFunc
	ended  chan struct{} // closed after result is set
	result T
}

// startJob starts a job of a target, unless an earlier job for the same work has not ended: the end of that job wakes
// the reconciler.
func startJob[T any](ctx context.Context, s *jobSet, target, work string, do func(context.Context) T) *job[T] {
	key := work + "/" + target
	if !s.begin(ctx, key) {
		return nil
	}
	ctx, cancel := context.WithCancel(s.ctx)
	j := &job[T]{cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer s.end(key, target)
		defer cancel()
		j.result = do(ctx)
		close(j.ended)
	}()
	return j
}

func (j *job[T]) isRunning() bool { return j != nil && !j.hasEnded() }

func (j *job[T]) hasEnded() bool {
	if j == nil {
		return false
	}
	select {
	case <-j.ended:
		return true
	default:
		return false
	}
}

func (j *job[T]) stop() {
	if j != nil {
		j.cancel()
	}
}
