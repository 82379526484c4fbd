// Package targets is the node role's work for BackupTargets. It owns the status of each BackupTarget, the Backups that
// it finds in stores, the deletion of ended Backups from stores, sweeps and verifications. It also opens the
// repositories of targets for other work of the node.
//
// One node looks after a target, its owner (ownerOf). Two nodes may take turns, and for a moment both act. Therefore:
//
//   - Each write of a status is a compare-and-swap; after a conflict the reconciler reads again. Other nodes add the
//     blobs that they healed.
//   - All work in a repository is safe with other sessions, with one exception: only the node whose claim stands in
//     status.initializing makes a repository, for initTime, and other nodes respect the claim for claimTime.
//   - A visit creates the objects of found backups by turns of the volumes, and a running visit reports the number that
//     is left (visitProgress).
//   - A Backup is deleted from the store before its finalizer, and status.sweepRequested is set in between.
//   - In a store of Longhorn (status.format), nothing is written: a visit lists the backups, and a Backup that a user
//     deletes loses its finalizer, so that the next visit lists the backup again.
//   - A Backup that the lists lack is deleted only if the store, asked for the very object, lacks it: lists may be
//     short, and a sweep spares the snapshots that Backups name. The Backup loses its finalizer before its deletion: no
//     node takes the deletion for the wish of a user, which would delete the snapshot in the store.
//
// Everything that a store returns is hostile: package tags bounds the tags, and package repo bounds the rest.
//
// Goroutines: the reconcilers are the manager's. A store may hang, so all work with stores runs in goroutines of the
// jobSet, a Runnable of the manager that waits for all of them: at most one visit, one deletion, one sweep and one step
// of a verification for each target, and on nodes that are not the owner one heal. A job wakes the reconciler at its
// end, and the reconciler reads the result.
//
// Lock order: targetReconciler.mu, healReconciler.mu, jobSet.mu and Repositories.mu guard maps and counts; no two of
// them are held together, and none over a request to the API server or a store. A repositoryEntry.turn is held while a
// caller opens the repository, before Repositories.mu. A targetRecord or nodeHeal belongs to the reconcile of its
// target.
package targets
