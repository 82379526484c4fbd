// Package device gives an attached volume a block device, and keeps the device alive across the death of the process
// that serves the device.
//
//	workload -> /dev/loopN -> one file of a FUSE file system -> /dev/fuse -> conn -> block.Submitter
//	             (kernel)      (kernel, mounted nowhere)                     (a uring.Loop)
//
// Every device has its own FUSE connection with one file, on a mount that is attached to no tree. The loop device
// does direct I/O on the file, so nothing is cached twice. The holder, a process with no other job (RunHolder), keeps
// a second copy of the connection's and the mount's descriptors. When the serving process dies, the kernel keeps
// every unanswered request; the next process takes the descriptors from the holder, waits until the predecessor is
// really gone (Open), and asks the kernel for the unanswered requests again (Resume). Until then I/O waits and does
// not fail.
//
// Invariants:
//   - The server maps, populates and locks a request's memory before reading /dev/fuse: a read that faults while the
//     process is being killed loses the request with an I/O error.
//   - The new process asks for RESEND before reading the first request, and only when the old process is gone, so
//     that no two processes serve one request.
//   - The holder has a device's descriptors before the loop device exists. The file's name carries the key, so that
//     a process can always find a loop device again.
//   - Per request there is no lock, no goroutine and no allocation: servers, conns and pools belong to the thread of
//     one uring.Loop. Host and Device have a mutex each for the steps that happen once per attach.
//   - No thread of the process waits for a disk by way of a device that the process serves: a killed process could
//     not end, and no successor could take over. Helpers do the operations that may wait: loophelper, and the
//     scripts of freeze and trim. The process asks the file only for answers that come at once.
//   - If the holder dies, this process gives its devices to the next holder: only both deaths at a time lose a device.
//
// Goroutines: RunHolder waits for its own; Host.Close waits for the goroutine that watches the holder.
//
// Lock order: a Device's mutex or Host.keeping, then Host.mu, then the mutex of the client of the holder.
package device
