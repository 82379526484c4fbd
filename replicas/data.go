package replicas

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/block/pace"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/disks"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/attach"
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

// Data is the data role of a node. Data connects the owners below package host, and has no state but theirs.
//
//	d := NewData(...); d.Resume(ctx); SetupData(mgr, d); mgr.Start(ctx); d.Close()
type Data struct {
	*localnode.Node
	Heartbeat time.Duration // of the used bytes

	workers     *maintain.Workers // of the two below
	mergeWorker *maintain.MergeWorker
	scrubber    *maintain.Scrubber

	remote      *remote.Server
	layers      *remote.Layers
	replicas    *replica.Replicas
	snapshots   *snapshot.Snapshots
	attachments *attach.Attachments
	watch       *engine.Watch
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
	d := &Data{Node: node, Heartbeat: o.Heartbeat, workers: maintain.NewWorkers()}
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
	d.remote, err = remote.New(remote.Options{Node: o.Node, Identity: o.Peers.Identity, Listener: o.Peers.Listener,
		Places: places, Host: served{d}, Disks: node.Disks, Threads: node.Threads, Locks: node.Locks, Watch: d.watch,
		Log: o.Log})
	if err != nil {
		d.watch.Close()
		return nil, errors.Join(err, node.Threads.Close())
	}
	d.attachments = attach.New(attach.Options{Node: node, Host: o.Host, Merges: d.mergeWorker, Remote: d.remote,
		Watch: d.watch})
	d.snapshots = snapshot.New(snapshot.Options{Node: node, Merges: d.mergeWorker, Attachments: d.attachments,
		Replicas: served{d}})
	d.replicas = replica.New(replica.Options{Node: node, Merges: d.mergeWorker, Scrubs: d.scrubber, Remote: d.remote,
		Layers: d.layers, Attachments: d.attachments, Snapshots: d.snapshots})
	d.attachments.Connect(d.replicas, d.snapshots)
	d.remote.Serve() // calls the owners
	return d, nil
}

// Resume resumes the devices that the process before left; see attach.Attachments.
func (d *Data) Resume(ctx context.Context) error { return d.attachments.Resume(ctx) }

// GuestIO counts the requests that volumes attached to this node have answered, and replicas of this node to other
// nodes.
func (d *Data) GuestIO() pace.GuestIO { return d.attachments.GuestIO().Add(d.remote.GuestIO()) }

// Close stops serving, leaves the devices to the holder for the next process, and ends everything else. The manager
// must have stopped.
func (d *Data) Close() error {
	d.replicas.Close()
	d.workers.Close()
	if err := d.attachments.Stop(); err != nil {
		return err
	}
	waiting, err := d.attachments.Close()
	if waiting += d.watch.Waits(); waiting > 0 {
		// The kernel still has requests of these, and the I/O threads cannot end before.
		return errors.Join(err, d.remote.Close(), api.Errorf(api.Unavailable,
			"%d replicas are left as they are: their disks do not answer", waiting))
	}
	d.watch.Close()
	return errors.Join(err, d.remote.Close(), d.Disks.Close(), d.Threads.Close(), d.layers.Close())
}

// SetupData adds the reconcilers of the data role to mgr.
func SetupData(mgr ctrl.Manager, d *Data) error {
	d.Use(mgr)
	d.scrubber.Use(d.Client, d.Events)
	d.remote.Use(d.Client, d.Reader, d.Events)
	if err := watch.AddIndexes(mgr); err != nil {
		return err
	}
	opts := controller.Options{MaxConcurrentReconciles: 8, NeedLeaderElection: new(bool),
		RateLimiter: backlog.RateLimiter(),
		NewQueue:    backlog.New}
	if err := d.replicas.Setup(mgr, opts); err != nil {
		return err
	}
	if err := d.attachments.Setup(mgr, opts); err != nil {
		return err
	}
	if err := d.snapshots.Setup(mgr, opts); err != nil {
		return err
	}
	if err := mgr.Add(manager.RunnableFunc(d.remote.Announce)); err != nil {
		return err
	}
	return mgr.Add(manager.RunnableFunc(d.beat))
}
