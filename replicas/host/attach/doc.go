// Package attach reconciles the Attachments of a node: it claims a volume with a new epoch, opens an engine over the
// members and a device, takes members out of the volume and in again, rebuilds and repairs replicas, resumes the
// devices of the process before, and detaches. The same path serves volumes with one replica and with several. An
// offline engine does the same for a detached volume, without a device. The package owns the sessions of all engines of
// this node, the resumes and ends in progress, the runs of offline rebuilds, and the device records.
//
// Invariants: an engine starts only after a swap that took an epoch, or in the epoch of its device record; a swap is in
// the device record before the API is asked. Volume.status.epoch, engineNode and members change by compare-and-swap
// only: here; in package replica, for a move to another disk; in the planner, for a new volume, a revert, a salvage and
// the removal of a member; in driver/recover. A resume needs no API, unless a swap was in progress.
//
// Replicas and snapshots are met through the interfaces Replicas and Snapshots.
//
// Goroutines: a session owns the goroutines of its device and of its rebuilds, which end with the session; Attachments
// owns the resumes, the ends in the background and the trims. Stop and Close await all goroutines, but a goroutine in a
// call of a hanging disk only for a bounded time. Lock order: the volume's lock, then the mutexes of a session
// (membership.recording, then membership.mu), then Attachments.mu; no other owner is called with a mutex held.
package attach
