// Package transfer moves the content of layers: Copy copies a layer to another disk, Flatten makes one layer of
// several, OpenStack and View read a stack as one source, and Delta lists the blocks that differ between two stacks.
//
// The package stands between layer and stack: a transfer knows layers and their stores, never a replica. The stack
// package turns a replica into a list of layers, and passes the list down. Copies are verified: no damage of a source
// gets a digest that matches.
//
// Copy and Flatten own their goroutines and wait for them. View and Delta start none; a View may serve several
// goroutines, a Delta belongs to one. No lock of the package is held during a call of another package's function that
// takes a lock.
package transfer
