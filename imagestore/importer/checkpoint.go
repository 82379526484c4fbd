package importer

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"hash"
	"sync/atomic"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/origin"
)

// An import from an origin that can continue writes a checkpoint now and then: the layer up to some chunk, the state of
// the checksum, the place in the origin, and of a converted image the scratch file. So a restart costs the time since
// the last checkpoint. An archive has no checkpoint: no decoder can begin in the middle of an archive.

// defaultCheckpointEvery is the interval between checkpoints; each costs a sync of the disk.
const defaultCheckpointEvery = 10 * time.Second

func (im *importRun) checkpointEvery() time.Duration {
	if im.want.CheckpointEvery > 0 {
		return im.want.CheckpointEvery
	}
	return defaultCheckpointEvery
}

// Checkpoint is the state of an earlier process from which an import continues.
type Checkpoint struct {
	// Mark is the place in the origin; State is the state from Stream.At there, or nil.
	Mark  origin.Mark
	State json.RawMessage

	w      block.CheckpointWriter
	at     int64 // end of the data in the layer
	record checkpointRecord
}

// checkpointRecord is the record beside the layer.
type checkpointRecord struct {
	Mark origin.Mark `json:"mark"`
	Sum  []byte      `json:"sum"` // state of the SHA-512
	// The state of the origin itself.
	State json.RawMessage `json:"state,omitempty"`
	// Earlier versions recorded a place in an archive; From is the first byte that these versions need, at the Mark.
	Packed json.RawMessage `json:"packed,omitempty"`
	From   int64           `json:"from,omitempty"`
	// The format and the scratch file of a converted image.
	Format format        `json:"format,omitempty"`
	Spool  *scratchState `json:"spool,omitempty"`
}

// FindCheckpoint returns the usable checkpoint of an image, or nil. Give the checkpoint to Import, or call Drop.
func FindCheckpoint(ctx context.Context, on block.Layers, want Spec) *Checkpoint {
	r, ok := on.(block.Resumer)
	if !ok || len(want.Layers) != 1 {
		return nil
	}
	w, upTo, note, err := r.Resume(ctx, string(want.Layers[0]))
	if err != nil {
		return nil // the import starts from the beginning
	}
	k := &Checkpoint{w: w, at: upTo}
	if err := json.Unmarshal(note, &k.record); err != nil || !k.isUsable() {
		k.Drop()
		return nil
	}
	k.Mark, k.State = k.record.Mark, k.record.State
	return k
}

func (k *Checkpoint) isUsable() bool {
	n := &k.record
	if n.Mark.Off <= 0 || n.Mark.Size < n.Mark.Off {
		return false
	}
	if n.Packed != nil {
		return false // an import of an archive starts again
	}
	if n.Spool != nil {
		return n.Spool.Have == n.Mark.Off && n.Format != formatRaw
	}
	return n.Mark.Off == k.at
}

// Drop removes the checkpoint with its data.
func (k *Checkpoint) Drop() { _ = k.w.Abort() } // a new layer removes what is left

// adoptCheckpoint starts at the checkpoint, if the origin continues at its Mark.
func (im *importRun) adoptCheckpoint(k *Checkpoint) (bool, error) {
	if k == nil {
		return false, nil
	}
	state, ok := im.sum.(encoding.BinaryUnmarshaler)
	if im.s.Mark == nil || *im.s.Mark != k.Mark || !ok || state.UnmarshalBinary(k.record.Sum) != nil {
		k.Drop()
		im.sum.Reset()
		if im.s.Mark != nil && im.s.Mark.Off > 0 {
			return false, api.Errorf(api.Unavailable, "the checkpoint of the import is unusable: %w", errRestart)
		}
		return false, nil
	}
	im.w, im.format = k.w, formatRaw
	im.virtual, im.size = k.Mark.Size, k.Mark.Size
	im.from, im.at, im.crc = k.Mark.Off, k.at, k.Mark.CRC
	im.p.read.Store(k.Mark.Off)
	im.checkpointed = true
	if k.record.Spool != nil {
		im.format = k.record.Format
	}
	return true, nil
}

// checkpointWriter returns the writer of a layer with checkpoints, if the origin can continue.
func (im *importRun) checkpointWriter() (block.CheckpointWriter, bool) {
	w, ok := im.w.(block.CheckpointWriter)
	return w, ok && im.isResumable()
}

// errRestart is in the errors of an import that cannot continue but can start again.
var errRestart = errors.New("the import starts again")

// continueImport completes an import from its checkpoint and returns the number of bytes of the whole origin.
func (im *importRun) continueImport(k *Checkpoint) (n int64, err error) {
	rest := imageStream{r: im.s, size: im.s.Size, sum: im.originHash(), report: im.readSome}
	if k.record.Spool != nil {
		n, err = im.convertStream(rest, k.record.Spool)
	} else {
		n, err = im.writeRaw(&rest)
	}
	if k.record.State != nil && api.Is(err, api.Corrupt) {
		// The checkpoint may be damaged instead of the image.
		err = api.Errorf(api.Unavailable, "the import could not continue (%w): %w", err, errRestart)
	}
	return n, err
}

// isResumable reports whether another process can continue the import.
func (im *importRun) isResumable() bool {
	_, sums := im.sum.(encoding.BinaryMarshaler)
	return sums && im.s.Mark != nil && im.packed == ""
}

// recordAt returns the record for a checkpoint after off bytes of the origin, without format and scratch file.
func (im *importRun) recordAt(off int64) (note checkpointRecord, ok bool) {
	note.Mark, note.From = *im.s.Mark, off
	if im.s.At != nil {
		if note.State, ok = im.s.At(off); !ok {
			return note, false
		}
	}
	m, ok := im.sum.(encoding.BinaryMarshaler)
	if !ok {
		return note, false
	}
	var err error
	note.Sum, err = m.MarshalBinary()
	note.Mark.Off, note.Mark.CRC = off, im.crc
	return note, err == nil
}

// writeCheckpoint writes a checkpoint: the record, and the data of the layer before at.
func (im *importRun) writeCheckpoint(w block.CheckpointWriter, at int64, note checkpointRecord) error {
	if note.Spool != nil {
		note.Format = im.format
	}
	b, err := json.Marshal(note)
	if err == nil {
		err = w.Checkpoint(at, b)
	}
	im.checkpointed = im.checkpointed || err == nil
	return err
}

// endFailed ends a failed import: a checkpoint stays if the import can continue, everything else is removed.
func (im *importRun) endFailed(err error) error {
	passes := errors.Is(err, context.Canceled) || api.Is(err, api.Unavailable) && !origin.Changed(err) &&
		!errors.Is(err, errRestart)
	if k, ok := im.w.(block.CheckpointWriter); ok && im.checkpointed && passes {
		return k.Leave()
	}
	return im.w.Abort()
}

// checkpointFeed writes checkpoints of a raw import.
type checkpointFeed struct {
	feed
	im   *importRun
	w    block.CheckpointWriter
	next time.Time
	last int64 // bytes at the last checkpoint

	given, inside atomic.Int64 // bytes, and bytes before the chunks that can be the end
}

func (f *checkpointFeed) fillChunk(buf []byte) ([]byte, int64, error) {
	b, hole, err := f.feed.fillChunk(buf)
	f.given.Add(int64(len(b)) + hole)
	if t, ok := f.feed.(*holdbackFeed); ok && !t.done {
		f.inside.Store(f.given.Load())
	}
	return b, hole, err
}

func (f *checkpointFeed) wakeUps() <-chan struct{} { return nil }
func (f *checkpointFeed) nextPause() time.Time     { return f.next }
func (f *checkpointFeed) pauseDue(int64) bool      { return !time.Now().Before(f.next) }

func (f *checkpointFeed) pauseAt(off int64) error {
	im := f.im
	f.next = time.Now().Add(im.checkpointEvery())
	// The next process must read the end again, because the end shows a VHD footer.
	end := off > f.inside.Load()
	off += im.from
	if end || off == f.last || off%chunkSize != 0 {
		return nil
	}
	note, ok := im.recordAt(off)
	if !ok {
		return nil
	}
	f.last = off
	return im.writeCheckpoint(f.w, off, note)
}

// originHash returns the hash for the bytes of the origin.
func (im *importRun) originHash() hash.Hash {
	if im.s.Mark != nil && im.s.CRC {
		return &crcHash{im.sum, &im.crc}
	}
	return im.sum
}

// crcHash adds a CRC-32C to a hash.
type crcHash struct {
	hash.Hash
	crc *uint32
}

func (s *crcHash) Write(p []byte) (int, error) {
	*s.crc = origin.CRC32C(*s.crc, p)
	return s.Hash.Write(p)
}
