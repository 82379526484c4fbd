package replicas

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/engine"
)

// DataOptions say what NewData needs.
type DataOptions struct {
	Node string
	Host *device.Host
	// Loops is how many I/O threads share the volumes; 0: one per CPU, at least two.
	Loops int
	// Instance is that of NodeOptions.
	Instance  string
	Heartbeat time.Duration // of the used bytes; 0: 30 s
	Log       *slog.Logger
}

// Data is the data role of a node: its replicas and the volumes attached there.
//
//	d := NewData(...); d.Resume(ctx); SetupData(mgr, d); mgr.Start(ctx); d.Close()
type Data struct {
	DataOptions
	client client.Client
	reader client.Reader // of the API itself, for compare-and-swap
	events events.EventRecorder
	disks  *Disks

	mu       sync.Mutex
	locks    map[string]*volumeLock
	sessions map[string]*session // by volume name
	loops    []*ioLoop
	made     map[api.UID]bool // replicas known to be on their disk
	listed   map[api.UID]bool // disks whose replicas are in made

	attachments atomic.Pointer[queue]
	pending     waiters // replicas that wait for a disk or an image

	snapshots atomic.Pointer[queue]
	snapWaits waiters              // snapshots that wait for a disk or a device
	lineages  map[api.UID]*lineage // by replica; under mu
	unseen    map[api.UID]bool     // replicas whose snapshots may lack objects; under mu
	untidy    map[string]untidy    // replicas in which layers may be merged, by uid; under mu
	tidier    *tidier
}

// ioLoop is an I/O thread and the number of volumes on it.
type ioLoop struct {
	*uring.Loop
	pool  *engine.Pool
	users int
	done  chan error
}

// ringEntries bounds the submissions of one io_uring_enter, not what is under way.
const ringEntries = 256

// NewData starts the I/O threads.
func NewData(o DataOptions) (*Data, error) {
	if o.Loops == 0 {
		o.Loops = max(2, runtime.NumCPU())
	}
	if o.Heartbeat == 0 {
		o.Heartbeat = heartbeat
	}
	d := &Data{DataOptions: o, disks: newDisks(o.Instance),
		locks: map[string]*volumeLock{}, sessions: map[string]*session{},
		made: map[api.UID]bool{}, listed: map[api.UID]bool{},
		lineages: map[api.UID]*lineage{}, unseen: map[api.UID]bool{}, untidy: map[string]untidy{}, tidier: newTidier()}
	for range o.Loops {
		l, err := uring.New(ringEntries)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("I/O thread: %w", err), d.stopLoops())
		}
		pool, err := engine.NewPool()
		if err != nil {
			l.Close()
			return nil, errors.Join(err, d.stopLoops())
		}
		il := &ioLoop{Loop: l, pool: pool, done: make(chan error, 1)}
		go func() {
			err := l.Run()
			if err != nil {
				o.Log.Error("an I/O thread ended", "err", err)
			}
			il.done <- err
		}()
		d.loops = append(d.loops, il)
	}
	return d, nil
}

func (d *Data) stopLoops() error {
	var errs []error
	for _, l := range d.loops {
		l.Close()
		errs = append(errs, <-l.done)
		l.pool.Close()
	}
	return errors.Join(errs...)
}

// pick takes the I/O thread with the fewest volumes.
func (d *Data) pick() (*ioLoop, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.loops) == 0 {
		return nil, api.Errorf(api.Unavailable, "the data role is stopping")
	}
	best := d.loops[0]
	for _, l := range d.loops {
		if l.users < best.users {
			best = l
		}
	}
	best.users++
	return best, nil
}

func (d *Data) putBack(l *ioLoop) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l.users--
}

// volumeLock serialises what is done with one volume.
type volumeLock struct {
	sync.Mutex
	users int
	yield context.CancelFunc // of who has it and gives way; may be nil
}

// lock takes the lock of a volume; call what it returns to release it.
func (d *Data) lock(volume string) func() {
	d.mu.Lock()
	l := d.locks[volume]
	if l == nil {
		l = &volumeLock{}
		d.locks[volume] = l
	}
	l.users++
	if l.yield != nil {
		l.yield()
	}
	d.mu.Unlock()
	l.Lock()
	return func() {
		l.Unlock()
		d.mu.Lock()
		if l.users--; l.users == 0 {
			delete(d.locks, volume)
		}
		d.mu.Unlock()
	}
}

func (d *Data) session(volume string) *session {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sessions[volume]
}

// keep takes a session with a device into the books.
func (d *Data) keep(s *session) {
	d.mu.Lock()
	d.sessions[s.Volume] = s
	d.made[s.Replica] = true
	d.mu.Unlock()
	s.begin(func() { d.stir(s.Volume) })
}

// forget takes it out again.
func (d *Data) forget(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.sessions, s.Volume)
}

func (d *Data) all() []*session {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := make([]*session, 0, len(d.sessions))
	for _, s := range d.sessions {
		list = append(list, s)
	}
	return list
}

// stir has a volume's Attachment looked at.
func (d *Data) stir(volume string) {
	if q := d.attachments.Load(); q != nil {
		(*q).Add(one(volume)[0])
	}
}

// Close stops serving, leaves the devices to the holder for the next process, and ends everything else. The manager
// must have stopped.
func (d *Data) Close() error {
	d.tidier.close()
	if err := d.Host.Close(); err != nil {
		// Requests are still under way, or wait for room. To end their engines would fail them; the next process does
		// them instead, once this one is gone.
		return fmt.Errorf("devices are left as they are: %w", err)
	}
	var errs []error
	for _, s := range d.all() {
		d.forget(s)
		if err := d.close(s); err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", s.Volume, err))
		}
	}
	errs = append(errs, d.disks.Close(), d.stopLoops())
	return errors.Join(errs...)
}

// SetupData adds the Replica and Attachment loops of the data role to mgr.
func SetupData(mgr ctrl.Manager, d *Data) error {
	d.client, d.reader = mgr.GetClient(), mgr.GetAPIReader()
	d.events = mgr.GetEventRecorder("drover-data")
	if err := index(mgr); err != nil {
		return err
	}
	if err := setupIOMetrics(d); err != nil {
		return err
	}
	node := func(of func(client.Object) string) builder.Predicates {
		return builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool { return of(o) == d.Node }))
	}
	waiting := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return d.pending.requests()
	})
	opts := controller.Options{MaxConcurrentReconciles: 8, NeedLeaderElection: new(bool), RateLimiter: limiter()}
	err := ctrl.NewControllerManagedBy(mgr).Named("replica").
		For(&api.Replica{}, node(func(o client.Object) string { return o.(*api.Replica).Spec.Node })).
		Watches(&api.ImageCopy{}, waiting, node(func(o client.Object) string { return o.(*api.ImageCopy).Spec.Node })).
		Watches(&api.Node{}, waiting, node(client.Object.GetName), when(nodeMatters)).
		Watches(&api.Volume{}, handler.EnqueueRequestsFromMapFunc(d.unseenOf), when(membersMatter)).
		WithOptions(opts).Complete(&replicaLoop{d})
	if err != nil {
		return err
	}
	mine := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		return d.attachmentOf(ctx, o)
	})
	err = ctrl.NewControllerManagedBy(mgr).Named("attachment").
		For(&api.Attachment{}, node(func(o client.Object) string { return o.(*api.Attachment).Spec.Node })).
		Watches(&api.Volume{}, mine, when(volumeMatters)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(d.unready),
			node(client.Object.GetName), when(nodeMatters)).
		WatchesRawSource(source.Func(func(_ context.Context, q queue) error {
			d.attachments.Store(&q)
			for _, s := range d.all() { // resumed ones, in case their Attachment is gone
				q.Add(one(s.Volume)[0])
			}
			return nil
		})).
		WithOptions(opts).Complete(&attachmentLoop{d})
	if err != nil {
		return err
	}
	if err := d.setupSnapshots(mgr, opts); err != nil {
		return err
	}
	return mgr.Add(manager.RunnableFunc(d.beat))
}

// attachmentOf wakes the Attachment of a volume if it is one of this node that is not ready.
func (d *Data) attachmentOf(ctx context.Context, o client.Object) []reconcile.Request {
	var a api.Attachment
	if d.client.Get(ctx, client.ObjectKey{Name: o.GetName()}, &a) != nil || a.Spec.Node != d.Node {
		return nil
	}
	return one(a.Name)
}

// unready wakes the Attachments that wait for the node's disks, to come or to go.
func (d *Data) unready(ctx context.Context, _ client.Object) []reconcile.Request {
	var list api.AttachmentList
	if err := d.client.List(ctx, &list); err != nil {
		d.Log.Error("attachments cannot be listed", "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if a := &list.Items[i]; a.Spec.Node == d.Node && (!a.Status.Ready || a.DeletionTimestamp != nil) {
			all = append(all, one(a.Name)...)
		}
	}
	return all
}

// volumeMatters tells whether a volume's change can matter to its Attachment.
func volumeMatters(old, now client.Object) bool {
	x, y := old.(*api.Volume), now.(*api.Volume)
	a, b := x.Status, y.Status
	if x.Generation != y.Generation || !maps.Equal(x.Annotations, y.Annotations) || !maps.Equal(x.Labels, y.Labels) {
		return true // the disk keeps a record of it
	}
	return a.Epoch != b.Epoch || a.EngineNode != b.EngineNode || len(a.Members) != len(b.Members) || a.UID != b.UID
}

// waiters are names of objects to be looked at when something has changed.
type waiters struct {
	mu    sync.Mutex
	names map[string]bool
}

func (w *waiters) set(name string, on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.names == nil {
		w.names = map[string]bool{}
	}
	if on {
		w.names[name] = true
	} else {
		delete(w.names, name)
	}
}

func (w *waiters) requests() []reconcile.Request {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]reconcile.Request, 0, len(w.names))
	for name := range w.names {
		all = append(all, one(name)...)
	}
	return all
}
