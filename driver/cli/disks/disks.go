// Package disks finds the disks of nodes, and the objects on a disk, for the commands. For a silent node only the
// heartbeat counts, because the last status of a dead node may call all its disks ready.
//
// Errors of the API server are not explained. The package starts no goroutines.
package disks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
)

// Disk joins the spec and the status of a disk.
type Disk struct {
	Node   string
	Spec   api.DiskSpec
	Status api.DiskStatus
}

// OnNode returns the disks of a node.
func OnNode(n *api.Node) []Disk {
	var out []Disk
	for _, spec := range n.Spec.Disks {
		d := Disk{Node: n.Name, Spec: spec}
		for _, s := range n.Status.Disks {
			if s.Path == spec.Path {
				d.Status = s
			}
		}
		out = append(out, d)
	}
	return out
}

// Find finds a disk by path, UID or the node:path of -o name, on a node or, with node "", anywhere.
func Find(ctx context.Context, c client.Client, node, which string) (Disk, error) {
	if n, path, ok := strings.Cut(which, ":/"); ok && node == "" {
		node, which = n, "/"+path
	}
	var list api.NodeList
	if err := c.List(ctx, &list); err != nil {
		return Disk{}, err
	}
	var found []Disk
	for _, n := range list.Items {
		for _, d := range OnNode(&n) {
			if (node == "" || node == n.Name) && (d.Spec.Path == which || string(d.Status.UID) == which) {
				found = append(found, d)
			}
		}
	}
	switch {
	case len(found) == 0:
		return Disk{}, api.Errorf(api.NotFound, "disk %q does not exist: `drover disk list` shows all", which)
	case len(found) > 1:
		return Disk{}, api.Errorf(api.Invalid, "several nodes have a disk %q: say which with --node, or give its UID", which)
	}
	return found[0], nil
}

// IsSilent reports whether a node's heartbeat is too old for a node that is alive.
func IsSilent(n *api.Node) bool { return time.Since(n.Status.Heartbeat.Time) >= n.SilentAfter() }

// Names returns the names of the volumes and images on a disk.
func Names(ctx context.Context, c client.Client, uid api.UID) (vols, imgs []string, err error) {
	var reps api.ReplicaList
	if err := c.List(ctx, &reps, client.MatchingLabels{api.LabelDisk: string(uid)}); err != nil {
		return nil, nil, err
	}
	for _, r := range reps.Items {
		vols = append(vols, r.Spec.Volume)
	}
	var copies api.ImageCopyList
	if err := c.List(ctx, &copies, client.MatchingLabels{api.LabelDisk: string(uid)}); err != nil {
		return nil, nil, err
	}
	for _, f := range copies.Items {
		imgs = append(imgs, f.Spec.Image)
	}
	return vols, imgs, nil
}

// EvictionRows returns the volumes and images on the evicted disks of a node, each with the reason of its wait.
func EvictionRows(ctx context.Context, c client.Client, n *api.Node) (rows [][]string, err error) {
	disks := map[api.UID]string{}
	for _, d := range OnNode(n) {
		if d.Status.UID != "" && (n.Spec.EvictionRequested || d.Spec.EvictionRequested) {
			disks[d.Status.UID] = d.Spec.Path
		}
	}
	for uid, path := range disks {
		vols, imgs, err := Names(ctx, c, uid)
		if err != nil {
			return nil, err
		}
		for _, name := range vols {
			var v api.Volume
			if err := c.Get(ctx, client.ObjectKey{Name: name}, &v); client.IgnoreNotFound(err) != nil {
				return nil, err
			}
			rows = append(rows, []string{"volume", name, path, waitsFor(v.Status.Conditions)})
		}
		for _, name := range imgs {
			var i api.BackingImage
			if err := c.Get(ctx, client.ObjectKey{Name: name}, &i); client.IgnoreNotFound(err) != nil {
				return nil, err
			}
			rows = append(rows, []string{"image", name, path, waitsFor(i.Status.Conditions)})
		}
	}
	slices.SortFunc(rows, slices.Compare)
	return rows, nil
}

// IsElsewhere reports whether a missing disk is at another path of its node, or on another node, with all its objects.
// The status of a dead node does not count.
func IsElsewhere(ctx context.Context, c client.Client, d Disk, dead bool) (bool, error) {
	var nodes api.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return false, err
	}
	if d.Status.Ready && !dead || d.Status.UID == "" {
		return false, nil
	}
	has := func(n *api.Node) bool {
		return slices.ContainsFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.UID == d.Status.UID && s.Ready })
	}
	moved := !dead && api.DiskMovedTo(nodes.Items, d.Status.UID, d.Node, time.Now()) != ""
	for i := range nodes.Items {
		switch n := &nodes.Items[i]; {
		case !dead && n.Name == d.Node && has(n):
			return true, nil
		case dead && n.Name != d.Node && has(n) && !IsSilent(n):
			moved = true
		}
	}
	if !moved {
		return false, nil
	}
	reps, copies, err := objectsOn(ctx, c, d)
	return len(reps)+len(copies) == 0, err
}

// objectsOn returns the replicas and image copies on a disk.
func objectsOn(ctx context.Context, c client.Client, d Disk) ([]api.Replica, []api.ImageCopy, error) {
	var reps api.ReplicaList
	var copies api.ImageCopyList
	on := client.MatchingLabels{api.LabelDisk: string(d.Status.UID)}
	if err := errors.Join(c.List(ctx, &reps, on), c.List(ctx, &copies, on)); err != nil {
		return nil, nil, err
	}
	return slices.DeleteFunc(reps.Items, func(r api.Replica) bool { return r.Spec.Node != d.Node }),
		slices.DeleteFunc(copies.Items, func(c api.ImageCopy) bool { return c.Spec.Node != d.Node }), nil
}

// waitsFor says why an object stays on an evicted disk.
func waitsFor(conds []metav1.Condition) string {
	if c := meta.FindStatusCondition(conds, api.ConditionKept); c != nil && c.Status == metav1.ConditionTrue {
		return c.Message
	}
	for _, kind := range []string{api.ConditionEvicted, api.ConditionScheduled} {
		if c := meta.FindStatusCondition(conds, kind); c != nil && c.Status == metav1.ConditionFalse {
			return c.Message
		}
	}
	return "it is deleted here when another disk has all of its data"
}

// Ready returns the ready disks of living nodes. The user declared the node dead; empty: no node.
func Ready(ctx context.Context, c client.Client, dead string) (map[api.UID]bool, error) {
	var nodes api.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return nil, err
	}
	ready := map[api.UID]bool{}
	for _, n := range nodes.Items {
		alive := n.Name != dead && !IsSilent(&n)
		for _, d := range n.Status.Disks {
			ready[d.UID] = ready[d.UID] || d.Ready && alive
		}
	}
	return ready, nil
}

// LastCopies returns the images whose only whole copy is on a disk, and that no import can fetch again. The user
// declared the node dead; empty: no node.
func LastCopies(ctx context.Context, c client.Client, d Disk, dead string) (last []string, err error) {
	var copies api.ImageCopyList
	ready, err := Ready(ctx, c, dead)
	if err == nil {
		err = c.List(ctx, &copies)
	}
	if err != nil {
		return nil, err
	}
	for _, f := range copies.Items {
		if f.Spec.Disk != d.Status.UID || f.Status.Digest == "" {
			continue // on another disk, or never whole
		}
		var img api.BackingImage
		err := c.Get(ctx, client.ObjectKey{Name: f.Spec.Image}, &img)
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, err
		}
		fetched := slices.Contains([]api.SourceType{api.SourceDownload, api.SourceRegistry, api.SourceRestore},
			img.Spec.SourceType)
		other := slices.ContainsFunc(copies.Items, func(o api.ImageCopy) bool {
			return o.Spec.UUID == f.Spec.UUID && o.Spec.Disk != f.Spec.Disk && o.Status.State == api.ImageReady &&
				ready[o.Spec.Disk]
		})
		if err == nil && img.DeletionTimestamp == nil && !fetched && !other {
			last = append(last, f.Spec.Image)
		}
	}
	return last, nil
}

// Forget deletes the objects of a disk whose node is dead and cannot remove the finalizers. The files stay.
func Forget(ctx context.Context, c client.Client, d Disk) error {
	reps, copies, err := objectsOn(ctx, c, d)
	if err != nil {
		return err
	}
	var all []client.Object
	for i := range reps {
		all = append(all, &reps[i])
	}
	for i := range copies {
		all = append(all, &copies[i])
	}
	for _, obj := range all {
		if err := forceDelete(ctx, c, obj); err != nil {
			return fmt.Errorf("object %s of disk %s cannot be deleted: %w", obj.GetName(), d.Spec.Path, err)
		}
	}
	return nil
}

// forceDelete deletes an object and its finalizers, if the object is unchanged since the read.
func forceDelete(ctx context.Context, c client.Client, obj client.Object) error {
	if obj.GetDeletionTimestamp() == nil {
		uid, seen := obj.GetUID(), obj.GetResourceVersion()
		err := c.Delete(ctx, obj, client.Preconditions{UID: &uid, ResourceVersion: &seen})
		if err == nil {
			err = c.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		}
		if err != nil {
			return client.IgnoreNotFound(err)
		}
		if obj.GetUID() != uid {
			return nil
		}
	}
	if !controllerutil.RemoveFinalizer(obj, api.Finalizer) {
		return nil
	}
	return client.IgnoreNotFound(c.Update(ctx, obj))
}
