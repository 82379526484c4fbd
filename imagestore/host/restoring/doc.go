// Package restoring serves restoring layers, which restores of backups have not finished: volumes read their chunks
// while the restore writes the layer.
//
// A Layer opens its backup, and learns the layer's map, digests and root digest before any data. A chunk comes from the
// cache, from the layer in the making, or from the backup, and then goes into the layer, too. Reads of one chunk share
// one fetch. Reads in order fetch the next chunks ahead. The restore gives way to reads, and begins with the chunks
// that an earlier process left on the disk. After the restore, the layer of the disk answers.
//
// A restore first copies the chunks that other layers on the node's disks have at the same place, and then fetches the
// rest from the store.
//
// Invariants: a chunk that the package serves matches its digest. Reads fail while the backup is out of reach, and
// their callers ask again; the package opens the backup again, after pauses that grow. A damaged chunk fails alone. The
// cache and the fetches of all layers together take at most 2 MiB for each of cachedChunks, readsAtOnce and
// aheadAtOnce, each restore localAtOnce of them, and the digests of each layer 16 bytes per MiB of its size.
//
// Goroutines belong to the Set, a Runnable of the manager, which waits for all of them.
//
// Lock order: Layer.filling, then Layer.mu, then Set.mu. None is held over a request to a store; filling is held for
// reading over reads of the layer in the making, and over writes of readers' chunks.
package restoring
