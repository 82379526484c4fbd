package stack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// Cut makes an immutable layer of what an open replica holds, and puts a new head on it. It moves no data.
//
// Everything that takes time is done beforehand: the new head is there, the old one has a second name as a layer, and
// the new stack.json is written beside the old one. I/O is held back only while the rename of that commits, so the
// pause is that of one sync of a folder. The layer counts as durable when Do returns; until then flushes wait.
type Cut struct {
	r        *Replica
	snapshot Snapshot
	was, now Meta // now is written as the file beside stack.json
	head     file.Handle
	log      *zeroLog
	ended    bool
}

// PrepareCut begins a cut that gives the layer of snapshot.Layer, a new uid, that snapshot's name; without a name it is
// a layer that no snapshot has. Between it and Do or Abort the replica does nothing else. The replica must be in a
// session.
func (r *Replica) PrepareCut(ctx context.Context, s Snapshot) (_ *Cut, err error) {
	r.mu.Lock()
	defer func() {
		if err != nil {
			r.mu.Unlock()
			err = r.name(fmt.Errorf("cut: %w", classify(err)))
		}
	}()
	r.metaMu.Lock()
	closed := r.closed
	r.metaMu.Unlock()
	m := r.Meta()
	switch {
	case closed:
		return nil, errClosed
	case !r.adopted:
		return nil, api.Errorf(api.Denied, "it is in no session")
	case len(m.Layers) >= maxLayers-1:
		return nil, api.Errorf(api.OutOfRange, "it has %d layers already", len(m.Layers))
	case slices.ContainsFunc(m.Snapshots, func(o Snapshot) bool { return s.Name != "" && o.Name == s.Name }):
		return nil, api.Errorf(api.Exists, "there is a snapshot %s already", s.Name)
	}
	if err := api.UID(s.Layer).Validate(); err != nil {
		return nil, err
	}
	c := &Cut{r: r, snapshot: s, was: m, now: m.clone()}
	c.now.Layers = append(c.now.Layers, s.Layer)
	c.now.Head = nextHead(m.Head)
	if s.Name != "" {
		c.now.Snapshots = append(c.now.Snapshots, s)
	}
	// What is written already need not be synced in the end.
	if err := r.head.Datasync(); err != nil {
		return nil, err
	}
	if err := c.prepare(); err != nil {
		return nil, errors.Join(err, c.clean())
	}
	return c, ctx.Err()
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
	names, err := d.named()
	if err != nil {
		return err
	}
	if names[c.snapshot.Layer] {
		return api.Errorf(api.Exists, "there is a layer %s already", c.snapshot.Layer)
	}
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

// Do commits the cut. After an error that leaves it open whether the disk has it, the replica takes no more writes.
func (c *Cut) Do(ctx context.Context) error {
	if c.ended {
		return api.Errorf(api.Invalid, "the cut has ended")
	}
	c.ended = true
	defer c.r.mu.Unlock()
	old, log, err := c.commit(ctx)
	if err != nil {
		return c.r.name(fmt.Errorf("cut: %w", err))
	}
	return c.r.name(c.settle(old, log))
}

// commit holds I/O back, commits and puts the new head in place. It returns what the old head was.
func (c *Cut) commit(ctx context.Context) (*layer, *zeroLog, error) {
	r, d := c.r, c.r.disk
	release, err := r.quiesce(ctx)
	if err != nil {
		return nil, nil, errors.Join(err, c.clean())
	}
	defer release()
	var zeros []span
	failed := error(nil)
	if err := r.onLoop(func() { zeros, failed = r.takeZeros(), r.failed }); err != nil || failed != nil {
		return nil, nil, errors.Join(err, failed, c.clean())
	}
	r.work.do(func() { err = r.log.add(zeros) })
	if err != nil {
		back := r.onLoop(func() { r.zeros = append(zeros, r.zeros...) })
		return nil, nil, errors.Join(err, back, c.clean())
	}
	if err := d.fs.Rename(c.beside(), r.dir+"/"+stackFile); err != nil {
		return nil, nil, errors.Join(err, c.clean())
	}
	if err := d.fs.SyncDir(r.dir); err != nil {
		_ = r.onLoop(func() { r.fail(err) })
		return nil, nil, fmt.Errorf("whether it is on the disk is not known: %w", err)
	}
	r.metaMu.Lock()
	r.meta = c.now
	r.metaMu.Unlock()
	old := &layer{rec: layerRecord{UID: c.snapshot.Layer, Size: c.was.Size, Created: c.snapshot.Created}, data: r.head}
	var log *zeroLog
	// Neither the worker nor the loop looks meanwhile.
	r.work.do(func() {
		err = r.onLoop(func() {
			log = r.log
			old.m = &frozenMap{size: c.was.Size, data: r.head, zeros: r.log.zeros}
			r.idx.change(fromHead, fromLayer+uint16(len(r.layers)))
			r.layers, r.fds = append(r.layers, old), append(r.fds, r.fds[0])
			r.metaMu.Lock()
			r.head = c.head
			r.metaMu.Unlock()
			r.log, r.fds[0] = c.log, int(c.head.Fd())
			r.fresh, r.noZeros = true, true
			r.cutting++
		})
	})
	return old, log, err
}

// settle makes the layer durable, lets the flushes go that wait for that, and takes the head's old names away.
func (c *Cut) settle(old *layer, log *zeroLog) error {
	r := c.r
	// It is no head any more: readers may have it.
	err := errors.Join(log.sync(), old.data.Datasync(), log.close(), flock(old.data, unix.LOCK_UN))
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
func (r *Replica) Cut(ctx context.Context, s Snapshot) error {
	c, err := r.PrepareCut(ctx, s)
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
			e.Name() == stackFile+".cut" {
			errs = append(errs, d.fs.Remove(dir+"/"+e.Name()))
		}
	}
	return errors.Join(errs...)
}
