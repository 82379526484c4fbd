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

// An import whose source can be continued is kept on the disk now and then: the layer up to some chunk, the state of
// the checksum, the place in the source, and, of an image that is converted, the scratch file. So a restart costs what
// came since, not all of it. Nothing is kept of an archive: no decoder can begin in its middle.

// checkpointEvery is how often that is done, at the most; it costs a sync of the disk.
const defaultCheckpointEvery = 10 * time.Second

func (im *importRun) checkpointEvery() time.Duration {
	if im.want.CheckpointEvery > 0 {
		return im.want.CheckpointEvery
	}
	return defaultCheckpointEvery
}

// Checkpoint is what an earlier process left of an import.
type Checkpoint struct {
	// Mark is where the source is to be continued; State is what Stream.At said of it, or nil.
	Mark  origin.Mark
	State json.RawMessage

	w      block.Keeper
	at     int64 // up to where the layer is made
	record checkpointRecord
}

// checkpointRecord is what is recorded beside the layer.
type checkpointRecord struct {
	Mark origin.Mark `json:"mark"`
	Sum  []byte      `json:"sum"` // state of the SHA-512
	// What the source itself has to know.
	State json.RawMessage `json:"state,omitempty"`
	// Earlier versions recorded a place in an archive, and From is where the bytes begin that they need: at the Mark.
	Packed json.RawMessage `json:"packed,omitempty"`
	From   int64           `json:"from,omitempty"`
	// Of an image that is converted: its format, and the scratch file.
	Format format        `json:"format,omitempty"`
	Spool  *scratchState `json:"spool,omitempty"`
}

// FindCheckpoint looks for what was kept of an image; nil: nothing that could be used. Give it to Import, or Drop it.
func FindCheckpoint(ctx context.Context, on block.Layers, want Spec) *Checkpoint {
	r, ok := on.(block.Resumer)
	if !ok || len(want.Layers) != 1 {
		return nil
	}
	w, upTo, note, err := r.Resume(ctx, string(want.Layers[0]))
	if err != nil {
		return nil // it is made from the beginning then
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
		return false // that import begins again
	}
	if n.Spool != nil {
		return n.Spool.Have == n.Mark.Off && n.Format != formatRaw
	}
	return n.Mark.Off == k.at
}

// Drop removes what was kept.
func (k *Checkpoint) Drop() { _ = k.w.Abort() } // what cannot be removed is when the layer is made

// adoptCheckpoint begins with what was kept, if the source continues there.
func (im *importRun) adoptCheckpoint(k *Checkpoint) (bool, error) {
	if k == nil {
		return false, nil
	}
	state, ok := im.sum.(encoding.BinaryUnmarshaler)
	if im.s.Mark == nil || *im.s.Mark != k.Mark || !ok || state.UnmarshalBinary(k.record.Sum) != nil {
		k.Drop()
		im.sum.Reset()
		if im.s.Mark != nil && im.s.Mark.Off > 0 {
			return false, api.Errorf(api.Unavailable, "what was kept of it cannot be used: %w", errRestart)
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

// checkpointWriter is a writer whose work can be kept, where the source can be continued.
func (im *importRun) checkpointWriter() (block.Keeper, bool) {
	w, ok := im.w.(block.Keeper)
	return w, ok && im.resumable()
}

// errRestart is in the errors of what cannot be continued, but may be had from the beginning.
var errRestart = errors.New("it begins anew")

// continueImport makes the rest of an image whose begin was adopted. It returns how many bytes of the source came in
// all.
func (im *importRun) continueImport(k *Checkpoint) (n int64, err error) {
	rest := imageStream{r: im.s, size: im.s.Size, sum: im.originHash(), tell: im.readSome}
	if k.record.Spool != nil {
		n, err = im.convertStream(rest, k.record.Spool)
	} else {
		n, err = im.writeRaw(&rest)
	}
	if k.record.State != nil && api.Is(err, api.Corrupt) {
		// It may be what was kept that is damaged.
		err = api.Errorf(api.Unavailable, "it could not be continued (%w): %w", err, errRestart)
	}
	return n, err
}

// resumable reports whether another process can continue the import.
func (im *importRun) resumable() bool {
	_, sums := im.sum.(encoding.BinaryMarshaler)
	return sums && im.s.Mark != nil && im.packed == ""
}

// recordAt is what is to be recorded when off bytes of the image are there, in so far as it is about the source.
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

// writeCheckpoint records an import: what the note says is there, and what is in the layer before at.
func (im *importRun) writeCheckpoint(w block.Keeper, at int64, note checkpointRecord) error {
	if note.Spool != nil {
		note.Format = im.format
	}
	b, err := json.Marshal(note)
	if err == nil {
		err = w.Keep(at, b)
	}
	im.checkpointed = im.checkpointed || err == nil
	return err
}

// endFailed ends a failed import: what may be continued stays, all else goes.
func (im *importRun) endFailed(err error) error {
	passes := errors.Is(err, context.Canceled) || api.Is(err, api.Unavailable) && !origin.Changed(err) &&
		!errors.Is(err, errRestart)
	if k, ok := im.w.(block.Keeper); ok && im.checkpointed && passes {
		return k.Leave()
	}
	return im.w.Abort()
}

// checkpointFeed keeps a raw import from time to time.
type checkpointFeed struct {
	feed
	im   *importRun
	w    block.Keeper
	next time.Time
	last int64 // what was kept

	given, inside atomic.Int64 // bytes, and those before pieces that show whether they are the end
}

func (f *checkpointFeed) fill(buf []byte) ([]byte, int64, error) {
	b, hole, err := f.feed.fill(buf)
	f.given.Add(int64(len(b)) + hole)
	if t, ok := f.feed.(*holdbackFeed); ok && !t.done {
		f.inside.Store(f.given.Load())
	}
	return b, hole, err
}

func (f *checkpointFeed) wake() <-chan struct{} { return nil }
func (f *checkpointFeed) nextPause() time.Time  { return f.next }
func (f *checkpointFeed) pauseDue(int64) bool   { return !time.Now().Before(f.next) }

func (f *checkpointFeed) pause(off int64) error {
	im := f.im
	f.next = time.Now().Add(im.checkpointEvery())
	// What the end tells must be told by what is read anew.
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

// originHash is where the bytes of the source go to be summed.
func (im *importRun) originHash() hash.Hash {
	if im.s.Mark != nil && im.s.CRC {
		return &crcHash{im.sum, &im.crc}
	}
	return im.sum
}

// crcHash adds a CRC-32C to a checksum.
type crcHash struct {
	hash.Hash
	crc *uint32
}

func (s *crcHash) Write(p []byte) (int, error) {
	*s.crc = origin.CRC32C(*s.crc, p)
	return s.Hash.Write(p)
}
