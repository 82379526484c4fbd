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

// movers owns the transfers of a node: it starts them, bounds how many run at once, cancels them, and waits for all of
// them when the manager stops. A transfer touches a disk and nothing else; what it did is read from it by the
// reconciler of its ImageCopy, which is woken (wake) when there is news.
type movers struct {
	wake  chan event.GenericEvent
	slots chan struct{}
	tick  time.Duration

	started chan struct{} // closed when ctx is set
	ctx     context.Context

	lanes lanes

	mu   sync.Mutex
	jobs map[string]*job // by name of the ImageCopy
	wg   sync.WaitGroup
	done bool
}

func newMovers(parallel int, tick time.Duration) *movers {
	return &movers{wake: make(chan event.GenericEvent, 16), slots: make(chan struct{}, parallel), tick: tick,
		started: make(chan struct{}), lanes: newLanes(), jobs: map[string]*job{}}
}

// Start is the life of all transfers.
func (m *movers) Start(ctx context.Context) error {
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
func (m *movers) NeedLeaderElection() bool { return false }

// job is one transfer.
type job struct {
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

func (j *job) running() bool {
	select {
	case <-j.ended:
		return false
	default:
		return true
	}
}

// is tells the world where the job is before bytes arrive.
func (j *job) is(state api.ImageState, url string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.state, j.url = state, url
}

// glance is what can be seen of a running job.
type glance struct {
	state       api.ImageState
	percent     int32
	done, total int64
	url         string
}

func (j *job) glance() glance {
	j.mu.Lock()
	defer j.mu.Unlock()
	g := glance{state: j.state, url: j.url}
	if g.state == api.ImageInProgress {
		g.state, g.percent, g.done, g.total = j.progress.Snapshot()
	}
	return g
}

// get is the job of an ImageCopy, running or ended.
func (m *movers) get(name string) *job {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.jobs[name]
}

// forget drops an ended job.
func (m *movers) forget(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if j := m.jobs[name]; j != nil && !j.running() {
		delete(m.jobs, name)
	}
}

// start begins a transfer. run gets a function that waits for a slot, which the job then has until its end.
func (m *movers) start(ctx context.Context, copy *api.ImageCopy, source string,
	run func(ctx context.Context, j *job, slot func(context.Context) error) (importer.Result, error)) (*job, error) {
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
	if j := m.jobs[copy.Name]; j != nil && j.running() {
		return nil, api.Errorf(api.Busy, "a transfer for %s is under way", copy.Name)
	}
	jctx, cancel := context.WithCancel(m.ctx)
	j := &job{object: copy.UID, source: source, token: copy.Spec.Verify, cancel: cancel, ended: make(chan struct{}),
		begun: time.Now(),
		state: api.ImagePending}
	m.jobs[copy.Name] = j
	ev := event.GenericEvent{Object: &api.ImageCopy{ObjectMeta: *copy.ObjectMeta.DeepCopy()}}
	m.wg.Go(func() { m.carry(jctx, j, ev, run) })
	return j, nil
}

// carry is the owner of one transfer: it tells of progress at every tick, and of the end.
func (m *movers) carry(ctx context.Context, j *job, ev event.GenericEvent,
	run func(ctx context.Context, j *job, slot func(context.Context) error) (importer.Result, error)) {
	defer j.cancel()
	transfers.Inc()
	defer transfers.Dec()
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
	var last glance
	var counted int64
	for running := true; running; {
		select {
		case <-ended:
			running = false
		case <-ticker.C:
			if g := j.glance(); g != last {
				last = g
				m.tell(ctx, ev)
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
	m.tell(m.ctx, ev)
}

// tell wakes the reconciler, unless everything ends.
func (m *movers) tell(ctx context.Context, ev event.GenericEvent) {
	select {
	case m.wake <- ev:
	case <-ctx.Done():
	}
}
