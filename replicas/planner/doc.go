// Package planner is the controller role's half of the room. It decides which replicas a volume has, on which disks,
// and asks nodes for changes through the specs of Replicas. Nodes carry decisions out and answer in the statuses.
//
// Deciders are pure functions with tables of cases: choosePlacement and candidates (place.go), decideReplicas
// (replica_count.go), findMigration (balance.go), describeVolume (status.go). The volumeReconciler collects their input
// from the cache, writes the Volume's status once per reconcile, and creates, patches and deletes Replicas.
//
// One writer per status: the planner writes the status of Volumes, except epoch, engineNode and members, which the data
// role of the engine's node changes by compare-and-swap as well; a conflict makes the planner reconcile again. The
// planner writes the status of a Snapshot only while no node is responsible for the Snapshot.
//
// The manager owns and awaits the goroutines of the reconcilers; the package starts no other goroutine.
//
// Lock order: volumeReconciler.mu guards the maps and the queue's pointer, is never held over a request to the API, and
// no other lock is taken below it, except those of the queue.
package planner
