package host

import (
	"context"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"drover.io/drover/api"
	"drover.io/drover/backups/mover"
)

// work is one job for a Backup or a BackupBackingImage: an attempt to make the backup, or the removal of what an
// unfinished backup left.
type work struct {
	backup  types.NamespacedName // as in a request of the maker
	object  types.UID            // of the object
	source  any                  // sourceOf the object
	disk    api.UID              // of the source
	removal bool
	begun   bool  // an earlier attempt may have a snapshot in the repository
	reached int64 // bytes that the attempt before was done with

	cancel   context.CancelFunc
	ended    chan struct{} // closed at the end, after made, err and cancelled are set
	made     completed
	err      error
	canceled bool // and failed therefore

	progress mover.Progress
	phase    atomic.Pointer[string] // what the work waits for; nil: nothing
}

// serves reports whether the node still has to do the work for the Backup as the Backup is now; b may be nil.
func (w *work) serves(b api.StoredBackup, node string) bool {
	return b != nil && b.GetUID() == w.object && isMine(b, node) && reflect.DeepEqual(sourceOf(b), w.source) &&
		w.removal == !b.GetDeletionTimestamp().IsZero()
}

func (w *work) isRunning() bool {
	select {
	case <-w.ended:
		return false
	default:
		return true
	}
}

// setPhase shows users what the work waits for.
func (w *work) setPhase(text string) { w.phase.Store(&text) }

func (w *work) currentPhase() string {
	if text := w.phase.Load(); text != nil {
		return *text
	}
	return ""
}

// workFunc does a work. It writes no status.
type workFunc func(ctx context.Context, w *work) error

// workSet owns the works of a node, one for each Backup at most: it starts them, cancels them, and waits for all of
// them, and for the releases of holds, when the manager stops. The end of a work wakes the reconciler.
type workSet struct {
	wake       chan event.GenericEvent
	ctx        context.Context // of all works
	cancel     context.CancelFunc
	goroutines sync.WaitGroup

	mu       sync.Mutex
	stopped  bool
	byBackup map[types.NamespacedName]*work
}

func newWorkSet() *workSet {
	s := &workSet{wake: make(chan event.GenericEvent, 16), byBackup: map[types.NamespacedName]*work{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Start runs until ctx and then all works end.
func (s *workSet) Start(ctx context.Context) error {
	<-ctx.Done()
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	s.cancel()
	s.goroutines.Wait()
	return nil
}

// NeedLeaderElection is false: every node runs its own works.
func (s *workSet) NeedLeaderElection() bool { return false }

// startWork starts a work and calls done at its end.
func (s *workSet) startWork(w *work, do workFunc, done func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return context.Canceled
	}
	ctx, cancel := context.WithCancel(s.ctx)
	w.cancel, w.ended = cancel, make(chan struct{})
	s.byBackup[w.backup] = w
	s.goroutines.Go(func() { s.runWork(ctx, w, do, done) })
	return nil
}

// runBehind runs do in the background, unless the works end.
func (s *workSet) runBehind(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopped {
		s.goroutines.Go(do)
	}
}

func (s *workSet) runWork(ctx context.Context, w *work, do workFunc, done func()) {
	defer w.cancel()
	begun := time.Now()
	w.err = do(ctx, w)
	w.canceled = w.err != nil && ctx.Err() != nil
	if !w.removal {
		result := "ok"
		switch {
		case w.canceled:
			result = "cancelled"
		case w.err != nil:
			result = api.KindOf(w.err).String()
		}
		backupSeconds.WithLabelValues(result).Observe(time.Since(begun).Seconds())
	}
	done()
	close(w.ended)
	select {
	case s.wake <- event.GenericEvent{Object: &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: w.backup.Name,
		Namespace: w.backup.Namespace}}}:
	case <-s.ctx.Done():
	}
}

// get returns the work for a Backup, running or ended, or nil.
func (s *workSet) get(backup types.NamespacedName) *work {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byBackup[backup]
}

// forget forgets an ended work.
func (s *workSet) forget(w *work) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byBackup[w.backup] == w {
		delete(s.byBackup, w.backup)
	}
}
