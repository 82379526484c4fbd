// Package stack owns what is on a disk: replicas, which are stacks of layers with a head on top, the records of images
// and pins, and the references from records to layers. With the packages below, stack is the only writer of the formats
// that docs/formats.md describes:
//
//	format    codecs; knows no disk
//	diskfs    what the file system of a disk does; knows no layer
//	layer     one immutable layer, and Store, the layers of a disk; knows no replica
//	transfer  copies, views and differences of layers; knows no replica
//	stack     Disk, Replica, references, garbage collection, cuts and merges
//
// Other rooms import stack alone.
//
// Invariants: a finished layer is never written again, and its uid means one content for ever. stack.json, image.json
// and pin.json name layers; a layer without a reference is garbage, and Collect removes garbage only while all records
// are readable. References and garbage collection take the disk's lock, a flock, so that several processes can work on
// one disk. A replica has one opener, and a new opener waits for the disk I/O of a dead one. The rename of stack.json
// commits every change of a replica.
//
// The data path of a Replica belongs to the thread of its loop. Functions that may block run in the replica's worker
// goroutine, and scattered writes in two more; Close ends and awaits all of them. Disk.Close awaits removals in the
// background.
//
// Lock order: Replica.merging, Replica.mu, the disk's lock, the mutexes of the references (mu, syncedMu, wholeMu) and
// of the reserve, Replica.metaMu. The loop's thread and the worker take only metaMu and the mutex of a hydration;
// a caller that waits for both takes the worker first.
package stack
