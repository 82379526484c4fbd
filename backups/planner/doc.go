// Package planner is the controller role's half of the room. It takes the snapshot of a backup, chooses the replica
// that the backup is made from, and asks the replica's node for the backup through spec.source. The node carries the
// decision out and answers in the status.
//
// The imageReconciler does the same for the backups of images, whose sources are copies. A backup of a volume waits
// until its target has a backup of the volume's image (taken_along.go). The backupVolumeReconciler keeps the
// BackupVolumes, and deletes the Backups of a deleted one. The restoreReconciler brings the image of a volume that is
// made from a backup.
//
// chooseSource and explainLoss (source.go) and disposableSnapshots (own_snapshots.go) are pure functions with tables of
// cases. The backupReconciler collects their input from the cache. It gives a backup its finalizer and labels, writes
// spec.source, and removes the finalizer where no node does. The snapshotReconciler deletes snapshots that were taken
// for backups.
//
// A Backup with spec.copyOf gets its finalizer and labels here, and has no source: the owner of its target makes the
// copy.
//
// One writer per status: the planner writes the status of a Backup only while spec.source, spec.snapshotID and
// status.snapshotID are empty, and the backup has no end. Each write names the version of the object that the decision
// stands on; a conflict makes the planner reconcile again.
//
// The manager owns and awaits the goroutines of the reconcilers; the package starts no other goroutine, and has no
// lock.
package planner
