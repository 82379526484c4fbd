// Package snapshot reconciles the Snapshots and SnapshotGroups of volumes for which this node is responsible: it cuts,
// removes and reports snapshots, cuts groups at one instant, freezes mounted file systems for a cut, and creates the
// objects of snapshots found on a disk. The package owns the cached trees of the stacks, and the list of replicas whose
// snapshots may lack objects.
//
// Invariants: a reconcile holds the lock of the volume, of a group the locks of all volumes. The members' records are
// read before each cut, so that a cut whose answer was lost is not made twice. No Snapshot of a group is ready before
// all volumes are cut. An object is deleted only if a readable stack of a current replica lacks the snapshot.
//
// Engines and devices are met through the interface Attachments, disks with their replicas through Replicas.
//
// The package has no goroutine that outlives a call. Lock order: the locks of volumes, then Snapshots.mu; no other
// owner is called with Snapshots.mu held.
package snapshot
