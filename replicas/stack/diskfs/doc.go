// Package diskfs asks the file system of a disk for what a stack needs beside files: locks that outlive no process, the
// end of direct I/O of a dead process, holes, room that comes back in small steps, the mount that keeps unflushed
// writes, and the probe of a new disk.
//
// The package knows no layer and no replica. It starts goroutines only in AtOnce, which waits for them, and has no
// locks of its own.
package diskfs

import "drover.io/drover/replicas/stack/format"

// blockSize is the block size of every file system that passes Probe.
const blockSize = format.BlockSize
