package engine

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Loop is the engine's thread.
type Loop interface {
	// Post runs fn on the loop's thread soon. Any goroutine may call Post. False: the loop has ended, fn never runs.
	Post(fn func()) bool
}

// Member is one replica of the volume as the engine sees the replica, on any node; a pointer.
type Member interface {
	// Submit takes requests of whole 4 KiB blocks. A member answers each request once, in bounded time (WatchedMember),
	// and before that lets go of the buffer, or leases the buffer. An error of kind denied says: a newer engine was
	// adopted.
	block.Submitter
	// Adopt refuses every older session, drains its disk I/O, and makes epoch, incarnation and members durable.
	Adopt(ctx context.Context, epoch, incarnation int64, members []string) error
	// Expand makes the member at least size bytes long, durably. Called from any goroutine.
	Expand(ctx context.Context, size int64) error
	// Close ends the session. No request is outstanding.
	Close() error
}

// Named is a member with the name of its Replica object.
type Named struct {
	Name   string
	Local  bool // for reads
	Member Member
}

// MaxMembers of a volume; sets of members are bits of a word.
const MaxMembers = 64

// Config of an engine. Loop, Size and Members are required; Drop too if there are several members.
type Config struct {
	Loop        Loop
	Pool        *Pool // of the loop; nil: the engine makes one
	Size        int64 // bytes, a multiple of the block size
	Members     []Named
	Epoch       int64
	Incarnation int64
	ReadOnly    bool
	// Drop takes a member out of the volume's record, which moves from epoch to epoch+1. Nil: the member is out, also
	// if an earlier call had that effect. Denied: the record belongs to another engine. Any other error: the outcome is
	// unknown, and the engine calls Drop again. A goroutine of the engine calls Drop.
	Drop func(ctx context.Context, epoch int64, member string) error
	// Add makes a replica a member in the volume's record, which moves from epoch to epoch+1; as Drop. An error of kind
	// not found says: not done, now and later. Nil: no replica can join.
	Add func(ctx context.Context, epoch int64, member string) error
	// Owns asks the API whether the API still names this engine in an epoch. Denied: the API names another engine. Any
	// other error: not known, and the engine calls Owns again, from a goroutine of the engine. Nil: a member's word
	// counts alone.
	Owns func(ctx context.Context, epoch int64) error
	// Track makes a single member note intents, as several members always do: the volume has other replicas. An engine
	// without Track begins with NoteIntents.
	Track bool
	// Lenient opens the engine if one member adopts the epoch. The engine drops the others, which never serve: see
	// Missing.
	Lenient bool
	// Resync makes Open resync the members before the first read: the last engine had no clean end.
	Resync bool
	// Reported tells whether the API has reported a snapshot of the volume. The engine drops a member without a
	// reported snapshot that another member has. Nil: the API cannot be asked, and the engine removes a snapshot that
	// some member lacks from the other members.
	Reported func(ctx context.Context, s stack.Snapshot) (bool, error)
	// OnDrop reports a dropped member and the cause. Called on the loop's thread, must not block; may be nil.
	OnDrop func(member string, why error)
	// OnSpace reports that writes began to wait for room, or that no write waits any more. As OnDrop.
	OnSpace func(full bool)
	// OnFence reports that another engine replaced this engine, which has stopped. As OnDrop.
	OnFence func(why error)
}

// set of members, by index.
type set uint64

func bit(m int) set          { return 1 << m }
func (s set) has(m int) bool { return s&bit(m) != 0 }
func (s set) first() int     { return bits.TrailingZeros64(uint64(s)) }
func (s set) len() int       { return bits.OnesCount64(uint64(s)) }

// Engine is one attached volume.
type Engine struct {
	cfg       Config
	base      time.Time
	stats     counters
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	drops     sync.WaitGroup
	dropped   []error                  // why, by member
	unreached []string                 // names of the members without which the engine began
	resumed   bool                     // several members serve as the process before left them
	gone      set                      // members that the engine has closed
	spare     set                      // closed members without an operation in progress: free places. Loop thread
	leaving   map[string]chan struct{} // dropped members, by name: closed at the end of its close. Loop thread
	revival   revival
	cleaner   cleaner
	unequal   unequal

	// Loop thread only from here on.
	size      int64
	epoch     int64
	members   set  // of the epoch
	suspect   set  // members that failed and are being dropped: no I/O for them
	weak      set  // members without the epoch's adoption
	doubted   bool // a member names another engine: reads wait until the API has answered
	lost      set  // the last serving member, if its session is gone: all I/O waits for a member
	missing   set  // suspects that Open did not reach: never resynced, never revived
	joiners   set  // replicas that get all writes and are no members yet
	joining   set  // the joiner in the swap: no acknowledgement without it
	joins     map[int]*join
	wishes    []*join // joins that wait for their swap
	dropping  bool
	vouched   bool // a member has answered since the drop in progress began
	fenced    error
	hurry     bool
	bare      time.Time // since when all replicas are gone while I/O waits; zero: not
	impatient bool      // the last member is not waited for any more
	refusing  bool      // I/O fails until a replica is back: the wait was too long
	closing   bool
	drained   chan struct{} // closed when the last operation is done, set by Close

	free     *op // operations not in use
	inflight int // operations in use
	ranges   ranges
	room     roomQueue
	reads    [MaxMembers]int // in flight, by member
	hurt     set             // members with damage on their disks, which a read met
	stalled  stalledReads
	fetches  fetches
	gens     generations
	cutting  bool // a cut is in progress: no other cut and no join begins
	gate     cutGate
	pool     *Pool
}

// Open makes every member adopt the epoch and returns the engine, which does not own the loop. After an error the
// caller closes the members.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	n := len(cfg.Members)
	switch {
	case n == 0 || n > MaxMembers:
		return nil, api.Errorf(api.Invalid, "an engine of %d members", n)
	case n > 1 && cfg.Drop == nil:
		return nil, api.Errorf(api.Invalid, "an engine of %d members that cannot drop any", n)
	case cfg.Size <= 0 || cfg.Size%block.Size != 0:
		return nil, api.Errorf(api.Invalid, "an engine of %d bytes: not a multiple of %d", cfg.Size, block.Size)
	}
	names := make([]string, n)
	for i, m := range cfg.Members {
		names[i] = m.Name
	}
	var missing set
	why := make([]error, n)
	for i, m := range cfg.Members {
		err := m.Member.Adopt(ctx, cfg.Epoch, cfg.Incarnation, names)
		if err == nil {
			continue
		}
		why[i] = fmt.Errorf("replica %s, epoch %d: %w", m.Name, cfg.Epoch, err)
		if api.Is(err, api.Denied) && cfg.Lenient {
			err = cfg.confirmDenial(ctx, cfg.Epoch, err)
		}
		if !cfg.Lenient || err != nil && api.Is(why[i], api.Denied) {
			return nil, fmt.Errorf("replica %s, epoch %d: %w", m.Name, cfg.Epoch, err)
		}
		missing |= bit(i)
	}
	if missing.len() == n {
		if n == 1 {
			return nil, why[0]
		}
		if slices.ContainsFunc(why, func(err error) bool { return !errors.Is(err, stack.ErrRestarted) }) {
			return nil, api.Errorf(api.Unavailable, "no replica can be reached: %v", errors.Join(why...))
		}
		return nil, errors.Join(why...)
	}
	e := &Engine{
		cfg: cfg, base: time.Now(), size: cfg.Size, epoch: cfg.Epoch,
		members: set(1)<<n - 1, dropped: why, suspect: missing, missing: missing, resumed: n > 1 && !cfg.Resync,
		joins: map[int]*join{}, gens: generations{{}}, leaving: map[string]chan struct{}{},
	}
	e.ranges.e, e.room.e, e.gate.e, e.stalled.e, e.fetches.e = e, e, e, e, e
	e.cleaner.e, e.cleaner.touched = e, map[int64]int64{}
	e.unequal = unequal{e: e, wake: make(chan struct{}, 1), pieces: map[int64]bool{}}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	if e.pool = cfg.Pool; e.pool == nil {
		var err error
		if e.pool, err = NewPool(); err != nil {
			return nil, err
		}
	}
	for range ahead {
		o := e.newOp()
		for range n {
			e.addRequest(o)
		}
		o.next, e.free = e.free, o
	}
	if err := (&opening{e: e}).prepareMembers(ctx); err != nil {
		e.cancel()
		if cfg.Pool == nil {
			e.pool.Close()
		}
		return nil, err
	}
	e.unreached = e.memberNames(e.missing)
	if err := e.pool.addEngine(cfg.Loop); err != nil {
		e.cancel()
		if cfg.Pool == nil {
			e.pool.Close()
		}
		return nil, err
	}
	for _, m := range cfg.Members {
		e.fetches.subscribeToMember(m.Member)
	}
	if e.missing != 0 && !cfg.Loop.Post(e.nextDrop) {
		return nil, api.Errorf(api.Unavailable, "the volume's I/O thread has ended")
	}
	if n > 1 || e.cfg.Track {
		e.cleaner.startCleaner()
	}
	return e, nil
}

// mayAcknowledge reports whether the guest may hear "done" (I1): every member of the epoch has completed the operation
// and has adopted the epoch. For reads one member is enough.
func (e *Engine) mayAcknowledge(o *op) bool {
	if o.reading {
		return o.ok != 0
	}
	return ((e.members|e.joining)&^o.ok)|e.weak == 0
}

// Submit starts a request. Loop thread.
func (e *Engine) Submit(r *block.Request) {
	if err := e.validateRequest(r); err != nil {
		r.Err = err
		r.Done(r)
		return
	}
	if e.gate.parkWrite(r) {
		return
	}
	o := e.startOp(r)
	switch r.Op {
	case block.OpRead:
		if o.isAligned() {
			o.readFromMember(r.Buf, r.Off)
			return
		}
		o.slow = true // for a buffer, not for a range
		o.firstStep()
	case block.OpFlush:
		o.lo, o.hi = 0, 0
		e.ranges.busy.push(o)
		o.sendToMembers(block.OpFlush, nil, 0, 0, false)
	case block.OpWrite:
		o.slow = !o.isAligned()
		e.ranges.admit(o)
	default:
		o.slow = true
		e.ranges.admit(o)
	}
}

func (e *Engine) validateRequest(r *block.Request) error {
	switch {
	case e.fenced != nil || e.closing || e.refusing:
		return syscall.EIO
	case r.Op == block.OpFlush:
		return nil
	case r.Op > block.OpZero:
		return syscall.EOPNOTSUPP
	case e.cfg.ReadOnly && r.Op != block.OpRead:
		return syscall.EROFS
	case r.Off < 0 || r.Len <= 0 || r.Off > e.size-r.Len || (r.Off|r.Len)&511 != 0:
		return syscall.EINVAL
	case r.Op <= block.OpWrite && int64(len(r.Buf)) != r.Len:
		return syscall.EINVAL
	}
	return nil
}

// finishOp ends an operation, and answers the guest.
func (e *Engine) finishOp(o *op, err error) {
	r := o.parent
	r.Err = nil
	if err != nil {
		r.Err = errnoOf(err)
	}
	o.waiting = false
	if o.lock == nil {
		e.stats.countRequest(r, int64(time.Since(e.base))-o.start)
	} else {
		e.ranges.locks--
	}
	locked := !o.isRead()
	if err != nil && locked && o.lock == nil {
		e.unequal.noteFailed(o)
	}
	if locked {
		e.ranges.removeBusy(o)
	}
	e.room.endRetry(o)
	if o.bounce != nil {
		o.giveBounce()
	}
	if len(o.leases) > 0 {
		r.Lease = block.JoinLeases(o.leases...)
		o.leases = nil
	}
	e.freeOp(o)
	r.Done(r)
	if locked {
		if e.ranges.queue.head != nil {
			e.ranges.startQueued()
		}
		e.room.reportRoom()
	}
	if e.inflight == 0 && e.drained != nil {
		close(e.drained)
		e.drained = nil
	}
}

// errnoOf translates an error for the guest's kernel.
func errnoOf(err error) error {
	var no syscall.Errno
	if errors.As(err, &no) {
		return no
	}
	return syscall.EIO
}

// runOnLoop runs fn on the loop's thread and waits for the end. After an error fn did not run, and will not.
func (e *Engine) runOnLoop(ctx context.Context, fn func()) error {
	var taken atomic.Bool // by the loop, or by a caller that stopped waiting
	done := make(chan struct{})
	run := func() {
		if taken.CompareAndSwap(false, true) {
			fn()
		}
		close(done)
	}
	if !e.cfg.Loop.Post(run) {
		return api.Errorf(api.Unavailable, "the volume's I/O thread has ended")
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		if taken.CompareAndSwap(false, true) {
			return api.Errorf(api.Unavailable, "the volume's I/O thread does not answer: %w", ctx.Err())
		}
		<-done
		return nil
	}
}

// Missing names the members that Open did not reach, or that went back in time. The engine did not resync these members
// and drops them; until then a later process of the same epoch must not adopt them either.
func (e *Engine) Missing() []string { return slices.Clone(e.unreached) }

// Epoch returns the present epoch and the names of its members.
func (e *Engine) Epoch(ctx context.Context) (epoch int64, members []string, err error) {
	err = e.runOnLoop(ctx, func() { epoch, members = e.epoch, e.memberNames(e.members) })
	return epoch, members, err
}

func (e *Engine) memberNames(s set) []string {
	var names []string
	for i, m := range e.cfg.Members {
		if s.has(i) {
			names = append(names, m.Name)
		}
	}
	return names
}

// Full reports whether writes wait for room.
func (e *Engine) Full(ctx context.Context) (full bool, err error) {
	err = e.runOnLoop(ctx, func() { full = e.room.full })
	return full, err
}

// Close ends the engine after its device is gone. Close waits for operations at members, fails operations that wait for
// room or for a drop, and then closes the members. The loop must still run.
func (e *Engine) Close() error {
	done := make(chan struct{})
	alive := e.cfg.Loop.Post(func() {
		e.closing, e.hurry = true, true
		e.cancel()
		e.updateLast()
		if e.inflight == 0 && len(e.fetches.list) == 0 {
			close(done)
			return
		}
		e.drained = done
		e.failWaiting()
	})
	if !alive {
		return api.Errorf(api.Unavailable, "the volume's I/O thread has ended")
	}
	<-done
	e.drops.Wait()
	if e.cleaner.ended != nil {
		<-e.cleaner.ended
		e.cleaner.cleanAllRegions()
	}
	var gone set
	var list []Named
	_ = e.runOnLoop(context.Background(), func() { gone, list = e.gone, e.cfg.Members }) // after all that the drops posted
	var errs []error
	for i, m := range list {
		if !gone.has(i) {
			if err := m.Member.Close(); err != nil {
				errs = append(errs, fmt.Errorf("replica %s: %w", m.Name, err))
			}
		}
	}
	if e.cfg.Pool != nil {
		_ = e.runOnLoop(context.Background(), e.pool.removeEngine) // where the loop has ended, the pool ends, too
	} else if e.runOnLoop(context.Background(), e.pool.Close) != nil {
		e.pool.Close() // the loop has ended
	}
	return errors.Join(errs...)
}

// failWaiting ends every operation that waits for anything but a member's answer.
func (e *Engine) failWaiting() {
	e.gate.openGate(syscall.EIO)
	held := e.room.held
	e.room.held = nil
	for _, o := range held {
		e.finishOp(o, syscall.ENOSPC)
	}
	for _, o := range e.ranges.listWaiting() {
		if o.waiting { // the operation before may have ended this one, too
			e.finishOp(o, syscall.EIO)
		}
	}
	e.stalled.failAll()
	e.fetches.failAll()
	e.ranges.startQueued() // firstStep fails the operations
	for _, b := range []*bounces{&e.pool.reads, &e.pool.writes} {
		for _, o := range slices.Clone(b.queue) {
			if o.e == e {
				b.unqueue(o)
				e.finishOp(o, syscall.EIO)
			}
		}
	}
}
