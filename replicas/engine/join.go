package engine

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Mirror is a member that the engine can resync.
type Mirror interface {
	Member
	// Track makes the member note durably, before each write, where the member may differ from the others.
	Track(ctx context.Context, on bool) error
	Intents(ctx context.Context) (stack.Intents, error)
	// Intend notes regions, as writes to them would.
	Intend(ctx context.Context, regions []int64) error
	// Mark and Clean remove intents of flushed regions, except regions touched in between.
	Mark(ctx context.Context, token int64) error
	Clean(ctx context.Context, token, epoch int64, regions []int64) error
	// Digests has 16 bytes for each block of a range.
	Digests(ctx context.Context, off, n int64) ([]byte, error)
}

const digestSize = 16

// zeroSum is the digest of a block of zeros.
var zeroSum = sha256.Sum256(make([]byte, block.Size))

// Progress of a rebuild.
type Progress struct {
	Total int64 // bytes in regions that may differ
	Done  int64 // bytes compared
	Sent  int64 // bytes copied
	Full  bool  // the intents do not name all missing regions: everything is compared
}

// JoinOptions tune a Join.
type JoinOptions struct {
	OnProgress     func(Progress) // called every now and then, from Join's goroutine; may be nil
	BytesPerSecond int64          // bytes compared per second; 0: as fast as the guest allows
	// OnSwap is called before the swap that adds the replica; an error gives the join up. Afterwards only the engine's
	// end does. May be nil.
	OnSwap func() error
	// Join waits for Turn once the replica has adopted the epoch, so that a replica without an answer has no turn; and
	// for WholeTurn before the engine compares the replica as a whole. Join calls each release in the end. Nil: no
	// wait.
	Turn, WholeTurn func(ctx context.Context) (release func(), err error)
}

// joinRun is one call of Join, in the caller's goroutine.
type joinRun struct {
	e     *Engine
	n     Named
	dst   Mirror
	o     JoinOptions
	turns []func() // release the turns of the run
	whole bool     // the run has the turn of a comparison as a whole
	at    layered  // how far the snapshots are
}

// awaitTurn waits for a turn, which releaseTurns gives back.
func (r *joinRun) awaitTurn(ctx context.Context, take func(context.Context) (func(), error)) error {
	if take == nil {
		return nil
	}
	release, err := take(ctx)
	if err == nil {
		r.turns = append(r.turns, release)
	}
	return err
}

// wholeTurn waits for the turn of a comparison as a whole, once.
func (r *joinRun) wholeTurn(ctx context.Context) error {
	if r.whole {
		return nil
	}
	r.whole = true
	return r.awaitTurn(ctx, r.o.WholeTurn)
}

func (r *joinRun) releaseTurns() {
	for _, release := range r.turns {
		release()
	}
}

// awaitEnd waits until the engine has closed a former member of this name: the end of the former session ends all
// sessions with the replica.
func (r *joinRun) awaitEnd(ctx context.Context) error {
	var ended chan struct{}
	if err := r.e.runOnLoop(ctx, func() { ended = r.e.leaving[r.n.Name] }); err != nil || ended == nil {
		return err
	}
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return api.Errorf(api.Unavailable, "replica %s: its former session has not ended: %w", r.n.Name, ctx.Err())
	}
}

// join is a replica between enlistReplica and its membership.
type join struct {
	m      int
	failed chan struct{} // closed when the join fails
	err    error         // why
	done   chan struct{} // closed when the replica is a member
}

// Join makes a replica a member: the replica gets all new writes, the engine copies the missing data, and a swap adds
// the replica. Guest I/O continues. After an error the replica is no member and will not be, and the caller closes it.
func (e *Engine) Join(ctx context.Context, n Named, o JoinOptions) (p Progress, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(e.ctx, cancel)
	defer stop()
	dst, ok := n.Member.(Mirror)
	if !ok || e.cfg.Add == nil {
		return p, api.Errorf(api.Unsupported, "replica %s cannot join", n.Name)
	}
	r := &joinRun{e: e, n: n, dst: dst, o: o}
	defer r.releaseTurns()
	if err := r.prepareReplica(ctx); err != nil {
		return r.at.p, err
	}
	j, src, err := r.enlistReplica(ctx)
	if err != nil {
		return p, err
	}
	defer func() {
		if err != nil {
			r.expelReplica(j, err)
		}
	}()
	// Again: from now on Expand includes the replica, and may have run already.
	if err := r.expandReplica(ctx); err != nil {
		return p, err
	}
	if err := sameSnapshots(ctx, src, dst); err != nil {
		return p, fmt.Errorf("replica %s: %w", n.Name, err)
	}
	work, end := context.WithCancel(ctx)
	defer end()
	go func() { // ends with Join
		select {
		case <-j.failed:
			end()
		case <-work.Done():
		}
	}()
	if p, err = r.catchUp(work, j, src); err == nil {
		err = submitAndWait(work, e.cfg.Loop, dst, &block.Request{Op: block.OpFlush})
	}
	if err != nil {
		return p, errJoin(n.Name, j, err)
	}
	if o.OnSwap != nil {
		if err := o.OnSwap(); err != nil {
			return p, errJoin(n.Name, j, err)
		}
	}
	e.cfg.Loop.Post(func() {
		if e.joins[j.m] == j { // else the join failed in the meantime
			e.wishes = append(e.wishes, j)
			e.nextDrop()
		}
	})
	select {
	case <-j.done:
		return p, nil
	case <-j.failed:
		return p, errJoin(n.Name, j, j.err)
	case <-ctx.Done(): // the next engine finds the outcome of the swap
		return p, api.Errorf(api.Unavailable, "the volume's engine is ending")
	}
}

// prepareReplica makes the replica adopt the present epoch, and gives the replica the size and the snapshots of the
// members.
func (r *joinRun) prepareReplica(ctx context.Context) error {
	e := r.e
	if err := e.NoteIntents(ctx); err != nil {
		return err
	}
	epoch, names, err := e.Epoch(ctx)
	if err != nil {
		return err
	}
	if err := r.awaitEnd(ctx); err != nil {
		return err
	}
	// From now on the replica refuses late writes of former engines.
	if err := r.dst.Adopt(ctx, epoch, e.cfg.Incarnation, names); err != nil {
		return err
	}
	if err := r.awaitTurn(ctx, r.o.Turn); err != nil {
		return err
	}
	if err := r.expandReplica(ctx); err != nil {
		return err
	}
	if err := r.dst.Track(ctx, true); err != nil {
		return err
	}
	if err := r.clearTail(ctx); err != nil {
		return fmt.Errorf("replica %s cannot be rebuilt: %w", r.n.Name, err)
	}
	if err := r.copySnapshots(ctx); err != nil {
		return fmt.Errorf("replica %s cannot be rebuilt: %w", r.n.Name, err)
	}
	return r.expandReplica(ctx) // the volume may have grown meanwhile
}

func errJoin(name string, j *join, err error) error {
	select {
	case <-j.failed:
		err = j.err
	default:
	}
	return fmt.Errorf("replica %s cannot be rebuilt: %w", name, err)
}

func (e *Engine) volumeSize(ctx context.Context) (size int64, err error) {
	err = e.runOnLoop(ctx, func() { size = e.size })
	return size, err
}

// enlistReplica makes the replica get all new writes, and waits for the end of the older ones.
func (r *joinRun) enlistReplica(ctx context.Context) (*join, Mirror, error) {
	e, n := r.e, r.n
	j := &join{failed: make(chan struct{}), done: make(chan struct{})}
	settled := make(chan struct{})
	var src Mirror
	var refused error
	err := e.runOnLoop(ctx, func() {
		switch {
		case e.closing || e.fenced != nil:
			refused = api.Errorf(api.Unavailable, "the engine is ending")
			return
		case e.cutting:
			refused = errCutting
			return
		case len(e.cfg.Members) >= MaxMembers && e.spare == 0:
			refused = api.Errorf(api.Busy, "the volume has %d replicas, or had them a moment ago", MaxMembers)
			return
		case slices.ContainsFunc(e.cfg.Members, func(m Named) bool { return m.Name == n.Name && e.isIn(m.Name) }):
			refused = api.Errorf(api.Exists, "replica %s is a member already", n.Name)
			return
		}
		m := e.selectReader(e.hurt)
		if m < 0 {
			m = e.selectReader(0)
		}
		if m >= 0 {
			src, _ = e.cfg.Members[m].Member.(Mirror)
		}
		if src == nil {
			refused = api.Errorf(api.Unavailable, "the engine has no member to copy from now")
			return
		}
		e.cfg.Members = slices.Clone(e.cfg.Members) // readers iterate over the old slice
		if e.spare != 0 {
			j.m = e.spare.first()
			e.spare &^= bit(j.m)
			e.cfg.Members[j.m], e.dropped[j.m] = n, nil
			e.hurt &^= bit(j.m)
		} else {
			j.m = len(e.cfg.Members)
			e.cfg.Members, e.dropped = append(e.cfg.Members, n), append(e.dropped, nil)
		}
		e.gone |= bit(j.m) // until the membership the caller of Join closes it
		e.joiners |= bit(j.m)
		e.joins[j.m] = j
		e.fetches.subscribeToMember(n.Member)
		e.gens.callAfterOperations(func() { close(settled) })
	})
	if err == nil {
		err = refused
	}
	if err != nil {
		return nil, nil, err
	}
	select {
	case <-settled:
		return j, src, nil
	case <-ctx.Done():
		err := api.Errorf(api.Unavailable, "writes wait: %w", ctx.Err())
		r.expelReplica(j, err)
		return nil, nil, err
	}
}

func (e *Engine) isIn(name string) bool {
	for i, m := range e.cfg.Members {
		if m.Name == name && (e.members | e.joiners | e.joining).has(i) {
			return true
		}
	}
	return false
}

// expelReplica takes the replica out after a failed join, and waits for the end of all operations that may use the
// replica.
func (r *joinRun) expelReplica(j *join, why error) {
	e := r.e
	idle := make(chan struct{})
	if !e.cfg.Loop.Post(func() {
		if e.joins[j.m] == j { // else another replica may have the place
			e.removeJoiners(bit(j.m), why)
		}
		e.gens.callAfterOperations(func() { close(idle) })
	}) {
		return
	}
	select {
	case <-idle:
	case <-e.ctx.Done():
	}
}

// removeJoiners forgets joiners. Loop thread.
func (e *Engine) removeJoiners(who set, why error) {
	for m, j := range e.joins {
		if !who.has(m) || !e.joiners.has(m) {
			continue
		}
		e.joiners &^= bit(m)
		j.err = why
		e.wishes = slices.DeleteFunc(e.wishes, func(w *join) bool { return w == j })
		delete(e.joins, m)
		e.freePlaceLater(m)
		close(j.failed)
	}
}

// freePlaceLater frees the place of a replica at the end of all operations that may have asked the replica. Loop
// thread.
func (e *Engine) freePlaceLater(m int) {
	e.gens.callAfterOperations(func() { e.spare |= bit(m) })
}

// nextJoin starts the swap for the next join. During a deletion of a snapshot the swap waits: a joiner that does not
// delete the snapshot must not become a member.
func (e *Engine) nextJoin() {
	if len(e.wishes) == 0 || e.cutting {
		return
	}
	j := e.wishes[0]
	e.wishes = slices.Delete(e.wishes, 0, 1)
	e.dropping = true
	e.joiners &^= bit(j.m)
	e.joining = bit(j.m) // from now on no acknowledgement without the replica
	d := drop{m: j.m, list: e.cfg.Members, epoch: e.epoch, names: e.memberNames(e.members | bit(j.m)),
		survivors: e.members&^e.suspect | bit(j.m)}
	name := e.cfg.Members[j.m].Name
	e.drops.Add(1)
	go func() {
		defer e.drops.Done()
		called := error(nil)
		err := e.repeatUntilDecided(func(ctx context.Context) error {
			err := e.cfg.Add(ctx, d.epoch, name)
			if api.Is(err, api.NotFound) { // surely not done
				called = err
				return nil
			}
			return err
		})
		if err == nil && called == nil {
			err = e.adoptAll(&d, d.epoch+1)
		}
		e.cfg.Loop.Post(func() { e.joinEnded(j, &d, called, err) })
	}()
}

// joinEnded takes the outcome. Loop thread.
func (e *Engine) joinEnded(j *join, d *drop, called, err error) {
	e.dropping = false
	switch {
	case err != nil && api.Is(err, api.Denied):
		e.fence(err)
		fallthrough
	case err != nil || e.closing:
		e.joining = 0
		delete(e.joins, j.m)
		j.err = err
		close(j.failed)
		return
	case called != nil:
		e.joining, e.joiners = 0, e.joiners|bit(j.m)
		e.removeJoiners(bit(j.m), called)
		e.nextDrop()
		e.decideWaiting()
		return
	}
	e.joining = 0
	e.members |= bit(j.m)
	e.gone &^= bit(j.m)
	e.weak = (e.weak&^d.survivors | d.weak) & e.members
	e.epoch = d.epoch + 1
	delete(e.joins, j.m)
	e.updateLast()
	close(j.done)
	for m := range e.cfg.Members {
		if d.weak.has(m) {
			e.proposeDrop(m, d.why)
		}
	}
	e.nextDrop()
	e.decideWaiting()
	e.unequal.requestResync()
}

// catchUp copies the data that the replica lacks.
func (r *joinRun) catchUp(ctx context.Context, j *join, src Mirror) (p Progress, err error) {
	regions, region, full, err := r.findLackingRegions(ctx, src)
	if err == nil {
		err = inheritIntents(ctx, src, r.dst)
	}
	if err != nil {
		return r.at.p, err
	}
	size, err := r.e.volumeSize(ctx)
	if err != nil {
		return r.at.p, err
	}
	p = r.at.p
	if p.Full = p.Full || full; full {
		if err := r.wholeTurn(ctx); err != nil {
			return p, err
		}
	}
	c := copier{e: r.e, to: []Mirror{r.dst}, join: j, o: r.o, p: p}
	c.bare.Store(p.Full)
	return c.copyRegions(ctx, regions, region, size)
}

// inheritIntents makes the replica note the intents of the member that the copy came from. In such a region both may
// hold the same, so that the engine copies nothing, but a third, missing replica may hold something else.
func inheritIntents(ctx context.Context, src, dst Mirror) error {
	t, err := src.Intents(ctx)
	if err != nil {
		return err
	}
	return dst.Intend(ctx, t.Regions)
}

func union(a, b []int64) []int64 {
	all := append(slices.Clone(a), b...)
	slices.Sort(all)
	return slices.Compact(all)
}

// lockRange keeps the guest from writing to a range until release.
func (e *Engine) lockRange(ctx context.Context, off, n int64) (release func(), err error) {
	got := make(chan error, 1)
	var o *op
	if !e.cfg.Loop.Post(func() {
		if e.closing || e.fenced != nil {
			got <- api.Errorf(api.Unavailable, "the engine is ending")
			return
		}
		ended := false
		r := &block.Request{Op: block.OpWrite, Off: off, Len: n}
		r.Done = func(r *block.Request) {
			if !ended && r.Err != nil {
				got <- r.Err
			}
		}
		o = e.startOp(r)
		o.slow = true
		o.lock = func() { ended = true; got <- nil }
		e.ranges.locks++
		e.ranges.admit(o)
	}) {
		return nil, api.Errorf(api.Unavailable, "the volume's I/O thread has ended")
	}
	if err := <-got; err != nil { // in bounded time: the operations before end, or the engine does
		return nil, err
	}
	return func() {
		done := make(chan struct{})
		if e.cfg.Loop.Post(func() { e.finishOp(o, nil); close(done) }) {
			<-done
		}
	}, nil
}
