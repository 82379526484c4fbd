package snapshot

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Chain are the snapshots of a stack that the head alone stands on, the newest first: down to the first that another
// snapshot stands on, too.
func (ss *Snapshots) Chain(m stack.Meta) (list []stack.Snapshot) {
	names := map[string]*node{}
	var at *node
	for _, k := range buildTree(m).all {
		names[k.Name] = k
		if k.children[api.VolumeHead] {
			at = k
		}
	}
	for ; at != nil && len(at.children) == 1; at = names[at.parent] {
		list = append(list, at.Snapshot)
	}
	return list
}

// DeleteChain deletes the objects of a chain, down to the first snapshot of a group or a clone in progress; kept says
// why the rest stays.
func (ss *Snapshots) DeleteChain(ctx context.Context, v *api.Volume, chain []stack.Snapshot) (deleted []string,
	kept string, err error) {
	for _, k := range chain {
		var s api.Snapshot
		err := ss.Client.Get(ctx, client.ObjectKey{Name: k.Name}, &s)
		if err == nil && (s.Spec.Volume != v.Name || uidOf(&s) != api.UID(k.UID)) {
			continue
		}
		if err == nil && (s.Spec.Group != "" || s.Spec.Labels[api.LabelClone] != "") {
			return deleted, fmt.Sprintf("snapshot %s and those below it stay: it is part of a group, or being cloned",
				k.Name), nil
		}
		if err == nil {
			err = ss.Client.Delete(ctx, &s, client.Preconditions{UID: &s.UID})
		}
		if client.IgnoreNotFound(err) != nil {
			return deleted, "", fmt.Errorf("snapshot %s: %w", k.Name, err)
		}
		deleted = append(deleted, k.Name)
	}
	return deleted, "", nil
}
