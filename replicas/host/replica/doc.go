// Package replica reconciles the Replicas of a node: it creates each on its disk, from an image or from a snapshot of
// another replica, expands, reverts, moves and removes replicas, and copies layers that a replica's disk lacks. The
// package owns the list of replicas that exist on the node's disks, the replicas whose files are in doubt, the pins
// that have no replica any more, and the copy jobs.
//
// Invariants: a reconcile holds the lock of the volume; a copy job touches disks alone, and the next process finds its
// copies on the disk. A member of a volume is never given up: its files may come back. A source keeps the layers that a
// replica needs, by a pin, until the replica's own disk has them.
//
// Attached volumes and snapshots are met through the interfaces Attachments and Snapshots.
//
// Replicas owns the goroutines of the copy jobs; Close ends and awaits them. Lock order: the volume's lock, then
// Replicas.mu or copyJobs.mu, then the mutexes of stack; no other owner is called with either of the two held.
package replica
