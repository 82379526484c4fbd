// Package disks owns the disks of this machine: the reconciler of the machine's Node object, the registry of open
// disks, and the lock that keeps two instances of Drover off a disk.
//
// The Node reconciler alone writes the status of the machine's Node, once per heartbeat. A status lists a disk as ready
// only while the registry has the disk open.
//
// A disk is known by its UID, wherever its file system is mounted. Open never adds a disk at a path whose disk is
// known: the folder below a missing mount is empty, and a new disk there would hide the loss.
//
// Goroutines: a reconcile starts one garbage collection per disk and hour; a runnable of the manager waits for these.
// Close of the registry waits for the background work of the disks.
//
// Lock order: the lock of a path (Registry.opens), which is held over disk I/O; then Registry.mu, which guards the maps
// and is never held over disk I/O, except in Close.
package disks
