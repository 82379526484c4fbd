// Package repo owns a repository: the config, the key, the locks, the index and the blobs of backups in a store. The
// format is version 2 of restic's, by restic's design document (doc/design.rst), so that restic checks and restores the
// backups without Drover.
//
//	config                 version, id and chunker polynomial, sealed
//	keys/<sha256>          the key, sealed with a password (package keys)
//	data/xx/<sha256>       packs (package pack)
//	index/<sha256>         which blob lies where (package index)
//	snapshots/<sha256>     a backup: its time, tags and tree (package tree)
//	locks/<sha256>         a session that uses the repository
//	drover-snapshots       the names of the snapshots in earlier lists (snapshot_record.go); only Drover's
//
// Invariants:
//
//   - No object is overwritten: the name is the SHA-256 of the bytes, and a reader compares. Only config and the
//     snapshot record have fixed names, and only the record is overwritten.
//   - All objects of a store are hostile: sizes are bounded before a read, lengths before an allocation.
//   - A pack is durable before an index file names the pack. Flush returns nil only after both. After a kill, packs
//     without an index file are garbage, which restic tolerates.
//   - An index file of a session that failed names packs that exist, and stays (index_without_lock.go).
//   - A Writer stops with the first error. No later call succeeds.
//   - A session takes its Lock before LoadIndex: nobody deletes a pack that the index names while the lock is held. The
//     age of a lock is judged by the store's clock alone.
//   - The name of a lock is durable on this machine before the lock exists: the next process deletes the locks of a
//     killed one (lock_record.go).
//   - The local cache decides nothing: lists of objects come from the store, and bytes of the cache count only if they
//     match the name or the id. A cache may hide damage of the store, so verification must not use the cache.
//   - A sweep deletes a pack only if no snapshot needs the pack, and after the end of all sessions that may rely on the
//     pack (sweep.go). A snapshot that a list had exists until the store denies the snapshot by name.
//   - No error has a password.
//
// Goroutines: a Lock has one, which refreshes the lock; a Writer has the uploaders and one for index files; Close waits
// for them. LoadIndex, ReadMany and Sweep wait for their own.
//
// Lock order: Writer.indexing, Writer.mu; marker.mu, Blobs.building, sharedTable.turn; Blobs.building, Blobs.mu;
// Lock.mu is a leaf. No method of Blobs is called with Writer.mu held. A call of the store runs with Writer.indexing,
// Blobs.building, sharedTable.turn or marker.mu at most.
package repo
