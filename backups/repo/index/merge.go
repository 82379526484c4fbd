package index

import (
	"bufio"
	"encoding/binary"
	"io"
	"slices"
)

// mergeSource is a sorted stream of entries. The queue of a merge has the sources as a binary heap.
type mergeSource struct {
	record
	rank int // of two equal entries, the merge keeps that of the lower rank
	next func(*record) (ok bool, err error)
}

func (s *mergeSource) less(o *mergeSource) bool {
	c := s.order(&o.record)
	return c < 0 || c == 0 && s.rank < o.rank
}

// merge writes all entries in order, the best copies of each blob, and returns their number.
func (b *TableBuilder) merge(w *pageWriter, prefixes *[]uint64) (records int64, err error) {
	damaged, err := b.damagedNumbers()
	if err != nil {
		return 0, err
	}
	queue, err := b.sources()
	if err != nil {
		return 0, err
	}
	var copies []record // of one blob
	var item [recordSize]byte
	write := func() {
		for _, r := range bestCopies(copies) {
			r.encode(item[:])
			if w.add(item[:]) {
				*prefixes = append(*prefixes, binary.BigEndian.Uint64(r.id[:]))
			}
			records++
		}
		copies = copies[:0]
	}
	for len(queue) > 0 && w.err == nil {
		s := queue[0]
		r := s.record
		if _, is := damaged[r.number()]; is {
			r.pack |= damagedBit
		}
		if len(copies) > 0 && r.compare(&copies[0]) != 0 {
			write()
		}
		if len(copies) < copiesRead {
			copies = append(copies, r)
		}
		ok, err := s.next(&s.record)
		if err != nil {
			return 0, err
		}
		if !ok {
			n := len(queue) - 1
			queue[0], queue = queue[n], queue[:n]
		}
		siftDown(queue, 0)
	}
	write()
	w.flush()
	return records, w.err
}

// copiesRead bounds the memory for the entries of one blob.
const copiesRead = 4096

// bestCopies sorts the entries of a blob, and returns those that the table keeps. A hidden pack counts only if it has the
// best copy, and sweeps alone look for hidden packs.
func bestCopies(copies []record) []record {
	slices.SortStableFunc(copies, func(x, y record) int { return x.order(&y) })
	best := copies[:min(len(copies), 1)]
	for _, r := range copies[len(best):] {
		if len(best) < copiesLimit && !r.hidden() && !best[0].hidden() {
			best = append(best, r)
		}
	}
	return best
}

// sources returns the heap of all sources that have entries.
func (b *TableBuilder) sources() (queue []*mergeSource, err error) {
	add := func(next func(*record) (bool, error)) error {
		s := &mergeSource{rank: len(queue), next: next}
		ok, err := next(&s.record)
		if ok {
			queue = append(queue, s)
		}
		return err
	}
	if b.base != nil {
		if err := add(b.base.stream()); err != nil {
			return nil, err
		}
	}
	memory := min(max(mergeMemory/(len(b.runs)+1), pageSize), 64<<10)
	begin := int64(0)
	for _, end := range b.runs {
		from, err := b.spill.reader(begin, memory)
		if err != nil {
			return nil, err
		}
		if err := add(streamRun(from, (end-begin)/recordSize)); err != nil {
			return nil, err
		}
		begin = end
	}
	b.sortRun()
	run := b.run
	if err := add(func(r *record) (bool, error) {
		if len(run) == 0 {
			return false, nil
		}
		*r, run = run[0], run[1:]
		return true, nil
	}); err != nil {
		return nil, err
	}
	for i := len(queue)/2 - 1; i >= 0; i-- {
		siftDown(queue, i)
	}
	return queue, nil
}

// siftDown restores the order of the heap below element i.
func siftDown(queue []*mergeSource, i int) {
	for {
		least := i
		for _, child := range [...]int{2*i + 1, 2*i + 2} {
			if child < len(queue) && queue[child].less(queue[least]) {
				least = child
			}
		}
		if least == i {
			return
		}
		queue[i], queue[least] = queue[least], queue[i]
		i = least
	}
}

func streamRun(from *bufio.Reader, left int64) func(*record) (bool, error) {
	var item [recordSize]byte
	return func(r *record) (bool, error) {
		if left == 0 {
			return false, nil
		}
		left--
		if _, err := io.ReadFull(from, item[:]); err != nil {
			return false, err
		}
		r.decode(item[:])
		return true, nil
	}
}

// stream reads all entries of the table.
func (t *Table) stream() func(*record) (bool, error) {
	page, number, left := new([pageSize]byte), t.records.first, t.records.count
	var items []byte
	return func(r *record) (bool, error) {
		if left == 0 {
			return false, nil
		}
		if len(items) < recordSize {
			var err error
			if items, err = t.readPage(page, number); err != nil {
				return false, err
			}
			number++
		}
		r.decode(items[:recordSize])
		items = items[recordSize:]
		left--
		return true, nil
	}
}
