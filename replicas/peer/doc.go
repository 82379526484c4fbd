// Package peer is the protocol between the engine of an attached volume and a replica on another node.
//
// Two nodes keep a set of a few connections (Dialer), by mutual TLS 1.3, which all sessions between the nodes share. A
// session is one engine and one replica, and lives on one connection of the set. A connection carries frames: a header
// of 48 bytes with a checksum of its own, and a payload with a CRC32C. Requests are pipelined; the Server answers each
// request once, in any order. docs/replication.md has the frames.
//
//	engine -> Member.Submit -> connection -> TLS -> Server -> replica's loop -> stack.Replica
//
// Invariants:
//
//   - A Member answers a request once, and lets go of the buffer before. A Member has no stall timeout: the engine's
//     WatchedMember abandons the Member. Then the Member answers all requests with an error; if the connection is just
//     writing from a buffer or reading into a buffer, the answer to this request waits for the connection.
//   - While a Member is not abandoned, the Member connects again when a connection breaks, adopts the same session
//     again, and sends the unanswered requests again. The engine keeps overlapping writes apart, so a repeated write is
//     harmless. Before that the Member asks the replica, which may have been opened again, to note intents again. The
//     Member fails for good if the machine of the replica restarted in between: acknowledged writes may be gone.
//   - An abandoned Member adopts a new session, so that the Server drains the disk I/O of the former session. Close of
//     an abandoned Member ends the session at the Server, if the connection lives, and waits for nothing.
//   - A Server takes requests of the last adopted session alone. The Server compares the session on the loop's thread,
//     right before the request reaches the replica, so no request of an older session reaches the replica after the
//     answer to ADOPT.
//   - The goroutines of control frames run in any order. A frame that gives earlier frames up (beginControl) ends their
//     contexts in the order of the connection; their work then leaves no prepared cut and no open snapshot.
//   - The end of one session, also of an unknown or failed one, breaks no connection: other sessions live there.
//   - One open of a replica runs at a time in a Server. A target decides under its lock whether it is idle, and adds
//     sessions under the same lock.
//   - Each side validates the arguments and the answers of calls (method) before use. A call that panics ends its
//     session, and no other session.
//   - All data in progress on a connection is bounded: by credit at the sender, by buffers at the receiver.
//
// Goroutines: a connection has two at each end, a Member one while it has no connection, a Dialer one for the clock of
// its connections; a Server has one for each control frame, one for each replica that ReleaseFrom or a panic closes,
// and one for each idle replica when its time ends. Close of the owner waits for each. Submit and the answers run on
// the loop's thread.
//
// Lock order at the engine's end: Member, Dialer, lanes, conn. At the replica's end: the turn of an open
// (Server.opens), the adopting and changing locks of a target, then target, Server, served, buffers.
package peer
