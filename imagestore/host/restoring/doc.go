// Package restoring serves restoring layers, which restores of backups have not finished: volumes read their chunks
// while the restore writes the layer.
//
// A Layer opens its backup, and learns the layer's map, digests and root digest before any data. A chunk comes from the
// cache, from the layer in the making, or from the backup, and then goes into the layer, too. Reads of one chunk share
// one fetch. Reads in order fetch the next chunks ahead. The restore gives way to reads, and begins with the chunks
// that an earlier process left on the disk. After the restore, the layer of the disk answers.
//
// A restore first copies the chunks that other layers on the node's disks have at the same place, and then fetches the
// rest from the store, also what a disk has that hangs (package watched).
//
// An open backup has the index of when it was opened, and a node may heal damage later: so a backup with damage is
// opened again, after pauses that grow, and the one of before stays in use until then. A restore that lacks damaged
// chunks alone, or whose store stays away, is idle: it keeps its layer, which readers read, and waits.
//
// Invariants: a chunk that the package serves matches its digest. Reads fail while the backup is out of reach, and
// their callers ask again; the package opens the backup again, after pauses that grow. A damaged chunk fails alone. The
// cache and the fetches of all layers together take at most 2 MiB for each of cachedChunks, readsAtOnce and
// aheadAtOnce, each restore localAtOnce of them. The digests of a layer take 16 bytes per MiB of its size, those of all
// layers at most Options.PlanMemory.
//
// Goroutines belong to the Set, a Runnable of the manager, which waits for all of them but the overdue calls of a disk.
//
// Lock order: Layer.filling, then Layer.mu, then Set.mu. None is held over a request to a store; filling is held for
// reading over reads of the layer in the making, and over writes of readers' chunks.
package restoring
