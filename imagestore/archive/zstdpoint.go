package archive

import (
	"bytes"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/huff0"
)

// zstdState is what is known between two blocks of a frame.
type zstdState struct {
	Window uint64 `json:"window"` // of the frame,
	Size   uint64 `json:"size"`   // and what it says of its size
	Sum    bool   `json:"sum,omitempty"`
	Made   int64  `json:"made"` // bytes of the frame,
	Have   int64  `json:"have"` // as the executor counts them

	Huff   []byte       `json:"huff,omitempty"` // the codes of literals, if there are any
	Reps   [3]uint32    `json:"reps"`
	Tables [3]zstdTable `json:"tables"`

	state []byte // of the checksum
}

// zstdTable is one of sequences, as it was described.
type zstdTable struct {
	Have bool   `json:"have,omitempty"`
	Mode byte   `json:"mode,omitempty"`
	How  []byte `json:"how,omitempty"`
}

// mark tells of a place between two blocks. The executor adds what it knows.
func (z *unzstder) mark(f frame) error {
	if !z.due(z.plain) {
		return nil
	}
	st := &zstdState{Window: f.window, Size: f.size, Sum: f.sum, Made: z.made, Reps: z.seq.reps}
	if z.hasHuff {
		st.Huff = bytes.Clone(z.huffs)
	}
	for i, h := range z.seq.how {
		if z.seq.have[i] {
			st.Tables[i] = zstdTable{true, h.mode, bytes.Clone(h.b)}
		}
	}
	s, err := z.step()
	if err != nil {
		return err
	}
	s.place = &place{packed: z.in.off, know: st}
	z.todo <- s
	return nil
}

// tell is the executor's part of mark. Where some of the window is not in memory, nothing is told.
func (z *unzstder) tell(g *ring, p *place, window int) error {
	if err := g.commit(); err != nil || g.far != nil {
		return err
	}
	if st, ok := p.know.(*zstdState); ok {
		st.Have = g.have
		p.plain, p.window = z.total.Load(), min(g.have, int64(window))
		g.place(p)
	}
	return nil
}

// begin is the executor's part of the begin of a frame, or of the rest of one.
func (z *unzstder) begin(g *ring, b *zstdBegin) (err error) {
	sum := zstdSum{xxhash.New()}
	if b.again == nil {
		g.have = int64(g.sent - g.pos)
	} else {
		if err := z.refill(g, b.again.Have); err != nil {
			return err
		}
		if b.sum {
			_, err = z.resumed(sum, b.again.state)
		}
	}
	if b.sum && err == nil {
		g.begin(sum)
	}
	return err
}

// frameAgain goes to where an earlier reader was, and to the end of that frame.
func (z *unzstder) frameAgain() error {
	var st zstdState
	var err error
	if st.state, err = z.restore(&st); err != nil {
		return err
	}
	need := min(st.Window, st.Size)
	if need > uint64(z.lim.Memory-overhead) || st.Made < 0 || st.Have > st.Made {
		return z.senseless()
	}
	if st.Huff != nil {
		if z.huff, _, err = huff0.ReadTable(st.Huff, z.huff); err != nil {
			return z.senseless()
		}
		z.hasHuff, z.huffs = true, st.Huff
	}
	z.seq.reset()
	z.seq.reps = st.Reps
	for i, t := range st.Tables {
		if !t.Have {
			continue
		}
		if _, ok := z.seq.pick(i, t.Mode, t.How); !ok || t.Mode > 2 {
			return z.senseless()
		}
	}
	z.made = st.Made
	z.size = int(need)
	if z.g, err = z.ring(z.size, z.size); err != nil {
		return err
	}
	s, err := z.step()
	if err != nil {
		return err
	}
	s.ring = z.g
	s.begin = &zstdBegin{window: int(min(st.Window, 1<<40)), sum: st.Sum, again: &st}
	z.todo <- s
	return z.blocks(frame{window: st.Window, size: st.Size, sum: st.Sum})
}
