package stack

import (
	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/diskfs"
)

// zeroRange makes a range read as zeros and frees its space. Over lower layers the zero record is durable before the
// punch, which otherwise would expose lower data.
func (r *Replica) zeroRange(q *block.Request) {
	b, end := q.Off>>blockBits, (q.Off+q.Len)>>blockBits
	inHead, below := false, false
	for i := b; i < end; {
		v, n := r.idx.Run(i, end)
		inHead = inHead || v == fromHead
		below = below || v >= fromHead
		i += n
	}
	f := r.newRequest(q)
	switch {
	case !below:
		f.acknowledge()
	case len(r.layers) == 0:
		r.punchHead(f)
	default:
		r.appendZeros([]block.Span{{Off: q.Off, Len: q.Len}}, func(err error) {
			switch {
			case err != nil:
				f.endRequest(err)
			case inHead:
				r.punchHead(f)
			default:
				r.idx.Set(b, end, fromZero)
				f.acknowledge()
			}
		})
	}
}

// punchPiece is how much of the head one call frees: see diskfs.Emptier.
const punchPiece = int64(1) << 20

func (r *Replica) punchHead(f *request) {
	r.punchNext(f.newPart(r.fds[0], nil, f.q.Off, punchDone))
}

// punchNext punches the next piece in which the head may hold data, or ends the request. The piece ends at p.at.
func (r *Replica) punchNext(p *part) {
	f := p.f
	b, end := p.off>>blockBits, (f.q.Off+f.q.Len)>>blockBits
	for b < end {
		v, n := r.idx.Run(b, end)
		if v == fromHead || v == fromZero {
			p.off, p.at = b<<blockBits, min(b<<blockBits+punchPiece, end<<blockBits)
			r.ring.Fallocate(&p.op, p.fd, diskfs.PunchMode, p.off, p.at-p.off)
			return
		}
		b += n
	}
	p.free()
	v := fromNowhere
	if len(r.layers) > 0 {
		v = fromZero
	}
	r.idx.Set(f.q.Off>>blockBits, end, v)
	f.acknowledge()
}

func punchDone(op *uring.Op, res int32) {
	p := op.Ctx.(*part)
	f := p.f
	r := f.r
	if mustRetry(res) {
		r.ring.Fallocate(op, p.fd, diskfs.PunchMode, p.off, p.at-p.off)
		return
	}
	if res < 0 {
		p.free()
		f.endRequest(errnoOf(unix.Errno(-res)))
		return
	}
	p.off = p.at
	r.punchNext(p)
}
