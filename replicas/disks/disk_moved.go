package disks

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// takeSettings copies the settings that a disk had on another node to this node, where the disk is new. Settings that
// the user made here stay.
func (n *nodeReconciler) takeSettings(ctx context.Context, node *api.Node, d api.DiskStatus) error {
	was, from, err := n.settingsOf(ctx, d.UID)
	if was == nil || err != nil {
		return err
	}
	now := node.DeepCopy()
	i := slices.IndexFunc(now.Spec.Disks, func(s api.DiskSpec) bool { return s.Path == d.Path })
	mine := &now.Spec.Disks[i]
	if len(mine.Tags) == 0 {
		mine.Tags = was.Tags
	}
	if mine.ReservedBytes == 0 {
		mine.ReservedBytes = was.ReservedBytes
	}
	if was.Schedulable != nil && !*was.Schedulable {
		mine.Schedulable = was.Schedulable
	}
	mine.EvictionRequested = mine.EvictionRequested || was.EvictionRequested
	if equality.Semantic.DeepEqual(*mine, node.Spec.Disks[i]) {
		return nil
	}
	if err := n.client.Update(ctx, now); err != nil {
		return fmt.Errorf("settings of disk %s: %w", d.Path, err)
	}
	node.Spec, node.ResourceVersion, node.Generation = now.Spec, now.ResourceVersion, now.Generation
	n.events.Eventf(node, nil, "Normal", "DiskMoved", "Look",
		"disk %s keeps the settings that it had on node %s", d.Path, from)
	return nil
}

// settingsOf returns the settings of a disk on another node, or nil.
func (n *nodeReconciler) settingsOf(ctx context.Context, disk api.UID) (was *api.DiskSpec, node string, err error) {
	var list api.NodeList
	if err := n.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, "", err
	}
	for i := range list.Items {
		o := &list.Items[i]
		for _, s := range o.Status.Disks {
			at := slices.IndexFunc(o.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == s.Path })
			if o.Name != n.Name && s.UID == disk && at >= 0 {
				return o.Spec.Disks[at].DeepCopy(), o.Name, nil
			}
		}
	}
	return nil, "", nil
}

// reportMoved explains in the messages of disks that another node lists too where the disk is and how the user cleans
// up.
func (n *nodeReconciler) reportMoved(ctx context.Context, disks []api.DiskStatus) error {
	var list api.NodeList
	if err := n.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	for i := range list.Items {
		o := &list.Items[i]
		alive := time.Since(o.Status.Heartbeat.Time) < o.SilentAfter()
		for _, there := range o.Status.Disks {
			k := slices.IndexFunc(disks, func(d api.DiskStatus) bool { return d.UID == there.UID })
			if o.Name == n.Name || there.UID == "" || k < 0 {
				continue
			}
			switch d := &disks[k]; {
			case d.Gone && there.Ready && alive:
				d.Message = fmt.Sprintf("node %s has the disk now, at %s, and uses it; attached volumes follow after their "+
					"detach. To remove the disk from this node: `drover disk remove %s --node "+
					"%s`", o.Name, there.Path, d.Path, n.Name)
			case d.Ready && there.Gone && alive:
				d.Message = fmt.Sprintf("the disk came from node %s with its data; `drover disk remove %s --node %s` "+
					"removes it from the list of that node", o.Name, there.Path, o.Name)
			case d.Ready && there.Ready && alive:
				d.Message = fmt.Sprintf("node %s has this disk, too, at %s: if that node still has the disk after a "+
					"minute, one of the two disks is a copy; take the copy away", o.Name, there.Path)
			case d.Ready && !alive:
				d.Message = fmt.Sprintf("silent node %s had the disk: if that machine is dead, `drover recover --yes` on "+
					"this machine takes over the disk's data", o.Name)
			}
		}
	}
	return nil
}
