// Package localnode is shared by all owners of a node's data: the name of the node, clients of the API, open disks,
// volume locks and I/O threads, and questions that objects of the API alone answer. The package knows no replica, no
// snapshot and no attached volume.
//
// Invariants: Client reads from caches, and before the node reached the API a read of Client would wait; Reader reads
// from the API server itself. An owner with a swap to make reads with Reader.
//
// The package has no goroutine. Lock order: the mutexes here are taken last, and for no call.
package localnode
