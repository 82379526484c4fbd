package targets

import (
	"bytes"
	"crypto/sha256"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"drover.io/drover/api"
)

// ownerOf returns the node that looks after a target: among the nodes with a recent heartbeat the node with the highest
// hash of target and node, or "" without such a node. A node that joins or leaves moves few targets.
func ownerOf(target types.UID, nodes []api.Node, now time.Time) (owner string) {
	var highest []byte
	for i := range nodes {
		n := &nodes[i]
		if n.DeletionTimestamp != nil || !isAlive(n, now) {
			continue
		}
		hash := sha256.Sum256([]byte(string(target) + "/" + n.Name))
		if highest == nil || bytes.Compare(hash[:], highest) > 0 {
			owner, highest = n.Name, hash[:]
		}
	}
	return owner
}

// isAlive reports whether the node has a recent heartbeat.
func isAlive(n *api.Node, now time.Time) bool {
	return now.Before(n.Status.Heartbeat.Add(n.SilentAfter()))
}

// nextSilence is when the first of the nodes that are alive becomes silent without further heartbeats: no event reports
// silence.
func nextSilence(nodes []api.Node, now time.Time) (next time.Time) {
	for i := range nodes {
		n := &nodes[i]
		if at := n.Status.Heartbeat.Add(n.SilentAfter()); isAlive(n, now) && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}
