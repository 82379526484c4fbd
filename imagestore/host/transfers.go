package host

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"drover.io/drover/api"
	"drover.io/drover/block/semaphore"
	"drover.io/drover/imagestore/importer"
)

// slotFunc waits for one of the slots that bound the transfers of a node. The transfer holds the slot until its end,
// except in its pauses.
type slotFunc func(context.Context) error

// transferFunc is the work of a transfer. It touches disks and origins, never the API.
type transferFunc func(ctx context.Context, t *transfer, slot slotFunc) (importer.Result, error)

// transferSet owns the transfers of a node: it starts them, bounds how many run at once, cancels them, and waits for
// all of them when the manager stops. A transfer wakes the reconciler of its ImageCopy, and the reconciler reads the
// result.
type transferSet struct {
	wake  chan event.GenericEvent
	slots chan struct{}
	tick  time.Duration

	started chan struct{} // closed once ctx is set
	ctx     context.Context

	limits semaphore.Set[string] // by kind of job and disk

	mu     sync.Mutex
	byCopy map[string]*transfer // by name of the ImageCopy
	wg     sync.WaitGroup
	done   bool
}

func newTransferSet(parallel int, tick time.Duration) *transferSet {
	return &transferSet{wake: make(chan event.GenericEvent, 16), slots: make(chan struct{}, parallel), tick: tick,
		started: make(chan struct{}), byCopy: map[string]*transfer{}}
}

// Start runs until ctx and then all transfers end.
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

// NeedLeaderElection is false: every node runs its own transfers.
func (m *transferSet) NeedLeaderElection() bool { return false }

// transfer is one job for an ImageCopy: an import, a copy, a verification or the making of digests.
type transfer struct {
	object types.UID // of the ImageCopy
	from   api.UID   // Spec.From of the ImageCopy
	source string    // for metrics
	token  string    // of the verification that the user asked for before the start
	cancel context.CancelFunc
	ended  chan struct{} // closed at the end, after got and err are set
	begun  time.Time
	got    importer.Result
	err    error

	slots chan struct{} // of the transferSet
	holds bool          // a slot; the goroutine of the work has it

	progress importer.Progress
	mu       sync.Mutex
	state    api.ImageState                     // before the first byte: pending or starting; then in-progress
	url      string                             // for the sender of an upload
	readable readableLayer                      // of a restore, once its layer can be read
	problem  func() (text string, waiting bool) // of a restore's layer; nil: no restore
	rateFrom ratePoint
	estimate api.ByteProgress // the last one
}

// ratePoint is when the first bytes were seen, from which the rate of a transfer counts: a restore continues with
// bytes of an earlier process.
type ratePoint struct {
	at   time.Time // zero: none yet
	done int64
}

// takeSlot is a slotFunc.
func (t *transfer) takeSlot(ctx context.Context) error {
	select {
	case t.slots <- struct{}{}:
		t.holds = true
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *transfer) releaseSlot() {
	if t.holds {
		<-t.slots
	}
	t.holds = false
}

// pause calls wait, and leaves the slot to other transfers meanwhile.
func (t *transfer) pause(ctx context.Context, wait func(context.Context)) error {
	t.releaseSlot()
	wait(ctx)
	return t.takeSlot(ctx)
}

// readableLayer are the facts of a layer that can be read before its restore has finished.
type readableLayer struct {
	digest string // empty: the layer cannot be read
	size   int64
	why    string // why it cannot be read; empty: no reason to tell
}

func (t *transfer) isRunning() bool {
	select {
	case <-t.ended:
		return false
	default:
		return true
	}
}

// setState sets the state before the first byte arrives.
func (t *transfer) setState(state api.ImageState, url string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.state, t.url = state, url
}

// transferState is the visible state of a running transfer.
type transferState struct {
	state    api.ImageState
	percent  int32
	bytes    api.ByteProgress
	url      string
	readable readableLayer
	problem  string
	waiting  bool // the transfer waits for a store, and nobody knows for how long
}

// setRestoring notes a restore, and its layer once the layer can be read.
func (t *transfer) setRestoring(r readableLayer, problem func() (string, bool)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.readable, t.problem = r, problem
}

func (t *transfer) currentState() transferState {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := transferState{state: t.state, url: t.url, readable: t.readable}
	if t.problem != nil {
		if s.problem, s.waiting = t.problem(); !s.waiting && s.readable.digest == "" {
			s.problem = s.readable.why // it has no readers
		}
	}
	if s.state == api.ImageInProgress {
		s.state, s.percent, s.bytes.BytesDone, s.bytes.BytesTotal = t.progress.Snapshot()
		if !s.waiting { // nobody knows the end of a transfer that waits
			t.estimateEnd(&s.bytes, time.Now())
		}
	}
	return s
}

// estimateEnd estimates the end of the transfer. The estimate changes with the bytes alone: each other one would be a
// write of the status. The caller has t.mu.
func (t *transfer) estimateEnd(bytes *api.ByteProgress, now time.Time) {
	switch {
	case t.rateFrom.at.IsZero() || bytes.BytesDone < t.rateFrom.done:
		t.rateFrom, t.estimate = ratePoint{now, bytes.BytesDone}, api.ByteProgress{}
	case bytes.BytesDone != t.estimate.BytesDone:
		t.estimate = *bytes
		t.estimate.EstimatedEnd = api.EstimateEnd(t.rateFrom.at, now, t.rateFrom.done, bytes.BytesDone, bytes.BytesTotal)
	}
	bytes.EstimatedEnd = t.estimate.EstimatedEnd
}

// get returns the transfer of an ImageCopy, running or ended, or nil.
func (m *transferSet) get(name string) *transfer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.byCopy[name]
}

// forgetEnded forgets an ended transfer.
func (m *transferSet) forgetEnded(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if t := m.byCopy[name]; t != nil && !t.isRunning() {
		delete(m.byCopy, name)
	}
}

// startTransfer starts a transfer for an ImageCopy.
func (m *transferSet) startTransfer(ctx context.Context, copy *api.ImageCopy, source string, work transferFunc) error {
	select {
	case <-m.started:
	case <-ctx.Done():
		return ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done {
		return context.Canceled
	}
	if t := m.byCopy[copy.Name]; t != nil && t.isRunning() {
		return api.Errorf(api.Busy, "a transfer for %s is in progress", copy.Name)
	}
	ctx, cancel := context.WithCancel(m.ctx)
	t := &transfer{object: copy.UID, from: copy.Spec.From, source: source, token: copy.Spec.Verify, cancel: cancel,
		ended: make(chan struct{}), begun: time.Now(), state: api.ImagePending, slots: m.slots}
	m.byCopy[copy.Name] = t
	ev := event.GenericEvent{Object: &api.ImageCopy{ObjectMeta: *copy.ObjectMeta.DeepCopy()}}
	m.wg.Go(func() { m.runTransfer(ctx, t, ev, work) })
	return nil
}

// runTransfer owns one transfer: it wakes the reconciler after progress, at most once per tick, and after the end.
func (m *transferSet) runTransfer(ctx context.Context, t *transfer, ev event.GenericEvent, work transferFunc) {
	defer t.cancel()
	transfersRunning.Inc()
	defer transfersRunning.Dec()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer t.releaseSlot()
		t.got, t.err = work(ctx, t, t.takeSlot)
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
			if now := t.currentState(); now != last {
				last = now
				m.wakeReconciler(ctx, ev)
			}
		}
		_, _, done, _ := t.progress.Snapshot()
		transferBytes.WithLabelValues(t.source).Add(float64(max(done-counted, 0))) // a restore may count again from 0
		counted = max(done, counted)
	}
	result := "ok"
	switch {
	case errors.Is(t.err, context.Canceled):
		result = "cancelled"
	case t.err != nil:
		result = api.KindOf(t.err).String()
	}
	transferSeconds.WithLabelValues(t.source, result).Observe(time.Since(t.begun).Seconds())
	close(t.ended)
	m.wakeReconciler(m.ctx, ev)
}

// wakeReconciler wakes the reconciler of an ImageCopy, unless ctx ends first.
func (m *transferSet) wakeReconciler(ctx context.Context, ev event.GenericEvent) {
	select {
	case m.wake <- ev:
	case <-ctx.Done():
	}
}
