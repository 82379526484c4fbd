package importer

import (
	"bytes"
	"crypto/sha256"
	"hash"
	"slices"
	"sync"
	"sync/atomic"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

const (
	// lookaheadUnit is what of a source is read at once before it comes.
	lookaheadUnit = 64 << 10
	// maxLookahead is how much of a source is read before it comes.
	maxLookahead = 16 << 20
	// waitDistance is what is waited for instead: it will soon be there.
	waitDistance = 16 << 20
)

// lookahead is what a conversion has read of a source before it came: tables that are behind the data, which all of the
// image would otherwise wait for in the scratch file. When it comes it is compared: what the checksum is over is what
// the image was made from.
type lookahead struct {
	read  func(p []byte, off int64) error // nil: no more
	size  int64                           // of the source
	name  string
	total *atomic.Int64 // bytes read

	mu      sync.Mutex
	bytes   map[int64][]byte  // by unit
	records []lookaheadRecord // what has not come yet, in order
	arrived int64             // the stream is known up to here
	sum     hash.Hash         // of what came of the first note; nil: nothing
}

// lookaheadRecord is a unit that was read and has not come.
type lookaheadRecord struct {
	Unit int64  `json:"unit"`
	Sum  []byte `json:"sha256"`
}

// newLookahead makes it that of a stream, where that can be read out of order.
func (im *importRun) newLookahead() *lookahead {
	if im.s.Ahead == nil || im.s.Size < 0 || im.packed != "" {
		return nil
	}
	return &lookahead{read: im.s.Ahead, size: im.s.Size, name: im.s.Name, total: &im.p.early, bytes: map[int64][]byte{},
		arrived: im.from}
}

func (e *lookahead) end(unit int64) int64 { return min((unit+1)*lookaheadUnit, e.size) }

// readAt fills p from what is far behind have. It reports false where that has to be waited for.
func (e *lookahead) readAt(p []byte, off, have int64) bool {
	end := off + int64(len(p))
	if e == nil || len(p) == 0 || off < have+waitDistance || end > e.size {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for unit := off / lookaheadUnit; unit*lookaheadUnit < end; unit++ {
		if e.bytes[unit] != nil {
			continue
		}
		next := unit + 1
		for next*lookaheadUnit < end && e.bytes[next] == nil {
			next++
		}
		if !e.fetch(unit, next) {
			return false
		}
	}
	for at := off; at < end; {
		unit := at / lookaheadUnit
		b := e.bytes[unit]
		if b == nil {
			return false // it came while the others were read
		}
		at += int64(copy(p[at-off:], b[at-unit*lookaheadUnit:]))
	}
	return true
}

// fetch reads units. What stands against it is no failure: then they are waited for.
func (e *lookahead) fetch(from, to int64) bool {
	n := e.end(to-1) - from*lookaheadUnit
	if e.read == nil || e.total.Load()+n > maxLookahead {
		return false
	}
	b := make([]byte, n)
	e.mu.Unlock() // what comes meanwhile must not wait
	err := e.read(b, from*lookaheadUnit)
	e.mu.Lock()
	if err != nil {
		e.read = nil
		return false
	}
	if from*lookaheadUnit < e.arrived {
		return false // it has come, or is about to
	}
	e.total.Add(n)
	for unit := from; unit < to; unit++ {
		if e.bytes[unit] != nil {
			continue // somebody else was faster
		}
		part := b[(unit-from)*lookaheadUnit : e.end(unit)-from*lookaheadUnit]
		sum := sha256.Sum256(part)
		e.bytes[unit] = part
		at, _ := slices.BinarySearchFunc(e.records, unit, func(n lookaheadRecord, u int64) int { return int(n.Unit - u) })
		e.records = slices.Insert(e.records, at, lookaheadRecord{unit, sum[:]})
	}
	return true
}

// compare compares the next bytes of the stream with what was read of them before.
func (e *lookahead) compare(p []byte, off int64) error {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	end := off + int64(len(p))
	e.arrived = end
	for len(e.records) > 0 && e.records[0].Unit*lookaheadUnit < end {
		note := e.records[0]
		if e.sum == nil {
			e.sum = sha256.New()
		}
		to := min(e.end(note.Unit), end)
		_, _ = e.sum.Write(p[max(note.Unit*lookaheadUnit-off, 0) : to-off])
		if to < e.end(note.Unit) {
			break // the rest comes next
		}
		if !bytes.Equal(e.sum.Sum(nil), note.Sum) {
			return api.Errorf(api.Unavailable, "%s %w: what was read of it at %#x is not what came there afterwards", e.name,
				origin.ErrChanged, note.Unit*lookaheadUnit)
		}
		e.sum, e.records = nil, e.records[1:]
		delete(e.bytes, note.Unit)
	}
	return nil
}

// pending reports whether something that was read has not been compared yet.
func (e *lookahead) pending() bool {
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.records) > 0
}

// state is what is to be compared yet. ok is false in the middle of that.
func (e *lookahead) state() (notes []lookaheadRecord, ok bool) {
	if e == nil {
		return nil, true
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.records), e.sum == nil
}

// resume has what an earlier process read compared, too.
func (e *lookahead) resume(notes []lookaheadRecord, have int64) error {
	if len(notes) == 0 {
		return nil
	}
	if e == nil {
		return api.Errorf(api.Unavailable, "what was read of it before it came cannot be compared: %w", errRestart)
	}
	e.records, e.arrived = notes, have
	for i, n := range notes {
		if n.Unit*lookaheadUnit < have || i > 0 && n.Unit <= notes[i-1].Unit || n.Unit*lookaheadUnit >= e.size {
			return api.Errorf(api.Corrupt, "the record of the scratch file makes no sense")
		}
	}
	return nil
}
