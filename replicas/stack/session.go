package stack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// commitChange applies change to the record and writes stack.json.
func (r *Replica) commitChange(change func(*Meta)) error {
	r.metaMu.Lock()
	ended, unsure := r.over, r.unsure
	r.metaMu.Unlock()
	if ended { // the record may belong to another opener by now
		return errClosed
	}
	if unsure != nil {
		return unsure
	}
	m := r.Meta()
	change(&m)
	if err := r.disk.writeStack(r.dir, m); err != nil {
		if errors.Is(err, format.ErrUnsure) {
			r.markUnsure(err)
		}
		return diskfs.Classify(err)
	}
	r.metaMu.Lock()
	r.meta = m
	r.metaMu.Unlock()
	return nil
}

// markUnsure ends all recording and all writes: stack.json on the disk may differ from the record in memory, and
// garbage collection may remove layers that the file does not name. Only a new opener, who reads the file, can
// continue.
func (r *Replica) markUnsure(err error) {
	r.metaMu.Lock()
	r.unsure = api.Errorf(api.Unavailable, "stack.json on the disk is unknown since a sync failed; the replica "+
		"refuses all work until it is opened again: %w: %w", ErrFailed, err)
	r.metaMu.Unlock()
	_ = r.onLoop(func() { r.failWrites(err) })
}

func (r *Replica) nameError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("replica %s of volume %s on disk %s: %w", r.meta.UID, r.meta.Volume, r.disk.Root, err)
}

// ErrRestarted is the answer of Adopt if the machine restarted, or the disk's file system was mounted again, during the
// replica's last session: acknowledged writes that were not flushed may be lost.
var ErrRestarted = api.Errorf(api.Unavailable, "the machine restarted or the file system of the disk was mounted "+
	"again during the last session: unflushed writes may be lost; the replica must be resynced from the other members")

// Adopt begins the session (epoch, incarnation): when Adopt returns, all writes of earlier sessions have ended and the
// session is durable. Adopt refuses an older session with kind denied. The same session again is no error, and waits
// for no I/O.
//
// After a restart of the machine Adopt refuses one of several members with ErrRestarted, now and at every try, so that
// a lost answer loses nothing, and the engine drops the member. Adopt accepts an only member, like any disk after a
// loss of power, and a replica that is no member, because the engine is about to resync the replica.
//
// AdoptFor also names the engine.
func (r *Replica) Adopt(ctx context.Context, epoch, incarnation int64, members []string) error {
	return r.AdoptFor(ctx, "", epoch, incarnation, members)
}

// AdoptFor adopts a session of the engine on a node, and records the node with the epoch. An epoch has one engine: the
// replica refuses another node in the same epoch with kind denied.
func (r *Replica) AdoptFor(ctx context.Context, node string, epoch, incarnation int64, members []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.Meta()
	if epoch < m.Epoch || epoch == m.Epoch && incarnation < m.Incarnation {
		return r.nameError(api.Errorf(api.Denied, "session %d.%d is older than %d.%d, which was adopted before", epoch,
			incarnation, m.Epoch, m.Incarnation))
	}
	if epoch == m.Epoch && node != "" && m.EngineNode != "" && node != m.EngineNode {
		return r.nameError(api.Errorf(api.Denied, "epoch %d is that of the engine on node %s, not on node %s", epoch,
			m.EngineNode, node))
	}
	if epoch == m.Epoch && incarnation == m.Incarnation && !slices.Equal(members, m.Members) {
		return r.nameError(api.Errorf(api.Denied, "session %d.%d was adopted with other members", epoch, incarnation))
	}
	now, err := r.disk.lifetime()
	if err != nil {
		return r.nameError(err)
	}
	restarted := m.Dirty && m.lifetime().Ended(now)
	if restarted && len(members) > 1 && slices.Contains(members, m.UID) {
		return r.nameError(ErrRestarted)
	}
	if node == "" && epoch == m.Epoch {
		node = m.EngineNode
	}
	same := epoch == m.Epoch && incarnation == m.Incarnation && node == m.EngineNode && m.Dirty && !restarted
	if same && r.adopted {
		return nil // no older session has I/O in progress
	}
	release, err := r.holdUntil(ctx, nil, writesEnded)
	if err != nil {
		return r.nameError(err)
	}
	defer release()
	// An engine that continues, and has or had several members, may not know that the replica was opened again meanwhile.
	goesOn := incarnation == m.Incarnation
	if err := r.onLoop(func() {
		if len(members) > 1 || goesOn && (len(m.Members) > 1 || r.noted.Used()) {
			r.tracking = true
		}
	}); err != nil {
		return r.nameError(err)
	}
	if same {
		r.adopted = true
		return nil
	}
	if restarted {
		slog.Warn("the machine restarted, or the disk was mounted again, while the volume was attached: unflushed "+
			"writes may be lost",
			"volume", m.Volume, "replica", m.UID)
	}
	err = r.commitChange(func(m *Meta) {
		m.Epoch, m.Incarnation, m.Members, m.Dirty = epoch, incarnation, slices.Clone(members), true
		m.BootID, m.MountID, m.EngineNode = now.Boot, now.Mount, node
		if slices.Contains(members, m.UID) {
			m.Joined = epoch
		}
	})
	r.adopted = r.adopted || err == nil
	return r.nameError(err)
}

// Drain returns when the writes in progress have ended. A server calls Drain after a change of the session.
func (r *Replica) Drain(ctx context.Context) error {
	release, err := r.holdUntil(ctx, nil, writesEnded)
	if err != nil {
		return r.nameError(err)
	}
	release()
	return nil
}

// Note records the API object of the volume, so that `drover recover` can rebuild the object from this disk alone.
func (r *Replica) Note(object json.RawMessage) error {
	var compact bytes.Buffer
	if err := json.Compact(&compact, object); err != nil {
		return r.nameError(api.Errorf(api.Invalid, "object of the volume: %w", err))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if bytes.Equal(r.Meta().Object, compact.Bytes()) {
		return nil
	}
	return r.nameError(r.commitChange(func(m *Meta) { m.Object = compact.Bytes() }))
}

// Expand makes the volume larger. The same size again is no error; Expand refuses a smaller size. If I/O in progress
// does not end soon, the error is of kind busy.
func (r *Replica) Expand(ctx context.Context, size int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.Meta()
	if size < m.Size {
		return r.nameError(api.Errorf(api.OutOfRange, "cannot shrink from %d to %d bytes", m.Size, size))
	}
	if size%blockSize != 0 || size > api.MaxVolumeSize {
		return r.nameError(api.Errorf(api.OutOfRange, "%d is not a size that a volume can have", size))
	}
	if size == m.Size {
		return nil
	}
	release, err := r.holdWhile(ctx)
	if err != nil {
		return r.nameError(err)
	}
	defer release()
	err = errors.Join(r.head.Truncate(size), r.syncNow(), r.intentTracker.grow(size))
	if err != nil {
		return r.nameError(diskfs.Classify(err))
	}
	if err := r.commitChange(func(m *Meta) { m.Size = size }); err != nil {
		return r.nameError(err)
	}
	r.work.do(func() { r.log.Zeros.Grow(size>>blockBits, 0) })
	return r.nameError(r.onLoop(func() { r.idx.Grow(size>>blockBits, fromNowhere) }))
}

// Close ends the session: Close waits for I/O in progress, makes acknowledged writes durable, and records a clean end
// in stack.json. Later I/O fails. Without an Adopt there was no session, and the record stays as Close finds it.
func (r *Replica) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.metaMu.Lock()
	was := r.closed
	r.closed = true
	r.metaMu.Unlock()
	if was {
		return nil
	}
	r.disk.open.remove(r)
	release, err := r.quiesce(context.Background())
	failed := err
	if err == nil {
		failed = r.refuseIO()
		release()
	}
	var errs []error
	r.scattering.close()
	r.work.do(func() { errs = append(errs, r.log.Add(r.takeZeros()), r.log.Sync()) })
	r.work.close()
	if failed == nil {
		err := errors.Join(append(errs, r.head.Datasync())...)
		errs = []error{err}
		if err == nil && r.adopted && r.Meta().Dirty {
			errs = append(errs, r.commitChange(func(m *Meta) { m.Dirty = false }))
		}
	} else {
		slog.Warn("replica is closed after an error; its end is not marked clean", "replica", r.meta.UID, "error", failed)
	}
	r.metaMu.Lock()
	r.over = true
	r.metaMu.Unlock()
	errs = append(errs, r.closeFiles())
	r.crcs.freePages()
	return r.nameError(errors.Join(errs...))
}

var errClosed = api.Errorf(api.Unavailable, "the replica is closed")

// quiesce holds new I/O until release, and returns when no I/O is in progress.
func (r *Replica) quiesce(ctx context.Context) (release func(), err error) {
	return r.holdUntil(ctx, nil, allEnded)
}

// The I/O that a hold waits for.
const (
	allEnded = iota
	writesEnded
)

// holdUntil holds new I/O until release, and returns when the I/O of that kind has ended. The hold fails if no I/O
// ended between two ticks of look.
func (r *Replica) holdUntil(ctx context.Context, look <-chan time.Time, what int) (release func(), err error) {
	quiet, begun := make(chan struct{}), make(chan int, 1)
	left, then := &r.inflight, &r.idle
	if what == writesEnded {
		left, then = &r.writing, &r.drained
	}
	if !r.ring.Post(func() {
		r.holding++
		begun <- *left
		if *left == 0 {
			close(quiet)
			return
		}
		*then = append(*then, func() { close(quiet) })
	}) {
		return nil, errLoopEnded
	}
	release = func() {
		r.ring.Post(func() {
			r.holding--
			if r.holding > 0 {
				return
			}
			held := r.held
			r.held = nil
			for _, q := range held {
				r.Submit(q)
			}
		})
	}
	was := -1
	for {
		select {
		case <-quiet:
			return release, nil
		case was = <-begun:
		case <-look:
			now := was
			if err := r.onLoop(func() { now = *left }); err == nil && now < was || was < 0 {
				was = now
				continue
			}
			release()
			return nil, api.Errorf(api.Busy, "%w", ErrUnderWay)
		case <-ctx.Done():
			release()
			return nil, api.Errorf(api.Busy, "%w: %w", ErrUnderWay, ctx.Err())
		}
	}
}

// endOperation ends an operation that counts as in progress and is no request.
func (r *Replica) endOperation() {
	r.inflight--
	r.notifyIdle()
}

// notifyIdle calls the functions that wait until no request, or no write, is in progress.
func (r *Replica) notifyIdle() {
	if r.writing == 0 && len(r.drained) > 0 {
		drained := r.drained
		r.drained = nil
		for _, fn := range drained {
			fn()
		}
	}
	if r.inflight == 0 && len(r.idle) > 0 {
		idle := r.idle
		r.idle = nil
		for _, fn := range idle {
			fn()
		}
	}
}

// ErrUnderWay marks the errors of operations that need a moment without I/O. The caller tries again later.
var ErrUnderWay = errors.New("I/O is still in progress")

var errLoopEnded = api.Errorf(api.Unavailable, "the loop of the replica has ended")

// onLoop runs fn on the loop's thread and waits for it.
func (r *Replica) onLoop(fn func()) error { return onLoop(r.ring, fn) }

// onLoop runs fn on the thread of a loop and waits for fn.
func onLoop(on ring, fn func()) error {
	ran := make(chan struct{})
	if !on.Post(func() { fn(); close(ran) }) {
		return errLoopEnded
	}
	<-ran
	return nil
}

// refuseIO makes later I/O fail, and returns an earlier error.
func (r *Replica) refuseIO() error {
	var failed error
	err := r.onLoop(func() {
		failed = r.failed
		r.failed = errClosed
	})
	if err != nil {
		return err
	}
	return failed
}

// lifetime is that of the last session.
func (m Meta) lifetime() diskfs.Lifetime { return diskfs.Lifetime{Boot: m.BootID, Mount: m.MountID} }

// Restarted reports whether the lifetime of the replica's last session is over and that session had no clean end: the
// machine restarted, or the disk's file system was mounted again.
func (r *Replica) Restarted() (bool, error) {
	now, err := r.disk.lifetime()
	m := r.Meta()
	return m.Dirty && m.lifetime().Ended(now), r.nameError(err)
}
