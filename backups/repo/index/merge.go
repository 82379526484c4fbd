package index

import (
	"bufio"
	"encoding/binary"
	"io"
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

// merge writes all entries in order, each blob once, and returns their number.
func (b *TableBuilder) merge(w *pageWriter, prefixes *[]uint64) (records int64, err error) {
	queue, err := b.sources()
	if err != nil {
		return 0, err
	}
	var last record
	var item [recordSize]byte
	for len(queue) > 0 && w.err == nil {
		s := queue[0]
		if records == 0 || s.compare(&last) != 0 {
			last = s.record
			last.encode(item[:])
			if w.add(item[:]) {
				*prefixes = append(*prefixes, binary.BigEndian.Uint64(last.id[:]))
			}
			records++
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
	w.flush()
	return records, w.err
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
