package engine

import (
	"context"
	"sync/atomic"
	"time"

	"drover.io/drover/block"
)

// Intents say where members may differ after an unclean end. While all replicas of the volume are members, the cleaner
// removes the intents of regions without recent writes, after a later flush.

// cleanEvery is the pause between two runs of the cleaner.
const cleanEvery = 20 * time.Second

// cleanRegion is the unit in which the engine counts writes; a multiple of cleanRegion is a region of the intents.
const cleanRegion = int64(16) << 20

// SetWhole says whether all replicas of the volume are members. While a replica is missing, intents stay, because they
// name the regions that the replica lacks. SetWhole names an epoch, because the engine may have dropped a member since.
func (e *Engine) SetWhole(epoch int64, is bool) {
	e.cfg.Loop.Post(func() { e.cleaner.whole.Store(is && e.epoch == epoch) })
}

// cleaner removes intents of regions in which all members are equal.
type cleaner struct {
	e       *Engine
	whole   atomic.Bool     // all replicas of the volume are members
	touched map[int64]int64 // region -> generation of its last write since the last cleaning. Loop thread
	ended   chan struct{}   // closed at the goroutine's end; nil: not started
}

// startCleaner starts the goroutine, which ends with the engine.
func (c *cleaner) startCleaner() {
	c.ended = make(chan struct{})
	go c.runCleaner()
}

// notesIntents reports whether the members note intents. Loop thread.
func (c *cleaner) notesIntents() bool { return c.ended != nil }

// touchRegions notes a write in its regions. Loop thread.
func (c *cleaner) touchRegions(off, n, gen int64) {
	for g := off / cleanRegion; g <= (off+n-1)/cleanRegion; g++ {
		c.touched[g] = max(c.touched[g], gen) // a write that had to wait may come after a younger write
	}
}

func (c *cleaner) runCleaner() {
	e := c.e
	defer close(c.ended)
	tick := time.NewTicker(cleanEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			e.unequal.resyncPieces(e.ctx)
			c.cleanIdleRegions(e.ctx)
		case <-e.unequal.wake:
			e.unequal.resyncPieces(e.ctx)
		case <-e.ctx.Done():
			return
		}
	}
}

// cleanIdleRegions removes the intents of regions without a write since the last run. After an error the next run tries
// again: a remaining intent costs a comparison.
func (c *cleaner) cleanIdleRegions(ctx context.Context) {
	e := c.e
	if !c.whole.Load() {
		return
	}
	var members set
	var epoch, gen int64
	settled := make(chan struct{})
	some := false
	if e.runOnLoop(ctx, func() {
		if some = len(c.touched) > 0 && e.membersComplete(); !some {
			return
		}
		members, epoch = e.members, e.epoch
		gen = e.gens.callAfterOperations(func() { close(settled) })
	}) != nil || !some {
		return
	}
	all := e.mirrorsOf(ctx, members)
	for _, m := range all {
		if m.Mark(ctx, gen) != nil {
			return
		}
	}
	select {
	case <-settled:
	case <-ctx.Done():
		return
	}
	flushed := make(chan error, 1)
	r := &block.Request{Op: block.OpFlush}
	r.Done = func(r *block.Request) { flushed <- r.Err }
	if !e.cfg.Loop.Post(func() { e.Submit(r) }) || <-flushed != nil {
		return
	}
	var regions []int64
	if e.runOnLoop(ctx, func() {
		if !e.membersComplete() || e.members != members || e.epoch != epoch || !c.whole.Load() {
			return
		}
		for g, last := range c.touched {
			if last < gen {
				regions = append(regions, g)
				delete(c.touched, g)
			}
		}
	}) != nil || len(regions) == 0 {
		return
	}
	for _, m := range all {
		_ = m.Clean(ctx, gen, epoch, regions) // else the intents stay, which is safe
	}
}

// membersComplete reports whether every member has everything. Loop thread.
func (e *Engine) membersComplete() bool {
	return e.suspect|e.lost|e.weak|e.joiners|e.joining == 0 && !e.dropping && e.unequal.membersEqual() &&
		e.fenced == nil
}

func (e *Engine) mirrorsOf(ctx context.Context, who set) (all []Mirror) {
	_ = e.runOnLoop(ctx, func() {
		for i, m := range e.cfg.Members {
			if r, ok := m.Member.(Mirror); ok && who.has(i) {
				all = append(all, r)
			}
		}
	})
	return all
}

// closeTime bounds the work at a detach for the next attach.
const closeTime = 10 * time.Second

// cleanAllRegions takes all intents away when everything is flushed and nothing more will come. A resumed engine leaves
// the intents of the process before to the next attach: the kernel may not have sent again what this process left
// unanswered.
func (c *cleaner) cleanAllRegions() {
	e := c.e
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	var members set
	var epoch, size int64
	ok := false
	if e.runOnLoop(ctx, func() {
		ok = e.membersComplete() && c.whole.Load() && !e.resumed
		members, epoch, size = e.members, e.epoch, e.size
	}) != nil || !ok {
		return
	}
	all := e.mirrorsOf(ctx, members)
	if len(all) != members.len() {
		return
	}
	const token = int64(-1)
	for _, m := range all {
		if m.Mark(ctx, token) != nil {
			return
		}
	}
	for _, m := range all {
		if submitAndWait(ctx, e.cfg.Loop, m, &block.Request{Op: block.OpFlush}) != nil {
			return
		}
	}
	var regions []int64
	for g := range (size + cleanRegion - 1) / cleanRegion {
		regions = append(regions, g)
	}
	for _, m := range all {
		_ = m.Clean(ctx, token, epoch, regions) // else the intents stay, which is safe
	}
}
