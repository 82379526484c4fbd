package archive

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"hash/crc32"
	"hash/crc64"
	"io"
	"slices"

	"drover.io/drover/api"
)

// The xz container (version 1.1.0 of its description). Blocks that say their sizes, as xz -T writes them, are decoded
// side by side where that fits into memory; all others one after the other in one window.

const (
	xzFooterMagic = "YZ"
	xzHeadSize    = 12
	xzMaxBlocks   = 2 // decoded side by side
)

var crc64Table = crc64.MakeTable(crc64.ECMA)

var xzFilters = map[uint64]string{0x03: "delta", 0x04: "BCJ x86", 0x05: "BCJ PowerPC", 0x06: "BCJ IA-64",
	0x07: "BCJ ARM", 0x08: "BCJ ARM-Thumb", 0x09: "BCJ SPARC", 0x0a: "BCJ ARM64", 0x0b: "BCJ RISC-V"}

// xzSum is one of the four checks. The bytes of a checksum as Go gives them are those of the format, reversed for CRCs.
type xzSum struct {
	size  int
	start func() hash.Hash
}

var xzSums = map[byte]xzSum{
	0:  {0, nil},
	1:  {4, func() hash.Hash { return crc32.NewIEEE() }},
	4:  {8, func() hash.Hash { return crc64.New(crc64Table) }},
	10: {32, sha256.New},
}

// unxzer takes one xz file apart.
type unxzer struct {
	*unpacker
	sum    xzSum
	flags  [2]byte
	seen   tally // the blocks of this stream as they were
	serial *ring // of blocks that are decoded by this goroutine
	window int   // of serial
	d      *lzma // of serial
	idle   chan *lzma
	plain  int64 // bytes of the blocks so far
}

// tally stands for a list of pairs of numbers: lists that differ have different tallies.
type tally struct {
	n   uint64
	sum hash.Hash
}

func (t *tally) add(a, b uint64) {
	t.n++
	var p [16]byte
	binary.LittleEndian.PutUint64(p[:], a)
	binary.LittleEndian.PutUint64(p[8:], b)
	_, _ = t.sum.Write(p[:])
}

func unxz(u *unpacker) error {
	x := &unxzer{unpacker: u, idle: make(chan *lzma, xzMaxBlocks)}
	for range xzMaxBlocks {
		x.idle <- nil
	}
	err := x.streams()
	x.endSerial()
	return err
}

func (x *unxzer) streams() error {
	x.plain = x.total.Load()
	for first := true; ; first = false {
		if !first {
			more, err := x.padding()
			if err != nil || !more {
				return err
			}
		}
		var err error
		if first && x.from != nil {
			err = x.again()
		} else {
			err = x.stream()
		}
		if err == nil {
			err = x.blocks()
		}
		if err != nil {
			return err
		}
	}
}

// padding skips the zeros between streams, four by four, and tells whether another stream follows.
func (x *unxzer) padding() (bool, error) {
	for n := 0; ; n++ {
		end, err := x.in.atEnd()
		if err != nil {
			return false, err
		}
		if end || x.in.buf[x.in.pos] != 0 {
			if n%4 != 0 {
				return false, x.in.trailing()
			}
			if end {
				return false, nil
			}
			break
		}
		x.in.skip(1)
	}
	if !x.in.need(len(xzMagic)) && !errors.Is(x.in.err, io.EOF) {
		return false, x.in.err
	}
	if !bytes.HasPrefix(x.in.buf[x.in.pos:x.in.end], []byte(xzMagic)) {
		return false, x.in.trailing()
	}
	return true, nil
}

// stream reads the head of a stream.
func (x *unxzer) stream() error {
	head, err := x.in.next(xzHeadSize)
	if err != nil {
		return err
	}
	if string(head[:6]) != xzMagic {
		return x.in.damaged("this is not the start of an xz stream")
	}
	if crc32.ChecksumIEEE(head[6:8]) != binary.LittleEndian.Uint32(head[8:]) {
		return x.in.damaged("the header of the stream is damaged")
	}
	x.flags = [2]byte(head[6:8])
	var known bool
	if x.sum, known = xzSums[x.flags[1]]; !known || x.flags[0] != 0 {
		return api.Errorf(api.Unsupported, "xz: the file has checksums of a kind that is not known here (%#x)", x.flags)
	}
	x.seen = tally{sum: sha256.New()}
	return nil
}

// blocks are the rest of a stream.
func (x *unxzer) blocks() error {
	for {
		if err := x.outside(); err != nil {
			return err
		}
		size, err := x.in.peek(1)
		if err != nil {
			return err
		}
		if size[0] == 0 {
			return x.index()
		}
		if err := x.block((int(size[0]) + 1) * 4); err != nil {
			return err
		}
	}
}

// xzBlock is what the header of a block says.
type xzBlock struct {
	head          int
	packed, plain uint64 // unknown: absent
	dict          int
}

const absent = ^uint64(0)

func (x *unxzer) blockHeader(size int) (b xzBlock, err error) {
	head, err := x.in.next(size)
	if err != nil {
		return b, err
	}
	n := size - 4
	if crc32.ChecksumIEEE(head[:n]) != binary.LittleEndian.Uint32(head[n:]) {
		return b, x.in.damaged("the header of a block is damaged")
	}
	b = xzBlock{head: size, packed: absent, plain: absent}
	flags := head[1]
	p := fields{b: head[2:n]}
	if flags&0x3c != 0 {
		return b, api.Errorf(api.Unsupported, "xz: a block has flags that are not known here (%#x)", flags)
	}
	if flags&0x40 != 0 {
		b.packed = p.number()
	}
	if flags&0x80 != 0 {
		b.plain = p.number()
	}
	filters := int(flags&3) + 1
	var dict uint64
	for i := range filters {
		id, length := p.number(), p.number()
		props := p.take(length)
		if p.bad {
			break
		}
		last := i == filters-1
		if name := xzFilters[id]; name != "" {
			return b, api.Errorf(api.Unsupported, "xz: the filter %s is not supported: pack it without", name)
		}
		if id != 0x21 {
			return b, api.Errorf(api.Unsupported, "xz: the filter %#x is not supported", id)
		}
		if !last || length != 1 || props[0] > 40 {
			return b, x.in.damaged("the header of a block has filters that cannot be")
		}
		dict = 1<<32 - 1
		if props[0] < 40 {
			dict = uint64(2|props[0]&1) << (props[0]/2 + 11)
		}
	}
	if p.bad || b.packed == 0 || len(bytes.Trim(p.b, "\x00")) > 0 {
		return b, x.in.damaged("the header of a block cannot be")
	}
	if b.plain < dict {
		// No distance is longer than that.
		dict = max(b.plain, 4096)
	}
	if most := uint64(x.lim.Memory - overhead); dict > most {
		return b, x.unpacker.window(dict, most)
	}
	b.dict = int(dict)
	return b, nil
}

// fields takes the fields of a header apart.
type fields struct {
	b   []byte
	bad bool
}

func (f *fields) take(n uint64) []byte {
	if n > uint64(len(f.b)) {
		f.bad, f.b = true, nil
		return nil
	}
	p := f.b[:n]
	f.b = f.b[n:]
	return p
}

// number is of up to 63 bits, 7 in a byte.
func (f *fields) number() uint64 {
	v := uint64(0)
	for i := range 9 {
		p := f.take(1)
		if p == nil {
			return 0
		}
		v |= uint64(p[0]&0x7f) << (7 * i)
		if p[0] < 0x80 {
			f.bad = f.bad || p[0] == 0 && i > 0
			return v
		}
	}
	f.bad = true
	return 0
}

func (x *unxzer) block(head int) error {
	b, err := x.blockHeader(head)
	if err != nil {
		return err
	}
	if share := uint64(x.lim.Memory-overhead) / xzMaxBlocks; b.packed < share && b.plain < share-b.packed-1<<20 {
		return x.aside(b)
	}
	return x.here(b)
}

// here decodes a block on this goroutine.
func (x *unxzer) here(b xzBlock) error {
	if x.serial == nil || x.window < b.dict {
		x.endSerial()
		g, err := x.ring(b.dict, b.dict)
		if err != nil {
			return err
		}
		x.serial, x.window = g, b.dict
	}
	if x.d == nil {
		x.d = new(lzma)
	}
	start, before := x.in.off, x.serial.total
	x.serial.mark = func() error { return x.inside(b, start, before) }
	if err := x.d.block(x.serial, x.sum, x.in, b.dict); err != nil {
		return err
	}
	return x.end(b, start, before)
}

// end is that of a block which this goroutine decoded, from a place in the archive and one in the ring on.
func (x *unxzer) end(b xzBlock, start, before int64) error {
	packed, plain := uint64(x.in.off-start), uint64(x.serial.total-before)
	if b.packed != absent && b.packed != packed || b.plain != absent && b.plain != plain {
		return x.in.damaged("a block is not as long as its header says")
	}
	want, err := x.trailer(packed)
	if err != nil {
		return err
	}
	verify(x.serial, x.sum, want)
	x.seen.add(uint64(b.head)+packed+uint64(x.sum.size), plain)
	x.plain += int64(plain)
	return nil
}

func (x *unxzer) endSerial() {
	if x.serial != nil {
		close(x.serial.out)
		x.serial = nil
	}
}

// aside decodes a block on a goroutine of its own.
func (x *unxzer) aside(b xzBlock) error {
	x.endSerial()
	body, err := x.load(int(b.packed))
	if err != nil {
		return err
	}
	want, err := x.trailer(b.packed)
	var d *lzma
	if err == nil {
		select {
		case d = <-x.idle:
		case <-x.ctx.Done():
			err = errClosed
		}
	}
	var g *ring
	if err == nil {
		g, err = x.whole(int(b.plain))
	}
	if err != nil {
		x.unload(body)
		return err
	}
	x.seen.add(uint64(b.head)+b.packed+uint64(x.sum.size), b.plain)
	x.plain += int64(b.plain)
	sum := x.sum // the next stream may have another
	x.wg.Go(func() {
		defer close(g.out)
		if d == nil {
			d = new(lzma)
		}
		rest := &memory{x.in.name, body}
		err := d.block(g, sum, rest, b.dict)
		x.idle <- d
		if err == nil && (len(rest.b) > 0 || uint64(g.total) != b.plain) {
			err = corrupt("xz: a block is not as long as its header says")
		}
		x.unload(body)
		if err != nil {
			g.out <- item{err: err}
			return
		}
		verify(g, sum, want)
	})
	return nil
}

// load brings the packed bytes of a block into memory that costs nothing until it is written to.
func (x *unxzer) load(n int) ([]byte, error) {
	if err := x.mem.Acquire(x.ctx, int64(n)); err != nil {
		return nil, errClosed
	}
	body, err := allocate(n)
	if err != nil {
		x.mem.Release(int64(n))
		return nil, err
	}
	if err := x.in.fill(body); err != nil {
		x.unload(body)
		return nil, err
	}
	return body, nil
}

func (x *unxzer) unload(body []byte) {
	x.mem.Release(int64(len(body)))
	release(body)
}

// trailer reads what follows the packed bytes of a block: padding, and the checksum in the order of Go's hashes.
func (x *unxzer) trailer(packed uint64) ([]byte, error) {
	pad := int(-packed & 3)
	b, err := x.in.next(pad + x.sum.size)
	if err != nil {
		return nil, err
	}
	if len(bytes.Trim(b[:pad], "\x00")) > 0 {
		return nil, x.in.damaged("the padding of a block is not zero")
	}
	want := bytes.Clone(b[pad:])
	if x.sum.size < sha256.Size {
		slices.Reverse(want)
	}
	return want, nil
}

// block decodes the packed bytes of a block.
func (d *lzma) block(g *ring, sum xzSum, from source, window int) error {
	if sum.start != nil {
		g.begin(sum.start())
	}
	return d.lzma2(g, from, window)
}

// verify has the consumer compare the checksum.
func verify(g *ring, sum xzSum, want []byte) {
	if sum.start != nil {
		g.end(want, "xz")
	}
}

// index compares the list of blocks with what they were, and reads the footer.
func (x *unxzer) index() error {
	crc, start := crc32.NewIEEE(), x.in.off
	take := func(n int) ([]byte, error) {
		b, err := x.in.next(n)
		if err == nil {
			_, _ = crc.Write(b)
		}
		return b, err
	}
	number := func() (uint64, error) {
		var f [9]byte
		for i := range f {
			b, err := take(1)
			if err != nil {
				return 0, err
			}
			if f[i] = b[0]; f[i] < 0x80 {
				p := fields{b: f[:i+1]}
				if v := p.number(); !p.bad {
					return v, nil
				}
				break
			}
		}
		return 0, x.in.damaged("the index cannot be")
	}
	if _, err := take(1); err != nil {
		return err
	}
	n, err := number()
	if err != nil {
		return err
	}
	if n != x.seen.n {
		return x.in.damaged("the index lists %d blocks, but there are %d", n, x.seen.n)
	}
	listed := tally{sum: sha256.New()}
	for range n {
		unpadded, err := number()
		if err != nil {
			return err
		}
		plain, err := number()
		if err != nil {
			return err
		}
		listed.add(unpadded, plain)
	}
	pad, err := take(int(-(x.in.off - start) & 3))
	if err != nil {
		return err
	}
	if len(bytes.Trim(pad, "\x00")) > 0 || !bytes.Equal(listed.sum.Sum(nil), x.seen.sum.Sum(nil)) {
		return x.in.damaged("the index is not that of the blocks")
	}
	size := x.in.off - start + 4
	foot, err := x.in.next(4 + xzHeadSize)
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	switch {
	case crc.Sum32() != le.Uint32(foot):
		return x.in.damaged("the index is damaged")
	case string(foot[14:]) != xzFooterMagic || le.Uint32(foot[4:]) != crc32.ChecksumIEEE(foot[8:14]):
		return x.in.damaged("the end of the stream is damaged")
	case (int64(le.Uint32(foot[8:]))+1)*4 != size || [2]byte(foot[12:]) != x.flags:
		return x.in.damaged("the end of the stream does not fit its start")
	}
	return nil
}
