package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// Cut freezes the head of an open replica into an immutable layer, and puts a new head on top. A cut moves no data.
//
// No I/O waits for the disk. PrepareCut makes the new head, gives the old head a second name as a layer, and writes the
// new stack.json beside the current file. Do renames stack.json, which commits the cut, while writes continue to the
// file that is the head in memory and a layer on the disk: if the process ends now, the layer and the volume hold the
// content of that moment. Then the loop's thread switches to the new head between two requests: the instant of the cut.
// Writes in progress belong to the layer; Do waits for them and delays no other I/O. Discards in progress delay the
// requests behind them. The layer is durable when Do returns; until then flushes wait.
type Cut struct {
	r        *Replica
	snapshot Snapshot
	was, now Meta // now is written as the file beside stack.json
	head     file.Handle
	log      *format.ZeroLog
	making   bool // files that removePrepared removes may exist, and belong to this cut
	ended    bool

	// Set at the instant of the cut:
	old     *layer.Layer // of the old head
	oldLog  *format.ZeroLog
	writing *writes // to the old head
}

// PrepareCut begins a cut: the new layer gets the uid s.Layer and belongs to snapshot s; without a name, to no
// snapshot. The snapshots also get the same layer. Until Do or Abort the replica does nothing else. The replica must be
// in a session.
func (r *Replica) PrepareCut(ctx context.Context, s Snapshot, also ...Snapshot) (_ *Cut, err error) {
	r.mu.Lock()
	defer func() {
		if err != nil {
			r.mu.Unlock()
			err = r.nameError(fmt.Errorf("cut: %w", diskfs.Classify(err)))
		}
	}()
	if err := r.isOpen(); err != nil {
		return nil, err
	}
	if err := r.Failed(); err != nil {
		return nil, err
	}
	m := r.Meta()
	switch {
	case !r.adopted:
		return nil, api.Errorf(api.Denied, "the replica is in no session")
	case len(m.Layers) >= maxLayers-1:
		return nil, api.Errorf(api.OutOfRange, "the replica has %d layers already", len(m.Layers))
	}
	for _, s := range append([]Snapshot{s}, also...) {
		if s.Name != "" && slices.ContainsFunc(m.Snapshots, func(o Snapshot) bool { return o.Name == s.Name }) {
			return nil, api.Errorf(api.Exists, "snapshot %s exists already", s.Name)
		}
	}
	if err := api.UID(s.Layer).Validate(); err != nil {
		return nil, err
	}
	c := &Cut{r: r, snapshot: s, was: m, now: m.clone()}
	c.now.Layers = append(c.now.Layers, s.Layer)
	c.now.Head = nextHead(m.Head)
	for _, s := range append([]Snapshot{s}, also...) {
		if s.Layer = c.snapshot.Layer; s.Name != "" {
			c.now.Snapshots = append(c.now.Snapshots, s)
		}
	}
	// The last sync of the cut has less to write after this one.
	if err := errors.Join(r.recordZeros(), r.syncNow()); err != nil {
		return nil, err
	}
	if err := c.prepareFiles(); err != nil {
		return nil, errors.Join(err, c.removePrepared())
	}
	if err := ctx.Err(); err != nil {
		return nil, errors.Join(err, c.removePrepared())
	}
	return c, nil
}

// nextHead is the name of the head after head.
func nextHead(head string) string {
	n, _ := strconv.ParseUint(strings.TrimPrefix(strings.TrimPrefix(head, firstHead), "-"), 10, 63)
	return firstHead + "-" + strconv.FormatUint(n+1, 10)
}

func (c *Cut) layerDir() string { return c.r.disk.Join(layer.Dir, c.snapshot.Layer) }

func (c *Cut) prepareFiles() (err error) {
	r, d := c.r, c.r.disk
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	named, unread := d.isNamed(c.snapshot.Layer)
	if named {
		return api.Errorf(api.Exists, "layer %s exists already", c.snapshot.Layer)
	}
	if _, err := d.FS.ReadDir(c.layerDir()); unread != nil && !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(unread, err) // an unreadable record may name the layer
	}
	c.making = true
	r.work.do(func() { r.log.Linked = true })
	old, next := r.dir+"/"+c.was.Head, r.dir+"/"+c.now.Head
	for _, name := range []string{c.layerDir(), next + dataSuffix, next + zeroSuffix} { // left by a crash during a cut
		if err := file.RemoveAll(d.FS, name); err != nil {
			return err
		}
	}
	if err := d.FS.Mkdir(c.layerDir(), 0o700); err != nil {
		return err
	}
	if err := d.FS.Link(old+dataSuffix, c.layerDir()+"/"+layer.DataFile); err != nil {
		return err
	}
	if err := d.FS.Link(old+zeroSuffix, c.layerDir()+"/"+layer.ZeroFile); err != nil {
		return err
	}
	rec := layer.FrozenRecord{UID: c.snapshot.Layer, Size: c.was.Size, Created: time.Now().UTC().Truncate(time.Second)}
	if err := format.WriteMeta(d.FS, c.layerDir()+"/"+layer.FrozenFile, layer.FormatFrozen, rec); err != nil {
		return err
	}
	if c.head, err = d.FS.Open(next+dataSuffix, os.O_RDWR|os.O_CREATE|os.O_EXCL|d.Direct, 0o600); err != nil {
		return err
	}
	if err := diskfs.Flock(c.head, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}
	if err := errors.Join(c.head.Truncate(c.was.Size), c.head.Datasync()); err != nil {
		return err
	}
	if err := format.WriteFile(d.FS, next+zeroSuffix, format.ZeroHeader()); err != nil {
		return err
	}
	if c.log, err = format.OpenZeroLog(d.FS, next+zeroSuffix, c.was.Size>>blockBits); err != nil {
		return err
	}
	c.log.Reserve()
	data, err := format.EncodeMeta(formatStack, c.now.toRecord())
	if err != nil {
		return err
	}
	// All names but the one that commits are durable.
	return errors.Join(format.WriteFile(d.FS, c.preparedPath(), data), d.FS.SyncDir(d.Join(layer.Dir)),
		d.FS.SyncDir(r.dir))
}

func (c *Cut) preparedPath() string { return c.r.dir + "/" + stackFile + ".cut" }

// removePrepared removes the prepared files.
func (c *Cut) removePrepared() error {
	if !c.making {
		return nil
	}
	c.r.work.do(func() { c.r.log.Linked = false })
	var errs []error
	if c.log != nil {
		errs = append(errs, c.log.Close())
	}
	if c.head != nil {
		errs = append(errs, c.head.Close())
	}
	next := c.r.dir + "/" + c.now.Head
	for _, name := range []string{c.preparedPath(), next + dataSuffix, next + zeroSuffix, c.layerDir()} {
		errs = append(errs, file.RemoveAll(c.r.disk.FS, name))
	}
	return errors.Join(errs...)
}

// Abort ends a prepared cut without effect. After Do it does nothing.
func (c *Cut) Abort() error {
	if c.ended {
		return nil
	}
	c.ended = true
	defer c.r.mu.Unlock()
	return c.r.nameError(c.removePrepared())
}

// Hold holds new I/O until release, and returns when no I/O is in progress. Holds of several replicas make one instant.
func (r *Replica) Hold(ctx context.Context) (release func(), err error) { return r.quiesce(ctx) }

// Hold holds new I/O of the replica until release, and returns when no I/O is in progress. If I/O stops ending, Hold
// releases all I/O and fails with an error of kind busy.
func (c *Cut) Hold(ctx context.Context) (release func(), err error) { return c.r.holdWhile(ctx) }

// Do commits the cut. After an error that leaves the commit open, the replica takes no more writes.
func (c *Cut) Do(ctx context.Context) error { return Together(ctx, c) }

// Together commits cuts of several replicas, on any disks and loops, at one instant: no replica switches to its new
// head before all cuts are committed, and Together holds their I/O meanwhile. After an error only some cuts may be
// committed.
func Together(ctx context.Context, cuts ...*Cut) (err error) {
	defer func() {
		for _, c := range cuts { // without effect on cuts that began
			err = errors.Join(err, c.Abort())
		}
	}()
	for _, c := range cuts {
		if c.ended {
			return api.Errorf(api.Invalid, "the cut has ended")
		}
	}
	errs := make([]error, len(cuts))
	each := func(fn func(c *Cut) error) {
		var wg sync.WaitGroup
		do := func(i int) {
			if err := fn(cuts[i]); err != nil {
				r := cuts[i].r
				errs[i] = errors.Join(errs[i], r.nameError(fmt.Errorf("cut: %w", diskfs.Classify(err))), r.Failed())
			}
		}
		for i := range cuts[1:] {
			wg.Go(func() { do(i + 1) })
		}
		do(0)
		wg.Wait()
	}
	each((*Cut).commitRecord)
	var there []*Cut
	for i, c := range cuts {
		if c.ended = true; errs[i] == nil {
			there = append(there, c)
		}
	}
	err = switchHeads(ctx, there)
	each(func(c *Cut) error {
		defer c.r.mu.Unlock()
		switch {
		case !slices.Contains(there, c):
			return nil
		case c.old == nil:
			return c.undoCommit()
		}
		return c.completeLayer()
	})
	return errors.Join(append(errs, err)...)
}

// commitRecord puts the new stack.json in the place of the old one.
func (c *Cut) commitRecord() error {
	r, d := c.r, c.r.disk
	var failed error
	if err := r.onLoop(func() { failed = r.failed }); err != nil || failed != nil {
		return errors.Join(err, failed, c.removePrepared())
	}
	if err := d.FS.Rename(c.preparedPath(), r.dir+"/"+stackFile); err != nil {
		return errors.Join(err, c.removePrepared())
	}
	if err := d.FS.SyncDir(r.dir); err != nil {
		c.markUnsure(err)
		return fmt.Errorf("%w: %w", format.ErrUnsure, err)
	}
	return nil
}

// markUnsure ends a cut that may or may not be committed on the disk.
func (c *Cut) markUnsure(err error) {
	r := c.r
	r.markUnsure(err)
	r.strays = append(r.strays, c.head, c.log.File) // closed with the replica
}

// undoCommit rolls back a committed cut before its instant. If another record references the layer already, the replica
// must not write to the layer any more: the next opener of the replica finds the cut.
func (c *Cut) undoCommit() error {
	d := c.r.disk
	unlock, err := d.Lock()
	if err == nil {
		defer unlock()
		all, _, _ := d.readReferences() // an unreadable record is older than the layer
		for _, n := range all {
			if n.replica != c.was.UID && slices.Contains(n.layers, c.snapshot.Layer) {
				err = api.Errorf(api.InUse, "layer %s, which was to be taken back, is named already", c.snapshot.Layer)
			}
		}
	}
	if err == nil {
		err = d.writeStack(c.r.dir, c.was)
	}
	if err != nil {
		c.markUnsure(err)
		return fmt.Errorf("%w: %w", format.ErrUnsure, err)
	}
	return c.removePrepared()
}

// switchHeads switches the data paths of all cuts to the new heads, at one instant. A single cut holds no I/O unless
// discards are in progress.
func switchHeads(ctx context.Context, cuts []*Cut) error {
	if len(cuts) == 1 {
		if err := cuts[0].switchHead(false); err != nil || cuts[0].old != nil {
			return err
		}
	}
	for _, c := range cuts {
		release, err := c.r.holdWhile(ctx)
		if err != nil {
			return c.r.nameError(fmt.Errorf("cut: %w", err))
		}
		defer release()
	}
	var errs []error
	for _, c := range cuts {
		errs = append(errs, c.switchHead(true))
	}
	return errors.Join(errs...)
}

// switchHead switches to the new head, unless I/O is not held and a request in progress depends on the old head.
func (c *Cut) switchHead(held bool) (err error) {
	r := c.r
	// The worker reads none of the fields meanwhile.
	r.work.do(func() {
		err = r.onLoop(func() {
			if !held && !r.maySwitchHead() {
				return
			}
			value := fromLayer + uint16(len(r.layers))
			c.old = &layer.Layer{Rec: layer.Record{UID: c.snapshot.Layer, Size: c.was.Size, Created: c.snapshot.Created},
				Data: r.head, Store: r.disk.Store, Map: &layer.FrozenMap{Size: c.was.Size, Data: r.head, Zeros: r.log.Zeros}}
			c.oldLog, c.writing = r.log, r.now
			c.writing.seal(value, r.takeZeros())
			r.now = &writes{value: fromHead}
			r.idx.Change(fromHead, value)
			r.layers, r.fds = append(r.layers, c.old), append(r.fds, r.fds[0])
			r.metaMu.Lock()
			r.head, r.meta = c.head, c.now
			r.metaMu.Unlock()
			r.log, r.fds[0] = c.log, int(c.head.Fd())
			r.fresh, r.noZeros = true, true
			r.cutting++
		})
	})
	return err
}

// completeLayer makes the layer durable, starts the flushes that wait for the layer, and removes the old names of the
// head.
func (c *Cut) completeLayer() error {
	r, old, log := c.r, c.old, c.oldLog
	<-c.writing.over
	_ = c.writing.closeCached() // the sync below covers the file
	var err error
	r.work.do(func() {
		err = log.Add(c.writing.zeros)
		if errors.Is(err, unix.ENOSPC) && holdsAsData(int(old.Data.Fd()), c.writing.zeros) {
			err = nil
		}
		err = errors.Join(err, log.Sync(), log.Close())
	})
	// The file is no head any more: readers may open the layer.
	err = errors.Join(err, old.Data.Datasync(), diskfs.Flock(old.Data, unix.LOCK_UN))
	lerr := r.onLoop(func() {
		if r.cutting--; err != nil {
			r.failWrites(err)
		}
		if r.cutting > 0 {
			return
		}
		waiting := r.afterCut
		r.afterCut = nil
		for _, f := range waiting {
			if err != nil {
				f.endRequest(unix.EIO)
			} else {
				r.flushWrites(f)
			}
		}
	})
	if err = errors.Join(err, lerr); err != nil {
		return err
	}
	for _, suffix := range []string{dataSuffix, zeroSuffix} {
		if err := r.disk.FS.Remove(r.dir + "/" + c.was.Head + suffix); err != nil {
			slog.Warn("a name of a former head stays", "replica", r.dir, "head", c.was.Head, "error", err)
		}
	}
	return nil
}

// Cut is PrepareCut and Do.
func (r *Replica) Cut(ctx context.Context, s Snapshot, also ...Snapshot) error {
	c, err := r.PrepareCut(ctx, s, also...)
	if err != nil {
		return err
	}
	return c.Do(ctx)
}

// removeFormerHeads removes the files of other heads from a replica's folder, which a crash during a cut leaves.
func (d *Disk) removeFormerHeads(dir, head string) error {
	entries, err := d.FS.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		name, suffix, ok := strings.Cut(e.Name(), ".")
		if stale := ok && headName(name) && name != head && ("."+suffix == dataSuffix || "."+suffix == zeroSuffix); stale ||
			ok && headName(name) && "."+suffix == zeroSuffix+".tmp" || e.Name() == stackFile+".cut" {
			errs = append(errs, d.FS.Remove(dir+"/"+e.Name()))
		}
	}
	return errors.Join(errs...)
}
