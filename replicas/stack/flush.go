package stack

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/uring"
)

// acknowledge ends a write, a zero or a discard; with FUA a flush comes first.
func (f *request) acknowledge() {
	if f.q.FUA {
		f.r.flushWrites(f)
		return
	}
	f.endRequest(nil)
}

// flushWrites makes all acknowledged writes durable: first the zero log, then the head.
func (r *Replica) flushWrites(f *request) {
	if r.cutting > 0 {
		r.afterCut = append(r.afterCut, f)
		return
	}
	if len(r.zeros) == 0 && r.syncing == 0 {
		r.syncHead(f)
		return
	}
	spans := r.takeZeros()
	r.appendZeros(spans, func(err error) {
		if err != nil {
			r.zeros = append(spans, r.zeros...)
			if !errors.Is(err, unix.ENOSPC) {
				f.endRequest(err)
				return
			}
			r.flushUnrecorded(f, slices.Clone(r.zeros))
			return
		}
		r.syncHead(f)
	})
}

// flushUnrecorded continues a flush without room for the records of all-zero writes, if the head keeps the zeros as
// data and so needs no record. The next flush tries to write the records again.
func (r *Replica) flushUnrecorded(f *request, spans []block.Span) {
	fd := r.fds[0]
	r.work.put(func() {
		there := holdsAsData(fd, spans)
		r.ring.Post(func() {
			switch {
			case r.cutting > 0: // the zeros belong to a layer now
				r.flushWrites(f)
			case !there:
				f.endRequest(unix.ENOSPC)
			default:
				r.syncHead(f)
			}
		})
	})
}

// holdsAsData reports whether a file holds all of the ranges as data.
func holdsAsData(fd int, spans []block.Span) bool {
	for _, s := range spans {
		if from, to, err := file.NextData(fd, s.Off, s.Off+s.Len); err != nil || from != s.Off || to != s.Off+s.Len {
			return false
		}
	}
	return true
}

func (r *Replica) takeZeros() []block.Span {
	spans := r.zeros
	r.zeros = nil
	return spans
}

// appendZeros appends to the log and syncs the log, in the worker, and calls then on the loop's thread.
func (r *Replica) appendZeros(spans []block.Span, then func(error)) {
	r.syncing++
	r.work.put(func() {
		err := r.log.Add(spans)
		lost := false
		if err == nil {
			if err = r.log.Sync(); err == nil {
				err = r.log.Shrink()
			}
			lost = err != nil
		}
		r.ring.Post(func() {
			r.syncing--
			if lost {
				r.failWrites(err)
			}
			then(errnoOf(err))
		})
	})
}

// syncNow makes the head durable, outside of the loop's thread. The kernel reports an error once per open file, so
// syncNow fails the replica: the next flush would see no error.
func (r *Replica) syncNow() error {
	err := r.head.Datasync()
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrFailed, errors.Join(err, r.onLoop(func() { r.failWrites(err) })))
}

func (r *Replica) syncHead(f *request) {
	p := f.newPart(r.fds[0], nil, 0, syncDone)
	r.ring.Fdatasync(&p.op, p.fd)
}

func syncDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	if mustRetry(res) {
		f.r.ring.Fdatasync(op, p.fd)
		return
	}
	p.free()
	if res < 0 {
		f.r.failWrites(unix.Errno(-res))
		f.endRequest(unix.EIO)
		return
	}
	f.endRequest(nil)
}
