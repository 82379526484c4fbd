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
)

// Cut makes an immutable layer of what an open replica holds, and puts a new head on it. It moves no data.
//
// No I/O waits for the disk. The new head is there beforehand, the old one has a second name as a layer, and the new
// stack.json is written beside the old one. Its rename commits while writes go on, to what is the head in memory and a
// layer on the disk: should the process end now, the layer is what was there at that moment, and so is the volume. Then
// the loop's thread turns to the new head between two requests: that is the instant of the cut. Writes under way
// belong to the layer and are waited for, but hold nobody up. Only discards under way do: what comes after them is
// held back until they are over. The layer counts as durable when Do returns; until then flushes wait.
type Cut struct {
	r        *Replica
	snapshot Snapshot
	was, now Meta // now is written as the file beside stack.json
	head     file.Handle
	log      *zeroLog
	making   bool // what clean removes may be there, and is this cut's
	ended    bool

	// Of a cut that is there:
	old     *layer // of the old head
	oldLog  *zeroLog
	writing *writes // to the old head
}

// PrepareCut begins a cut that gives the layer of snapshot.Layer, a new uid, that snapshot's name; without a name it is
// a layer that no snapshot has. Others that hold the same can be given that layer too. Between it and Do or Abort the
// replica does nothing else. The replica must be in a session.
func (r *Replica) PrepareCut(ctx context.Context, s Snapshot, also ...Snapshot) (_ *Cut, err error) {
	r.mu.Lock()
	defer func() {
		if err != nil {
			r.mu.Unlock()
			err = r.name(fmt.Errorf("cut: %w", classify(err)))
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
		return nil, api.Errorf(api.Denied, "it is in no session")
	case len(m.Layers) >= maxLayers-1:
		return nil, api.Errorf(api.OutOfRange, "it has %d layers already", len(m.Layers))
	}
	for _, s := range append([]Snapshot{s}, also...) {
		if s.Name != "" && slices.ContainsFunc(m.Snapshots, func(o Snapshot) bool { return o.Name == s.Name }) {
			return nil, api.Errorf(api.Exists, "there is a snapshot %s already", s.Name)
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
	// What is written already need not be synced in the end.
	if err := errors.Join(r.recordZeros(), r.syncNow()); err != nil {
		return nil, err
	}
	if err := c.prepare(); err != nil {
		return nil, errors.Join(err, c.clean())
	}
	if err := ctx.Err(); err != nil {
		return nil, errors.Join(err, c.clean())
	}
	return c, nil
}

// nextHead is the name of the head after head.
func nextHead(head string) string {
	n, _ := strconv.ParseUint(strings.TrimPrefix(strings.TrimPrefix(head, firstHead), "-"), 10, 63)
	return firstHead + "-" + strconv.FormatUint(n+1, 10)
}

func (c *Cut) dir() string { return c.r.disk.path(layersDir, c.snapshot.Layer) }

func (c *Cut) prepare() (err error) {
	r, d := c.r, c.r.disk
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	named, unread := d.isNamed(c.snapshot.Layer)
	if named {
		return api.Errorf(api.Exists, "there is a layer %s already", c.snapshot.Layer)
	}
	if _, err := d.fs.ReadDir(c.dir()); unread != nil && !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(unread, err) // it may be what such a record names
	}
	c.making = true
	r.work.do(func() { r.log.twice = true })
	old, next := r.dir+"/"+c.was.Head, r.dir+"/"+c.now.Head
	for _, name := range []string{c.dir(), next + dataSuffix, next + zeroSuffix} { // of a cut that a crash ended
		if err := file.RemoveAll(d.fs, name); err != nil {
			return err
		}
	}
	if err := d.fs.Mkdir(c.dir(), 0o700); err != nil {
		return err
	}
	if err := d.fs.Link(old+dataSuffix, c.dir()+"/"+dataFile); err != nil {
		return err
	}
	if err := d.fs.Link(old+zeroSuffix, c.dir()+"/"+zeroFile); err != nil {
		return err
	}
	rec := frozenRecord{c.snapshot.Layer, c.was.Size, time.Now().UTC().Truncate(time.Second)}
	if err := writeMeta(d.fs, c.dir()+"/"+frozenFile, formatFrozen, rec); err != nil {
		return err
	}
	if c.head, err = d.fs.Open(next+dataSuffix, os.O_RDWR|os.O_CREATE|os.O_EXCL|d.direct, 0o600); err != nil {
		return err
	}
	if err := flock(c.head, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}
	if err := errors.Join(c.head.Truncate(c.was.Size), c.head.Datasync()); err != nil {
		return err
	}
	if err := writeFile(d.fs, next+zeroSuffix, zeroHeader()); err != nil {
		return err
	}
	if c.log, err = openZeroLog(d.fs, next+zeroSuffix, c.was.Size>>blockBits); err != nil {
		return err
	}
	c.log.reserve()
	data, err := encodeMeta(formatStack, c.now.record())
	if err != nil {
		return err
	}
	// All names but the one that commits are durable.
	return errors.Join(writeFile(d.fs, c.beside(), data), d.fs.SyncDir(d.path(layersDir)), d.fs.SyncDir(r.dir))
}

func (c *Cut) beside() string { return c.r.dir + "/" + stackFile + ".cut" }

// clean removes what was prepared.
func (c *Cut) clean() error {
	if !c.making {
		return nil
	}
	c.r.work.do(func() { c.r.log.twice = false })
	var errs []error
	if c.log != nil {
		errs = append(errs, c.log.close())
	}
	if c.head != nil {
		errs = append(errs, c.head.Close())
	}
	next := c.r.dir + "/" + c.now.Head
	for _, name := range []string{c.beside(), next + dataSuffix, next + zeroSuffix, c.dir()} {
		errs = append(errs, file.RemoveAll(c.r.disk.fs, name))
	}
	return errors.Join(errs...)
}

// Abort ends a cut that was not done.
func (c *Cut) Abort() error {
	if c.ended {
		return nil
	}
	c.ended = true
	defer c.r.mu.Unlock()
	return c.r.name(c.clean())
}

// Hold keeps new I/O back until release; it returns when none is under way. Holds of several replicas make one instant.
func (r *Replica) Hold(ctx context.Context) (release func(), err error) { return r.quiesce(ctx) }

// Hold keeps new I/O of the replica back until release; it returns when none is under way. Where nothing of it
// ends any more the error is of kind busy, and nothing is held.
func (c *Cut) Hold(ctx context.Context) (release func(), err error) { return c.r.holdWhile(ctx) }

// Do commits the cut. After an error that leaves it open whether the disk has it, the replica takes no more writes.
func (c *Cut) Do(ctx context.Context) error { return Together(ctx, c) }

// Together commits cuts of several replicas, of any disks and loops, at one instant: none of them turns to its new head
// before all are committed, and their I/O is held back meanwhile. After an error some may be there and others not.
func Together(ctx context.Context, cuts ...*Cut) (err error) {
	defer func() {
		for _, c := range cuts { // those that were not begun
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
				errs[i] = errors.Join(errs[i], cuts[i].r.name(fmt.Errorf("cut: %w", classify(err))), cuts[i].r.Failed())
			}
		}
		for i := range cuts[1:] {
			wg.Go(func() { do(i + 1) })
		}
		do(0)
		wg.Wait()
	}
	each((*Cut).commit)
	var there []*Cut
	for i, c := range cuts {
		if c.ended = true; errs[i] == nil {
			there = append(there, c)
		}
	}
	err = turn(ctx, there)
	each(func(c *Cut) error {
		defer c.r.mu.Unlock()
		switch {
		case !slices.Contains(there, c):
			return nil
		case c.old == nil:
			return c.undo()
		}
		return c.settle()
	})
	return errors.Join(append(errs, err)...)
}

// commit puts the new stack.json in the place of the old one.
func (c *Cut) commit() error {
	r, d := c.r, c.r.disk
	var failed error
	if err := r.onLoop(func() { failed = r.failed }); err != nil || failed != nil {
		return errors.Join(err, failed, c.clean())
	}
	if err := d.fs.Rename(c.beside(), r.dir+"/"+stackFile); err != nil {
		return errors.Join(err, c.clean())
	}
	if err := d.fs.SyncDir(r.dir); err != nil {
		c.unknown(err)
		return fmt.Errorf("%w: %w", errUnsure, err)
	}
	return nil
}

// unknown ends a cut of which nobody knows whether the disk has it.
func (c *Cut) unknown(err error) {
	r := c.r
	r.unknown(err)
	r.strays = append(r.strays, c.head, c.log.h) // whoever opens the replica next finds nobody in them
}

// undo takes a cut back that was committed and did not come to its instant. Where somebody has named its layer since,
// nothing more may be written to that: whoever opens the replica next has the cut.
func (c *Cut) undo() error {
	d := c.r.disk
	unlock, err := d.lock()
	if err == nil {
		defer unlock()
		all, _, _ := d.namings() // what cannot be read is older than the layer
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
		c.unknown(err)
		return fmt.Errorf("%w: %w", errUnsure, err)
	}
	return c.clean()
}

// turn has the data paths of all cuts turn to the new heads, at one instant. A single one has no need to hold I/O back,
// unless discards are under way.
func turn(ctx context.Context, cuts []*Cut) error {
	if len(cuts) == 1 {
		if err := cuts[0].turn(false); err != nil || cuts[0].old != nil {
			return err
		}
	}
	for _, c := range cuts {
		release, err := c.r.holdWhile(ctx)
		if err != nil {
			return c.r.name(fmt.Errorf("cut: %w", err))
		}
		defer release()
	}
	var errs []error
	for _, c := range cuts {
		errs = append(errs, c.turn(true))
	}
	return errors.Join(errs...)
}

// turn puts the new head in place, unless I/O is not held and some is under way that must not see that.
func (c *Cut) turn(held bool) (err error) {
	r := c.r
	// The worker does not look meanwhile.
	r.work.do(func() {
		err = r.onLoop(func() {
			if !held && !r.calm() {
				return
			}
			value := fromLayer + uint16(len(r.layers))
			c.old = &layer{rec: layerRecord{UID: c.snapshot.Layer, Size: c.was.Size, Created: c.snapshot.Created},
				data: r.head, disk: r.disk, m: &frozenMap{size: c.was.Size, data: r.head, zeros: r.log.zeros}}
			c.oldLog, c.writing = r.log, r.now
			c.writing.seal(value, r.takeZeros())
			r.now = &writes{value: fromHead}
			r.idx.change(fromHead, value)
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

// settle makes the layer durable, lets the flushes go that wait for that, and takes the head's old names away.
func (c *Cut) settle() error {
	r, old, log := c.r, c.old, c.oldLog
	<-c.writing.over
	_ = c.writing.forget() // what it wrote is synced below
	var err error
	r.work.do(func() {
		if err = log.add(c.writing.zeros); errors.Is(err, unix.ENOSPC) && kept(int(old.data.Fd()), c.writing.zeros) {
			err = nil
		}
		err = errors.Join(err, log.sync(), log.close())
	})
	// It is no head any more: readers may have it.
	err = errors.Join(err, old.data.Datasync(), flock(old.data, unix.LOCK_UN))
	lerr := r.onLoop(func() {
		if r.cutting--; err != nil {
			r.fail(err)
		}
		if r.cutting > 0 {
			return
		}
		waiting := r.afterCut
		r.afterCut = nil
		for _, f := range waiting {
			if err != nil {
				f.end(unix.EIO)
			} else {
				r.flush(f)
			}
		}
	})
	if err = errors.Join(err, lerr); err != nil {
		return err
	}
	for _, suffix := range []string{dataSuffix, zeroSuffix} {
		if err := r.disk.fs.Remove(r.dir + "/" + c.was.Head + suffix); err != nil {
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

// tidyHeads removes what a cut that a crash ended left in a replica's folder: names of other heads than its own.
func (d *Disk) tidyHeads(dir, head string) error {
	entries, err := d.fs.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		name, suffix, ok := strings.Cut(e.Name(), ".")
		if stale := ok && headName(name) && name != head && ("."+suffix == dataSuffix || "."+suffix == zeroSuffix); stale ||
			ok && headName(name) && "."+suffix == zeroSuffix+".tmp" || e.Name() == stackFile+".cut" {
			errs = append(errs, d.fs.Remove(dir+"/"+e.Name()))
		}
	}
	return errors.Join(errs...)
}
