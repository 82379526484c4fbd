// Package engine is one attached volume: it takes block requests of any multiple of 512 bytes, gives them to the
// volume's members as requests of whole 4 KiB blocks, and decides when the guest hears "done".
//
//	guest -> device -> Submit -> admit (ranges) -> steps (merge partial blocks) -> members -> settle -> Done
//
// What always holds:
//
//   - Ack: a write, zero, discard or flush is done when every member of the epoch has it. The function acked says so,
//     and nothing else does.
//   - Drop before ack: a member that failed gets no more I/O from that moment on. It is taken out of the volume by
//     Config.Drop, a compare-and-swap that moves the epoch on; the survivors adopt the new epoch; only then is anything
//     acknowledged without it. While the outcome of the swap is unknown, it is asked again and writes wait. The last
//     member is never dropped: its errors are the guest's.
//   - Fence: a member that answers with an error of kind denied serves another engine. If the API confirms that this
//     engine was replaced (see owner.go), or the volume has no other member, this one stops: everything that waits and
//     everything new fails, and OnFence is called once. Else the member is dropped.
//   - Stall: every member of a real volume is a WatchedMember. It answers its requests and calls in bounded time, with an
//     error where its replica does not, unless it is the last member. The memory of such a request is leased.
//   - Partial blocks are merged here and nowhere else, under a lock of the block that writes of whole blocks respect.
//     With several members, writes that overlap are sent one after the other, so that all members end up equal.
//   - Not fetched: a member answers a read of blocks that it still fetches from another source at once. The engine asks
//     another member, and sets the operation aside if no member has the blocks: it is no I/O under way then.
//   - No room: a write that found the disk full waits, with its range locked, and is tried again on Retry. It does not
//     fail. Reads, and writes that need no new room, go on.
//
// Owner: everything but Open, Expand, Retry, Stats and Close runs on the thread of the loop that carries the volume;
// there are no locks. The engine starts a goroutine only to drop a member; Close waits for it. A Watch has one
// for all members of a process, and one for each replica that it closes; its Close waits for these. A call of a
// WatchedMember runs in a goroutine of its own, and the replica is closed after the last of these ended. Lock order: of a
// Remote member, of its WatchedMember, of the Watch. On the path of a whole block read or write nothing is allocated.
package engine
