// Package cluster runs several machines on one computer. Each machine has its own network, processes, mounts and disks,
// and runs the real program. Tests break machines in every way that machines break. Tests and `make cluster` use the
// package.
//
// A machine is an init process in its own namespaces. All processes of a machine die with the machine, and the machine
// dies with the process that owns the cluster, however the owner ends. The machines' network cards are TAP devices. The
// owner holds the other ends: a switch in user space (Network) moves the frames, and loses, delays or drops frames on
// request. So only files and dead loop devices outlive the owner, and the next cluster on the computer sweeps up both.
//
// A program with this package calls Init first thing in its main (a test in TestMain).
//
// Goroutines: the switch and the processes' output have goroutines. Close ends the goroutines and waits for the last.
package cluster
