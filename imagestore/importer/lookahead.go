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
	// lookaheadUnit is the unit of reads ahead of the stream.
	lookaheadUnit = 64 << 10
	// maxLookahead bounds the bytes read ahead of the stream.
	maxLookahead = 16 << 20
	// waitDistance is how near bytes have to be for a read to wait for the stream instead.
	waitDistance = 16 << 20
)

// lookahead is the part of a stream that a conversion reads early: tables behind the data, which the whole image would
// otherwise wait for in the scratch file. The bytes of the stream are compared with the lookahead when they arrive, so
// that the checksum covers the bytes that the image was made from.
type lookahead struct {
	read  func(p []byte, off int64) error // nil: no further reads
	size  int64                           // of the stream
	name  string
	total *atomic.Int64 // bytes read ahead

	mu      sync.Mutex
	bytes   map[int64][]byte  // by unit
	records []lookaheadRecord // units that did not arrive yet, in order
	arrived int64             // end of the bytes that arrived
	sum     hash.Hash         // of the arrived part of the first record; nil: nothing arrived
}

// lookaheadRecord is a unit that was read ahead and did not arrive yet.
type lookaheadRecord struct {
	Unit int64  `json:"unit"`
	Sum  []byte `json:"sha256"`
}

// newLookahead returns the lookahead of a stream that can be read out of order, else nil.
func (im *importRun) newLookahead() *lookahead {
	if im.s.Ahead == nil || im.s.Size < 0 || im.packed != "" {
		return nil
	}
	return &lookahead{read: im.s.Ahead, size: im.s.Size, name: im.s.Name, total: &im.p.early, bytes: map[int64][]byte{},
		arrived: im.from}
}

func (e *lookahead) unitEnd(unit int64) int64 { return min((unit+1)*lookaheadUnit, e.size) }

// readAt fills p with bytes far behind have. false means that the read has to wait for the stream.
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
		if !e.fetchUnits(unit, next) {
			return false
		}
	}
	for at := off; at < end; {
		unit := at / lookaheadUnit
		b := e.bytes[unit]
		if b == nil {
			return false // the unit arrived meanwhile
		}
		at += int64(copy(p[at-off:], b[at-unit*lookaheadUnit:]))
	}
	return true
}

// fetchUnits reads units ahead. A failure of fetchUnits only means waiting for the stream.
func (e *lookahead) fetchUnits(from, to int64) bool {
	n := e.unitEnd(to-1) - from*lookaheadUnit
	if e.read == nil || e.total.Load()+n > maxLookahead {
		return false
	}
	b := make([]byte, n)
	e.mu.Unlock() // the stream must not wait
	err := e.read(b, from*lookaheadUnit)
	e.mu.Lock()
	if err != nil {
		e.read = nil
		return false
	}
	if from*lookaheadUnit < e.arrived {
		return false // the stream was faster
	}
	e.total.Add(n)
	for unit := from; unit < to; unit++ {
		if e.bytes[unit] != nil {
			continue // another read was faster
		}
		part := b[(unit-from)*lookaheadUnit : e.unitEnd(unit)-from*lookaheadUnit]
		sum := sha256.Sum256(part)
		e.bytes[unit] = part
		at, _ := slices.BinarySearchFunc(e.records, unit, func(n lookaheadRecord, u int64) int { return int(n.Unit - u) })
		e.records = slices.Insert(e.records, at, lookaheadRecord{unit, sum[:]})
	}
	return true
}

// compareStream compares the next bytes of the stream with the lookahead.
func (e *lookahead) compareStream(p []byte, off int64) error {
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
		to := min(e.unitEnd(note.Unit), end)
		_, _ = e.sum.Write(p[max(note.Unit*lookaheadUnit-off, 0) : to-off])
		if to < e.unitEnd(note.Unit) {
			break // the rest follows
		}
		if !bytes.Equal(e.sum.Sum(nil), note.Sum) {
			return api.Errorf(api.Unavailable, "%s %w: the bytes read ahead at %#x differ from the bytes of the stream", e.name,
				origin.ErrChanged, note.Unit*lookaheadUnit)
		}
		e.sum, e.records = nil, e.records[1:]
		delete(e.bytes, note.Unit)
	}
	return nil
}

// hasPending reports whether a part of the lookahead is not compared yet.
func (e *lookahead) hasPending() bool {
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.records) > 0
}

// pendingRecords returns the units to compare. ok is false in the middle of a comparison.
func (e *lookahead) pendingRecords() (notes []lookaheadRecord, ok bool) {
	if e == nil {
		return nil, true
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.records), e.sum == nil
}

// restoreRecords adds the lookahead of an earlier process to the comparison.
func (e *lookahead) restoreRecords(notes []lookaheadRecord, have int64) error {
	if len(notes) == 0 {
		return nil
	}
	if e == nil {
		return api.Errorf(api.Unavailable, "the lookahead of the checkpoint cannot be compared: %w", errRestart)
	}
	e.records, e.arrived = notes, have
	for i, n := range notes {
		if n.Unit*lookaheadUnit < have || i > 0 && n.Unit <= notes[i-1].Unit || n.Unit*lookaheadUnit >= e.size {
			return api.Errorf(api.Corrupt, "the record of the scratch file makes no sense")
		}
	}
	return nil
}
