package format

// Units of a volume and of an index.
const (
	PageBits    = 14
	PageBlocks  = 1 << PageBits                 // blocks per page
	PageSize    = PageBlocks << BlockBits       // bytes per page
	BlockBits   = 12                            // 4 KiB
	BlockSize   = int64(1) << BlockBits         // bytes per block
	ChunkSize   = int64(2) << 20                // bytes per digest
	ChunkBlocks = ChunkSize >> BlockBits        // blocks per digest
	Unbuilt     = uint16(0xffff)                // in Index.Uniform: the page has no values yet
	MaxLayers   = int(Unbuilt) - int(FromLayer) // far above any useful chain
)

// Values of blocks in the index of an open stack.
const (
	FromNowhere = uint16(iota) // a hole in all layers
	FromZero                   // explicitly zero
	FromHead
	FromLayer // layer k, counted from the bottom, is FromLayer+k
)

// Index holds one value for every block of a volume, in pages of 64 MiB: the kinds of a map, or the layers that blocks
// are read from. A page with one value costs 11 bytes; any other page is a palette plus 1, 2, 4, 8 or 16 bits per
// block.
type Index struct {
	Blocks  int64
	Uniform []uint16  // the one value of a page, where Packed is nil
	Packed  []*packed // nil: the page is uniform or unbuilt
	Used    []bool    // by page: the user sets it, DropUnused clears it
}

// NewIndex makes an index in which every block has the value v.
func NewIndex(blocks int64, v uint16) Index {
	var x Index
	x.Grow(blocks, v)
	return x
}

// Grow adds blocks of value v. A last page that was short keeps its content.
func (x *Index) Grow(blocks int64, v uint16) {
	if blocks <= x.Blocks {
		return
	}
	pages := int((blocks + PageBlocks - 1) >> PageBits)
	old := x.Blocks
	for len(x.Uniform) < pages {
		x.Uniform = append(x.Uniform, v)
		x.Packed = append(x.Packed, nil)
		x.Used = append(x.Used, false)
	}
	x.Blocks = blocks
	if old&(PageBlocks-1) == 0 {
		return
	}
	p := int(old >> PageBits)
	if x.Uniform[p] == Unbuilt && x.Packed[p] == nil {
		return // the builder of the page sees the new size
	}
	lo, hi := int(old&(PageBlocks-1)), x.PageLen(p)
	if q := x.Packed[p]; q != nil {
		q.cnt[0] += uint16(hi - q.blocks) // new blocks carry code 0 as the bits are clear
		q.blocks = hi
	}
	x.setInPage(p, lo, hi, v)
}

// PageLen is the number of blocks in page p: the last page may be short.
func (x *Index) PageLen(p int) int { return int(min(PageBlocks, x.Blocks-int64(p)<<PageBits)) }

// Built reports whether page p has values.
func (x *Index) Built(p int) bool { return x.Packed[p] != nil || x.Uniform[p] != Unbuilt }

// Run is the value at block b, and how many blocks from b on, below end, surely have the same value.
func (x *Index) Run(b, end int64) (uint16, int64) {
	p := int(b >> PageBits)
	v, n := x.RunInPage(p, int(b&(PageBlocks-1)), int(min(end-int64(p)<<PageBits, PageBlocks)))
	total := int64(n)
	for b+total < end && (b+total)&(PageBlocks-1) == 0 {
		p++
		w, n := x.RunInPage(p, 0, int(min(end-int64(p)<<PageBits, PageBlocks)))
		if w != v {
			break
		}
		total += int64(n)
	}
	return v, total
}

// RunInPage is Run within the blocks [lo, hi) of page p.
func (x *Index) RunInPage(p, lo, hi int) (uint16, int) {
	q := x.Packed[p]
	if q == nil {
		return x.Uniform[p], hi - lo
	}
	return q.runAt(lo, hi)
}

// Set gives the blocks [b, end) the value v. All pages of the range must be built.
func (x *Index) Set(b, end int64, v uint16) {
	for b < end {
		p := int(b >> PageBits)
		lo := int(b & (PageBlocks - 1))
		hi := int(min(end-int64(p)<<PageBits, PageBlocks))
		x.setInPage(p, lo, hi, v)
		b += int64(hi - lo)
	}
}

func (x *Index) setInPage(p, lo, hi int, v uint16) {
	n := x.PageLen(p)
	if lo == 0 && hi == n {
		x.Uniform[p], x.Packed[p] = v, nil
		return
	}
	q := x.Packed[p]
	if q == nil {
		if x.Uniform[p] == v {
			return
		}
		q = newPacked(n, x.Uniform[p])
		x.Packed[p] = q
	}
	if q.setRange(lo, hi, v) {
		x.Uniform[p], x.Packed[p] = v, nil
	}
}

// Load gives page p the values vals.
func (x *Index) Load(p int, vals []uint16) {
	x.Uniform[p], x.Packed[p] = vals[0], nil
	for i := 0; i < len(vals); {
		j := i + 1
		for j < len(vals) && vals[j] == vals[i] {
			j++
		}
		x.setInPage(p, i, j, vals[i])
		i = j
	}
}

// Change replaces one value by another in the whole index.
func (x *Index) Change(from, to uint16) {
	for p := range x.Uniform {
		if q := x.Packed[p]; q != nil {
			for c, v := range q.pal {
				if v == from && q.cnt[c] > 0 {
					q.pal[c] = to
				}
			}
		} else if x.Uniform[p] == from {
			x.Uniform[p] = to
		}
	}
}

// ChangeIn replaces one value by another in the built part of a range of blocks.
func (x *Index) ChangeIn(b, end int64, from, to uint16) {
	for b < end {
		p := int(b >> PageBits)
		if !x.Built(p) {
			b = min(end, int64(p+1)<<PageBits)
			continue
		}
		v, n := x.RunInPage(p, int(b&(PageBlocks-1)), int(min(end-int64(p)<<PageBits, PageBlocks)))
		if v == from {
			x.Set(b, b+int64(n), to)
		}
		b += int64(n)
	}
}

// Remap gives every value a new one.
func (x *Index) Remap(to func(uint16) uint16) {
	for p := range x.Uniform {
		x.Uniform[p] = to(x.Uniform[p])
		if q := x.Packed[p]; q != nil {
			for c := range q.pal {
				q.pal[c] = to(q.pal[c])
			}
		}
	}
}

// Memory is the heap that the index takes, in bytes.
func (x *Index) Memory() int64 {
	n := int64(cap(x.Uniform))*2 + int64(cap(x.Packed))*8 + int64(cap(x.Used))
	for _, q := range x.Packed {
		n += q.memory()
	}
	return n
}

// AnyUnused reports whether DropUnused would drop a page.
func (x *Index) AnyUnused() bool {
	for p, q := range x.Packed {
		if q != nil && !x.Used[p] {
			return true
		}
	}
	return false
}

// DropUnused makes the packed pages unbuilt that were not used since the call before, and returns their memory, in
// bytes.
func (x *Index) DropUnused() (freed int64) {
	for p, q := range x.Packed {
		if q != nil && !x.Used[p] {
			x.Uniform[p], x.Packed[p] = Unbuilt, nil
			freed += q.memory()
		}
		x.Used[p] = false
	}
	return freed
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

func (q *packed) memory() int64 {
	if q == nil {
		return 0
	}
	return packedOverhead + int64(cap(q.pal)+cap(q.cnt))*2 + int64(cap(q.words))*8
}

func newPacked(blocks int, v uint16) *packed {
	return &packed{blocks: blocks, width: 1, pal: []uint16{v}, cnt: []uint16{uint16(blocks)},
		words: make([]uint64, PageBlocks/64)}
}

func (q *packed) codeAt(i int) uint64 {
	bit := uint(i) * q.width
	return q.words[bit>>6] >> (bit & 63) & (1<<q.width - 1)
}

func (q *packed) runAt(lo, hi int) (uint16, int) {
	c := q.codeAt(lo)
	per := 64 / int(q.width)
	pattern := c * (^uint64(0) / (1<<q.width - 1))
	i := lo + 1
	for i < hi {
		if i&(per-1) == 0 && i+per <= hi && q.words[i/per] == pattern {
			i += per
			continue
		}
		if q.codeAt(i) != c {
			break
		}
		i++
	}
	return q.pal[c], i - lo
}

// setRange gives the blocks [lo, hi) the value v, and reports whether the whole page has it now.
func (q *packed) setRange(lo, hi int, v uint16) bool {
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
		q.doubleWidth()
	}
	q.pal = append(q.pal, v)
	q.cnt = append(q.cnt, 0)
	return uint64(len(q.pal) - 1)
}

func (q *packed) doubleWidth() {
	r := packed{width: q.width * 2, words: make([]uint64, len(q.words)*2)}
	for i := range q.blocks {
		bit := uint(i) * r.width
		r.words[bit>>6] |= q.codeAt(i) << (bit & 63)
	}
	q.width, q.words = r.width, r.words
}
