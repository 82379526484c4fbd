package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/file"
)

// What a process that was killed had written is seen by the next one, durable or not: the page cache outlives it.
// Before anything is built on that, it is made durable: else a loss of power takes away what was answered for since.

// settle does so for a replica that is being opened.
func (r *Replica) settle(ctx context.Context) error {
	errs := []error{r.disk.fs.SyncDir(r.dir)} // the name of stack.json
	if !r.meta.Dirty {
		return errors.Join(errs...)
	}
	if r.log.n > 0 {
		errs = append(errs, r.log.h.Datasync())
	}
	for _, l := range r.layers {
		if _, frozen := l.m.(*frozenMap); frozen && l.lender == nil {
			errs = append(errs, r.disk.settleFrozen(ctx, l.rec.UID))
		}
	}
	return errors.Join(errs...)
}

// settleFrozen makes the content of a frozen layer durable. One that was finished meanwhile is. Writes to it that a
// dead process left under way are waited for: it may have died between the commit of the cut and their end.
func (d *Disk) settleFrozen(ctx context.Context, uid string) error {
	for _, name := range []string{dataFile, zeroFile} {
		h, err := d.fs.Open(d.path(layersDir, uid, name), os.O_RDWR, 0)
		if errors.Is(err, os.ErrNotExist) {
			if there, eerr := d.exists(d.path(layersDir, uid, layerFile)); there && eerr == nil {
				return nil
			}
		}
		if err != nil {
			return err
		}
		if name == dataFile {
			err = quiet(ctx, h)
		}
		if err := errors.Join(err, h.Datasync(), h.Close()); err != nil {
			return err
		}
	}
	return nil
}

// settleTime is how long writes of a dead process are waited for where nobody says.
const settleTime = 10 * time.Second

// quiet waits until no I/O of a dead process writes to a file that was a head: its lock goes with the last reference to
// its open file, and direct I/O has one.
func quiet(ctx context.Context, h file.Handle) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	if err := awaitLock(ctx, h, unix.LOCK_SH); err != nil {
		return err
	}
	st, err := h.Stat()
	if err == nil {
		err = awaitIO(h, st.Size())
	}
	return errors.Join(err, flock(h, unix.LOCK_UN))
}

// Settle makes durable what the record of a replica says now, and the layers: a process that is dead may have written
// it a moment ago. Before anybody is told that a snapshot is there, or gone, or that the replica was reverted.
func (d *Disk) Settle(replica string, layers ...string) error {
	err := d.fs.SyncDir(d.path(replicaDir, replica))
	for _, uid := range layers {
		if there, eerr := d.exists(d.path(layersDir, uid, layerFile)); eerr == nil && !there {
			err = errors.Join(err, d.settleFrozen(context.Background(), uid))
		}
	}
	if err != nil {
		return fmt.Errorf("replica %s on disk %s: %w", replica, d.root, classify(err))
	}
	return nil
}
