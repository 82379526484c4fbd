package archive

import (
	"encoding"
	"encoding/json"
	"hash"
	"io"

	"drover.io/drover/api"
)

// Point is a place in an archive that another reader can go on from, without what is before it but for the last bytes
// that were unpacked.
type Point struct {
	Format Format          `json:"format"`
	Packed int64           `json:"packed"` // bytes of the archive before it,
	Plain  int64           `json:"plain"`  // and bytes that they unpack to;
	Window int64           `json:"window"` // of those, how many of the last the decoder has to have
	State  json.RawMessage `json:"state"`  // what else it knows
}

// place is a point on its way: what is known is put into words only for who asks.
type place struct {
	packed, plain, window int64

	sum  []byte // state of the checksum of the part that it is in
	know any
}

// placed is the state of a Point. Know is that of the format.
type placed struct {
	Sum  []byte          `json:"sum,omitempty"`
	Know json.RawMessage `json:"know"`
}

// pointsBack is for how many plain bytes points are remembered: who consumes may have taken more than was put to use.
const pointsBack = 64 << 20

// KeepPoints has the reader remember a point about every so many plain bytes. It is called before the first Read.
func (r *Reader) KeepPoints(every int64) { r.u.every = every }

// Point is the last place that is known at or before upTo plain bytes, which have been read. It may be called by any
// goroutine, also after Close.
func (r *Reader) Point(upTo int64) (Point, bool) {
	r.mu.Lock()
	var at *place
	for _, p := range r.points {
		if p.plain <= upTo {
			at = p
		}
	}
	r.mu.Unlock()
	if at == nil {
		return Point{}, false
	}
	know, err := json.Marshal(at.know)
	if err != nil {
		return Point{}, false
	}
	state, err := json.Marshal(placed{at.sum, know})
	return Point{Format: r.format, Packed: at.packed, Plain: at.plain, Window: at.window, State: state}, err == nil
}

// passed is what the consumer does at a place: all before it has come.
func (r *Reader) passed(p *place) {
	if r.sum != nil {
		m, ok := r.sum.(encoding.BinaryMarshaler)
		if !ok {
			return
		}
		var err error
		if p.sum, err = m.MarshalBinary(); err != nil {
			return
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.points) > 1 && r.points[1].plain <= p.plain-pointsBack {
		r.points = r.points[1:]
	}
	r.points = append(r.points, p)
}

// Continue is NewReader for the rest of an archive: r has what is behind the point, and before what was unpacked before
// it, at its place.
func Continue(r io.Reader, p Point, lim Limits, before io.ReaderAt) (*Reader, error) {
	z, err := NewReader(r, p.Format, lim)
	if err != nil {
		return nil, err
	}
	if p.Packed < 0 || p.Plain < 0 || p.Window < 0 || p.Window > p.Plain {
		return nil, z.u.senseless()
	}
	z.u.from, z.u.before = &p, before
	z.u.in.pos, z.u.in.end = maxBack, maxBack // decoders look behind
	z.u.in.off, z.u.last = p.Packed, p.Plain
	z.u.total.Store(p.Plain)
	return z, nil
}

// senseless is the error for a state that no reader has told.
func (u *unpacker) senseless() error {
	return corrupt("%s: the record of a place in it makes no sense", u.in.name)
}

// restore reads what was known at the point that the reader begins at.
func (u *unpacker) restore(know any) (sum []byte, err error) {
	var p placed
	if json.Unmarshal(u.from.State, &p) != nil || json.Unmarshal(p.Know, know) != nil {
		return nil, u.senseless()
	}
	return p.Sum, nil
}

// refill puts the plain bytes before the point into a new ring; have is how many there were since the last reset.
func (u *unpacker) refill(g *ring, have int64) error {
	n := u.from.Window
	if n > int64(g.size-ringAlign) || have < n || g.far != nil {
		return u.senseless()
	}
	got, err := u.before.ReadAt(g.b[:n], u.from.Plain-n)
	if int64(got) < n {
		return api.Errorf(api.KindOf(err), "%s: what was unpacked before cannot be read: %w", u.in.name, err)
	}
	g.pos, g.sent, g.total, g.have = int(n), int(n), n, have
	return nil
}

// resumed is a checksum that goes on from a state.
func (u *unpacker) resumed(sum hash.Hash, state []byte) (hash.Hash, error) {
	s, ok := sum.(encoding.BinaryUnmarshaler)
	if !ok || s.UnmarshalBinary(state) != nil {
		return nil, u.senseless()
	}
	return sum, nil
}

// due tells whether it is time for a point, so many plain bytes from the start. Only one goroutine of a reader asks.
func (u *unpacker) due(plain int64) bool {
	if u.every <= 0 || plain-u.last < u.every {
		return false
	}
	u.last = plain
	return true
}

// place tells the consumer of one; all before it is committed.
func (r *ring) place(p *place) { r.out <- item{place: p} }

// between is place where no ring is open.
func (u *unpacker) between(p *place) error {
	g := &ring{out: make(chan item, 1)}
	g.place(p)
	close(g.out)
	select {
	case u.rings <- g:
		return nil
	case <-u.ctx.Done():
		return errClosed
	}
}
