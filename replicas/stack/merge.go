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

// A merge joins two neighbouring layers when only the upper layer needs the lower one. The merge copies the blocks of
// the smaller layer into the file of the larger one, the target, window by window: copy, sync, record in stack.json,
// and only then free the blocks of the smaller layer. So at most a window exists twice, and at any moment, also after a
// crash, each block is surely in one place: below Done in the target, above Done where the maps of the layers say. In
// the end the larger file becomes the data of a new layer: a uid has one content for ever, and the old uids are never
// served again.

const (
	mergeWindow = int64(512) << 20 // how far a window reaches at most
	mergeTwice  = int64(32) << 20  // how much of a window is copied, and exists twice
)

// mergeAhead is how much of a window is copied between two writeouts, so that no system call takes long.
const mergeAhead = int64(2) << 20

// MergeOptions tune a merge.
type MergeOptions struct {
	BytesPerSecond int64 // bound of the copied bytes; 0: no bound
}

// Merge merges two neighbouring layers, or continues an interrupted merge, and reports whether there was a merge to do.
// I/O continues, except for the moment in which reads of a window change to the target. The newest layer is never the
// lower one: cut first.
func (r *Replica) Merge(ctx context.Context, o MergeOptions) (bool, error) {
	if !r.merging.TryLock() {
		return false, r.nameError(api.Errorf(api.Busy, "a merge is in progress"))
	}
	defer r.merging.Unlock()
	var w *merger
	err := layer.AwaitReaders(ctx, func() error { return r.mergePicker().checkPairs(ctx, o) })
	if err == nil {
		err = layer.AwaitReaders(ctx, func() (err error) {
			w, err = r.beginMerge()
			return err
		})
	}
	if errors.Is(err, errRead) {
		return false, nil
	}
	if w == nil || err != nil {
		return false, r.nameError(diskfs.Classify(err))
	}
	defer w.close()
	return true, r.nameError(diskfs.Classify(w.mergeRest(ctx, o)))
}

// mergeRest does the rest of the merge.
func (w *merger) mergeRest(ctx context.Context, o MergeOptions) error {
	for {
		if err := w.whenQuiet(ctx, w.switchReads); err != nil {
			return err
		}
		if err := layer.Throttle(ctx, w.began, w.copied, o.BytesPerSecond); err != nil { // while no I/O is held
			return err
		}
		if w.seen.Done >= w.size {
			return w.completeMerge(ctx)
		}
		if err := w.copyNextWindow(ctx); err != nil {
			return err
		}
	}
}

// merger runs one merge, with handles of its own: the replica may be closed between two windows.
type merger struct {
	r            *Replica
	lower, upper *layer.Layer // opened for this merge
	from, to     file.Handle
	crcs, spent  file.Handle // moving checksums: of the target, of the other layer; nil: none
	turn         file.Handle // the lower one's MovingFile, locked: a merge of the replica's former opener may still copy
	size         int64
	seen         Merge // as recorded
	beside       bool  // both layers are beside the head, outside of the data path
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

// isOpen checks that the replica is open and its record known. The caller has mu.
func (r *Replica) isOpen() error {
	r.metaMu.Lock()
	defer r.metaMu.Unlock()
	if r.closed {
		return errClosed
	}
	return r.unsure
}

// beginMerge picks two layers, or the recorded merge, and makes sure that no other process has the layers.
func (r *Replica) beginMerge() (_ *merger, err error) {
	if m := r.Meta(); m.Merge == nil && len(m.Layers) > 1 {
		r.disk.syncReferencesEarly()
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
		if g, err = r.mergePicker().choosePair(m); g == nil || err != nil {
			return nil, err
		}
		if err := d.CheckUnread(g.Lower, g.Upper); err != nil {
			return nil, err
		}
		err := errors.Join(r.adoptFinished(g.Lower), r.adoptFinished(g.Upper),
			d.syncReferences(context.Background()))
		if err != nil {
			return nil, err
		}
		if g.Crcs, err = d.bothHaveCRCs(g); err != nil {
			return nil, err
		}
		// Commit 1: no other process can open or name the layers.
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
		if err := r.commitChange(func(m *Meta) { m.Merge = g }); err != nil {
			return nil, err
		}
		if err := r.setMerge(g); err != nil {
			return nil, err
		}
	}
	for _, uid := range []string{g.Lower, g.Upper} {
		dir := d.Join(layer.Dir, uid)
		// No process may continue from an old checkpoint: the files become the files of another layer.
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

// emptyLast frees the last recorded window in the emptied layer, which an interrupted merge may not have done. The
// caller has mu.
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
	return w.emptyCopied(max(done-r.disk.window, 0), done)
}

// mergeablePairs returns the pairs of layers, lower and upper, below the head and beside the head, where only the upper
// layer needs the lower one.
func (m Meta) mergeablePairs(needed map[string]bool) (list [][2]string) {
	above := map[string]int{}
	for _, b := range m.Branches {
		above[b.Below]++
	}
	for k := 0; k+1 < len(m.Layers); k++ {
		// No branch stands on either layer, because the merge changes the uid of the upper one.
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

// setMerge gives the merge to the data path, while neither the worker nor the loop reads.
func (r *Replica) setMerge(g *Merge) (err error) {
	r.work.do(func() { err = r.onLoop(func() { r.merge = g }) })
	return err
}

// copyNextWindow copies the next window and records the copy.
func (w *merger) copyNextWindow(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	off := w.seen.Done
	end, n, err := w.copyWindow(off, min(off+w.r.disk.window, w.size))
	if err != nil {
		return err
	}
	if err := w.syncTarget(); err != nil {
		return err
	}
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	if err := w.r.isOpen(); err != nil {
		return err
	}
	next := w.seen
	next.Done = end
	if err := w.r.commitChange(func(m *Meta) { m.Merge = &next }); err != nil {
		return err
	}
	w.seen = next
	w.copied += n
	return nil
}

// switchReads switches reads of the copied part to the target, and then frees the part in the other layer.
func (w *merger) switchReads(ctx context.Context) error {
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
	if w.beside { // the data path does not read the layers
		if err := r.setMerge(&g); err != nil {
			return err
		}
	} else if err := r.turnTo(ctx, g, off); err != nil {
		return err
	}
	return w.emptyCopied(off, g.Done)
}

// turnTo switches reads from off to Done to the target. Reads of the old place have ended then.
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
		r.crcs.forgetRange(r.layers[to-fromLayer], off, g.Done)
		r.idx.ChangeIn(off>>blockBits, min(g.Done>>blockBits, r.idx.Blocks), from, to)
	})
}

const (
	mostHeld  = time.Second // how long a hold waits for I/O in progress
	holdTries = 8           // holds with mostHeld in between, before the merge gives up for now
	longHeld  = 10 * mostHeld
)

// holdSoon is quiesce with a short bound: one request may wait long for a slow disk, and other I/O must not wait with
// the request. The caller tries again later.
func (r *Replica) holdSoon(ctx context.Context) (release func(), err error) {
	soon, cancel := context.WithTimeout(ctx, mostHeld)
	defer cancel()
	return r.quiesce(soon)
}

// holdWhile is quiesce for as long as requests end: a slow disk may have many in progress. If no request ends for
// mostHeld, or not all end in longHeld, the hold fails, and the caller tries again later.
func (r *Replica) holdWhile(ctx context.Context) (release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, longHeld)
	defer cancel()
	look := time.NewTicker(mostHeld)
	defer look.Stop()
	return r.holdUntil(ctx, look.C, allEnded)
}

// whenQuiet runs do, which holds I/O, and tries again while do is busy.
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
