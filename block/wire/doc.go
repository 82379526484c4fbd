// Package wire lets nodes read each other's layers and prove their names: mutual TLS 1.3 with certificates that the
// controller issues.
//
// The package owns the identity of a node (the key never leaves the node) and the protocol by which a finished layer,
// an immutable thing with a digest, is a block.Source on another node. Standard library and packages of block only.
//
// Invariants: a node serves and believes only peers with a node's certificate of the same authority; the certificate,
// not the address, names a node. Each side bounds and checks the other side's messages before use: answers have a
// largest size, and nothing but a uid reaches a disk.
//
// Goroutines: Serve ends and awaits the goroutines of a Server; a client has none.
package wire
