package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// The last status of a dead node may call all disks ready. Only the heartbeat counts.

// isSilent reports whether a node's heartbeat is too old for a node that is alive.
func isSilent(n *api.Node) bool { return time.Since(n.Status.Heartbeat.Time) >= n.SilentAfter() }

// ConfirmDead checks a node that the user calls dead before its silence proves the death: no heartbeat may arrive while
// a heartbeat is due. A node with a heartbeat is alive, whatever the user says.
func ConfirmDead(ctx context.Context, c client.WithWatch, name string) error {
	var n api.Node
	if err := getObject(ctx, c, "node", name, &n); err != nil || isSilent(&n) {
		return err
	}
	was := n.Status.Heartbeat
	due, cancel := context.WithTimeout(ctx, n.SilentAfter()/2) // two heartbeats
	defer cancel()
	_, err := await.Until(due, c, name, func(n *api.Node) (bool, error) { return !n.Status.Heartbeat.Equal(&was), nil })
	switch {
	case err == nil:
		return api.Errorf(api.InUse,
			"node %q is alive: it has just renewed its heartbeat; leave --dead-node out", name)
	case errors.Is(due.Err(), context.DeadlineExceeded) && ctx.Err() == nil:
		return nil
	}
	return explain(ctx, err)
}

// isDead reports whether a disk's node is silent. With surely the user declares the node dead for ever.
func isDead(ctx context.Context, c client.WithWatch, name string, surely bool) (bool, error) {
	if surely {
		return true, ConfirmDead(ctx, c, name)
	}
	n, err := nodeOf(ctx, c, name)
	if err != nil {
		return false, err
	}
	return isSilent(n), nil
}

// forgetDisk deletes the objects of a disk whose node is dead and cannot remove the finalizers. The files stay.
func forgetDisk(ctx context.Context, c client.Client, d disk) error {
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
			return explain(ctx, fmt.Errorf("object %s of disk %s cannot be deleted: %w", obj.GetName(), d.spec.Path, err))
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
