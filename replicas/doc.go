// Package replicas makes volumes true. SetupController plans (which disk, how large, what state), SetupNode looks after
// the disks of a machine, SetupData creates replicas and attaches volumes; Resume takes up the devices of a dead
// predecessor before the API is reachable.
//
//	Volume --planner--> Replica --data--> stack on a disk
//	Attachment --data--> epoch + 1 in the Volume, engine over the members, device
//
// Every status has one writer: the planner writes the Volume's, but for epoch, engineNode and members, which the data
// role of the engine changes by compare-and-swap on the resourceVersion; data writes Replica and Attachment; node
// writes Node.
//
// Loops are event driven. Times exist for three things: the node's heartbeat, with which the used bytes of its replicas
// are renewed; the probe for room while writes wait; back-off after an error. Below: stack (layers on a disk), engine
// (one attached volume), device (what the kernel sees).
//
// Goroutines: the manager runs the loops and the heartbeats; a session's goroutines end with the session, and all
// sessions end, with their devices kept for the next process, when the manager stops.
package replicas
