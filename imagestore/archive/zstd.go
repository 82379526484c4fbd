package archive

import (
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"sync"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/huff0"

	"drover.io/drover/api"
)

// The zstd container (RFC 8878): frames, and blocks in them.
const (
	zstdMagic = 0xfd2fb528
	skipMagic = 0x184d2a50
	skipMask  = 0xfffffff0
	maxBlock  = 128 << 10
	// What the zstd program, too, unpacks without being asked twice: --long=27 and --ultra -22.
	maxWindow = 128 << 20
)

// zstdSum is the checksum of a frame: the low half of XXH64.
type zstdSum struct{ *xxhash.Digest }

func (s zstdSum) Sum(b []byte) []byte {
	return binary.BigEndian.AppendUint32(b, uint32(s.Sum64()))
}

// unzstder takes one zstd file apart: it decodes the literals and the sequences. An executor, on another goroutine,
// puts them together.
type unzstder struct {
	*unpacker
	g    *ring
	size int   // of the window that g is for
	made int64 // bytes of the current frame

	huff    *huff0.Scratch
	hasHuff bool
	huffs   []byte // the description of huff
	seq     seqDecoder
	plain   int64 // bytes so far

	todo, idle chan *step
	failed     chan struct{} // closed by the executor when it fails
}

// step is what the executor has to do, in this order.
type step struct {
	ring  *ring      // go on there
	begin *zstdBegin // a frame
	block bool       // append seqs and lit, or fill bytes
	lit   []byte     // with copySlack behind it
	seqs  []sequence
	fill  int
	sum   []byte // compare
	end   bool   // of the ring
	place *place // tell of it

	buf []byte // of lit
}

type zstdBegin struct {
	window int
	sum    bool
	again  *zstdState // the frame is gone on with
}

// maxSteps is how far the decoder is ahead of the executor.
const maxSteps = 4

// frame is what the header of a frame says.
type frame struct {
	window uint64
	size   uint64 // of the content; unknown: absent
	sum    bool
}

func unzstd(u *unpacker) error {
	z := &unzstder{unpacker: u, todo: make(chan *step, maxSteps), idle: make(chan *step, maxSteps),
		failed: make(chan struct{})}
	for range maxSteps {
		z.idle <- &step{buf: make([]byte, maxBlock+copySlack)}
	}
	var failure error
	var executor sync.WaitGroup
	executor.Go(func() { failure = z.execute() })
	err := z.frames()
	close(z.todo)
	executor.Wait()
	if failure != nil {
		return failure
	}
	return err
}

// execute is the executor. After a failure it only hands the steps back.
func (z *unzstder) execute() (err error) {
	var g *ring
	window := 0
	for s := range z.todo {
		if s.ring != nil {
			g = s.ring
		}
		if err == nil {
			if err = z.do(g, s, &window); err != nil {
				close(z.failed)
			}
		}
		if s.end {
			close(g.out)
			g = nil
		}
		z.idle <- s
	}
	if g != nil {
		if err == nil {
			err = g.commit()
		}
		close(g.out)
	}
	return err
}

func (z *unzstder) do(g *ring, s *step, window *int) error {
	if s.begin != nil {
		*window = s.begin.window
		if err := z.begin(g, s.begin); err != nil {
			return err
		}
	}
	if s.place != nil {
		return z.tell(g, s.place, *window)
	}
	if s.block {
		if err := g.reserve(); err != nil {
			return err
		}
		if s.fill > 0 {
			g.b[g.pos] = s.lit[0]
			g.pos++
			g.repeat(1, s.fill-1)
		} else if err := g.execute(s.seqs, s.lit, *window); err != nil {
			return err
		}
		if err := g.commitPiece(); err != nil {
			return err
		}
	}
	if s.sum != nil || s.end {
		if err := g.commit(); err != nil {
			return err
		}
	}
	if s.sum != nil {
		g.end(s.sum, z.in.name)
	}
	return nil
}

// step gives the next step, to be filled in and sent.
func (z *unzstder) step() (*step, error) {
	select {
	case s := <-z.idle:
		*s = step{buf: s.buf, seqs: s.seqs[:0]}
		return s, nil
	case <-z.failed:
	case <-z.ctx.Done():
	}
	return nil, errClosed
}

func (z *unzstder) frames() error {
	z.plain = z.total.Load()
	first := true
	if z.from != nil {
		if err := z.frameAgain(); err != nil {
			return err
		}
		first = false
	}
	for ; ; first = false {
		end, err := z.in.atEnd()
		if err != nil || end && !first {
			return err
		}
		if !z.in.need(4) && !errors.Is(z.in.err, io.EOF) {
			return z.in.err
		}
		var magic uint32
		whole := z.in.end-z.in.pos >= 4
		if whole {
			magic = binary.LittleEndian.Uint32(z.in.buf[z.in.pos:])
		}
		switch {
		case first && !whole:
			err = z.in.failed()
		case magic&skipMask == skipMagic:
			err = z.skipFrame()
		case magic == zstdMagic:
			err = z.frame()
		case first:
			err = z.in.damaged("this is not the start of a zstd frame")
		default:
			err = z.in.trailing()
		}
		if err != nil {
			return err
		}
	}
}

func (z *unzstder) skipFrame() error {
	head, err := z.in.next(8)
	if err != nil {
		return err
	}
	for n := int64(binary.LittleEndian.Uint32(head[4:])); n > 0; {
		if !z.in.need(1) {
			return z.in.failed()
		}
		k := min(n, int64(z.in.end-z.in.pos))
		z.in.skip(int(k))
		n -= k
	}
	return nil
}

func (z *unzstder) header() (f frame, err error) {
	head, err := z.in.next(5)
	if err != nil {
		return f, err
	}
	d := head[4]
	if d&8 != 0 {
		return f, api.Errorf(api.Unsupported, "zstd: a frame has flags that are not known here (%#x)", d)
	}
	single := d&0x20 != 0
	f.sum = d&4 != 0
	sizeLen := [4]int{0, 2, 4, 8}[d>>6]
	dictLen := [4]int{0, 1, 2, 4}[d&3]
	windowLen := 1
	if single {
		windowLen, sizeLen = 0, max(sizeLen, 1)
	}
	b, err := z.in.next(windowLen + dictLen + sizeLen)
	if err != nil {
		return f, err
	}
	var num [8]byte
	if !single {
		base := uint64(1) << (10 + b[0]>>3)
		f.window = base + base/8*uint64(b[0]&7)
	}
	copy(num[:], b[windowLen:windowLen+dictLen])
	if dict := binary.LittleEndian.Uint64(num[:]); dict != 0 {
		return f, api.Errorf(api.Unsupported, "zstd: a frame needs the dictionary %d: pack it without", dict)
	}
	num = [8]byte{}
	copy(num[:], b[windowLen+dictLen:])
	f.size = binary.LittleEndian.Uint64(num[:])
	switch sizeLen {
	case 0:
		f.size = absent
	case 2:
		f.size += 256
	}
	if single {
		f.window = f.size
	}
	return f, nil
}

func (z *unzstder) frame() error {
	f, err := z.header()
	if err != nil {
		return err
	}
	if f.size != absent && f.size > uint64(z.lim.Output) {
		return z.count(int(min(f.size, 1<<62)))
	}
	// No distance is longer than the content.
	need := min(f.window, f.size)
	if need > maxWindow {
		return z.window(need, maxWindow)
	}
	size := int(need)
	if z.g != nil && z.size < size {
		s, err := z.step()
		if err != nil {
			return err
		}
		s.end = true
		z.todo <- s
		z.g = nil
	}
	s, err := z.step()
	if err != nil {
		return err
	}
	if z.g == nil {
		if z.g, err = z.ring(min(size, int(z.lim.Memory-overhead)), size); err != nil {
			return err
		}
		s.ring, z.size = z.g, size
	}
	s.begin = &zstdBegin{window: int(min(f.window, 1<<40)), sum: f.sum}
	z.todo <- s
	z.hasHuff, z.made = false, 0
	z.seq.reset()
	return z.blocks(f)
}

// blocks are the rest of a frame.
func (z *unzstder) blocks(f frame) error {
	for last := false; !last; {
		err := z.mark(f)
		if err == nil {
			last, err = z.block(int(min(f.window, maxBlock)))
		}
		if err != nil {
			return err
		}
	}
	if f.size != absent && uint64(z.made) != f.size {
		return z.in.damaged("a frame is not as long as its header says")
	}
	s, err := z.step()
	if err != nil {
		return err
	}
	if f.sum {
		sum, err := z.in.next(4)
		if err != nil {
			return err
		}
		s.sum = slices.Clone(sum)
		slices.Reverse(s.sum)
	}
	z.todo <- s
	return nil
}

// block decodes the next block of a frame, and tells whether it is the last one.
func (z *unzstder) block(most int) (last bool, err error) {
	b, err := z.in.next(3)
	if err != nil {
		return false, err
	}
	head := uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16
	last = head&1 != 0
	n := int(head >> 3)
	if n > most {
		return false, z.in.damaged("a block is larger than it can be")
	}
	s, err := z.step()
	if err != nil {
		return false, err
	}
	s.block = true
	size := n
	switch head >> 1 & 3 {
	case 0:
		b, err := z.in.next(n)
		if err != nil {
			return false, err
		}
		s.lit = s.buf[:n+copySlack]
		copy(s.lit, b)
	case 1:
		b, err := z.in.next(1)
		if err != nil {
			return false, err
		}
		s.lit = s.buf[:copySlack]
		s.lit[0], s.fill = b[0], n
	case 2:
		b, err := z.in.next(n)
		if err != nil {
			return false, err
		}
		used, ok := z.literals(s, b, most)
		if ok {
			// The decoder looks a bit beyond the start; headers are before it.
			b = z.in.buf[z.in.pos-n-maxBack : z.in.pos]
			s.seqs, size, ok = z.seq.decode(s.seqs, b, used+maxBack, len(s.lit)-copySlack, most)
		}
		if !ok {
			return false, z.in.damaged("the packed data are damaged")
		}
	default:
		return false, z.in.damaged("there is no block of kind 3")
	}
	z.made += int64(size)
	z.plain += int64(size)
	z.todo <- s
	return last, nil
}

// literals decodes the first part of a block, and tells how long it is.
func (z *unzstder) literals(s *step, b []byte, most int) (used int, ok bool) {
	if len(b) < 1 {
		return 0, false
	}
	kind, format := b[0]&3, b[0]>>2&3
	var head uint64
	for i := range min(len(b), 5) {
		head |= uint64(b[i]) << (8 * i)
	}
	var n, size, packed int
	if kind < 2 {
		n, size = [4]int{1, 2, 1, 3}[format], int(head>>[4]int{3, 4, 3, 4}[format])&(1<<[4]int{5, 12, 5, 20}[format]-1)
		packed = size
		if kind == 1 {
			packed = 1
		}
	} else {
		bits := [4]int{10, 10, 14, 18}[format]
		n = [4]int{3, 3, 4, 5}[format]
		size, packed = int(head>>4)&(1<<bits-1), int(head>>(4+bits))&(1<<bits-1)
	}
	if n+packed > len(b) || size > most {
		return 0, false
	}
	body := b[n : n+packed]
	lit := s.buf[:size+copySlack]
	s.lit = lit
	switch kind {
	case 0:
		copy(lit, body)
	case 1:
		for i := range lit[:size] {
			lit[i] = body[0]
		}
	default:
		var err error
		if kind == 2 {
			z.hasHuff = false
			all := body
			if z.huff, body, err = huff0.ReadTable(body, z.huff); err != nil {
				return 0, false
			}
			z.huffs = append(z.huffs[:0], all[:len(all)-len(body)]...)
			z.hasHuff = true
		}
		if !z.hasHuff {
			return 0, false
		}
		z.huff.MaxDecodedSize = size
		var got []byte
		if format == 0 {
			got, err = z.huff.Decoder().Decompress1X(lit[:0:size], body)
		} else {
			got, err = z.huff.Decoder().Decompress4X(lit[:0:size], body)
		}
		if err != nil || len(got) != size {
			return 0, false
		}
	}
	return n + packed, true
}
