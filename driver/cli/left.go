package cli

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// leaving are the volumes and images that are still on disks of a node which are to be left, and what each waits for.
func leaving(ctx context.Context, c client.Client, n *api.Node) (rows [][]string, err error) {
	disks := map[api.UID]string{}
	for _, d := range disksOf(n) {
		if d.status.UID != "" && (n.Spec.EvictionRequested || d.spec.EvictionRequested) {
			disks[d.status.UID] = d.spec.Path
		}
	}
	for uid, path := range disks {
		vols, imgs, err := holdings(ctx, c, uid)
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

// isElsewhere reports whether a disk that is not where it is looked for is at another path of its node.
func isElsewhere(ctx context.Context, c client.Client, d disk) (bool, error) {
	n, err := nodeOf(ctx, c, d.node)
	if err != nil {
		return false, err
	}
	return !d.status.Ready && d.status.UID != "" && slices.ContainsFunc(n.Status.Disks, func(s api.DiskStatus) bool {
		return s.UID == d.status.UID && s.Ready
	}), nil
}

// waitsFor says in words what keeps something on a disk that it is to leave.
func waitsFor(conds []metav1.Condition) string {
	if c := meta.FindStatusCondition(conds, api.ConditionKept); c != nil && c.Status == metav1.ConditionTrue {
		return c.Message
	}
	for _, kind := range []string{api.ConditionEvicted, api.ConditionScheduled} {
		if c := meta.FindStatusCondition(conds, kind); c != nil && c.Status == metav1.ConditionFalse {
			return c.Message
		}
	}
	return "it goes when it is whole elsewhere"
}
