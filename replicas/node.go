package replicas

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
	"drover.io/drover/replicas/device"
)

// NodeOptions say what SetupNode looks after.
type NodeOptions struct {
	Name string
	// Disks are added to the Node's spec where it does not have their path.
	Disks     []api.DiskSpec
	Addresses []string
	// LayerAddress is where this node's layers are served to other nodes; empty: nowhere.
	LayerAddress string
	Version      string
	// Instance tells this Drover from others on the machine, in words; a disk is one instance's. Empty: not checked.
	Instance  string
	Heartbeat time.Duration // whole seconds; 0: 10 s
	// GoneAfter is how long a disk is not at its path until it is told to be gone; at a boot it may be mounted late.
	GoneAfter time.Duration // 0: a minute
	Log       *slog.Logger
}

// Times of the node loop.
const (
	collectEvery = time.Hour
	collectGrace = time.Hour
)

// nodeLoop keeps the Node object of this machine.
type nodeLoop struct {
	NodeOptions
	client  client.Client
	events  events.EventRecorder
	disks   *Disks
	kernel  string
	resend  bool
	collect sync.WaitGroup
	tidied  map[api.UID]time.Time // when a disk was last put in order; the loop's own
	missed  map[string]time.Time  // since when a disk is not at its path; the loop's own
}

// SetupNode adds the loop that makes this machine's Node object true. The disks it opens serve image movers too; they
// are there once the loop has seen the Node. Close them when the manager has stopped.
func SetupNode(mgr ctrl.Manager, o NodeOptions) (*Disks, error) {
	if o.Heartbeat == 0 {
		o.Heartbeat = api.DefaultHeartbeat
	}
	if err := watch.AddIndexes(mgr); err != nil {
		return nil, err
	}
	for _, d := range o.Disks {
		_ = os.MkdirAll(d.Path, 0o700) // else the disk's status tells
	}
	n := &nodeLoop{NodeOptions: o, client: mgr.GetClient(), events: mgr.GetEventRecorder("drover-node"),
		disks: newDisks(o.Instance), kernel: kernelRelease(), resend: device.ResendSupported() == nil,
		tidied: map[api.UID]time.Time{}, missed: map[string]time.Time{}}
	if n.GoneAfter == 0 {
		n.GoneAfter = time.Minute
	}
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		<-ctx.Done()
		n.collect.Wait()
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
		WithOptions(controller.Options{NeedLeaderElection: new(bool), RateLimiter: backlog.RateLimiter(), NewQueue: backlog.New}).
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

// Reconcile looks at every disk and writes the Node's status, now and with every heartbeat.
func (n *nodeLoop) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
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
	if err := n.look(ctx, &node); apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: 100 * time.Millisecond}, nil
	} else if err != nil {
		return reconcile.Result{}, err
	}
	if !equality.Semantic.DeepEqual(old.Status, node.Status) {
		if err := n.client.Status().Update(ctx, &node); err != nil {
			if apierrors.IsConflict(err) { // the cache is behind; its event may be no news to this loop
				return reconcile.Result{RequeueAfter: 100 * time.Millisecond}, nil
			}
			return reconcile.Result{}, fmt.Errorf("status of node %s: %w", n.Name, err)
		}
	}
	return reconcile.Result{RequeueAfter: n.Heartbeat}, nil
}

// addDisks puts the disks of the command line into the spec.
func (n *nodeLoop) addDisks(ctx context.Context, node *api.Node) (bool, error) {
	added := false
	for _, d := range n.Disks {
		if !slices.ContainsFunc(node.Spec.Disks, func(h api.DiskSpec) bool { return h.Path == d.Path }) {
			node.Spec.Disks = append(node.Spec.Disks, d)
			added = true
		}
	}
	n.Disks = nil // once: the user may remove one later
	if !added {
		return false, nil
	}
	if err := n.client.Update(ctx, node); err != nil {
		return true, fmt.Errorf("node %s: %w", n.Name, err)
	}
	return true, nil
}

// look opens the disks and computes the status.
func (n *nodeLoop) look(ctx context.Context, node *api.Node) error {
	st := &node.Status
	was := map[string]api.DiskStatus{}
	for _, d := range st.Disks {
		was[d.Path] = d
	}
	st.Heartbeat, st.HeartbeatSeconds = metav1.Now(), int32(n.Heartbeat/time.Second)
	st.Addresses, st.Kernel, st.Version, st.Resend = n.Addresses, n.kernel, n.Version, n.resend
	st.LayerAddress = n.LayerAddress
	st.Disks = nil
	paths := map[string]bool{}
	var capacity, available int64
	ready := 0
	add := func(d api.DiskStatus) {
		paths[d.Path] = true
		st.Disks = append(st.Disks, d)
		if d.Ready {
			ready++
			capacity += d.Capacity
			available += d.Available
		}
		if old, seen := was[d.Path]; d.Ready != old.Ready || !seen && !d.Ready {
			if d.Ready {
				n.events.Eventf(node, nil, "Normal", "DiskReady", "Look", "disk %s: ready, %s free", d.Path,
					api.SizeText(d.Available))
			} else {
				n.events.Eventf(node, nil, "Warning", "DiskNotReady", "Look", "%s", d.Message)
			}
		}
	}
	for _, spec := range node.Spec.Disks {
		d := n.disk(ctx, spec, was[spec.Path].UID)
		if was[spec.Path].UID == "" && d.Ready {
			if err := n.takeSettings(ctx, node, d); err != nil {
				return err // it is tried again before the disk is known here
			}
		}
		add(d)
	}
	// A disk that was taken out of the spec is served until nothing is on it any more.
	for path, d := range was {
		if paths[path] || d.UID == "" {
			continue
		}
		left, err := n.leftOn(ctx, d.UID)
		if err != nil {
			return err
		}
		if left != "" {
			d = n.disk(ctx, api.DiskSpec{Path: path}, d.UID)
			d.Message = "the disk is to be removed, but " + left + " on it"
			add(d)
		}
	}
	st.Disks = mountedElsewhere(st.Disks, node.Spec.Disks)
	if err := n.tellMoved(ctx, st.Disks); err != nil {
		return err
	}
	n.disks.keep(paths)
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
	return nil
}

// mountedElsewhere has a disk that is mounted at another path now counted there. Where it was it is told as long as the
// user has that path in the spec: after the others, since who looks for a disk by its uid takes the first.
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

// disk is the status of one disk.
func (n *nodeLoop) disk(ctx context.Context, spec api.DiskSpec, known api.UID) api.DiskStatus {
	st := api.DiskStatus{Path: spec.Path, UID: known}
	d, err := n.disks.open(ctx, spec.Path, known, true)
	if err != nil {
		if known != "" && (api.Is(err, api.NotFound) || errors.Is(err, errOtherDisk)) {
			if n.missed[spec.Path].IsZero() {
				n.missed[spec.Path] = time.Now()
			}
			st.Gone = time.Since(n.missed[spec.Path]) >= n.GoneAfter
		}
		if known != "" && api.Is(err, api.NotFound) {
			err = fmt.Errorf("its file system is not mounted, or its files were removed: %w", err)
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
	if time.Since(n.tidied[st.UID]) > collectEvery {
		n.tidied[st.UID] = time.Now()
		n.collect.Add(1)
		go func() {
			defer n.collect.Done()
			if err := d.Collect(ctx, collectGrace); err != nil && ctx.Err() == nil {
				n.Log.Warn("disk cannot be put in order", "disk", spec.Path, "err", err)
			}
		}()
	}
	return st
}

// leftOn tells what is on a disk, in words, or nothing.
func (n *nodeLoop) leftOn(ctx context.Context, uid api.UID) (string, error) {
	var reps api.ReplicaList
	if err := n.client.List(ctx, &reps, client.MatchingFields{watch.ByDisk: string(uid)}); err != nil {
		return "", err
	}
	var copies api.ImageCopyList
	if err := n.client.List(ctx, &copies, client.MatchingFields{watch.ByDisk: string(uid)}); err != nil {
		return "", err
	}
	// Those of another node are there: the disk has moved.
	reps.Items = slices.DeleteFunc(reps.Items, func(r api.Replica) bool { return r.Spec.Node != n.Name })
	copies.Items = slices.DeleteFunc(copies.Items, func(c api.ImageCopy) bool { return c.Spec.Node != n.Name })
	if len(reps.Items)+len(copies.Items) == 0 {
		return "", nil
	}
	return fmt.Sprintf("%d replicas and %d image copies are", len(reps.Items), len(copies.Items)), nil
}
