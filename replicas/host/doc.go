// Package host is the picture of the data role's parts, without code. Each part below owns a lock, maps and goroutines,
// and meets the other parts through small interfaces of its own; replicas.NewData connects the parts.
//
//	attach      Attachments: engine and device of a volume, members, rebuild, repair, resume, offline engine
//	replica     Replicas: create, clone, copy jobs, expand, move, revert, remove
//	snapshot    Snapshots and groups: cut, freeze, remove, the snapshot tree
//	maintain    layers of disks: finish, merge, scrub
//	remote      replicas served to other nodes, layers read from them
//	localnode   the shared clients, disks and settings; volumelock; iothreads
//
// Lock order, from the first taken to the last:
//
//  1. the lock of a volume (volumelock); of several volumes in the order of their names
//  2. the mutexes of a session: membership.recording, then membership.mu
//  3. the mutex of one owner: attach.Attachments, replica.Replicas, snapshot.Snapshots, MergeWorker, Scrubber,
//     remote.Server
//  4. the mutexes of localnode, stack, engine, peer and device
//
// No owner calls another owner with a mutex of step 3 held. A reconciler takes a volume's lock with LockSoon, because
// the lock's owner may wait for a disk that hangs; a background operation takes the lock with LockYielding. Close ends
// the owners in this order: replica, maintain, attach, remote.
package host
