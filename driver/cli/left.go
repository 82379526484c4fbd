package cli

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// evictionRows returns the volumes and images on the evicted disks of a node, each with the reason of its wait.
func evictionRows(ctx context.Context, c client.Client, n *api.Node) (rows [][]string, err error) {
	disks := map[api.UID]string{}
	for _, d := range disksOf(n) {
		if d.status.UID != "" && (n.Spec.EvictionRequested || d.spec.EvictionRequested) {
			disks[d.status.UID] = d.spec.Path
		}
	}
	for uid, path := range disks {
		vols, imgs, err := namesOnDisk(ctx, c, uid)
		if err != nil {
			return nil, err
		}
		for _, name := range vols {
			var v api.Volume
			if err := c.Get(ctx, client.ObjectKey{Name: name}, &v); client.IgnoreNotFound(err) != nil {
				return nil, explain(ctx, err)
			}
			rows = append(rows, []string{"volume", name, path, waitsFor(v.Status.Conditions)})
		}
		for _, name := range imgs {
			var i api.BackingImage
			if err := c.Get(ctx, client.ObjectKey{Name: name}, &i); client.IgnoreNotFound(err) != nil {
				return nil, explain(ctx, err)
			}
			rows = append(rows, []string{"image", name, path, waitsFor(i.Status.Conditions)})
		}
	}
	slices.SortFunc(rows, slices.Compare)
	return rows, nil
}

// isElsewhere reports whether a missing disk is at another path of its node, or on another node, with all its objects.
// The status of a dead node does not count.
func isElsewhere(ctx context.Context, c client.Client, d disk, dead bool) (bool, error) {
	var nodes api.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return false, explain(ctx, err)
	}
	if d.status.Ready && !dead || d.status.UID == "" {
		return false, nil
	}
	has := func(n *api.Node) bool {
		return slices.ContainsFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.UID == d.status.UID && s.Ready })
	}
	moved := !dead && api.DiskMovedTo(nodes.Items, d.status.UID, d.node, time.Now()) != ""
	for i := range nodes.Items {
		switch n := &nodes.Items[i]; {
		case !dead && n.Name == d.node && has(n):
			return true, nil
		case dead && n.Name != d.node && has(n) && !isSilent(n):
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
func objectsOn(ctx context.Context, c client.Client, d disk) ([]api.Replica, []api.ImageCopy, error) {
	var reps api.ReplicaList
	var copies api.ImageCopyList
	on := client.MatchingLabels{api.LabelDisk: string(d.status.UID)}
	if err := errors.Join(c.List(ctx, &reps, on), c.List(ctx, &copies, on)); err != nil {
		return nil, nil, explain(ctx, err)
	}
	return slices.DeleteFunc(reps.Items, func(r api.Replica) bool { return r.Spec.Node != d.node }),
		slices.DeleteFunc(copies.Items, func(c api.ImageCopy) bool { return c.Spec.Node != d.node }), nil
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
