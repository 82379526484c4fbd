// Package host is the node role's half of the room. The copyReconciler compares the ImageCopies of its node with the
// disks, starts transfers (imports, copies from other disks, verifications, repairs), and is the only writer of the
// status of these ImageCopies. The host also serves the layers of its disks to the hosts of other nodes, and to all
// nodes the layers that its restores have not finished (package restoring), and takes uploads.
//
// Goroutines: the reconcilers are the manager's. Transfers run in goroutines of the transfers registry, a Runnable of
// the manager that waits for all of them. A transfer never writes to the API; it wakes the reconciler of its ImageCopy
// at most twice a second.
//
// Lock order: copyReconciler.mu, transfers.mu and transfer.mu guard maps and fields; no two of them are held together,
// and none over disk I/O or a request to the API. layerAccess.apiQueries is held over a request to the
// API, before layerAccess.mu.
package host
