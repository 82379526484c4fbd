package replicas

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/block/semaphore"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/disks"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/attempts"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/maintain"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/host/replica"
	"drover.io/drover/replicas/host/snapshot"
	"drover.io/drover/replicas/host/volumelock"
)

// DataOptions are the options of NewData.
type DataOptions struct {
	Node string
	Host *device.Host
	// Loops is how many I/O threads share the volumes; 0: one per CPU, at least two.
	Loops int
	// Instance is the instance of disks.RegistryOptions.
	Instance  string
	Heartbeat time.Duration // of the used bytes; 0: 30 s
	Peers     PeerOptions
	Log       *slog.Logger
}

// Data is the data role of a node: its replicas and the volumes attached there.
//
//	d := NewData(...); d.Resume(ctx); SetupData(mgr, d); mgr.Start(ctx); d.Close()
type Data struct {
	*localnode.Node
	Host      *device.Host
	Heartbeat time.Duration // of the used bytes

	mu       sync.Mutex
	sessions map[string]*session        // by volume name
	resuming map[string]bool            // volumes whose devices are being resumed
	left     map[*session]chan struct{} // sessions that end in the background; closed at the end
	resumed  chan struct{}              // closed when all devices are resumed, or have failed
	closing  chan struct{}              // closed when Close begins

	attachments atomic.Pointer[backlog.Queue]

	workers     *maintain.Workers // of the two below, and of trims
	mergeWorker *maintain.MergeWorker
	scrubber    *maintain.Scrubber

	remote    *remote.Server
	layers    *remote.Layers
	replicas  *replica.Replicas
	snapshots *snapshot.Snapshots
	upkeep    attempts.Log[string]  // rebuilds of detached volumes
	watch     *engine.Watch         // of members, here and on other nodes
	rebuilds  semaphore.Set[string] // of replicas that are compared as a whole: key "full"
}

// usedEvery is how often the used bytes of attached volumes are reported.
const usedEvery = 30 * time.Second

// NewData starts the I/O threads.
func NewData(o DataOptions) (*Data, error) {
	if o.Loops == 0 {
		o.Loops = max(2, runtime.NumCPU())
	}
	if o.Heartbeat == 0 {
		o.Heartbeat = usedEvery
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	node := &localnode.Node{Name: o.Node, Log: o.Log, Locks: volumelock.New()}
	d := &Data{Node: node, Host: o.Host, Heartbeat: o.Heartbeat, sessions: map[string]*session{},
		resuming: map[string]bool{}, left: map[*session]chan struct{}{}, resumed: make(chan struct{}),
		closing: make(chan struct{}), workers: maintain.NewWorkers()}
	d.mergeWorker = maintain.NewMergeWorker(maintained{d}, d.workers, o.Log)
	d.scrubber = maintain.NewScrubber(maintained{d}, o.Node, d.workers, o.Log)
	places := remote.NewPlaces(o.Peers.State, o.Log)
	d.layers = remote.NewLayers(node, served{d}, places, o.Peers.Identity)
	node.Disks = disks.NewRegistry(disks.RegistryOptions{Instance: o.Instance, OnDamage: d.scrubber.Damaged,
		Fetch: d.layers.Fetch, Beside: d.layers.Beside})
	var err error
	if node.Threads, err = iothreads.Start(o.Loops, o.Log); err != nil {
		return nil, err
	}
	d.watch = engine.NewWatch()
	d.remote, err = remote.Start(remote.Options{Node: o.Node, Identity: o.Peers.Identity, Listener: o.Peers.Listener,
		Places: places, Host: served{d}, Disks: node.Disks, Threads: node.Threads, Locks: node.Locks, Watch: d.watch,
		Log: o.Log})
	if err != nil {
		d.watch.Close()
		return nil, errors.Join(err, node.Threads.Close())
	}
	d.snapshots = snapshot.New(snapshot.Options{Node: node, Merges: d.mergeWorker, Attachments: attached{d},
		Replicas: served{d}})
	d.replicas = replica.New(replica.Options{Node: node, Merges: d.mergeWorker, Scrubs: d.scrubber, Remote: d.remote,
		Layers: d.layers, Attachments: attached{d}, Snapshots: d.snapshots})
	return d, nil
}

func (d *Data) session(volume string) *session {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sessions[volume]
}

// keep registers a session with a device.
func (d *Data) keep(s *session) {
	d.mu.Lock()
	d.sessions[s.Volume] = s
	d.mu.Unlock()
	if s.Replica != "" {
		d.replicas.Created(s.Replica)
	}
	s.begin(func() { d.stir(s.Volume) })
}

// forget unregisters a session.
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

// stir wakes a volume's Attachment.
func (d *Data) stir(volume string) {
	if q := d.attachments.Load(); q != nil {
		(*q).Add(watch.Request(volume))
	}
}

// Close stops serving, leaves the devices to the holder for the next process, and ends everything else. The manager
// must have stopped.
func (d *Data) Close() error {
	close(d.closing)
	d.replicas.Close()
	d.workers.Close()
	if err := d.awaitResumed(); err != nil {
		return err
	}
	if err := d.Host.Close(); err != nil {
		// Requests are in progress, or wait for room. The end of their engines would fail them; the next process serves
		// the requests, once this process has ended.
		return fmt.Errorf("devices are left as they are: %w", err)
	}
	sessions := d.all()
	errs := make([]error, len(sessions))
	var closing sync.WaitGroup
	for i, s := range sessions {
		d.forget(s)
		closing.Go(func() { // a disk that hangs delays the end once, not once for each of its volumes
			if err := d.close(s); err != nil {
				errs[i] = fmt.Errorf("volume %s: %w", s.Volume, err)
			}
		})
	}
	closing.Wait()
	n := d.awaitLeft() // sessions that are not counted any more may wait for their disks now
	if n += d.watch.Waits(); n > 0 {
		// The kernel still has requests of these, and the I/O threads cannot end before.
		return errors.Join(append(errs, d.remote.Close(), api.Errorf(api.Unavailable,
			"%d replicas are left as they are: their disks do not answer", n))...)
	}
	d.watch.Close()
	errs = append(errs, d.remote.Close(), d.Disks.Close(), d.Threads.Close(), d.layers.Close())
	return errors.Join(errs...)
}

// awaitResumed waits a bounded time for devices that are being resumed.
func (d *Data) awaitResumed() error {
	d.mu.Lock()
	left := len(d.resuming)
	d.mu.Unlock()
	if left == 0 {
		return nil
	}
	late := time.NewTimer(resumeWait)
	defer late.Stop()
	select {
	case <-d.resumed:
		return nil
	case <-late.C:
		return api.Errorf(api.Unavailable, "devices are left as they are: the disks of %d of them do not answer", left)
	}
}

// SetupData adds the Replica and Attachment loops of the data role to mgr. The manager starts loops after the caches
// have synced: whichever loop is first sets d.api.
func SetupData(mgr ctrl.Manager, d *Data) error {
	d.Use(mgr)
	d.scrubber.Use(d.Client, d.Events)
	d.remote.Use(d.Client, d.Reader, d.Events)
	if err := watch.AddIndexes(mgr); err != nil {
		return err
	}
	if err := setupIOMetrics(d); err != nil {
		return err
	}
	opts := controller.Options{MaxConcurrentReconciles: 8, NeedLeaderElection: new(bool),
		RateLimiter: backlog.RateLimiter(),
		NewQueue:    backlog.New}
	if err := d.replicas.Setup(mgr, opts); err != nil {
		return err
	}
	mine := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		return d.attachmentOf(ctx, o)
	})
	err := ctrl.NewControllerManagedBy(mgr).Named("attachment").
		For(&api.Attachment{}, d.OfNode(func(o client.Object) string { return o.(*api.Attachment).Spec.Node })).
		Watches(&api.Volume{}, mine, watch.Updates(volumeMatters)).
		Watches(&api.Replica{}, handler.EnqueueRequestsFromMapFunc(d.replicaChanged), watch.Updates(replicaMatters)).
		Watches(&api.Node{}, handler.EnqueueRequestsFromMapFunc(d.unready),
			d.OfNode(client.Object.GetName), watch.Updates(watch.DisksChanged)).
		WatchesRawSource(source.Func(func(_ context.Context, q backlog.Queue) error {
			d.ReachedAPI()
			d.attachments.Store(&q)
			for _, s := range d.all() { // resumed sessions may have lost their Attachment
				q.Add(watch.Request(s.Volume))
			}
			return nil
		})).
		WithOptions(opts).Complete(&attachmentLoop{d})
	if err != nil {
		return err
	}
	if err := d.snapshots.Setup(mgr, opts); err != nil {
		return err
	}
	if err := mgr.Add(manager.RunnableFunc(d.remote.Announce)); err != nil {
		return err
	}
	if err := mgr.Add(manager.RunnableFunc(d.keepUp)); err != nil {
		return err
	}
	return mgr.Add(manager.RunnableFunc(d.beat))
}

// attachmentOf wakes the Attachment of a volume on this node.
func (d *Data) attachmentOf(ctx context.Context, o client.Object) []reconcile.Request {
	var a api.Attachment
	if d.Client.Get(ctx, client.ObjectKey{Name: o.GetName()}, &a) != nil || a.Spec.Node != d.Name {
		return nil
	}
	return watch.Requests(a.Name)
}

// replicaChanged wakes the rebuild loop of a volume that is attached here, or the Attachment of a volume that is to be
// attached here and may wait for the replica.
func (d *Data) replicaChanged(ctx context.Context, o client.Object) []reconcile.Request {
	volume := o.(*api.Replica).Spec.Volume
	s := d.session(volume)
	if s == nil {
		return d.attachmentOf(ctx, &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume}})
	}
	s.mates.lookSoon()
	return nil
}

// replicaMatters reports whether a replica's change can matter to the volume's engine: the replica can join, is to
// leave, or is damaged.
func replicaMatters(old, now client.Object) bool {
	a, b := old.(*api.Replica), now.(*api.Replica)
	return a.Status.Mode != b.Status.Mode || a.Spec.Leave != b.Spec.Leave ||
		a.DeletionTimestamp.IsZero() != b.DeletionTimestamp.IsZero() || wantsRepair(a) != wantsRepair(b) ||
		!slices.Equal(a.Status.Damage, b.Status.Damage)
}

// unready wakes the Attachments of this node that wait for a disk.
func (d *Data) unready(ctx context.Context, _ client.Object) []reconcile.Request {
	var list api.AttachmentList
	if err := d.Client.List(ctx, &list); err != nil {
		d.Log.Error("attachments cannot be listed", "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if a := &list.Items[i]; a.Spec.Node == d.Name && (!a.Status.Ready || a.DeletionTimestamp != nil) {
			all = append(all, watch.Requests(a.Name)...)
		}
	}
	return all
}

// volumeMatters reports whether a volume's change can matter to its Attachment.
func volumeMatters(old, now client.Object) bool {
	x, y := old.(*api.Volume), now.(*api.Volume)
	a, b := x.Status, y.Status
	if x.Generation != y.Generation || !maps.Equal(x.Annotations, y.Annotations) || !maps.Equal(x.Labels, y.Labels) {
		return true // the disk has a record of the object
	}
	return a.Epoch != b.Epoch || a.EngineNode != b.EngineNode || len(a.Members) != len(b.Members) || a.UID != b.UID
}
