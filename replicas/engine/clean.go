package engine

import (
	"context"
	"sync/atomic"
	"time"
	"unsafe"

	"drover.io/drover/block"
)

// Intents say where members may differ after an unclean end. They are taken away again while all replicas of the volume
// are members: a region that nobody wrote to for a while, after a flush that began later.

// cleanEvery is how often that is looked at.
const cleanEvery = 20 * time.Second

// cleanRegion is what the engine counts writes in; a multiple of it is a region of the intents.
const cleanRegion = int64(16) << 20

// SetWhole says whether all replicas of the volume are members. While one is away, intents stay: they tell what it
// lacks. It is said of an epoch: by now the engine may have dropped one.
func (e *Engine) SetWhole(epoch int64, is bool) {
	e.cfg.Loop.Post(func() { e.cleaner.whole.Store(is && e.epoch == epoch) })
}

// cleaner takes intents away that are not needed any more.
type cleaner struct {
	e       *Engine
	whole   atomic.Bool     // all replicas of the volume are members
	touched map[int64]int64 // region -> generation of its last write, since it was last clean. Loop thread
	ended   chan struct{}   // closed when the goroutine has ended; nil: there is none. Set before the engine serves, or on the loop
}

// start starts the goroutine, which ends with the engine.
func (c *cleaner) start() {
	c.ended = make(chan struct{})
	go c.run()
}

// notes reports whether the members note intents. Loop thread.
func (c *cleaner) notes() bool { return c.ended != nil }

// touch notes a write. Loop thread.
func (c *cleaner) touch(off, n, gen int64) {
	for g := off / cleanRegion; g <= (off+n-1)/cleanRegion; g++ {
		c.touched[g] = max(c.touched[g], gen) // one that had to wait may come after a younger one
	}
}

func (c *cleaner) run() {
	e := c.e
	defer close(c.ended)
	tick := time.NewTicker(cleanEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			e.unequal.resync(e.ctx)
			c.once(e.ctx)
		case <-e.unequal.wake:
			e.unequal.resync(e.ctx)
		case <-e.ctx.Done():
			return
		}
	}
}

// once takes the intents of regions away that were not written to since the last time. What fails is tried again
// the next time: an intent that stays costs a comparison.
func (c *cleaner) once(ctx context.Context) {
	e := c.e
	if !c.whole.Load() {
		return
	}
	var members set
	var epoch, gen int64
	settled := make(chan struct{})
	some := false
	if e.on(ctx, func() {
		if some = len(c.touched) > 0 && e.steady(); !some {
			return
		}
		members, epoch = e.members, e.epoch
		gen = e.gens.after(func() { close(settled) })
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
	if e.on(ctx, func() {
		if !e.steady() || e.members != members || e.epoch != epoch || !c.whole.Load() {
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
		_ = m.Clean(ctx, gen, epoch, regions) // else they stay for good, which is safe
	}
}

// steady reports whether every member has everything. Loop thread.
func (e *Engine) steady() bool {
	return e.suspect|e.lost|e.weak|e.joiners|e.joining == 0 && !e.dropping && e.unequal.none() &&
		e.fenced == nil
}

func (e *Engine) mirrorsOf(ctx context.Context, who set) (all []Mirror) {
	_ = e.on(ctx, func() {
		for i, m := range e.cfg.Members {
			if r, ok := m.Member.(Mirror); ok && who.has(i) {
				all = append(all, r)
			}
		}
	})
	return all
}

// closeTime bounds what is done for the next attach when a volume is detached.
const closeTime = 10 * time.Second

// last takes all intents away when everything is flushed and nothing more will come.
func (c *cleaner) last() {
	e := c.e
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	var members set
	var epoch, size int64
	ok := false
	if e.on(ctx, func() {
		ok = e.steady() && c.whole.Load()
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
		if do(ctx, e.cfg.Loop, m, &block.Request{Op: block.OpFlush}) != nil {
			return
		}
	}
	var regions []int64
	for g := range (size + cleanRegion - 1) / cleanRegion {
		regions = append(regions, g)
	}
	for _, m := range all {
		_ = m.Clean(ctx, token, epoch, regions) // else they stay, which is safe
	}
}

// aligned is memory for direct I/O.
func aligned(n int) []byte {
	b := make([]byte, n+block.Size)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (block.Size - 1))
	return b[skip : skip+n : skip+n]
}
