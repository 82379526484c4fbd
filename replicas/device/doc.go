// Package device gives an attached volume its block device, and keeps it alive across the death of the process that
// serves it.
//
//	workload -> /dev/loopN -> one file of a FUSE file system -> /dev/fuse -> conn -> block.Submitter
//	             (kernel)      (kernel, mounted nowhere)                     (a uring.Loop)
//
// Every device has its own FUSE connection with one file in it, on a mount that is attached to no tree. The loop device
// does direct I/O on that file, so nothing is cached twice. The holder, a process that does nothing else (RunHolder),
// keeps a second copy of the connection's and the mount's descriptors. When the serving process dies, the kernel keeps
// every unanswered request; the next process takes the descriptors from the holder, waits until its predecessor is
// really gone (Open), and asks for those requests again (Resume). Until then I/O waits; it does not fail.
//
// Invariants:
//   - A request's memory is mapped, populated and locked before /dev/fuse is read: a read that faults while the
//     process is being killed loses its request with an I/O error.
//   - RESEND is asked for before the new process reads its first request, and only when the old process is gone, so
//     that no request is served by two.
//   - The holder has a device's descriptors before its loop device exists. The file's name carries the key, so a
//     loop device can always be found again.
//   - Per request there is no lock, no goroutine and no allocation: servers, conns and their pools belong to the thread
//     of one uring.Loop. Host and Device have a mutex each for what happens once per attach.
//   - No thread of the process waits for a disk by way of a device that it serves itself: it could not be killed then,
//     and nobody could take over. What may wait so is done by others: loophelper, and the scripts of freeze and trim.
//     Of the file itself it asks only what it answers at once.
//   - If the holder dies, this process gives its devices to the next one: only both deaths at a time lose a device.
//
// Goroutines: those of RunHolder, which waits for them, and one that watches the holder, which Host.Close waits for.
package device
