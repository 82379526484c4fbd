package stack

import (
	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/diskfs"
)

// zero makes a range read as zeros and gives its space back. Over lower layers the record of it is durable before the
// punch, which would else expose what lies below.
func (r *Replica) zero(q *block.Request) {
	b, end := q.Off>>BlockBits, (q.Off+q.Len)>>BlockBits
	inHead, below := false, false
	for i := b; i < end; {
		v, n := r.idx.Run(i, end)
		inHead = inHead || v == FromHead
		below = below || v >= FromHead
		i += n
	}
	f := r.flight(q)
	switch {
	case !below:
		f.acknowledge()
	case len(r.layers) == 0:
		r.punch(f)
	default:
		r.record([]block.Span{{Off: q.Off, Len: q.Len}}, func(err error) {
			switch {
			case err != nil:
				f.end(err)
			case inHead:
				r.punch(f)
			default:
				r.idx.Set(b, end, FromZero)
				f.acknowledge()
			}
		})
	}
}

// punchPiece is how much of the head is emptied at once: see emptier.
const punchPiece = int64(1) << 20

func (r *Replica) punch(f *flight) {
	r.punchNext(f.part(r.fds[0], nil, f.q.Off, punchDone))
}

// punchNext punches the next piece in which the head may hold something, or ends. The piece ends at p.at.
func (r *Replica) punchNext(p *part) {
	f := p.f
	b, end := p.off>>BlockBits, (f.q.Off+f.q.Len)>>BlockBits
	for b < end {
		v, n := r.idx.Run(b, end)
		if v == FromHead || v == FromZero {
			p.off, p.at = b<<BlockBits, min(b<<BlockBits+punchPiece, end<<BlockBits)
			r.ring.Fallocate(&p.op, p.fd, diskfs.PunchMode, p.off, p.at-p.off)
			return
		}
		b += n
	}
	p.free()
	v := FromNowhere
	if len(r.layers) > 0 {
		v = FromZero
	}
	r.idx.Set(f.q.Off>>BlockBits, end, v)
	f.acknowledge()
}

func punchDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	r := f.r
	if again(res) {
		r.ring.Fallocate(op, p.fd, diskfs.PunchMode, p.off, p.at-p.off)
		return
	}
	if res < 0 {
		p.free()
		f.end(errnoOf(unix.Errno(-res)))
		return
	}
	p.off = p.at
	r.punchNext(p)
}
