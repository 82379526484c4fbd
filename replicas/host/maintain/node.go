package maintain

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Node is the node of the disks, as maintenance sees the node.
type Node interface {
	// APIReached reports whether settings and attachments are known. Before that, nothing is merged.
	APIReached() bool
	// Setting is a setting that is a number.
	Setting(ctx context.Context, name string) int64
	// GuestRequests is how many requests the engines of this node have answered.
	GuestRequests() uint64
	// Opened are the replicas of a disk that engines of this node have open.
	Opened(disk *stack.Disk) []*stack.Replica
	// WithReplica calls work with a replica: the open one of an engine, or one opened for the call, which ends
	// with ctx when another task wants the volume. Busy: the replica cannot be opened now.
	WithReplica(ctx context.Context, disk *stack.Disk, uid, volume string,
		work func(ctx context.Context, r *stack.Replica) error) error
	// SnapshotsChanged has the named snapshots of a replica reported again.
	SnapshotsChanged(replica api.UID, names ...string)
	// DigestsMade has snapshots reported again soon, by name: their layers have digests now.
	DigestsMade(names []string)
	// MergeReported has the status of a replica written: whether its layers can be merged has changed.
	MergeReported(ctx context.Context, replica, volume string)
}
