package cli

import (
	"context"
	"errors"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/driver/cli/disks"
)

// ConfirmDead checks a node that the user calls dead before its silence proves the death: no heartbeat may arrive while
// a heartbeat is due. A node with a heartbeat is alive, whatever the user says.
func ConfirmDead(ctx context.Context, c client.WithWatch, name string) error {
	var n api.Node
	if err := getObject(ctx, c, "node", name, &n); err != nil || disks.IsSilent(&n) {
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
	return disks.IsSilent(n), nil
}
