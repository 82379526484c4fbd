package stack

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// Two neighbouring layers become one when nothing needs the lower one by itself any more. What the smaller of them has
// to give is copied into the file of the larger, window by window: copied, synced, recorded in stack.json, and only
// then taken out of the smaller one. So no more than a window is there twice, and at any moment, after a crash too,
// each block is surely in one place: below Done in the target, above it where the maps of the two say. In the end the
// larger file becomes the data of a new layer; a uid keeps meaning one content, and those of the two are never served
// again.

// Merge is a merge under way, as stack.json has it.
type Merge struct {
	Lower  string `json:"lower"`
	Upper  string `json:"upper"`
	Result string `json:"result"` // the uid of the layer that comes of it
	Up     bool   `json:"up"`     // the upper layer's file is the target
	Done   int64  `json:"done"`   // bytes from the start on that the target has
}

const mergingFile = "merging" // in the folders of both: nobody else may open or name them

// mergeWindow bounds what is on the disk twice.
const mergeWindow = int64(32) << 20

// mergeAhead is how much of a window is copied until the disk has it, so that no system call takes long: see emptier.
const mergeAhead = int64(2) << 20

// moved corrects where the blocks of a page, of which base is the first, are read from.
func (g *Merge) moved(vals []uint16, base int64, layers []*layer) {
	if g == nil || base >= g.Done>>blockBits {
		return
	}
	k := slices.IndexFunc(layers, func(l *layer) bool { return l.rec.UID == g.Lower })
	if k < 0 {
		return
	}
	from, to := g.ends(k)
	for i := range vals[:min(int64(len(vals)), g.Done>>blockBits-base)] {
		if vals[i] == from {
			vals[i] = to
		}
	}
}

// ends are the values in the index of the layer that is emptied and of the target; the lower one is layer k.
func (g *Merge) ends(k int) (from, to uint16) {
	if g.Up {
		return fromLayer + uint16(k), fromLayer + uint16(k+1)
	}
	return fromLayer + uint16(k+1), fromLayer + uint16(k)
}

// MergeOptions tune a merge.
type MergeOptions struct {
	BytesPerSecond int64 // of what is copied; 0: as fast as it goes
}

// Merge merges two neighbouring layers, or goes on with a merge that was interrupted, and reports whether there was
// anything to do. I/O goes on; it is held for the moment in which a window changes its place. The newest layer is never
// the lower one: cut first.
func (r *Replica) Merge(ctx context.Context, o MergeOptions) (bool, error) {
	if !r.merging.TryLock() {
		return false, r.name(api.Errorf(api.Busy, "a merge is under way"))
	}
	defer r.merging.Unlock()
	if err := r.sound(ctx, o); err != nil {
		return false, r.name(classify(err))
	}
	w, err := r.beginMerge()
	for wait := forkTime / 8; errors.Is(err, errRead) && wait <= forkTime; wait *= 2 {
		select { // a process that is being started may have them, too
		case <-time.After(wait):
		case <-ctx.Done():
			return false, ctx.Err()
		}
		w, err = r.beginMerge()
	}
	if errors.Is(err, errRead) {
		return false, nil
	}
	if w == nil || err != nil {
		return false, r.name(classify(err))
	}
	defer w.close()
	for err == nil {
		var more bool
		if more, err = w.window(ctx, o); err == nil && !more {
			return true, r.name(classify(w.end(ctx)))
		}
	}
	return true, r.name(classify(err))
}

// merger carries one merge. Its handles are its own: the replica may be closed between two windows.
type merger struct {
	r            *Replica
	lower, upper *layer // opened for this merge
	from, to     file.Handle
	size         int64
	seen         Merge // as recorded
	beside       bool  // both are beside the head: its data path does not have them
	copied       int64
	freed        emptier
	began        time.Time

	mu     sync.Mutex
	damage []Damage // of the result
}

func (w *merger) close() {
	for _, l := range []*layer{w.lower, w.upper} {
		if l != nil {
			_ = l.close()
		}
	}
	for _, h := range []file.Handle{w.from, w.to} {
		if h != nil {
			_ = h.Close()
		}
	}
}

// open checks that the replica is still open. The caller has mu.
func (r *Replica) isOpen() error {
	r.metaMu.Lock()
	defer r.metaMu.Unlock()
	if r.closed {
		return errClosed
	}
	return nil
}

// errRead says that layers which could be merged are being read.
var errRead = errors.New("somebody has the layers open")

// beginMerge finds two layers, or the merge that stack.json tells of, and makes sure that nobody else has them.
func (r *Replica) beginMerge() (_ *merger, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return nil, err
	}
	d := r.disk
	unlock, err := d.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	m := r.Meta()
	g := m.Merge
	if g == nil {
		if g, err = r.choose(m); g == nil || err != nil {
			return nil, err
		}
		// Commit 1: the two are out of everybody else's reach.
		for _, uid := range []string{g.Lower, g.Upper} {
			if err := writeFile(d.fs, d.path(layersDir, uid, mergingFile), []byte(m.UID)); err != nil {
				return nil, err
			}
			if err := d.fs.SyncDir(d.path(layersDir, uid)); err != nil {
				return nil, err
			}
		}
		free, done, err := d.unread(g.Lower, g.Upper)
		defer done()
		if err != nil || !free {
			if err = errors.Join(err, d.unmark(g.Lower), d.unmark(g.Upper)); err == nil {
				err = errRead
			}
			return nil, err
		}
		if err := r.commit(func(m *Meta) { m.Merge = g }); err != nil {
			return nil, err
		}
		if err := r.setMerge(g); err != nil {
			return nil, err
		}
	}
	w := &merger{r: r, seen: *g, beside: !slices.Contains(m.Layers, g.Lower), began: time.Now()}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.lower, err = d.openLayerAs(g.Lower, 0, true); err != nil {
		return nil, err
	}
	if w.upper, err = d.openLayerAs(g.Upper, 0, true); err != nil {
		return nil, err
	}
	w.size = max(w.lower.rec.Size, w.upper.rec.Size)
	from, to := g.Lower, g.Upper
	if !g.Up {
		from, to = to, from
	}
	if w.from, err = d.fs.Open(d.path(layersDir, from, dataFile), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if w.to, err = d.fs.Open(d.path(layersDir, to, dataFile), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	return w, nil
}

// choose finds two layers that may be merged. The caller has the disk's lock.
func (r *Replica) choose(m Meta) (*Merge, error) {
	d := r.disk
	others, err := d.namedBut(m.UID)
	if err != nil {
		return nil, err
	}
	needed := map[string]bool{}
	for _, s := range m.Snapshots {
		needed[s.Layer] = true
	}
	for _, two := range m.neighbours(needed) {
		lower, upper := two[0], two[1]
		if others[lower] || others[upper] {
			continue
		}
		a, aerr := d.layerRecord(lower)
		b, berr := d.layerRecord(upper)
		if api.Is(aerr, api.NotFound) || api.Is(berr, api.NotFound) {
			continue // frozen, or borrowed
		}
		if err := errors.Join(aerr, berr); err != nil {
			return nil, err
		}
		if len(d.damaged(lower, a.Size)) > 0 || len(d.damaged(upper, b.Size)) > 0 {
			continue // it would get digests that match
		}
		// The larger file is the target; but it must be as long as the result.
		up := b.Data >= a.Data || a.Size < b.Size
		return &Merge{Lower: lower, Upper: upper, Result: string(api.NewUID()), Up: up}, nil
	}
	return nil, nil
}

// neighbours are the layers, lower and upper, of which the upper one alone needs the lower one: below the head, and
// beside it.
func (m Meta) neighbours(needed map[string]bool) (list [][2]string) {
	above := map[string]int{}
	for _, b := range m.Branches {
		above[b.Below]++
	}
	for k := 0; k+1 < len(m.Layers); k++ {
		// No branch stands on either: who needs the upper one would see it change its uid.
		if lower, upper := m.Layers[k], m.Layers[k+1]; !needed[lower] && above[lower] == 0 && above[upper] == 0 {
			list = append(list, [2]string{lower, upper})
		}
	}
	for _, b := range m.Branches {
		beside := slices.ContainsFunc(m.Branches, func(l Branch) bool { return l.Layer == b.Below })
		if beside && !needed[b.Below] && above[b.Below] == 1 {
			list = append(list, [2]string{b.Below, b.Layer})
		}
	}
	return list
}

// unmark takes back that a layer is being merged.
func (d *Disk) unmark(uid string) error { return d.fs.Remove(d.path(layersDir, uid, mergingFile)) }

// unread reports whether nobody but their owner has the layers open, and keeps readers out until done is called. Those
// that come later see the mark, and the merge in the stack of the replica that the mark names.
func (d *Disk) unread(uids ...string) (free bool, done func(), err error) {
	var held []file.Handle
	done = func() {
		for _, h := range held {
			_ = h.Close()
		}
	}
	for _, uid := range uids {
		h, err := d.fs.Open(d.path(layersDir, uid, dataFile), os.O_RDONLY, 0)
		if err != nil {
			return false, done, err
		}
		held = append(held, h)
		if err := flock(h, unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
			return false, done, nil
		} else if err != nil {
			return false, done, err
		}
	}
	return true, done, nil
}

// beingMerged reports whether a layer is part of a merge. A mark that a crash left before the merge began says nothing.
func (d *Disk) beingMerged(uid string) (bool, error) {
	h, err := d.fs.Open(d.path(layersDir, uid, mergingFile), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	b, err := io.ReadAll(io.NewSectionReader(h, 0, 64))
	if err = errors.Join(err, h.Close()); err != nil {
		return false, err
	}
	if api.UID(b).Validate() != nil {
		return false, nil // cut off by a loss of power, before the merge
	}
	m, err := d.readStack(string(b))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return m.Merge != nil && (m.Merge.Lower == uid || m.Merge.Upper == uid), err
}

// namedBut are the layers that any stack, image or pin but one replica names.
func (d *Disk) namedBut(replica string) (map[string]bool, error) {
	replicas, err := d.Replicas()
	if err != nil {
		return nil, err
	}
	images, err := d.Images()
	if err != nil {
		return nil, err
	}
	pins, err := d.Pins()
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, p := range pins {
		for _, l := range p.Layers {
			names[l] = true
		}
	}
	for _, m := range replicas {
		for _, l := range m.all() {
			names[l] = names[l] || m.UID != replica
		}
	}
	for _, img := range images {
		for _, l := range img.Layers {
			names[l] = true
		}
	}
	return names, nil
}

// setMerge tells the data path of the merge; neither the worker nor the loop looks meanwhile.
func (r *Replica) setMerge(g *Merge) (err error) {
	r.work.do(func() { err = r.onLoop(func() { r.merge = g }) })
	return err
}

// window carries the next window, and reports whether there are more.
func (w *merger) window(ctx context.Context, o MergeOptions) (more bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, context.Cause(ctx)
	}
	r := w.r
	off := w.seen.Done
	end := min(off+r.disk.window, w.size)
	if off >= end {
		return false, nil
	}
	n, err := w.carry(off, end)
	if err != nil {
		return false, err
	}
	if err := w.to.Datasync(); err != nil {
		return false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return false, err
	}
	next := w.seen
	next.Done = end
	if err := r.commit(func(m *Meta) { m.Merge = &next }); err != nil {
		return false, err
	}
	// Reads of the old place are over before it is emptied. Beside the head there are none: nobody may read there.
	if !w.beside {
		release, err := r.quiesce(ctx)
		if err != nil {
			return false, err
		}
		defer release()
	}
	if err := r.setMerge(&next); err != nil {
		return false, err
	}
	if !w.beside {
		err = r.onLoop(func() {
			k := slices.IndexFunc(r.layers, func(l *layer) bool { return l.rec.UID == next.Lower })
			from, to := next.ends(k)
			r.idx.changeIn(off>>blockBits, min(end>>blockBits, r.idx.blocks), from, to)
		})
		if err != nil {
			return false, err
		}
	}
	w.seen = next
	w.copied += n
	if err := w.freed.punch(w.from, off, end-off); err != nil {
		return false, err
	}
	return end < w.size, pace(ctx, w.began, w.copied, o.BytesPerSecond)
}

// kinds are those of both layers in a page.
func (w *merger) kinds(p int) (lower, upper *[pageBlocks]block.Kind, err error) {
	lower, upper = new([pageBlocks]block.Kind), new([pageBlocks]block.Kind)
	return lower, upper, errors.Join(w.lower.m.load(p, lower), w.upper.m.load(p, upper))
}

// carry copies into the target what the other layer has to give in a window. It may do so again after a crash.
func (w *merger) carry(off, end int64) (copied int64, err error) {
	sent, dirty := off, int64(0)
	for b, last := off>>blockBits, end>>blockBits; b < last; {
		p := int(b >> pageBits)
		base := int64(p) << pageBits
		lower, upper, err := w.kinds(p)
		if err != nil {
			return copied, err
		}
		for stop := min(last, base+pageBlocks); b < stop; {
			act := w.act(lower[b-base], upper[b-base])
			e := b + 1
			for e < stop && e-b < mergeAhead>>blockBits && w.act(lower[e-base], upper[e-base]) == act {
				e++
			}
			from, n := b<<blockBits, (e-b)<<blockBits
			switch act {
			case copyBlock:
				err = w.to.CopyFrom(w.from, from, n)
				copied, dirty = copied+n, dirty+n
			case punchBlock:
				err = w.to.Punch(from, n)
			}
			if err == nil && dirty >= mergeAhead {
				err = w.to.Writeout(sent, e<<blockBits-sent)
				sent, dirty = e<<blockBits, 0
			}
			if err != nil {
				return copied, err
			}
			b = e
		}
	}
	return copied, nil
}

type action uint8

const (
	leaveBlock action = iota
	copyBlock
	punchBlock
)

// act is what the target needs of a block, given what the two layers hold.
func (w *merger) act(lower, upper block.Kind) action {
	switch {
	case w.seen.Up && upper == block.Hole && lower == block.Data, !w.seen.Up && upper == block.Data:
		return copyBlock
	case !w.seen.Up && upper == block.Zero && lower == block.Data:
		return punchBlock
	}
	return leaveBlock
}

// union is what the result holds of a block.
func union(lower, upper block.Kind) block.Kind {
	if upper != block.Hole {
		return upper
	}
	return lower
}
