// Package cluster runs several machines on one: each has its own network, processes and mounts, runs the real program
// with disks of its own, and can be broken in every way that machines break. Tests and `make cluster` use it.
//
// A machine is an init process in namespaces of its own. All that runs on the machine dies with it, and it dies with
// the process that owns the cluster, however that ends. The machines' network cards are TAP devices whose other ends
// the owner holds: a switch in user space (Network) moves the frames, and loses, delays or drops them as asked. So
// nothing of it outlives the owner but files and dead loop devices, which the next cluster on the machine sweeps up.
//
// A program that uses this package calls Init first thing in its main (a test in TestMain).
//
// Goroutines: those of the switch and of the processes' output end with Close, which waits for them.
package cluster
