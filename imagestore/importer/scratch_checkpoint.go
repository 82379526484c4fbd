package importer

import (
	"encoding/binary"
	"maps"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// scratchName is the name of the scratch file of an import that can continue.
const scratchName = "spool"

// scratchState is the state of a scratchFile besides the bytes in its file.
type scratchState struct {
	Have int64         `json:"have"`
	Gone []byte        `json:"gone,omitempty"` // scratchFile.gone in little-endian words
	Part map[int64]int `json:"part,omitempty"`
	// The lookahead that is not compared yet.
	Early []lookaheadRecord `json:"early,omitempty"`
}

// maxParts bounds the record of a scratch file: an image in great disorder has no checkpoint.
const maxParts = 100_000

// durableState makes the bytes durable while the conversion is halted and no byte arrives, and returns the rest of the
// state. ok is false if the state is too large.
func (s *scratchFile) durableState() (st scratchState, ok bool, err error) {
	s.mu.Lock()
	st = scratchState{Have: s.have, Part: maps.Clone(s.part)}
	for _, w := range s.gone {
		st.Gone = binary.LittleEndian.AppendUint64(st.Gone, w)
	}
	s.mu.Unlock()
	if st.Early, ok = s.lookahead.pendingRecords(); !ok {
		return st, false, nil
	}
	if len(st.Part) > maxParts || len(st.Gone) > 4<<20 {
		return st, false, nil
	}
	return st, true, s.f.Datasync()
}

// punchCheckpointed reports that the checkpoint with the bytes before upTo is durable: no process needs bytes dropped
// before.
func (s *scratchFile) punchCheckpointed(upTo int64) {
	s.mu.Lock()
	done := s.punchLater
	s.punchLater, s.punchLaterBytes, s.durable = nil, 0, upTo
	s.mu.Unlock()
	for _, u := range done {
		s.punchUnits(u)
	}
}

// restoreState restores the state of a checkpoint.
func (s *scratchFile) restoreState(st *scratchState) error {
	if st.Have <= 0 || len(st.Gone)%8 != 0 || int64(len(st.Gone)/8*64-64)*scratchUnit > st.Have {
		return api.Errorf(api.Corrupt, "the record of the scratch file makes no sense")
	}
	if err := s.lookahead.restoreRecords(st.Early, st.Have); err != nil {
		return err
	}
	if err := s.f.Truncate(st.Have); err != nil { // later bytes arrive again
		return err
	}
	s.have, s.held, s.durable = st.Have, st.Have, st.Have
	for u, n := range st.Part {
		if u < 0 || u*scratchUnit > st.Have || n <= 0 || n >= scratchUnit {
			return api.Errorf(api.Corrupt, "the record of the scratch file makes no sense")
		}
		s.part[u] = n
	}
	for w := range len(st.Gone) / 8 {
		bits := binary.LittleEndian.Uint64(st.Gone[w*8:])
		s.gone = append(s.gone, bits)
		for i := int64(0); i < 64; i++ {
			if bits>>i&1 == 0 {
				continue
			}
			u := int64(w)*64 + i
			s.held -= scratchUnit
			s.punchUnits(units{u, u + 1}) // the earlier process may not have punched the last units
		}
	}
	s.peak.Store(max(s.peak.Load(), s.held))
	return nil
}

// scratchFeed is the stream of a conversion that can continue. It halts the conversion now and then and writes a
// checkpoint.
type scratchFeed struct {
	feed
	im   *importRun
	sp   *scratchFile
	gate *checkpointGate
	w    block.CheckpointWriter

	next time.Time // of the next checkpoint
	shut int64     // place in the stream where the conversion was halted; -1: not halted
	off  int64     // in the stream, at the last checkpoint
	at   int64     // in the layer, at the last checkpoint
}

func (f *scratchFeed) wakeUps() <-chan struct{} { return f.gate.news }

// nextPause is far away while the conversion is halted: a wake-up follows.
func (f *scratchFeed) nextPause() time.Time {
	if f.shut >= 0 {
		return time.Now().Add(f.im.checkpointEvery())
	}
	return f.next
}

// pauseDue is called after each chunk, and when the conversion may have halted.
func (f *scratchFeed) pauseDue(off int64) bool {
	switch {
	case f.shut < 0 && time.Now().Before(f.next):
		return false
	case f.shut < 0:
		f.gate.shutGate()
		f.sp.setHalted(true)
		f.shut = off
	}
	if _, ok := f.gate.haltedAt(); ok {
		return true
	}
	if off-f.shut > 2*scratchTarget {
		f.resumeConversion() // the conversion takes too long to halt: try again later
	}
	return false
}

func (f *scratchFeed) resumeConversion() {
	f.shut, f.next = -1, time.Now().Add(f.im.checkpointEvery())
	f.sp.setHalted(false)
	f.gate.openGate()
}

func (f *scratchFeed) pauseAt(off int64) error {
	defer f.resumeConversion()
	off += f.im.from
	at, ok := f.gate.haltedAt()
	if !ok || at%chunkSize != 0 || off == f.off && at == f.at {
		return nil
	}
	note, ok := f.im.recordAt(off)
	if !ok {
		return nil
	}
	st, ok, err := f.sp.durableState()
	if err != nil || !ok {
		return err
	}
	note.Spool = &st
	if err := f.im.writeCheckpoint(f.w, at, note); err != nil {
		return err
	}
	f.off, f.at = off, at
	f.sp.punchCheckpointed(off)
	return nil
}
