package stack

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/bits"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// mirror is what a replica does because there are others: before the first write to a region it notes durably that the
// region may differ from theirs. The loop thread's.
type mirror struct {
	tracking bool
	region   int64           // bytes of a region; set once
	noted    *format.Intents // durable on the disk, or about to be cleared there
	wanted   []uint64        // bits that waiting requests need
	toNote   []func(error)   // that wait for them
	noting   bool
	token    int64    // of the last Mark
	since    []uint64 // regions touched since then
}

// openIntents reads the intents and keeps their file open.
func (r *Replica) openIntents() (err error) {
	name := r.dir + "/" + intentsFile
	if r.marks, err = r.disk.FS.Open(name, os.O_RDWR, 0); err != nil {
		return err
	}
	data, err := io.ReadAll(io.NewSectionReader(r.marks, 0, format.MaxIntentsSize))
	if err != nil {
		return err
	}
	if r.noted, err = format.DecodeIntents(data); err != nil {
		return err
	}
	r.region = r.noted.Region
	r.wanted, r.since = make([]uint64, len(r.noted.Bits)), make([]uint64, len(r.noted.Bits))
	return nil
}

// growIntents makes the intents cover a larger volume. I/O is held. Nothing is noted or cleaned meanwhile: it would be
// lost here or in the file.
func (r *Replica) growIntents(size int64) (err error) {
	for free := false; !free; {
		if err := r.onLoop(func() { free, r.noting = !r.noting, true }); err != nil {
			return err
		}
		r.work.do(func() {}) // what is under way is over then
	}
	defer func() {
		err = errors.Join(err, r.onLoop(func() { r.noting = false; r.note() }))
	}()
	r.work.do(func() {
		t := &format.Intents{}
		if err = r.onLoop(func() { *t = *r.noted; t.Bits = slices.Clone(t.Bits) }); err != nil || t.Size >= size {
			return
		}
		t.Size = size
		n := (t.Regions() + 63) / 64
		t.Bits = append(t.Bits, make([]uint64, n-int64(len(t.Bits)))...)
		if err = r.rewriteIntents(t); err != nil {
			return
		}
		err = r.onLoop(func() {
			r.noted = t
			more := make([]uint64, n-int64(len(r.wanted)))
			r.wanted, r.since = append(r.wanted, more...), append(r.since, more...)
		})
	})
	return err
}

// rewriteIntents replaces the file. In the worker. Where it is not known which file has the name, the replica fails: it
// would note in one that is gone after a loss of power.
func (r *Replica) rewriteIntents(t *format.Intents) error {
	name := r.dir + "/" + intentsFile
	err := format.ReplaceFile(r.disk.FS, name, format.EncodeIntents(t))
	if err != nil && !errors.Is(err, format.ErrUnsure) {
		return err
	}
	var h file.Handle
	if err == nil {
		h, err = r.disk.FS.Open(name, os.O_RDWR, 0)
	}
	if err != nil {
		r.ring.Post(func() { r.fail(err) })
		return err
	}
	old := r.marks
	r.marks = h
	return old.Close()
}

// intended reports whether all regions of a request are noted; else begin is called again once they are.
func (r *Replica) intended(q *block.Request) bool {
	t, all := r.noted, true
	for g := q.Off / t.Region; g <= (q.Off+q.Len-1)/t.Region; g++ {
		r.since[g/64] |= 1 << (g % 64)
		if !t.Dirty(g) {
			all = false
			r.wanted[g/64] |= 1 << (g % 64)
		}
	}
	if all {
		return true
	}
	r.toNote = append(r.toNote, func(err error) {
		if err != nil {
			r.finish(q, errnoOf(err))
		} else {
			r.begin(q)
		}
	})
	r.note()
	return false
}

// RegionSize is the size of a region that intents are noted for, in bytes.
func (r *Replica) RegionSize() int64 { return r.region }

// Intend notes regions durably, as a write to each would.
func (r *Replica) Intend(ctx context.Context, regions []int64) error {
	done := make(chan error, 1)
	err := r.onLoop(func() {
		t, all := r.noted, true
		for _, g := range regions {
			if g < 0 || g >= t.Regions() {
				continue // it is smaller
			}
			r.since[g/64] |= 1 << (g % 64)
			if !t.Dirty(g) {
				all = false
				r.wanted[g/64] |= 1 << (g % 64)
			}
		}
		if all {
			done <- nil
			return
		}
		r.toNote = append(r.toNote, func(err error) { done <- err })
		r.note()
	})
	if err == nil {
		select {
		case err = <-done:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	return r.name(err)
}

// note writes what waiting requests need, once for all that wait.
func (r *Replica) note() {
	if r.noting || len(r.toNote) == 0 {
		return
	}
	r.noting = true
	list := r.toNote
	r.toNote = nil
	t := &format.Intents{}
	*t = *r.noted
	t.Bits = slices.Clone(t.Bits)
	changed := slices.Clone(r.wanted)
	clear(r.wanted)
	for i := range changed {
		t.Bits[i] |= changed[i]
	}
	r.work.put(func() {
		err := r.writePages(t, changed)
		if err == nil {
			err = r.marks.Datasync()
		}
		r.ring.Post(func() {
			r.noting = false
			switch {
			case err == nil:
				err = r.failed // also of what the worker did before
			case !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT):
				r.fail(err)
			}
			if err == nil {
				for i := range changed {
					r.noted.Bits[i] |= changed[i]
				}
			}
			for _, answer := range list {
				answer(err)
			}
			r.note()
		})
	})
}

// writePages writes the pages of t in which bits of changed are set. In the worker.
func (r *Replica) writePages(t *format.Intents, changed []uint64) error {
	var page [format.IntentsPageSize]byte
	last := int64(-1)
	for i, w := range changed {
		for ; w != 0; w &= w - 1 {
			p := (int64(i)*64 + int64(bits.TrailingZeros64(w))) / format.RegionsPerPage
			if p == last {
				continue
			}
			last = p
			t.EncodePage(page[:], p)
			if _, err := r.marks.WriteAt(page[:], format.IntentsPageSize*(1+p)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Intents says in which regions a replica may differ from the others.
type Intents struct {
	Region  int64   `json:"region"`  // bytes
	Base    int64   `json:"base"`    // the epoch in which all replicas were equal last, but for the regions below
	Joined  int64   `json:"joined"`  // the last epoch that this replica was a member in
	Regions []int64 `json:"regions"` // numbers, ascending
}

// Covers reports whether the intents of a member tell, with those of a replica that comes back, all that this one may
// lack: it was a member when they were cleared last, and has not cleared its own since in a session that the member was
// not in, as before a salvage.
func (t Intents) Covers(back Intents) bool {
	return t.Region == back.Region && back.Joined > 0 && back.Joined >= t.Base && back.Base <= t.Base
}

// Intents are the regions written since the replicas were known to be equal.
func (r *Replica) Intents(context.Context) (Intents, error) {
	var out Intents
	err := r.onLoop(func() {
		t := r.noted
		out = Intents{Region: t.Region, Base: t.Epoch}
		for g := range t.Regions() {
			if t.Dirty(g) {
				out.Regions = append(out.Regions, g)
			}
		}
	})
	out.Joined = r.Meta().Joined
	return out, r.name(err)
}

// Track turns the noting of intents on or off. Adopting several members turns it on, and so does going on after it.
func (r *Replica) Track(_ context.Context, on bool) error {
	return r.name(r.onLoop(func() { r.tracking = on }))
}

// Unnoted says durably that what was written before epoch, or in it until now, no intents tell: a replica that was a
// member before is compared as a whole.
func (r *Replica) Unnoted(_ context.Context, epoch int64) (err error) {
	r.work.do(func() { // what was noted before is in the file, and nothing else is written to it meanwhile
		now := &format.Intents{}
		if err = r.onLoop(func() {
			r.noted.Epoch = max(r.noted.Epoch, epoch)
			*now = *r.noted
			now.Bits = slices.Clone(now.Bits)
		}); err == nil {
			err = r.rewriteIntents(now)
		}
	})
	return r.name(err)
}

// Mark begins to watch which regions are touched, for a Clean with the same token.
func (r *Replica) Mark(_ context.Context, token int64) error {
	return r.name(r.onLoop(func() {
		r.token = token
		clear(r.since)
	}))
}

// Clean takes the intents of regions away that all replicas have flushed, but for those touched since Mark. That it is
// on the disk is not waited for: an intent that stays costs a comparison.
func (r *Replica) Clean(_ context.Context, token, epoch int64, regions []int64) error {
	if r.Meta().Epoch != epoch { // of an engine that was replaced in the meantime
		return nil
	}
	return r.name(r.onLoop(func() {
		t := r.noted
		if token != r.token || t.Epoch > epoch || r.noting {
			return
		}
		was := &format.Intents{}
		*was = *t
		was.Bits, was.Epoch = slices.Clone(t.Bits), epoch
		gone := make([]uint64, len(t.Bits))
		for _, g := range regions {
			if g < 0 || g >= t.Regions() || r.since[g/64]>>(g%64)&1 != 0 || !t.Dirty(g) {
				continue
			}
			gone[g/64] |= 1 << (g % 64)
		}
		// The epoch first: what is cleared is cleared as of then. It counts where nothing is to be cleared, too: all are
		// equal in it but for what stays noted.
		fresh := t.Epoch != epoch
		if !fresh && !slices.ContainsFunc(gone, func(w uint64) bool { return w != 0 }) {
			return
		}
		before := t.Epoch
		t.Epoch = epoch
		for i := range gone {
			t.Bits[i] &^= gone[i]
		}
		now := &format.Intents{}
		*now = *t
		now.Bits = slices.Clone(t.Bits)
		r.noting = true // what is to be noted waits until this is over, one way or the other
		r.work.put(func() {
			var err error
			if fresh {
				err = r.rewriteIntents(was)
			}
			kept := err != nil
			if err == nil {
				err = r.writePages(now, gone)
			}
			r.ring.Post(func() {
				r.noting = false
				if err != nil {
					slog.Warn("intents of a replica stay on its disk", "replica", r.dir, "err", err)
				}
				if kept { // all of them: else some may be gone, and what is touched there is noted again
					r.noted.Epoch = before
					for i := range gone {
						r.noted.Bits[i] |= gone[i]
					}
				}
				r.note()
			})
		})
	}))
}

// Restarted reports whether the lifetime of the replica's last session is over and that session had no clean end: the
// machine restarted, or the disk's file system was mounted again.
func (r *Replica) Restarted() (bool, error) {
	now, err := r.disk.lifetime()
	m := r.Meta()
	return m.Dirty && m.lifetime().Ended(now), r.name(err)
}
