// Package host is the node role's half of the room. The maker makes the Backups and BackupBackingImages whose
// spec.source names its node, and is the only writer of their status until they end. A content says which layers a
// backup reads, and describes them; all else is the same for both kinds.
//
// An unfinished backup that a user deletes leaves neither a snapshot in the repository nor a hold on the disk. Below
// lie targets, which looks after BackupTargets and ended backups, and copies, which makes the Backups with spec.copyOf.
//
// Invariants:
//
//   - A status is written by Update with the resourceVersion that the decision was made from, because the controller
//     role writes the same status before, and the owner of the target after. A work counts as handled only after such a
//     write, so a conflict costs a reconcile and loses nothing.
//   - A work begins after InProgress is in the status. So the next process, or the next node, knows that the repository
//     may have a snapshot of the Backup, and looks for the snapshot before the next attempt or the deletion.
//   - A Backup is completed with a snapshot that the node's own attempt wrote, while the node is the ownerID. Right
//     before an attempt commits, or deletes what earlier attempts left, it confirms that the node makes the Backup.
//   - A hold keeps the layers of the snapshot or image from the first attempt until the backup ends. The collector
//     releases the holds that a killed process left: no unfinished backup needs them, and no work uses them (package
//     holders).
//
// Memory: all works of a node share Options.Memory (targets.Memory, 256 MiB). Each place of a backup has an equal share
// of the part for backups: a buffer of 2 MiB for each of its workers (two for each processor, at most 16), and four
// packs of at most 32 MiB, at least 4 MiB. The places alone bound the backups, which reserve no memory.
//
// Goroutines: the reconciler and the collector are the manager's. Works run in goroutines of the workSet, a Runnable of
// the manager that waits for all of them. A work never writes the status of a Backup.
//
// A disk may hang: each call of a disk but ChangedChunks has a limit (package watched), and the reconciler calls none.
//
// The mutexes are leaves.
package host
