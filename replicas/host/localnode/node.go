package localnode

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/disks"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/host/volumelock"
)

// ResumePause is the pause between two tries to resume a device, and before a reconciler looks again at a volume whose
// device is being resumed.
const ResumePause = time.Second

// Node is the node of this process.
type Node struct {
	Name    string
	Log     *slog.Logger
	Disks   *disks.Registry
	Locks   *volumelock.Locks
	Threads *iothreads.Threads

	Client client.Client
	Reader client.Reader
	Events events.EventRecorder

	reached atomic.Bool
}

// Use gives the node the clients of a manager. APIReached follows.
func (n *Node) Use(mgr ctrl.Manager) {
	n.Client, n.Reader = mgr.GetClient(), sureReader{mgr.GetAPIReader()}
	n.Events = mgr.GetEventRecorder("drover-data")
}

// ReachedAPI notes that the caches have synced. The manager starts reconcilers after that: each calls ReachedAPI.
func (n *Node) ReachedAPI() { n.reached.Store(true) }

// APIReached reports whether the caches have synced. Before that a read of Client waits for the API.
func (n *Node) APIReached() bool { return n.reached.Load() }

// Setting is the value of a numeric setting.
func (n *Node) Setting(ctx context.Context, name string) int64 {
	var s api.Setting
	text := api.Settings[name]
	if err := n.Client.Get(ctx, client.ObjectKey{Name: name}, &s); err == nil {
		text = s.Value
	}
	value, err := strconv.ParseInt(text, 10, 64)
	if err != nil || value < 0 {
		value, _ = strconv.ParseInt(api.Settings[name], 10, 64)
	}
	return value
}

// Enabled reports whether a volume's own choice, "enabled" or "disabled", or else a setting says yes.
func (n *Node) Enabled(ctx context.Context, choice, setting string) bool {
	switch choice {
	case "enabled":
		return true
	case "disabled":
		return false
	}
	var s api.Setting
	if err := n.Client.Get(ctx, client.ObjectKey{Name: setting}, &s); err == nil {
		return s.Value == "true"
	}
	return api.Settings[setting] == "true"
}

// CopiesAtOnce is how many replicas this node copies or compares as a whole at once.
func (n *Node) CopiesAtOnce(ctx context.Context) int {
	return max(int(n.Setting(ctx, "concurrent-replica-copies-per-node")), 1)
}

// Silent reports whether a node has no recent heartbeat. This node is never silent.
func (n *Node) Silent(ctx context.Context, node string) (bool, error) {
	if node == n.Name {
		return false, nil
	}
	var o api.Node
	if err := n.Client.Get(ctx, client.ObjectKey{Name: node}, &o); apierrors.IsNotFound(err) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	return time.Since(o.Status.Heartbeat.Time) > o.SilentAfter(), nil
}

// SilentAfter is how old a heartbeat may be, of nodes like this one.
func (n *Node) SilentAfter(ctx context.Context) time.Duration {
	var o api.Node
	_ = n.Client.Get(ctx, client.ObjectKey{Name: n.Name}, &o) // else the default
	return o.SilentAfter()
}

// ResponsibleNode is the node that cuts and removes the snapshots of a volume: the node of the attachment, else the
// node of the first member whose node is not silent.
func (n *Node) ResponsibleNode(ctx context.Context, v *api.Volume) (node string, attached bool, err error) {
	var a api.Attachment
	err = n.Client.Get(ctx, client.ObjectKey{Name: v.Name}, &a)
	if err == nil {
		return a.Spec.Node, true, nil
	}
	if !apierrors.IsNotFound(err) {
		return "", false, err
	}
	var list api.ReplicaList
	if err := n.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return "", false, err
	}
	for _, name := range v.Status.Members {
		i := slices.IndexFunc(list.Items, func(r api.Replica) bool { return r.Name == name })
		if i < 0 {
			continue
		}
		if silent, err := n.Silent(ctx, list.Items[i].Spec.Node); err != nil {
			return "", false, err
		} else if !silent {
			return list.Items[i].Spec.Node, false, nil
		}
	}
	return "", false, nil
}

// MayBecomeResponsible reports whether this node could become the responsible node of a volume.
func (n *Node) MayBecomeResponsible(ctx context.Context, v *api.Volume) bool {
	if len(v.Status.Members) < 2 || n.Client.Get(ctx, client.ObjectKey{Name: v.Name}, &api.Attachment{}) == nil {
		return false
	}
	r, err := n.MemberOn(ctx, v, n.Name)
	return err == nil && r != nil
}

// MemberOn is a volume's member on a node; the node "" is any. Nil: the volume has no member there.
func (n *Node) MemberOn(ctx context.Context, v *api.Volume, node string) (*api.Replica, error) {
	var list api.ReplicaList
	if err := n.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return nil, err
	}
	for i := range list.Items {
		r := &list.Items[i]
		if r.Spec.VolumeUID == v.Status.UID && (node == "" || r.Spec.Node == node) &&
			slices.Contains(v.Status.Members, r.Name) {
			return r, nil
		}
	}
	return nil, nil
}

// DiskForgotten reports whether the node has given up a disk: the Node does not name the disk any more, or a user
// took the disk out of the spec and the disk is not ready.
func (n *Node) DiskForgotten(ctx context.Context, uid api.UID) (bool, error) {
	var o api.Node
	if err := n.Client.Get(ctx, client.ObjectKey{Name: n.Name}, &o); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	return !slices.ContainsFunc(o.Status.Disks, func(s api.DiskStatus) bool {
		wanted := s.Ready || slices.ContainsFunc(o.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == s.Path })
		return s.UID == uid && wanted || s.UID == ""
	}), nil
}

// MembersChanged lets the changes of a volume pass on which replicas and snapshots depend.
func MembersChanged(old, now client.Object) bool {
	a, b := old.(*api.Volume), now.(*api.Volume)
	return !slices.Equal(a.Status.Members, b.Status.Members) || !a.DeletionTimestamp.Equal(b.DeletionTimestamp) ||
		meta.IsStatusConditionTrue(a.Status.Conditions, api.ConditionKept) !=
			meta.IsStatusConditionTrue(b.Status.Conditions, api.ConditionKept)
}

// OfNode lets objects of this node pass; nodeOf is the node of an object.
func (n *Node) OfNode(nodeOf func(client.Object) string) builder.Predicates {
	return builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool { return nodeOf(o) == n.Name }))
}
