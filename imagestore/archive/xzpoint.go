package archive

import (
	"crypto/sha256"
	"encoding"
)

// xzState is what is known between two blocks of an xz stream, or between two chunks of one block.
type xzState struct {
	Flags  [2]byte `json:"flags"`
	Blocks uint64  `json:"blocks"` // that were seen,
	Seen   []byte  `json:"seen"`   // and the state of their tally
	Block  *xzMid  `json:"block,omitempty"`
}

// xzMid is what is known within a block.
type xzMid struct {
	Head   int    `json:"head"` // as xzBlock
	Packed uint64 `json:"packed"`
	Plain  uint64 `json:"plain"`
	Dict   int    `json:"dict"`

	Start int64      `json:"start"` // where its packed bytes begin
	Made  int64      `json:"made"`  // bytes of it
	Have  int64      `json:"have"`  // bytes since the dictionary was reset
	LZMA  *lzmaState `json:"lzma"`
}

// lzmaState is a decoder between two chunks, when its range coder holds nothing.
type lzmaState struct {
	Need   needs     `json:"need"`
	Reps   [4]uint32 `json:"reps"`
	State  uint32    `json:"state"`
	LC     uint32    `json:"lc"`
	LPMask uint32    `json:"lpMask"`
	PBMask uint32    `json:"pbMask"`
	Model  *model    `json:"model"`
}

// MarshalText makes one run of letters of it: it has fifteen thousand numbers of eleven bits.
func (m *model) MarshalText() ([]byte, error) {
	var b []byte
	m.each(func(p []uint16) {
		for _, v := range p {
			b = append(b, '0'+byte(v>>6), '0'+byte(v&63))
		}
	})
	return b, nil
}

// UnmarshalText reads what MarshalText made.
func (m *model) UnmarshalText(b []byte) error {
	ok := true
	m.each(func(p []uint16) {
		if ok = ok && len(b) >= 2*len(p); !ok {
			return
		}
		for i := range p {
			high, low := b[2*i]-'0', b[2*i+1]-'0'
			ok = ok && high < 32 && low < 64
			p[i] = uint16(high)<<6 | uint16(low)
		}
		b = b[2*len(p):]
	})
	if !ok || len(b) > 0 {
		return corrupt("xz: the record of a decoder makes no sense")
	}
	return nil
}

// know is what the decoder knows.
func (d *lzma) know() *lzmaState {
	m := d.model
	return &lzmaState{Need: d.need, Reps: d.reps, State: d.state, LC: d.lc, LPMask: d.lpMask, PBMask: d.pbMask, Model: &m}
}

// knew makes it one that knows that.
func (d *lzma) knew(s *lzmaState) bool {
	if s == nil || s.Model == nil || s.LC > 8 || s.LPMask > 15 || s.PBMask > 15 || s.State > 11 {
		return false
	}
	d.model = *s.Model
	d.need, d.reps, d.state, d.lc, d.lpMask, d.pbMask = s.Need, s.Reps, s.State, s.LC, s.LPMask, s.PBMask
	return true
}

// know is what is known outside of blocks.
func (x *unxzer) know() (st xzState, ok bool) {
	m, ok := x.seen.sum.(encoding.BinaryMarshaler)
	if !ok {
		return st, false
	}
	seen, err := m.MarshalBinary()
	return xzState{Flags: x.flags, Blocks: x.seen.n, Seen: seen}, err == nil
}

// outside tells of a place between two blocks.
func (x *unxzer) outside() error {
	if !x.due(x.plain) {
		return nil
	}
	st, ok := x.know()
	p := &place{packed: x.in.off, plain: x.plain, know: st}
	switch {
	case !ok:
		return nil
	case x.serial == nil:
		return x.between(p)
	}
	x.serial.place(p) // the end of a block committed all
	return nil
}

// inside tells of a place between two chunks of a block.
func (x *unxzer) inside(b xzBlock, start, before int64) error {
	g := x.serial
	if !x.due(x.plain + g.total + int64(g.pos-g.sent) - before) {
		return nil
	}
	if err := g.commit(); err != nil {
		return err
	}
	st, ok := x.know()
	if !ok {
		return nil
	}
	st.Block = &xzMid{Head: b.head, Packed: b.packed, Plain: b.plain, Dict: b.dict, Start: start, Made: g.total - before,
		Have: g.have, LZMA: x.d.know()}
	g.place(&place{packed: x.in.off, plain: x.plain + g.total - before, window: min(g.have, int64(b.dict)), know: st})
	return nil
}

// again goes to where an earlier reader was: to a place between two blocks, or to the end of the block that it was in.
func (x *unxzer) again() error {
	var st xzState
	state, err := x.restore(&st)
	if err != nil {
		return err
	}
	var known bool
	x.flags = st.Flags
	if x.sum, known = xzSums[x.flags[1]]; !known {
		return x.senseless()
	}
	x.seen.n = st.Blocks
	if x.seen.sum, err = x.resumed(sha256.New(), st.Seen); err != nil || st.Block == nil {
		return err
	}
	return x.blockAgain(st.Block, state)
}

func (x *unxzer) blockAgain(st *xzMid, state []byte) (err error) {
	x.d = new(lzma)
	if !x.d.knew(st.LZMA) || st.Dict <= 0 || int64(st.Dict) > x.lim.Memory-overhead || st.Made < 0 ||
		st.Made > x.from.Plain || st.Start < 0 || st.Start > x.from.Packed {
		return x.senseless()
	}
	if x.serial, err = x.ring(st.Dict, st.Dict); err != nil {
		return err
	}
	x.window = st.Dict
	g := x.serial
	if err := x.refill(g, st.Have); err != nil {
		return err
	}
	x.plain -= st.Made
	b := xzBlock{head: st.Head, packed: st.Packed, plain: st.Plain, dict: st.Dict}
	before := g.total - st.Made
	g.mark = func() error { return x.inside(b, st.Start, before) }
	if x.sum.start != nil {
		sum, err := x.resumed(x.sum.start(), state)
		if err != nil {
			return err
		}
		g.begin(sum)
	}
	if err := x.d.chunks(g, x.in, b.dict); err != nil {
		return err
	}
	return x.end(b, st.Start, before)
}
