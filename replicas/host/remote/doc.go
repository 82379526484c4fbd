// Package remote serves the replicas of a node to the engines of other nodes, and dials the replicas of other nodes.
// The package owns the peer server with its listener, the replicas that the server has open, and the file of known
// places.
//
// Invariants: a replica is served only to a node that the API, or the replica's own record of its adopted session,
// names: docs/replication.md, "Who may ask a replica". A replica that a local engine or a merge has open is busy; a
// merge gives way.
//
// Server owns the goroutine that accepts connections; Close ends and awaits the goroutine. Lock order: Server.mu is
// taken last; a caller of Node does not hold Server.mu.
package remote
