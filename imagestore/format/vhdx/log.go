package vhdx

import (
	"cmp"
	"fmt"
	"hash/crc32"
	"slices"

	"drover.io/drover/api"
)

// The log is a ring of entries; an entry lists writes of 4 KiB and ranges to zero. The newest complete sequence of
// entries holds the last writes of a writer that stopped. Replaying the sequence again after any progress of the writer
// has the same result.

const (
	logSector  = 4 * kib
	entryHead  = 64
	descSize   = 32
	maxChanges = 32 << 10 // in all; real images have a few
	// How often the bytes of the log may be summed, on average: entries that are not whole claim any length.
	maxChecked = 8
)

// change is a range of the file that the log changes: to data, or without data to zeros.
type change struct {
	off, n int64
	data   []byte
}

func (c change) end() int64 { return c.off + c.n }

// patchBytes applies the changes to the bytes read at off.
func (im *Image) patchBytes(p []byte, off int64) {
	end := off + int64(len(p))
	i, _ := slices.BinarySearchFunc(im.changes, off, func(c change, off int64) int { return cmp.Compare(c.end(), off+1) })
	for ; i < len(im.changes) && im.changes[i].off < end; i++ {
		c := im.changes[i]
		from, to := max(c.off, off), min(c.end(), end)
		if c.data == nil {
			clear(p[from-off : to-off])
		} else {
			copy(p[from-off:to-off], c.data[from-c.off:])
		}
	}
}

// addChange adds a change over all earlier changes.
func (im *Image) addChange(c change) {
	overlaps := func(o change, off int64) int { return cmp.Compare(o.end(), off+1) }
	i, _ := slices.BinarySearchFunc(im.changes, c.off, overlaps)
	j := i
	var keep []change
	for ; j < len(im.changes) && im.changes[j].off < c.end(); j++ {
		if o := im.changes[j]; o.off < c.off {
			keep = append(keep, o.clipTo(o.off, c.off))
		}
		if j == i {
			keep = append(keep, c)
		}
		if o := im.changes[j]; o.end() > c.end() {
			keep = append(keep, o.clipTo(c.end(), o.end()))
		}
	}
	if j == i {
		keep = append(keep, c)
	}
	im.changes = slices.Replace(im.changes, i, j, keep...)
}

func (c change) clipTo(from, to int64) change {
	if c.data != nil {
		c.data = c.data[from-c.off : to-c.off]
	}
	c.off, c.n = from, to-from
	return c
}

// logEntry is a complete entry of the log.
type logEntry struct {
	at, length    int64 // in the ring
	tail          int64 // start of its sequence
	sequence      uint64
	flushed, last int64 // sizes of the file
	descriptors   int64
}

type ring struct {
	im   *Image
	b    []byte
	id   guid
	left int64 // bytes left to sum
	made int   // changes
}

// bytesAt returns a part of the ring, which may wrap around.
func (r *ring) bytesAt(at, n int64) []byte {
	if at+n <= int64(len(r.b)) {
		return r.b[at : at+n]
	}
	return append(slices.Clone(r.b[at:]), r.b[:at+n-int64(len(r.b))]...)
}

// parseEntry returns the entry at a place in the ring, if a complete entry starts there.
func (r *ring) parseEntry(at int64) (e logEntry, ok bool, err error) {
	b := r.b[at : at+entryHead]
	e = logEntry{at: at, length: int64(le.Uint32(b[8:])), tail: int64(le.Uint32(b[12:])), sequence: le.Uint64(b[16:]),
		flushed: int64(le.Uint64(b[48:])), last: int64(le.Uint64(b[56:])), descriptors: int64(le.Uint32(b[24:]))}
	ring := int64(len(r.b))
	if string(b[:4]) != "loge" || guid(b[32:48]) != r.id || e.length < logSector || e.length%logSector != 0 ||
		e.length > ring || e.tail%logSector != 0 || e.tail >= ring || e.sequence == 0 || headLen(e.descriptors) > e.length {
		return e, false, nil
	}
	if r.left -= e.length; r.left < 0 {
		return e, false, corrupt("the log is full of incomplete entries")
	}
	over := max(at+e.length-ring, 0)
	sum := crc32.Update(checksum(r.b[at:at+e.length-over]), castagnoli, r.b[:over])
	return e, le.Uint32(b[4:]) == sum, nil
}

// headLen returns the length of the header and descriptors of an entry.
func headLen(descriptors int64) int64 {
	return (entryHead + descriptors*descSize + logSector - 1) / logSector * logSector
}

// activeSequence finds the newest complete sequence of entries, the oldest entry first.
func (r *ring) activeSequence() ([]logEntry, error) {
	var all []logEntry
	for at := int64(0); at < int64(len(r.b)); {
		e, ok, err := r.parseEntry(at)
		if err != nil {
			return nil, err
		}
		if !ok {
			at += logSector
			continue
		}
		all = append(all, e)
		at += e.length
	}
	follows := func(a, b logEntry) bool {
		return (a.at+a.length)%int64(len(r.b)) == b.at && b.sequence == a.sequence+1
	}
	// Start behind a break, so that a run that continues at the ring's start is in one piece. Numbers that grow all around
	// a ring do not exist.
	for i := range all {
		if prev := all[(i+len(all)-1)%len(all)]; !follows(prev, all[i]) {
			all = append(slices.Clone(all[i:]), all[:i]...)
			break
		}
	}
	var best []logEntry
	run := 0
	place := map[int64]int{} // of the run's entries
	for i, e := range all {
		if i > 0 && !follows(all[i-1], e) {
			run = i
			clear(place)
		}
		place[e.at] = i
		if from, ok := place[e.tail]; ok && from >= run && (best == nil || e.sequence > best[len(best)-1].sequence) {
			best = all[from : i+1]
		}
	}
	return best, nil
}

// replayLog reads the log and makes its changes in memory.
func (im *Image) replayLog(h *header) error {
	length := h.log.to - h.log.from
	if length > im.limits.Log {
		return api.Errorf(api.OutOfRange, "the image was not closed, and its log of %d bytes exceeds the limit of %d; "+
			"attach the image once in the program that made it", length, im.limits.Log)
	}
	r := &ring{im: im, b: make([]byte, length), id: h.logID, left: maxChecked * length}
	if err := im.readFull(r.b, h.log.from, "the log's entries"); err != nil {
		return err
	}
	entries, err := r.activeSequence()
	if err != nil || len(entries) == 0 {
		return err // the writer had written nothing yet
	}
	last := entries[len(entries)-1]
	if last.flushed < 0 || last.flushed > im.fileSize {
		return corrupt("the file had %d bytes when it was written, and has %d: it was cut off", last.flushed, im.fileSize)
	}
	if last.last > maxEffective || last.last < 0 {
		return corrupt("the log says that the file has %d bytes", last.last)
	}
	im.info.Replayed = len(entries)
	protected := []span{{0, 192 * kib}, h.log}
	for _, e := range entries {
		if err := r.applyEntry(e, protected); err != nil {
			return fmt.Errorf("entry %d: %w", e.sequence, err)
		}
	}
	// A file ends at whole MiB, but for a block at its end.
	im.fileSize = max(im.fileSize, last.last)
	return nil
}

// applyEntry makes the changes of one entry.
func (r *ring) applyEntry(e logEntry, protected []span) error {
	b := r.bytesAt(e.at, e.length)
	sectors := b[headLen(e.descriptors):]
	for i := range e.descriptors {
		d := b[entryHead+i*descSize:][:descSize]
		c := change{off: int64(le.Uint64(d[16:])), n: logSector}
		if le.Uint64(d[24:]) != e.sequence {
			return corrupt("a descriptor is that of entry %d", le.Uint64(d[24:]))
		}
		switch string(d[:4]) {
		case "desc":
			if len(sectors) < logSector {
				return corrupt("data of a descriptor is missing")
			}
			s := sectors[:logSector]
			sectors = sectors[logSector:]
			if string(s[:4]) != "data" || uint64(le.Uint32(s[4:]))<<32|uint64(le.Uint32(s[4092:])) != e.sequence {
				return corrupt("data of a descriptor belongs to another entry")
			}
			// The sector's own head and tail are in the way of what belongs there.
			copy(s, d[8:16])
			copy(s[4092:], d[4:8])
			c.data = s
		case "zero":
			c.n = int64(le.Uint64(d[8:]))
		default:
			return corrupt("a descriptor is of unknown kind %q", d[:4])
		}
		if c.off < 0 || c.off%logSector != 0 || c.n <= 0 || c.n%logSector != 0 || c.n > maxEffective ||
			c.off > maxEffective {
			return corrupt("a descriptor's place in the file (%d bytes at %#x) is not in whole 4 KiB", c.n, uint64(c.off))
		}
		for _, p := range protected {
			if p.hits(span{c.off, c.end()}) {
				return corrupt("a descriptor changes the headers or the log itself, at %#x", c.off)
			}
		}
		if r.made++; r.made > maxChanges {
			return api.Errorf(api.OutOfRange, "the log makes more than %d changes", maxChanges)
		}
		r.im.addChange(c)
	}
	return nil
}
