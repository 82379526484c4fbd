package disks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// Options describe this machine to Setup.
type Options struct {
	Name string
	// Disks are added once to the Node's spec, unless the spec has their paths.
	Disks     []api.DiskSpec
	Addresses []string
	// LayerAddress is the address at which this node serves its layers to other nodes; empty: the node serves none.
	LayerAddress string
	Version      string
	Resend       bool          // the kernel can hand devices over to a new data process
	Heartbeat    time.Duration // whole seconds; 0: 10 s
	// GoneAfter is how long a path lacks its disk until the status says so: after a boot a mount can be late. 0: a minute
	GoneAfter time.Duration
	Log       *slog.Logger
	Registry  RegistryOptions
}

// Times of garbage collection on a disk.
const (
	collectEvery = time.Hour
	collectGrace = time.Hour
)

// nodeReconciler keeps the Node object of this machine and the registry's open disks in step.
type nodeReconciler struct {
	Options
	client     client.Client
	events     events.EventRecorder
	disks      *Registry
	kernel     string
	collectors sync.WaitGroup
	collected  map[api.UID]time.Time // start of the last garbage collection of a disk; the reconciler's own
	missed     map[string]time.Time  // since when a path lacks its disk; the reconciler's own
}

// Setup adds the reconciler of this machine's Node to mgr, whose cache has the indexes of api/watch. The registry has
// open disks after the first reconcile; the caller closes it after the manager has stopped.
func Setup(mgr ctrl.Manager, o Options) (*Registry, error) {
	if o.Heartbeat == 0 {
		o.Heartbeat = api.DefaultHeartbeat
	}
	if o.GoneAfter == 0 {
		o.GoneAfter = time.Minute
	}
	for _, d := range o.Disks {
		_ = os.MkdirAll(d.Path, 0o700) // the disk's status reports a failure
	}
	n := &nodeReconciler{Options: o, client: mgr.GetClient(), events: mgr.GetEventRecorder("drover-node"),
		disks: NewRegistry(o.Registry), kernel: kernelRelease(),
		collected: map[api.UID]time.Time{}, missed: map[string]time.Time{}}
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		<-ctx.Done()
		n.collectors.Wait()
		return nil
	})); err != nil {
		return nil, err
	}
	mine := predicate.NewPredicateFuncs(func(obj client.Object) bool { return obj.GetName() == o.Name })
	err := ctrl.NewControllerManagedBy(mgr).Named("node").
		For(&api.Node{}, builder.WithPredicates(mine, predicate.GenerationChangedPredicate{})).
		WatchesRawSource(source.Func(func(_ context.Context, q backlog.Queue) error {
			q.Add(watch.Request(o.Name)) // the Node may not exist yet
			return nil
		})).
		WithOptions(controller.Options{NeedLeaderElection: new(bool), RateLimiter: backlog.RateLimiter(),
			NewQueue: backlog.New}).
		Complete(n)
	return n.disks, err
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Reconcile probes every disk and writes the Node's status, once per heartbeat and after each change of the spec.
func (n *nodeReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var node api.Node
	err := n.client.Get(ctx, req.NamespacedName, &node)
	switch {
	case apierrors.IsNotFound(err):
		node = api.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}, Spec: api.NodeSpec{Disks: n.Disks}}
		if err := n.client.Create(ctx, &node); err != nil && !apierrors.IsAlreadyExists(err) {
			return reconcile.Result{}, fmt.Errorf("node %s: %w", n.Name, err)
		}
		return reconcile.Result{RequeueAfter: n.Heartbeat}, nil
	case err != nil:
		return reconcile.Result{}, err
	case node.DeletionTimestamp != nil:
		return reconcile.Result{}, nil
	}
	if added, err := n.addDisks(ctx, &node); added || err != nil {
		return reconcile.Result{RequeueAfter: n.Heartbeat}, watch.IgnoreConflict(err)
	}
	old := node.DeepCopy()
	if err := n.probeDisks(ctx, &node); apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: 100 * time.Millisecond}, nil
	} else if err != nil {
		return reconcile.Result{}, err
	}
	if !equality.Semantic.DeepEqual(old.Status, node.Status) {
		if err := n.client.Status().Update(ctx, &node); err != nil {
			if apierrors.IsConflict(err) { // the cache is old; its next event may not pass the predicate
				return reconcile.Result{RequeueAfter: 100 * time.Millisecond}, nil
			}
			return reconcile.Result{}, fmt.Errorf("status of node %s: %w", n.Name, err)
		}
	}
	return reconcile.Result{RequeueAfter: n.Heartbeat}, nil
}

// addDisks adds the disks of the command line to the spec.
func (n *nodeReconciler) addDisks(ctx context.Context, node *api.Node) (bool, error) {
	added := false
	for _, d := range n.Disks {
		if !slices.ContainsFunc(node.Spec.Disks, func(h api.DiskSpec) bool { return h.Path == d.Path }) {
			node.Spec.Disks = append(node.Spec.Disks, d)
			added = true
		}
	}
	n.Disks = nil // once: a user may remove a disk later
	if !added {
		return false, nil
	}
	if err := n.client.Update(ctx, node); err != nil {
		return true, fmt.Errorf("node %s: %w", n.Name, err)
	}
	return true, nil
}

// probeDisks opens the disks and computes the status.
func (n *nodeReconciler) probeDisks(ctx context.Context, node *api.Node) error {
	st := &node.Status
	was := map[string]api.DiskStatus{}
	for _, d := range st.Disks {
		was[d.Path] = d
	}
	st.Heartbeat, st.HeartbeatSeconds = metav1.Now(), int32(n.Heartbeat/time.Second)
	st.Addresses, st.Kernel, st.Version, st.Resend = n.Addresses, n.kernel, n.Version, n.Resend
	st.LayerAddress = n.LayerAddress
	st.Disks = nil
	paths := map[string]bool{}
	add := func(d api.DiskStatus) {
		paths[d.Path] = true
		st.Disks = append(st.Disks, d)
		n.reportReady(node, d, was)
	}
	for _, spec := range node.Spec.Disks {
		d := n.probeDisk(ctx, spec, was[spec.Path].UID)
		if was[spec.Path].UID == "" && d.Ready {
			if err := n.takeSettings(ctx, node, d); err != nil {
				return err // the status does not name the disk yet, so the next reconcile retries
			}
		}
		add(d)
	}
	// The node serves a disk that a user removed from the spec until the last replica and image copy have left the disk.
	for path, d := range was {
		if paths[path] || d.UID == "" {
			continue
		}
		left, err := n.leftOn(ctx, d.UID)
		if err != nil {
			return err
		}
		if left != "" {
			d = n.probeDisk(ctx, api.DiskSpec{Path: path}, d.UID)
			d.Message = "the disk is to be removed, but " + left + " on it"
			add(d)
		}
	}
	st.Disks = mountedElsewhere(st.Disks, node.Spec.Disks)
	if err := n.reportMoved(ctx, st.Disks); err != nil {
		return err
	}
	n.disks.keepOnly(paths)
	setReady(node)
	return nil
}

// reportReady emits an event when a disk becomes ready or stops to be ready.
func (n *nodeReconciler) reportReady(node *api.Node, d api.DiskStatus, was map[string]api.DiskStatus) {
	old, seen := was[d.Path]
	switch {
	case d.Ready == old.Ready && (seen || d.Ready):
	case d.Ready:
		n.events.Eventf(node, nil, "Normal", "DiskReady", "Look", "disk %s: ready, %s free", d.Path,
			api.SizeText(d.Available))
	default:
		n.events.Eventf(node, nil, "Warning", "DiskNotReady", "Look", "%s", d.Message)
	}
}

// setReady sums the ready disks up and sets the Ready condition.
func setReady(node *api.Node) {
	st := &node.Status
	var capacity, available int64
	ready := 0
	for _, d := range st.Disks {
		if d.Ready {
			ready++
			capacity += d.Capacity
			available += d.Available
		}
	}
	st.DiskCount = int32(len(st.Disks))
	st.Capacity, st.Available = api.SizeText(capacity), api.SizeText(available)
	switch {
	case len(st.Disks) == 0:
		api.SetCondition(&st.Conditions, node.Generation, api.ConditionReady, true, "NoDisks", "the node has no disks")
	case ready < len(st.Disks):
		api.SetCondition(&st.Conditions, node.Generation, api.ConditionReady, ready > 0, "DiskNotReady",
			fmt.Sprintf("%d of %d disks are ready", ready, len(st.Disks)))
	default:
		api.SetCondition(&st.Conditions, node.Generation, api.ConditionReady, true, "Ready", "")
	}
}

// mountedElsewhere keeps one entry for a disk that is now mounted at another path. An old path that is still in the
// spec keeps an entry with an explanation, after all others, because a search by UID takes the first match.
func mountedElsewhere(list []api.DiskStatus, spec []api.DiskSpec) []api.DiskStatus {
	slices.SortFunc(list, func(a, b api.DiskStatus) int { return cmp.Compare(a.Path, b.Path) })
	var first, moved []api.DiskStatus
	for _, d := range list {
		at := slices.IndexFunc(list, func(o api.DiskStatus) bool { return o.UID == d.UID && o.UID != "" && o.Ready })
		switch {
		case d.Ready || at < 0:
			first = append(first, d)
		case slices.ContainsFunc(spec, func(s api.DiskSpec) bool { return s.Path == d.Path }):
			d.Message = "the disk is at " + list[at].Path + " now: `drover disk remove " + d.Path + "`"
			moved = append(moved, d)
		}
	}
	return append(first, moved...)
}

// probeDisk opens a disk and returns its status.
func (n *nodeReconciler) probeDisk(ctx context.Context, spec api.DiskSpec, known api.UID) api.DiskStatus {
	st := api.DiskStatus{Path: spec.Path, UID: known}
	d, err := n.disks.Open(ctx, spec.Path, known, true)
	if err != nil {
		if known != "" && (api.Is(err, api.NotFound) || errors.Is(err, errOtherDisk)) {
			if n.missed[spec.Path].IsZero() {
				n.missed[spec.Path] = time.Now()
			}
			st.Gone = time.Since(n.missed[spec.Path]) >= n.GoneAfter
		}
		if known != "" && api.Is(err, api.NotFound) {
			err = fmt.Errorf("disk %s: its file system is not mounted, or its files were removed: %w", spec.Path, err)
		}
		st.Message = err.Error()
		return st
	}
	delete(n.missed, spec.Path)
	st.UID = api.UID(d.UID())
	capacity, available, fsType, err := d.Statfs()
	if err != nil {
		st.Message = err.Error()
		return st
	}
	st.Ready, st.FSType = true, fsType
	st.Capacity, st.Available = capacity, max(available-spec.ReservedBytes, 0)
	if time.Since(n.collected[st.UID]) > collectEvery {
		n.collected[st.UID] = time.Now()
		n.collectors.Add(1)
		go func() {
			defer n.collectors.Done()
			if err := d.Collect(ctx, collectGrace); err != nil && ctx.Err() == nil {
				n.Log.Warn("disk cannot be put in order", "disk", spec.Path, "err", err)
			}
		}()
	}
	return st
}

// leftOn counts in words the replicas and image copies on a disk; empty: none.
func (n *nodeReconciler) leftOn(ctx context.Context, uid api.UID) (string, error) {
	var reps api.ReplicaList
	if err := n.client.List(ctx, &reps, client.MatchingFields{watch.ByDisk: string(uid)}); err != nil {
		return "", err
	}
	var copies api.ImageCopyList
	if err := n.client.List(ctx, &copies, client.MatchingFields{watch.ByDisk: string(uid)}); err != nil {
		return "", err
	}
	// A disk that has moved holds objects of another node.
	reps.Items = slices.DeleteFunc(reps.Items, func(r api.Replica) bool { return r.Spec.Node != n.Name })
	copies.Items = slices.DeleteFunc(copies.Items, func(c api.ImageCopy) bool { return c.Spec.Node != n.Name })
	if len(reps.Items)+len(copies.Items) == 0 {
		return "", nil
	}
	return fmt.Sprintf("%d replicas and %d image copies are", len(reps.Items), len(copies.Items)), nil
}
