// Package layer owns the immutable layers of one disk: it writes, seals, opens, verifies, scrubs and repairs layers,
// hydrates layers from sources, and keeps the checkpoints of half-made layers. Store is the layers of a disk, Layer an
// open layer, Writer a layer in the making.
//
// Invariants: a finished layer is never written again, except by a repair with the content of its digests, and its uid
// means one content for ever. The rename of layer.json commits a layer. Readers hold a shared lock on the data file; a
// merge begins only without readers. No read returns content that contradicts a digest.
//
// The package knows no replica: Records answers which records name a layer, and Observer is notified of finished layers
// and of damage. A Hydration owns its goroutines, which end with its last user; Store.Wait waits for all work in the
// background. A Writer waits for its sync in Seal, Leave and Abort.
//
// Lock order: the mutex of hydrations, then the disk's lock (Store.Lock), then the mutex of one Hydration or Writer.
// Store calls Records and Observer without a mutex, except Records under the disk's lock.
package layer
