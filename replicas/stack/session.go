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
)

// commit writes stack.json with what change does to it.
func (r *Replica) commit(change func(*Meta)) error {
	r.metaMu.Lock()
	ended, unsure := r.over, r.unsure
	r.metaMu.Unlock()
	if ended { // its record may be another opener's by now
		return errClosed
	}
	if unsure != nil {
		return unsure
	}
	m := r.Meta()
	change(&m)
	if err := r.disk.writeStack(r.dir, m); err != nil {
		if errors.Is(err, errUnsure) {
			r.unknown(err)
		}
		return classify(err)
	}
	r.metaMu.Lock()
	r.meta = m
	r.metaMu.Unlock()
	return nil
}

// unknown ends all recording and all writes: the disk's stack.json may be another one than what is known here. What it
// does not name may be collected, so only who opens the replica anew, and reads it, goes on from there.
func (r *Replica) unknown(err error) {
	r.metaMu.Lock()
	r.unsure = api.Errorf(api.Unavailable, "what its record says is not known since it could not be synced; nothing is "+
		"done with it until it is opened again: %w: %w", ErrFailed, err)
	r.metaMu.Unlock()
	_ = r.onLoop(func() { r.fail(err) })
}

func (r *Replica) name(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("replica %s of volume %s on disk %s: %w", r.meta.UID, r.meta.Volume, r.disk.root, err)
}

// ErrRestarted is the answer of Adopt where the machine restarted, or the disk's file system was mounted again, since
// the replica's last session, and that session had no clean end: acknowledged writes that were not flushed may be lost.
var ErrRestarted = api.Errorf(api.Unavailable, "its machine restarted or its file system was mounted again during the "+
	"last session: writes that were not flushed may be lost; the replica must be resynced from the other members")

// Adopt begins the session (epoch, incarnation): all writes of earlier ones are over, and the session is durable, when
// it returns. A session older than the one adopted before is refused with kind denied. The same one again is fine, and
// waits for no I/O.
//
// As one of several members a replica whose machine restarted is not adopted: ErrRestarted, now and with every try, so
// that a lost answer loses nothing. The engine drops it like any member that fails. As the only member it is taken as
// it is, like any disk after a power cut. So is one that is no member: it is about to be made equal to them.
//
// It does not say whose engine that is: AdoptFor does.
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
		return r.name(api.Errorf(api.Denied, "session %d.%d is older than %d.%d, which was adopted before", epoch,
			incarnation, m.Epoch, m.Incarnation))
	}
	if epoch == m.Epoch && node != "" && m.EngineNode != "" && node != m.EngineNode {
		return r.name(api.Errorf(api.Denied, "epoch %d is that of the engine on node %s, not on node %s", epoch,
			m.EngineNode, node))
	}
	if epoch == m.Epoch && incarnation == m.Incarnation && !slices.Equal(members, m.Members) {
		return r.name(api.Errorf(api.Denied, "session %d.%d was adopted with other members", epoch, incarnation))
	}
	now, err := r.disk.lifetime()
	if err != nil {
		return r.name(err)
	}
	restarted := m.Dirty && m.lifetime().ended(now)
	if restarted && len(members) > 1 && slices.Contains(members, m.UID) {
		return r.name(ErrRestarted)
	}
	if node == "" && epoch == m.Epoch {
		node = m.EngineNode
	}
	same := epoch == m.Epoch && incarnation == m.Incarnation && node == m.EngineNode && m.Dirty && !restarted
	if same && r.adopted {
		return nil // no older session has I/O under way
	}
	release, err := r.holdUntil(ctx, nil, writesEnded)
	if err != nil {
		return r.name(err)
	}
	defer release()
	// An engine that goes on, and has or had several members, may not know that the replica was opened anew meanwhile.
	goesOn := incarnation == m.Incarnation
	if err := r.onLoop(func() {
		if len(members) > 1 || goesOn && (len(m.Members) > 1 || r.noted.used()) {
			r.tracking = true
		}
	}); err != nil {
		return r.name(err)
	}
	if same {
		r.adopted = true
		return nil
	}
	if restarted {
		slog.Warn("the machine restarted, or the disk was mounted again, while the volume was attached: writes that were "+
			"not flushed may be lost",
			"volume", m.Volume, "replica", m.UID)
	}
	err = r.commit(func(m *Meta) {
		m.Epoch, m.Incarnation, m.Members, m.Dirty = epoch, incarnation, slices.Clone(members), true
		m.BootID, m.MountID, m.EngineNode = now.boot, now.mount, node
		if slices.Contains(members, m.UID) {
			m.Joined = epoch
		}
	})
	r.adopted = r.adopted || err == nil
	return r.name(err)
}

// Drain returns when the writes that are under way have ended. A server calls it after it changed its session.
func (r *Replica) Drain(ctx context.Context) error {
	release, err := r.holdUntil(ctx, nil, writesEnded)
	if err != nil {
		return r.name(err)
	}
	release()
	return nil
}

// Note records what the API knows of the volume, so that its object can be rebuilt from this disk alone.
func (r *Replica) Note(object json.RawMessage) error {
	var compact bytes.Buffer
	if err := json.Compact(&compact, object); err != nil {
		return r.name(api.Errorf(api.Invalid, "what is to be noted: %w", err))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if bytes.Equal(r.Meta().Object, compact.Bytes()) {
		return nil
	}
	return r.name(r.commit(func(m *Meta) { m.Object = compact.Bytes() }))
}

// Expand makes the volume larger. The same size again is fine, a smaller one is refused. While I/O is under way that
// does not end soon the error is of kind busy.
func (r *Replica) Expand(ctx context.Context, size int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.Meta()
	if size < m.Size {
		return r.name(api.Errorf(api.OutOfRange, "cannot shrink from %d to %d bytes", m.Size, size))
	}
	if size%blockSize != 0 || size > api.MaxVolumeSize {
		return r.name(api.Errorf(api.OutOfRange, "%d is not a size that a volume can have", size))
	}
	if size == m.Size {
		return nil
	}
	release, err := r.holdWhile(ctx)
	if err != nil {
		return r.name(err)
	}
	defer release()
	err = errors.Join(r.head.Truncate(size), r.syncNow(), r.growIntents(size))
	if err != nil {
		return r.name(classify(err))
	}
	if err := r.commit(func(m *Meta) { m.Size = size }); err != nil {
		return r.name(err)
	}
	r.work.do(func() { r.log.zeros.grow(size>>blockBits, 0) })
	return r.name(r.onLoop(func() { r.idx.grow(size>>blockBits, fromNowhere) }))
}

// Close ends the session: I/O under way is waited for, what was acknowledged is made durable, and stack.json says that
// the end was clean. I/O that comes later fails. Without an Adopt there was no session: one that ended without a clean
// end before stays so.
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
	r.disk.setOpen(r, false)
	release, err := r.quiesce(context.Background())
	failed := err
	if err == nil {
		failed = r.shut()
		release()
	}
	var errs []error
	r.scattering.close()
	r.work.do(func() { errs = append(errs, r.log.add(r.takeZeros()), r.log.sync()) })
	r.work.close()
	if failed == nil {
		err := errors.Join(append(errs, r.head.Datasync())...)
		errs = []error{err}
		if err == nil && r.adopted && r.Meta().Dirty {
			errs = append(errs, r.commit(func(m *Meta) { m.Dirty = false }))
		}
	} else {
		slog.Warn("replica is closed after an error; its end is not marked clean", "replica", r.meta.UID, "error", failed)
	}
	r.metaMu.Lock()
	r.over = true
	r.metaMu.Unlock()
	errs = append(errs, r.closeFiles())
	r.dropPages()
	return r.name(errors.Join(errs...))
}

var errClosed = api.Errorf(api.Unavailable, "the replica is closed")

// quiesce holds new I/O back and returns when none is under way. Release lets it go on.
func (r *Replica) quiesce(ctx context.Context) (release func(), err error) {
	return r.holdUntil(ctx, nil, allEnded)
}

// The I/O that a hold waits for.
const (
	allEnded = iota
	writesEnded
)

// holdUntil holds new I/O back and returns when the I/O of that kind has ended. It gives up if none ended between two
// looks.
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

// leave takes something that is no request out of what is in flight.
func (r *Replica) leave() {
	r.inflight--
	r.rest()
}

// rest calls who waits until nothing is in flight, or no write.
func (r *Replica) rest() {
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

// ErrUnderWay is in the errors of what needed I/O to be over for a moment. Whoever tries again lets it go on for
// longer.
var ErrUnderWay = errors.New("I/O is still under way")

var errLoopEnded = api.Errorf(api.Unavailable, "its loop has ended")

// onLoop runs fn on the loop's thread and waits for it.
func (r *Replica) onLoop(fn func()) error {
	ran := make(chan struct{})
	if !r.ring.Post(func() { fn(); close(ran) }) {
		return errLoopEnded
	}
	<-ran
	return nil
}

// shut makes later I/O fail, and reports an error that came before.
func (r *Replica) shut() error {
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
