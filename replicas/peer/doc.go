// Package peer is the protocol between the engine of an attached volume and a replica on another node.
//
// Two nodes keep a set of a few connections (Dialer), by mutual TLS 1.3, which all sessions between them share. A
// session is one engine and one replica; it lives on one connection of the set. Everything is a frame: a header of 48
// bytes with a checksum of its own, and a payload with a CRC32C. Requests are pipelined; each is answered once, in any
// order. docs/replication.md has the frames.
//
//	engine -> Member.Submit -> connection -> TLS -> Server -> replica's loop -> stack.Replica
//
// What always holds:
//
//   - A Member answers a request once, and lets go of the buffer before. A Member has no stall timeout: the engine's
//     WatchedMember abandons the Member. Then the Member answers all requests with an error; if the connection is just
//     writing from a buffer or reading into a buffer, the answer to this request waits for the connection.
//   - While a Member is not abandoned, it connects again when a connection breaks, adopts the same session again, and
//     sends again what was not answered. The engine keeps overlapping writes apart, so that is harmless. Before that
//     the replica, which may have been opened again, is asked again to note intents. The Member fails for good where
//     the machine of the replica restarted in between: acknowledged writes may be gone.
//   - An abandoned Member adopts a new session, so that the Server drains the disk I/O of the former session. Close of
//     an abandoned Member ends the session at the Server, if the connection lives, and waits for nothing.
//   - A Server takes requests of the session alone that was adopted last. The check is made on the loop's thread, right
//     before the request goes to the replica, so nothing of an older session reaches it after ADOPT was answered.
//   - Each side validates the arguments and the answers of calls (method) before it uses them. A call that panics ends
//     its session, and no other one.
//   - What is under way on a connection is bounded: by credit at the sender, by buffers at the receiver.
//
// Goroutines: a connection has two at each end, a Member one while it has no connection, a Dialer one for the pings of
// its connections. Each is waited for by Close of its owner. Submit and the answers run on the loop's thread.
package peer
