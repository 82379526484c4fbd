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
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// intentTracker keeps the intents of a replica: before the first write to a region it notes durably that the region may
// differ from the other members. The fields belong to the loop's thread, file to the worker.
type intentTracker struct {
	host     intentHost
	ring     ring
	work     *worker
	fs       file.FS
	path     string      // of the file
	file     file.Handle // the worker's
	tracking bool
	region   int64           // bytes of a region; set once
	noted    *format.Intents // durable on the disk, or about to be cleared there
	wanted   []uint64        // bits that waiting requests need
	toNote   []func(error)   // called after the next write of the file
	noting   bool
	token    int64    // of the last Mark
	since    []uint64 // regions touched since Mark
}

// intentHost is the part of a replica that the tracker of its intents needs. writeFailure, failWrites and resumeRequest
// run on the loop's thread.
type intentHost interface {
	writeFailure() error
	failWrites(err error)
	resumeRequest(q *block.Request, err error)
	nameError(err error) error
	Meta() Meta
}

// openFile reads the intents and keeps the file open.
func (i *intentTracker) openFile() (err error) {
	if i.file, err = i.fs.Open(i.path, os.O_RDWR, 0); err != nil {
		return err
	}
	data, err := io.ReadAll(io.NewSectionReader(i.file, 0, format.MaxIntentsSize))
	if err != nil {
		return err
	}
	if i.noted, err = format.DecodeIntents(data); err != nil {
		return err
	}
	i.region = i.noted.Region
	i.wanted, i.since = make([]uint64, len(i.noted.Bits)), make([]uint64, len(i.noted.Bits))
	return nil
}

// grow makes the intents cover a larger volume, while I/O is held. No intent is noted or cleaned meanwhile, because the
// change would be lost in memory or in the file.
func (i *intentTracker) grow(size int64) (err error) {
	for free := false; !free; {
		if err := onLoop(i.ring, func() { free, i.noting = !i.noting, true }); err != nil {
			return err
		}
		i.work.do(func() {}) // all work in progress has ended then
	}
	defer func() {
		err = errors.Join(err, onLoop(i.ring, func() { i.noting = false; i.noteWanted() }))
	}()
	i.work.do(func() {
		t := &format.Intents{}
		if err = onLoop(i.ring, func() { *t = *i.noted; t.Bits = slices.Clone(t.Bits) }); err != nil || t.Size >= size {
			return
		}
		t.Size = size
		n := (t.Regions() + 63) / 64
		t.Bits = append(t.Bits, make([]uint64, n-int64(len(t.Bits)))...)
		if err = i.replaceFile(t); err != nil {
			return
		}
		err = onLoop(i.ring, func() {
			i.noted = t
			more := make([]uint64, n-int64(len(i.wanted)))
			i.wanted, i.since = append(i.wanted, more...), append(i.since, more...)
		})
	})
	return err
}

// replaceFile replaces the file, in the worker. If the disk may have the old or the new file, the replica fails,
// because later intents could be lost with the file.
func (i *intentTracker) replaceFile(t *format.Intents) error {
	err := format.ReplaceFile(i.fs, i.path, format.EncodeIntents(t))
	if err != nil && !errors.Is(err, format.ErrUnsure) {
		return err
	}
	var h file.Handle
	if err == nil {
		h, err = i.fs.Open(i.path, os.O_RDWR, 0)
	}
	if err != nil {
		i.ring.Post(func() { i.host.failWrites(err) })
		return err
	}
	old := i.file
	i.file = h
	return old.Close()
}

// hasIntents reports whether all regions of a request are noted; otherwise the request resumes once they are.
func (i *intentTracker) hasIntents(q *block.Request) bool {
	t, all := i.noted, true
	for g := q.Off / t.Region; g <= (q.Off+q.Len-1)/t.Region; g++ {
		i.since[g/64] |= 1 << (g % 64)
		if !t.Dirty(g) {
			all = false
			i.wanted[g/64] |= 1 << (g % 64)
		}
	}
	if all {
		return true
	}
	i.toNote = append(i.toNote, func(err error) { i.host.resumeRequest(q, err) })
	i.noteWanted()
	return false
}

// RegionSize is the size of a region that intents are noted for, in bytes.
func (i *intentTracker) RegionSize() int64 { return i.region }

// Intend notes regions durably, as a write to each would.
func (i *intentTracker) Intend(ctx context.Context, regions []int64) error {
	done := make(chan error, 1)
	err := onLoop(i.ring, func() {
		t, all := i.noted, true
		for _, g := range regions {
			if g < 0 || g >= t.Regions() {
				continue // beyond the volume
			}
			i.since[g/64] |= 1 << (g % 64)
			if !t.Dirty(g) {
				all = false
				i.wanted[g/64] |= 1 << (g % 64)
			}
		}
		if all {
			done <- nil
			return
		}
		i.toNote = append(i.toNote, func(err error) { done <- err })
		i.noteWanted()
	})
	if err == nil {
		select {
		case err = <-done:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	return i.host.nameError(err)
}

// noteWanted writes the wanted intents, once for all waiting requests.
func (i *intentTracker) noteWanted() {
	if i.noting || len(i.toNote) == 0 {
		return
	}
	i.noting = true
	list := i.toNote
	i.toNote = nil
	t := &format.Intents{}
	*t = *i.noted
	t.Bits = slices.Clone(t.Bits)
	changed := slices.Clone(i.wanted)
	clear(i.wanted)
	for k := range changed {
		t.Bits[k] |= changed[k]
	}
	i.work.put(func() {
		err := i.writePages(t, changed)
		if err == nil {
			err = i.file.Datasync()
		}
		i.ring.Post(func() {
			i.noting = false
			switch {
			case err == nil:
				err = i.host.writeFailure() // also of what the worker did before
			case !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT):
				i.host.failWrites(err)
			}
			if err == nil {
				for k := range changed {
					i.noted.Bits[k] |= changed[k]
				}
			}
			for _, answer := range list {
				answer(err)
			}
			i.noteWanted()
		})
	})
}

// writePages writes the pages of t in which bits of changed are set. In the worker.
func (i *intentTracker) writePages(t *format.Intents, changed []uint64) error {
	var page [format.IntentsPageSize]byte
	last := int64(-1)
	for k, w := range changed {
		for ; w != 0; w &= w - 1 {
			p := (int64(k)*64 + int64(bits.TrailingZeros64(w))) / format.RegionsPerPage
			if p == last {
				continue
			}
			last = p
			t.EncodePage(page[:], p)
			if _, err := i.file.WriteAt(page[:], format.IntentsPageSize*(1+p)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Intents lists the regions in which a replica may differ from the other members.
type Intents struct {
	Region  int64   `json:"region"`  // bytes
	Base    int64   `json:"base"`    // the last epoch in which all members were equal, except for Regions
	Joined  int64   `json:"joined"`  // the last epoch in which this replica was a member
	Regions []int64 `json:"regions"` // numbers, ascending
}

// Covers reports whether the intents of a member, together with the intents of a returning replica, cover all that the
// replica may lack: the replica was a member when the intents were cleared last, and has not cleared its own since in a
// session without the member, as before a salvage.
func (t Intents) Covers(back Intents) bool {
	return t.Region == back.Region && back.Joined > 0 && back.Joined >= t.Base && back.Base <= t.Base
}

// Intents returns the regions with writes since the members were known to be equal.
func (i *intentTracker) Intents(context.Context) (Intents, error) {
	var out Intents
	err := onLoop(i.ring, func() {
		t := i.noted
		out = Intents{Region: t.Region, Base: t.Epoch}
		for g := range t.Regions() {
			if t.Dirty(g) {
				out.Regions = append(out.Regions, g)
			}
		}
	})
	out.Joined = i.host.Meta().Joined
	return out, i.host.nameError(err)
}

// Track turns write intents on or off. Adopt turns write intents on for several members, and in a resumed session.
func (i *intentTracker) Track(_ context.Context, on bool) error {
	return i.host.nameError(onLoop(i.ring, func() { i.tracking = on }))
}

// Unnoted records durably that no intents cover the writes before epoch, and in epoch until now: a former member is
// compared as a whole. On a full disk the error is of kind full, and the record stays as it was.
func (i *intentTracker) Unnoted(_ context.Context, epoch int64) (err error) {
	i.work.do(func() { // what was noted before is in the file, and nothing else is written to it meanwhile
		var before int64
		now := &format.Intents{}
		if err = onLoop(i.ring, func() {
			before = i.noted.Epoch
			i.noted.Epoch = max(before, epoch)
			*now = *i.noted
			now.Bits = slices.Clone(now.Bits)
		}); err != nil {
			return
		}
		// A later removal of intents is relative to the epoch in the file.
		if err = diskfs.Classify(i.replaceFile(now)); err != nil {
			err = errors.Join(err, onLoop(i.ring, func() { i.noted.Epoch = before }))
		}
	})
	return i.host.nameError(err)
}

// Mark begins to record touched regions, for a Clean with the same token.
func (i *intentTracker) Mark(_ context.Context, token int64) error {
	return i.host.nameError(onLoop(i.ring, func() {
		i.token = token
		clear(i.since)
	}))
}

// Clean removes the intents of regions that all members have flushed, except regions touched since Mark. Clean does not
// wait for the disk, because a leftover intent only costs a comparison.
func (i *intentTracker) Clean(_ context.Context, token, epoch int64, regions []int64) error {
	if i.host.Meta().Epoch != epoch { // of an engine that was replaced in the meantime
		return nil
	}
	return i.host.nameError(onLoop(i.ring, func() {
		t := i.noted
		if token != i.token || t.Epoch > epoch || i.noting {
			return
		}
		was := &format.Intents{}
		*was = *t
		was.Bits, was.Epoch = slices.Clone(t.Bits), epoch
		gone := make([]uint64, len(t.Bits))
		for _, g := range regions {
			if g < 0 || g >= t.Regions() || i.since[g/64]>>(g%64)&1 != 0 || !t.Dirty(g) {
				continue
			}
			gone[g/64] |= 1 << (g % 64)
		}
		// The epoch first, because the removal is relative to the epoch. The epoch also counts without a removal: the members
		// are equal in the epoch except for the remaining intents.
		fresh := t.Epoch != epoch
		if !fresh && !slices.ContainsFunc(gone, func(w uint64) bool { return w != 0 }) {
			return
		}
		before := t.Epoch
		t.Epoch = epoch
		for k := range gone {
			t.Bits[k] &^= gone[k]
		}
		now := &format.Intents{}
		*now = *t
		now.Bits = slices.Clone(t.Bits)
		i.noting = true // new intents wait until the end of the removal
		i.work.put(func() {
			var err error
			if fresh {
				err = i.replaceFile(was)
			}
			kept := err != nil
			if err == nil {
				err = i.writePages(now, gone)
			}
			i.ring.Post(func() {
				i.noting = false
				if err != nil {
					slog.Warn("intents of a replica stay on its disk", "file", i.path, "err", err)
				}
				if kept { // the file has all of them; otherwise some may be gone, and new writes note them again
					i.noted.Epoch = before
					for k := range gone {
						i.noted.Bits[k] |= gone[k]
					}
				}
				i.noteWanted()
			})
		})
	}))
}
