package host

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/importer"
)

// transferSet owns the transfers of a node: it starts them, bounds how many run at once, cancels them, and waits for all of
// them when the manager stops. A transfer touches a disk and nothing else; what it did is read from it by the
// reconciler of its ImageCopy, which is woken (wake) when there is news.
type transferSet struct {
	wake  chan event.GenericEvent
	slots chan struct{}
	tick  time.Duration

	started chan struct{} // closed when ctx is set
	ctx     context.Context

	limits diskLimits

	mu   sync.Mutex
	byCopy map[string]*transfer // by name of the ImageCopy
	wg   sync.WaitGroup
	done bool
}

func newTransferSet(parallel int, tick time.Duration) *transferSet {
	return &transferSet{wake: make(chan event.GenericEvent, 16), slots: make(chan struct{}, parallel), tick: tick,
		started: make(chan struct{}), limits: newDiskLimits(), byCopy: map[string]*transfer{}}
}

// Start is the life of all transfers.
func (m *transferSet) Start(ctx context.Context) error {
	m.ctx = ctx
	close(m.started)
	<-ctx.Done()
	m.mu.Lock()
	m.done = true
	m.mu.Unlock()
	m.wg.Wait()
	return nil
}

// NeedLeaderElection is false: every node moves its own.
func (m *transferSet) NeedLeaderElection() bool { return false }

// transfer is one transfer.
type transfer struct {
	object types.UID // the ImageCopy that it is for
	source string    // for metrics
	token  string    // of a verification that was asked for before it began
	cancel context.CancelFunc
	ended  chan struct{} // closed at the end; then got and err are set
	begun  time.Time
	got    importer.Result
	err    error

	progress importer.Progress
	mu       sync.Mutex
	state    api.ImageState // before bytes arrive: pending or starting; then in-progress
	url      string         // where an upload is expected
}

func (j *transfer) running() bool {
	select {
	case <-j.ended:
		return false
	default:
		return true
	}
}

// setState tells the world where the job is before bytes arrive.
func (j *transfer) setState(state api.ImageState, url string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.state, j.url = state, url
}

// transferState is what can be seen of a running job.
type transferState struct {
	state       api.ImageState
	percent     int32
	done, total int64
	url         string
}

func (j *transfer) snapshot() transferState {
	j.mu.Lock()
	defer j.mu.Unlock()
	g := transferState{state: j.state, url: j.url}
	if g.state == api.ImageInProgress {
		g.state, g.percent, g.done, g.total = j.progress.Snapshot()
	}
	return g
}

// get is the job of an ImageCopy, running or ended.
func (m *transferSet) get(name string) *transfer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.byCopy[name]
}

// forget drops an ended job.
func (m *transferSet) forget(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if j := m.byCopy[name]; j != nil && !j.running() {
		delete(m.byCopy, name)
	}
}

// start begins a transfer. run gets a function that waits for a slot, which the job then has until its end.
func (m *transferSet) start(ctx context.Context, copy *api.ImageCopy, source string,
	run func(ctx context.Context, j *transfer, slot func(context.Context) error) (importer.Result, error)) (*transfer, error) {
	select {
	case <-m.started:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done {
		return nil, context.Canceled
	}
	if j := m.byCopy[copy.Name]; j != nil && j.running() {
		return nil, api.Errorf(api.Busy, "a transfer for %s is under way", copy.Name)
	}
	jctx, cancel := context.WithCancel(m.ctx)
	j := &transfer{object: copy.UID, source: source, token: copy.Spec.Verify, cancel: cancel, ended: make(chan struct{}),
		begun: time.Now(),
		state: api.ImagePending}
	m.byCopy[copy.Name] = j
	ev := event.GenericEvent{Object: &api.ImageCopy{ObjectMeta: *copy.ObjectMeta.DeepCopy()}}
	m.wg.Go(func() { m.run(jctx, j, ev, run) })
	return j, nil
}

// run is the owner of one transfer: it tells of progress at every tick, and of the end.
func (m *transferSet) run(ctx context.Context, j *transfer, ev event.GenericEvent,
	run func(ctx context.Context, j *transfer, slot func(context.Context) error) (importer.Result, error)) {
	defer j.cancel()
	transfersRunning.Inc()
	defer transfersRunning.Dec()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		held := false
		slot := func(ctx context.Context) error {
			select {
			case m.slots <- struct{}{}:
				held = true
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		j.got, j.err = run(ctx, j, slot)
		if held {
			<-m.slots
		}
	}()
	ticker := time.NewTicker(m.tick)
	defer ticker.Stop()
	var last transferState
	var counted int64
	for running := true; running; {
		select {
		case <-ended:
			running = false
		case <-ticker.C:
			if g := j.snapshot(); g != last {
				last = g
				m.wakeReconciler(ctx, ev)
			}
		}
		_, _, done, _ := j.progress.Snapshot()
		transferBytes.WithLabelValues(j.source).Add(float64(done - counted))
		counted = done
	}
	result := "ok"
	switch {
	case errors.Is(j.err, context.Canceled):
		result = "cancelled"
	case j.err != nil:
		result = api.KindOf(j.err).String()
	}
	transferSeconds.WithLabelValues(j.source, result).Observe(time.Since(j.begun).Seconds())
	close(j.ended)
	m.wakeReconciler(m.ctx, ev)
}

// wakeReconciler wakes the reconciler, unless everything ends.
func (m *transferSet) wakeReconciler(ctx context.Context, ev event.GenericEvent) {
	select {
	case m.wake <- ev:
	case <-ctx.Done():
	}
}
