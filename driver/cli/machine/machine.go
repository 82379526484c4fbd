// Package machine finds the Node of the machine that a command runs on. Errors of the API server are not explained. The
// package starts no goroutines.
package machine

import (
	"context"
	"os"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// Node finds the Node of this machine: the node named like the host, or the only node.
func Node(ctx context.Context, c client.Client) (string, error) {
	var nodes api.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return "", err
	}
	host, err := os.Hostname()
	if err != nil {
		return "", err
	}
	var names []string
	for _, n := range nodes.Items {
		if strings.EqualFold(n.Name, host) {
			return n.Name, nil
		}
		names = append(names, n.Name)
	}
	switch len(names) {
	case 0:
		return "", api.Errorf(api.Unavailable, "no node has registered yet: is `drover serve` ready?")
	case 1:
		return names[0], nil
	}
	return "", api.Errorf(api.Invalid, "this machine (%s) is none of the nodes: name one with --node (%s)", host,
		strings.Join(names, ", "))
}

// Is reports whether a node is this machine, so that the mount table of this machine counts.
func Is(ctx context.Context, c client.Client, node string) (bool, error) {
	host, err := os.Hostname()
	if err != nil {
		return false, err
	}
	if strings.EqualFold(host, node) {
		return true, nil
	}
	var list api.NodeList
	if err := c.List(ctx, &list); err != nil {
		return false, err
	}
	return len(list.Items) == 1 && list.Items[0].Name == node, nil
}

// IsOnlyNode reports whether this machine is the only node, so that the node can open paths of this machine.
func IsOnlyNode(ctx context.Context, c client.Client) (bool, error) {
	var list api.NodeList
	if err := c.List(ctx, &list); err != nil {
		return false, err
	}
	host, err := os.Hostname()
	return err == nil && len(list.Items) == 1 && strings.EqualFold(list.Items[0].Name, host), err
}
