// Package wire is how nodes read each other's layers, and how they know each other: mutual TLS 1.3 with certificates
// that the controller issues.
//
// It owns the identity of a node (its key never leaves the node) and the protocol by which a finished layer, an
// immutable thing with a digest, is a block.Source on another node. Standard library and packages of block only.
//
// Invariants: nobody is served or believed whose certificate is not one of a node of this authority; what a node is
// called is in the certificate, not in its address. Each side bounds and checks what the other one sends before it uses
// it: answers have a largest size, and nothing but a uid reaches a disk.
//
// Goroutines: a Server's are ended and waited for by its Serve; a client has none.
package wire
