// Package maintain looks after the layers of a node's disks in the background: it finishes layers that cuts froze,
// merges layers that no snapshot needs, and scrubs replicas. The package owns the list of replicas with mergeable
// layers, the failures of merges and the findings of scrubs. The package decides nothing about volumes, and reaches
// engines and volume locks through the interface Node alone.
//
// Invariants: a disk has one merge worker and one scrub worker at a time; a worker ends when no work is left; the
// next process finds interrupted work again on the disk.
//
// Workers owns all goroutines: Close ends and awaits them. Lock order: MergeWorker.mu and Scrubber.mu before
// Workers.mu; a caller of Node holds neither.
package maintain
