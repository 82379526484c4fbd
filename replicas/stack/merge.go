package stack

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// Two neighbouring layers become one when nothing needs the lower one by itself any more. What the smaller of them has
// to give is copied into the file of the larger, window by window: copied, synced, recorded in stack.json, and only
// then taken out of the smaller one. So no more than a window is there twice, and at any moment, after a crash too,
// each block is surely in one place: below Done in the target, above it where the maps of the two say. In the end the
// larger file becomes the data of a new layer; a uid keeps meaning one content, and those of the two are never served
// again.

const (
	mergeWindow = int64(512) << 20 // how far a window reaches at most
	mergeTwice  = int64(32) << 20  // and how much of it is copied, which is what is on the disk twice
)

// mergeAhead is how much of a window is copied until the disk has it, so that no system call takes long: see emptier.
const mergeAhead = int64(2) << 20

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
		return false, r.name(diskfs.Classify(err))
	}
	w, err := r.beginMerge()
	if errors.Is(err, errRead) {
		diskfs.AwaitForks()
		w, err = r.beginMerge()
	}
	for wait := diskfs.ForkTime / 8; errors.Is(err, errRead) && wait <= diskfs.ForkTime; wait *= 2 {
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
		return false, r.name(diskfs.Classify(err))
	}
	defer w.close()
	return true, r.name(diskfs.Classify(w.run(ctx, o)))
}

// run carries what is left of the merge.
func (w *merger) run(ctx context.Context, o MergeOptions) error {
	for {
		if err := w.whenQuiet(ctx, w.follow); err != nil {
			return err
		}
		if err := layer.Pace(ctx, w.began, w.copied, o.BytesPerSecond); err != nil { // with nothing held
			return err
		}
		if w.seen.Done >= w.size {
			return w.end(ctx)
		}
		if err := w.window(ctx); err != nil {
			return err
		}
	}
}

// merger carries one merge. Its handles are its own: the replica may be closed between two windows.
type merger struct {
	r            *Replica
	lower, upper *layer.Layer // opened for this merge
	from, to     file.Handle
	crcs, spent  file.Handle // checksums, where they move: those of the target, and those it gets; nil: there are none
	turn         file.Handle // the lower one's MovingFile, locked: a merge of the replica's former opener may still copy
	size         int64
	seen         Merge // as recorded
	beside       bool  // both are beside the head: its data path does not have them
	copied       int64
	freed        diskfs.Emptier
	began        time.Time

	mu     sync.Mutex
	damage []Damage // of the result
}

func (w *merger) close() {
	for _, l := range []*layer.Layer{w.lower, w.upper} {
		if l != nil {
			_ = l.Close()
		}
	}
	for _, h := range []file.Handle{w.from, w.to, w.crcs, w.spent, w.turn} {
		if h != nil {
			_ = h.Close()
		}
	}
}

// isOpen checks that the replica is still open, and that what is known of its stack is true. The caller has mu.
func (r *Replica) isOpen() error {
	r.metaMu.Lock()
	defer r.metaMu.Unlock()
	if r.closed {
		return errClosed
	}
	return r.unsure
}

// errRead says that layers which could be merged are being read.
var errRead = errors.New("somebody has the layers open")

// beginMerge finds two layers, or the merge that stack.json tells of, and makes sure that nobody else has them.
func (r *Replica) beginMerge() (_ *merger, err error) {
	if m := r.Meta(); m.Merge == nil && len(m.Layers) > 1 {
		r.disk.settleAhead()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return nil, err
	}
	d := r.disk
	unlock, err := d.Lock()
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
		if err := errors.Join(r.know(g.Lower), r.know(g.Upper), d.settleNames(context.Background())); err != nil {
			return nil, err
		}
		if g.Crcs, err = d.bothHaveCRCs(g); err != nil {
			return nil, err
		}
		// Commit 1: the two are out of everybody else's reach.
		for _, uid := range []string{g.Lower, g.Upper} {
			if err := format.WriteFile(d.FS, d.Join(layer.Dir, uid, layer.MergingFile), []byte(m.UID)); err != nil {
				return nil, err
			}
			if err := d.FS.SyncDir(d.Join(layer.Dir, uid)); err != nil {
				return nil, err
			}
		}
		free, done, err := d.Unread(g.Lower, g.Upper)
		defer done()
		if err != nil || !free {
			if err = errors.Join(err, d.Unmark(g.Lower), d.Unmark(g.Upper)); err == nil {
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
	for _, uid := range []string{g.Lower, g.Upper} {
		dir := d.Join(layer.Dir, uid)
		// What a crash left of its making must not be gone on with: the files become another layer's.
		err := errors.Join(file.RemoveAll(d.FS, dir+"/"+layer.CheckpointFile),
			format.WriteFile(d.FS, dir+"/"+layer.MovingFile, nil),
			d.FS.SyncDir(dir))
		if err != nil {
			return nil, err
		}
	}
	w := &merger{r: r, seen: *g, beside: !slices.Contains(m.Layers, g.Lower), began: time.Now()}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.turn, err = d.FS.Open(d.Join(layer.Dir, g.Lower, layer.MovingFile), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if err = diskfs.TryLock(w.turn, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, api.Errorf(api.Busy, "a merge of its former opener is not over yet; try again")
	} else if err != nil {
		return nil, err
	}
	if w.lower, err = d.OpenLayerAs(g.Lower, 0, true); err != nil {
		return nil, err
	}
	if w.upper, err = d.OpenLayerAs(g.Upper, 0, true); err != nil {
		return nil, err
	}
	w.size = max(w.lower.Rec.Size, w.upper.Rec.Size)
	from, to := g.Lower, g.Upper
	if !g.Up {
		from, to = to, from
	}
	if w.from, err = d.FS.Open(d.Join(layer.Dir, from, layer.DataFile), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if w.to, err = d.FS.Open(d.Join(layer.Dir, to, layer.DataFile), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if err = w.openCRCs(); err != nil {
		return nil, err
	}
	return w, w.emptyLast()
}

// emptyLast empties the last window that reads have turned away from: whoever recorded it may not have come to that.
// The caller has mu.
func (w *merger) emptyLast() error {
	r, done := w.r, int64(0)
	err := r.onLoop(func() {
		if r.merge != nil {
			done = r.merge.Done
		}
	})
	if err != nil || done == 0 {
		return err
	}
	if err := r.disk.FS.SyncDir(r.dir); err != nil { // a process that was killed may have written the record a moment ago
		return err
	}
	return w.empty(max(done-r.disk.window, 0), done)
}

// choose finds two layers that may be merged. The caller has the disk's lock.
func (r *Replica) choose(m Meta) (*Merge, error) {
	d := r.disk
	others, err := d.namedBut(m.UID)
	if err != nil {
		return nil, err
	}
	remote, err := r.hydrating()
	if err != nil {
		return nil, err
	}
	needed := map[string]bool{}
	for _, s := range m.Snapshots {
		needed[s.Layer] = true
	}
	for _, two := range m.neighbours(needed) {
		lower, upper := two[0], two[1]
		if others[lower] || others[upper] || remote[lower] || remote[upper] {
			continue
		}
		a, aerr := d.Record(lower)
		b, berr := d.Record(upper)
		if api.Is(aerr, api.NotFound) || api.Is(berr, api.NotFound) {
			continue // frozen, or remote
		}
		if err := errors.Join(aerr, berr); err != nil {
			return nil, err
		}
		if len(d.KnownDamage(lower, a.Size)) > 0 || len(d.KnownDamage(upper, b.Size)) > 0 {
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

// namedBut are the layers that any stack, image or pin but one replica names. The caller has the disk's lock.
func (d *Disk) namedBut(replica string) (map[string]bool, error) {
	all, ofReplicas, ofImages := d.namings()
	if err := errors.Join(ofReplicas, ofImages); err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, n := range all {
		if n.replica == replica {
			continue
		}
		for _, l := range n.layers {
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

// window carries the next window, and records it.
func (w *merger) window(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	off := w.seen.Done
	end, n, err := w.carry(off, min(off+w.r.disk.window, w.size))
	if err != nil {
		return err
	}
	if err := w.sync(); err != nil {
		return err
	}
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	if err := w.r.isOpen(); err != nil {
		return err
	}
	next := w.seen
	next.Done = end
	if err := w.r.commit(func(m *Meta) { m.Merge = &next }); err != nil {
		return err
	}
	w.seen = next
	w.copied += n
	return nil
}

// follow has reads go to the target in all that was carried, and then empties the other layer there.
func (w *merger) follow(ctx context.Context) error {
	r, g := w.r, w.seen
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return err
	}
	var off int64
	if err := r.onLoop(func() { off = r.merge.Done }); err != nil || off == g.Done {
		return err
	}
	if w.beside { // nobody reads there
		if err := r.setMerge(&g); err != nil {
			return err
		}
	} else if err := r.turnTo(ctx, g, off); err != nil {
		return err
	}
	return w.empty(off, g.Done)
}

// turnTo tells the data path how far the merge is, which it knew up to off. Reads of the old place are over then.
func (r *Replica) turnTo(ctx context.Context, g Merge, off int64) error {
	release, err := r.holdSoon(ctx)
	if err != nil {
		return err
	}
	defer release()
	if err := r.setMerge(&g); err != nil {
		return err
	}
	return r.onLoop(func() {
		k := slices.IndexFunc(r.layers, func(l *layer.Layer) bool { return l.Rec.UID == g.Lower })
		from, to := g.Values(k)
		r.crcs.forget(r.layers[to-FromLayer], off, g.Done)
		r.idx.ChangeIn(off>>BlockBits, min(g.Done>>BlockBits, r.idx.Blocks), from, to)
	})
}

const (
	mostHeld  = time.Second // how long I/O is held back, at most, until what is under way is over
	holdTries = 8           // with as much time in between, before it is left for later
	longHeld  = 10 * mostHeld
)

// holdSoon is quiesce for a moment: I/O may wait for a slow disk for as long as it takes, and all other I/O is not to
// wait with it. The caller tries again later.
func (r *Replica) holdSoon(ctx context.Context) (release func(), err error) {
	soon, cancel := context.WithTimeout(ctx, mostHeld)
	defer cancel()
	return r.quiesce(soon)
}

// holdWhile is quiesce for as long as I/O comes to an end: much of it may be under way on a slow disk. Where nothing
// ends for mostHeld, or not all in longHeld, nothing is held, and who calls it tries again later.
func (r *Replica) holdWhile(ctx context.Context) (release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, longHeld)
	defer cancel()
	look := time.NewTicker(mostHeld)
	defer look.Stop()
	return r.holdUntil(ctx, look.C, allEnded)
}

// whenQuiet does something that I/O has to be held back for, as soon as that can be had.
func (w *merger) whenQuiet(ctx context.Context, do func(context.Context) error) (err error) {
	for range holdTries {
		if err = do(ctx); !api.Is(err, api.Busy) {
			return err
		}
		select {
		case <-time.After(mostHeld):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return err
}
