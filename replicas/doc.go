// Package replicas connects the parts of the room of volumes: SetupController adds the planner (which replicas, on
// which disks), SetupNode the disks of a machine, SetupData the owners of package host; Data.Resume resumes the devices
// of a dead process before the API answers.
//
//	Volume --planner--> Replica --host/replica--> stack on a disk
//	Attachment --host/attach--> epoch + 1 in the Volume, engine over the members, device
//	Snapshot --host/snapshot--> a cut of all members by the engine
//
// Invariants: every status has one writer. The planner writes Volume.status, except for epoch, engineNode and members,
// which the engine's node changes by compare-and-swap on the resourceVersion; the data role writes the status of
// Replica, Attachment and Snapshot, the node role of Node.
//
// Reconcilers are event driven. Timers exist for the heartbeat of the node, for the used bytes of replicas, for the
// probe for room while writes wait, and for the pause after a failure.
//
// Goroutines: the manager runs the reconcilers and the heartbeat; each owner of package host owns all others, and Close
// ends the owners in the order of host/doc.go. The package has no lock.
package replicas
