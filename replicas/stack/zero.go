package stack

import (
	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/uring"
)

// zero makes a range read as zeros and gives its space back. Over lower layers the record of it is durable before the
// punch, which would else expose what lies below.
func (r *Replica) zero(q *block.Request) {
	b, end := q.Off>>blockBits, (q.Off+q.Len)>>blockBits
	inHead, below := false, false
	for i := b; i < end; {
		v, n := r.idx.run(i, end)
		inHead = inHead || v == fromHead
		below = below || v >= fromHead
		i += n
	}
	f := r.flight(q)
	switch {
	case !below:
		f.acknowledge()
	case len(r.layers) == 0:
		r.punch(f)
	default:
		r.record([]span{{q.Off, q.Len}}, func(err error) {
			switch {
			case err != nil:
				f.end(err)
			case inHead:
				r.punch(f)
			default:
				r.idx.set(b, end, fromZero)
				f.acknowledge()
			}
		})
	}
}

func (r *Replica) punch(f *flight) {
	p := f.part(r.fds[0], nil, 0, punchDone)
	r.ring.Fallocate(&p.op, p.fd, punchMode, f.q.Off, f.q.Len)
}

func punchDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	r := f.r
	if again(res) {
		r.ring.Fallocate(op, p.fd, punchMode, f.q.Off, f.q.Len)
		return
	}
	p.free()
	if res < 0 {
		f.end(errnoOf(unix.Errno(-res)))
		return
	}
	v := fromNowhere
	if len(r.layers) > 0 {
		v = fromZero
	}
	r.idx.set(f.q.Off>>blockBits, (f.q.Off+f.q.Len)>>blockBits, v)
	f.acknowledge()
}
