// Package engine is one attached volume. The engine takes block requests of any multiple of 512 bytes, gives them to
// the members as requests of whole 4 KiB blocks, and decides when the guest hears "done".
//
//	guest -> device -> Submit -> admit (ranges) -> steps (merge partial blocks) -> members -> decideStep -> Done
//
// Invariants:
//
//   - Ack: a write, zero, discard or flush is done when every member of the epoch has completed the request. The
//     function mayAcknowledge decides so, and nothing else does.
//   - Drop before ack: a member that failed gets no more I/O from then on. Config.Drop, a compare-and-swap that
//     increments the epoch, takes the member out of the volume; the survivors adopt the new epoch; only then does the
//     engine acknowledge anything without the member. While the outcome of the swap is unknown, the engine repeats the
//     swap and writes wait. The engine never drops the last member: the guest gets its errors.
//   - Fence: a member that answers with an error of kind denied serves another engine. If the API confirms that another
//     engine replaced this engine (see owner.go), or the volume has no other member, the engine stops: all pending and
//     new requests fail, and the engine calls OnFence once. Otherwise the engine drops the member.
//   - Stall: every member of a real volume is a WatchedMember, which answers requests and calls in bounded time, with
//     an error if the replica stalls, unless the member is the last one. The memory of such a request is leased.
//   - Partial blocks are merged here and nowhere else, under a lock of the block that writes of whole blocks respect.
//     With several members, the engine sends overlapping writes one after the other, so that all members end up equal.
//   - Not fetched: a member answers a read of blocks that the member still fetches from another source at once. The
//     engine asks another member, and sets the operation aside if no member has the blocks: the operation is no I/O in
//     progress then.
//   - No room: a write that found the disk full does not fail. The write waits, with its range locked, until Retry.
//     Reads, and writes into allocated blocks, continue.
//
// State: Engine has the members, the epoch and the swaps; each other part of the state has a type of its own: ranges,
// cutGate, roomQueue, stalledReads, fetches, generations, unequal, cleaner; joinRun, repairRun, opening and copier are
// single runs. All of this state belongs to the thread of the loop that carries the volume, without locks; exported
// methods, except Submit, post to the thread, and any goroutine may call them.
//
// Goroutines: the engine starts one for each swap, one for each dropped member to close, and one for the cleaner; Close
// waits for all of these. A Watch has one for all members of a process, and one for each replica that the Watch closes;
// Close of the Watch waits for these. A call of a WatchedMember runs in a goroutine of its own, and the Watch closes
// the replica after the last call ended.
//
// Lock order: a Remote member, its WatchedMember, the Watch. On the path of a whole block read or write the engine
// allocates nothing.
package engine
