package stack

// The index says for every 4 KiB block of a stack where it is read from. It is cut into pages of 64 MiB. A page that
// holds one value costs 10 bytes; any other is a palette plus 1, 2, 4, 8 or 16 bits per block. An index belongs to one
// goroutine at a time; it has no locks.

const (
	pageBits   = 14
	pageBlocks = 1 << pageBits                 // blocks per page
	pageSize   = pageBlocks << blockBits       // bytes per page
	blockBits  = 12                            // 4 KiB
	blockSize  = int64(1) << blockBits         // bytes per block
	chunkSize  = int64(2) << 20                // bytes per digest
	chunkBlks  = chunkSize >> blockBits        // blocks per digest
	unbuilt    = uint16(0xffff)                // in index.uniform: nobody has looked yet
	maxLayers  = int(unbuilt) - int(fromLayer) // far above any chain that makes sense
)

// Values of blocks in a resolved index.
const (
	fromNowhere = uint16(iota) // a hole in all layers
	fromZero                   // explicitly zero
	fromHead
	fromLayer // layer k, counted from the bottom, is fromLayer+k
)

type index struct {
	blocks  int64
	uniform []uint16  // the one value of a page, where packed is nil
	packed  []*packed // nil: the page is uniform or unbuilt
}

// newIndex makes an index in which every block has the value v.
func newIndex(blocks int64, v uint16) index {
	var x index
	x.grow(blocks, v)
	return x
}

// grow adds blocks of value v. A last page that was short keeps its content.
func (x *index) grow(blocks int64, v uint16) {
	if blocks <= x.blocks {
		return
	}
	pages := int((blocks + pageBlocks - 1) >> pageBits)
	old := x.blocks
	for len(x.uniform) < pages {
		x.uniform = append(x.uniform, v)
		x.packed = append(x.packed, nil)
	}
	x.blocks = blocks
	if old&(pageBlocks-1) == 0 {
		return
	}
	p := int(old >> pageBits)
	if x.uniform[p] == unbuilt && x.packed[p] == nil {
		return // whoever builds it sees the new size
	}
	lo, hi := int(old&(pageBlocks-1)), x.pageLen(p)
	if q := x.packed[p]; q != nil {
		q.cnt[0] += uint16(hi - q.blocks) // new blocks carry code 0 as the bits are clear
		q.blocks = hi
	}
	x.setInPage(p, lo, hi, v)
}

// pageLen is the number of blocks in page p: the last one may be short.
func (x *index) pageLen(p int) int { return int(min(pageBlocks, x.blocks-int64(p)<<pageBits)) }

func (x *index) built(p int) bool { return x.packed[p] != nil || x.uniform[p] != unbuilt }

// run is the value at block b and how many blocks from there on, below end, surely have it.
func (x *index) run(b, end int64) (uint16, int64) {
	p := int(b >> pageBits)
	v, n := x.runInPage(p, int(b&(pageBlocks-1)), int(min(end-int64(p)<<pageBits, pageBlocks)))
	total := int64(n)
	for b+total < end && (b+total)&(pageBlocks-1) == 0 {
		p++
		w, n := x.runInPage(p, 0, int(min(end-int64(p)<<pageBits, pageBlocks)))
		if w != v {
			break
		}
		total += int64(n)
	}
	return v, total
}

func (x *index) runInPage(p, lo, hi int) (uint16, int) {
	q := x.packed[p]
	if q == nil {
		return x.uniform[p], hi - lo
	}
	return q.run(lo, hi)
}

// set gives the blocks [b, end) the value v. All pages of the range must be built.
func (x *index) set(b, end int64, v uint16) {
	for b < end {
		p := int(b >> pageBits)
		lo := int(b & (pageBlocks - 1))
		hi := int(min(end-int64(p)<<pageBits, pageBlocks))
		x.setInPage(p, lo, hi, v)
		b += int64(hi - lo)
	}
}

func (x *index) setInPage(p, lo, hi int, v uint16) {
	n := x.pageLen(p)
	if lo == 0 && hi == n {
		x.uniform[p], x.packed[p] = v, nil
		return
	}
	q := x.packed[p]
	if q == nil {
		if x.uniform[p] == v {
			return
		}
		q = newPacked(n, x.uniform[p])
		x.packed[p] = q
	}
	if q.set(lo, hi, v) {
		x.uniform[p], x.packed[p] = v, nil
	}
}

// load gives page p the values vals.
func (x *index) load(p int, vals []uint16) {
	x.uniform[p], x.packed[p] = vals[0], nil
	for i := 0; i < len(vals); {
		j := i + 1
		for j < len(vals) && vals[j] == vals[i] {
			j++
		}
		x.setInPage(p, i, j, vals[i])
		i = j
	}
}

// change replaces one value by another wherever it is.
func (x *index) change(from, to uint16) {
	for p := range x.uniform {
		if q := x.packed[p]; q != nil {
			for c, v := range q.pal {
				if v == from && q.cnt[c] > 0 {
					q.pal[c] = to
				}
			}
		} else if x.uniform[p] == from {
			x.uniform[p] = to
		}
	}
}

// changeIn does so in the built part of a range of blocks.
func (x *index) changeIn(b, end int64, from, to uint16) {
	for b < end {
		p := int(b >> pageBits)
		if !x.built(p) {
			b = min(end, int64(p+1)<<pageBits)
			continue
		}
		v, n := x.runInPage(p, int(b&(pageBlocks-1)), int(min(end-int64(p)<<pageBits, pageBlocks)))
		if v == from {
			x.set(b, b+int64(n), to)
		}
		b += int64(n)
	}
}

// remap gives every value a new one.
func (x *index) remap(to func(uint16) uint16) {
	for p := range x.uniform {
		x.uniform[p] = to(x.uniform[p])
		if q := x.packed[p]; q != nil {
			for c := range q.pal {
				q.pal[c] = to(q.pal[c])
			}
		}
	}
}

// memory is the heap that the index takes, in bytes.
func (x *index) memory() int64 {
	n := int64(cap(x.uniform))*2 + int64(cap(x.packed))*8
	for _, q := range x.packed {
		if q != nil {
			n += packedOverhead + int64(cap(q.pal)+cap(q.cnt))*2 + int64(cap(q.words))*8
		}
	}
	return n
}

// packed is a page of several values: each block has a code of width bits, an index into the palette.
type packed struct {
	blocks int
	width  uint     // 1, 2, 4, 8 or 16
	pal    []uint16 // value of a code
	cnt    []uint16 // blocks that have a code; 0: the code is free
	words  []uint64
}

const packedOverhead = 96 // the struct and its slice headers

func newPacked(blocks int, v uint16) *packed {
	return &packed{blocks: blocks, width: 1, pal: []uint16{v}, cnt: []uint16{uint16(blocks)},
		words: make([]uint64, pageBlocks/64)}
}

func (q *packed) code(i int) uint64 {
	bit := uint(i) * q.width
	return q.words[bit>>6] >> (bit & 63) & (1<<q.width - 1)
}

func (q *packed) run(lo, hi int) (uint16, int) {
	c := q.code(lo)
	per := 64 / int(q.width)
	pattern := c * (^uint64(0) / (1<<q.width - 1))
	i := lo + 1
	for i < hi {
		if i&(per-1) == 0 && i+per <= hi && q.words[i/per] == pattern {
			i += per
			continue
		}
		if q.code(i) != c {
			break
		}
		i++
	}
	return q.pal[c], i - lo
}

// set reports whether the whole page has the value v now.
func (q *packed) set(lo, hi int, v uint16) bool {
	c := q.codeFor(v)
	for i := lo; i < hi; i++ {
		bit := uint(i) * q.width
		w := &q.words[bit>>6]
		sh := bit & 63
		old := *w >> sh & (1<<q.width - 1)
		if old != c {
			*w ^= (old ^ c) << sh
			q.cnt[old]--
			q.cnt[c]++
		}
	}
	return int(q.cnt[c]) == q.blocks
}

func (q *packed) codeFor(v uint16) uint64 {
	free := -1
	for c, w := range q.pal {
		if w == v {
			return uint64(c)
		}
		if q.cnt[c] == 0 && free < 0 {
			free = c
		}
	}
	if free >= 0 && free != 0 { // code 0 stays what clear bits mean
		q.pal[free] = v
		return uint64(free)
	}
	if len(q.pal) == 1<<q.width {
		q.widen()
	}
	q.pal = append(q.pal, v)
	q.cnt = append(q.cnt, 0)
	return uint64(len(q.pal) - 1)
}

func (q *packed) widen() {
	r := packed{width: q.width * 2, words: make([]uint64, len(q.words)*2)}
	for i := range q.blocks {
		bit := uint(i) * r.width
		r.words[bit>>6] |= q.code(i) << (bit & 63)
	}
	q.width, q.words = r.width, r.words
}
