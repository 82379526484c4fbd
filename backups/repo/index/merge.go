package index

import (
	"bufio"
	"encoding/binary"
	"io"

	"drover.io/drover/api"
)

// mergeSource is a sorted stream of entries. The queue of a merge has the sources as a binary heap.
type mergeSource struct {
	record
	next nextRecord
}

// merge writes all entries in order, and returns their number. A blob that several packs have keeps an entry for each:
// a later table may lose one of the packs.
func (b *TableBuilder) merge(w *pageWriter, prefixes *[]uint64) (records int64, err error) {
	damaged, err := b.damagedPacks()
	if err != nil {
		return 0, err
	}
	queue, err := b.sources(damaged)
	if err != nil {
		return 0, err
	}
	var item [recordSize]byte
	for len(queue) > 0 && w.err == nil {
		s := queue[0]
		s.encode(item[:])
		if w.add(item[:]) {
			*prefixes = append(*prefixes, binary.BigEndian.Uint64(s.id[:]))
		}
		records++
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

// nextRecord reads the next entry of a sorted stream; ok is false at the end.
type nextRecord = func(r *record) (ok bool, err error)

// sources returns the heap of all sources that have entries. With damaged packs, each stream is two sources, so that
// each is in order: the entries of the damaged packs, and the others.
func (b *TableBuilder) sources(damaged []bool) (queue []*mergeSource, err error) {
	var streams []func() (nextRecord, error)
	if b.base != nil {
		streams = append(streams, func() (nextRecord, error) { return b.streamBase(), nil })
	}
	memory := min(max(mergeMemory/(2*len(b.runs)+2), pageSize), 64<<10)
	begin := int64(0)
	for _, end := range b.runs {
		from, n := begin, (end-begin)/recordSize
		streams = append(streams, func() (nextRecord, error) {
			r, err := b.spill.reader(from, memory)
			return streamRun(r, n), err
		})
		begin = end
	}
	b.sortRun()
	streams = append(streams, func() (nextRecord, error) { return streamMemory(b.run), nil })
	for _, open := range streams {
		for part := range 2 {
			if part == 1 && damaged == nil {
				break
			}
			next, err := open()
			if err != nil {
				return nil, err
			}
			if damaged != nil {
				next = filterDamaged(next, damaged, part == 1)
			}
			s := &mergeSource{next: next}
			if ok, err := next(&s.record); err != nil {
				return nil, err
			} else if ok {
				queue = append(queue, s)
			}
		}
	}
	for i := len(queue)/2 - 1; i >= 0; i-- {
		siftDown(queue, i)
	}
	return queue, nil
}

// filterDamaged returns the entries of the damaged packs, with a bit that says so, or those of the other packs.
func filterDamaged(next nextRecord, damaged []bool, wanted bool) nextRecord {
	return func(r *record) (bool, error) {
		for {
			if ok, err := next(r); err != nil || !ok {
				return false, err
			}
			if damaged[r.number()] != wanted {
				continue
			}
			if wanted {
				r.pack |= damagedBit
			}
			return true, nil
		}
	}
}

func streamMemory(run []record) nextRecord {
	return func(r *record) (bool, error) {
		if len(run) == 0 {
			return false, nil
		}
		*r, run = run[0], run[1:]
		return true, nil
	}
}

// siftDown restores the order of the heap below element i.
func siftDown(queue []*mergeSource, i int) {
	for {
		least := i
		for _, child := range [...]int{2*i + 1, 2*i + 2} {
			if child < len(queue) && queue[child].order(&queue[least].record) < 0 {
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

func streamRun(from *bufio.Reader, left int64) nextRecord {
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

// streamBase reads the entries of base that the new table keeps, with the new numbers of their packs. A base has no
// entries of hidden packs, so the stream is in order without the bits of the damaged packs, too.
func (b *TableBuilder) streamBase() nextRecord {
	next := b.base.stream()
	return func(r *record) (bool, error) {
		for {
			ok, err := next(r)
			if err != nil || !ok {
				return false, err
			}
			if int64(r.number()) >= int64(len(b.basePacks)) {
				return false, api.Errorf(api.Corrupt, "index table: pack %d of %d does not exist", r.number(), len(b.basePacks))
			}
			if number := b.basePacks[r.number()]; number != droppedPack {
				r.pack = r.pack&(treeBit|hiddenBit) | number
				return true, nil
			}
		}
	}
}

// stream reads all entries of the table.
func (t *Table) stream() nextRecord {
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
