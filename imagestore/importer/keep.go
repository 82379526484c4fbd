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

// keepEvery is how often that is done, at the most; it costs a sync of the disk.
const keepEvery = 10 * time.Second

func (im *importer) keepEvery() time.Duration {
	if im.want.KeepEvery > 0 {
		return im.want.KeepEvery
	}
	return keepEvery
}

// Kept is what an earlier process left of an import.
type Kept struct {
	// Mark is where the source is to be continued; State is what Stream.At said of it, or nil.
	Mark  origin.Mark
	State json.RawMessage

	w    block.Keeper
	at   int64 // up to where the layer is made
	note keptNote
}

// keptNote is what is recorded beside the layer.
type keptNote struct {
	Mark origin.Mark `json:"mark"`
	Sum  []byte      `json:"sum"` // state of the SHA-512
	// What the source itself has to know.
	State json.RawMessage `json:"state,omitempty"`
	// Earlier versions recorded a place in an archive, and From is where the bytes begin that they need: at the Mark.
	Packed json.RawMessage `json:"packed,omitempty"`
	From   int64           `json:"from,omitempty"`
	// Of an image that is converted: its format, and the scratch file.
	Format format      `json:"format,omitempty"`
	Spool  *spoolState `json:"spool,omitempty"`
}

// FindKept looks for what was kept of an image; nil: nothing that could be used. Give it to Import, or Drop it.
func FindKept(ctx context.Context, on block.Layers, want Spec) *Kept {
	r, ok := on.(block.Resumer)
	if !ok || len(want.Layers) != 1 {
		return nil
	}
	w, upTo, note, err := r.Resume(ctx, string(want.Layers[0]))
	if err != nil {
		return nil // it is made from the beginning then
	}
	k := &Kept{w: w, at: upTo}
	if err := json.Unmarshal(note, &k.note); err != nil || !k.sound() {
		k.Drop()
		return nil
	}
	k.Mark, k.State = k.note.Mark, k.note.State
	return k
}

func (k *Kept) sound() bool {
	n := &k.note
	if n.Mark.Off <= 0 || n.Mark.Size < n.Mark.Off {
		return false
	}
	if n.Packed != nil {
		return false // that import begins again
	}
	if n.Spool != nil {
		return n.Spool.Have == n.Mark.Off && n.Format != raw
	}
	return n.Mark.Off == k.at
}

// Drop removes what was kept.
func (k *Kept) Drop() { _ = k.w.Abort() } // what cannot be removed is when the layer is made

// adopt begins with what was kept, if the source continues there.
func (im *importer) adopt(k *Kept) (bool, error) {
	if k == nil {
		return false, nil
	}
	state, ok := im.sum.(encoding.BinaryUnmarshaler)
	if im.s.Mark == nil || *im.s.Mark != k.Mark || !ok || state.UnmarshalBinary(k.note.Sum) != nil {
		k.Drop()
		im.sum.Reset()
		if im.s.Mark != nil && im.s.Mark.Off > 0 {
			return false, api.Errorf(api.Unavailable, "what was kept of it cannot be used: %w", errAnew)
		}
		return false, nil
	}
	im.w, im.format = k.w, raw
	im.virtual, im.size = k.Mark.Size, k.Mark.Size
	im.from, im.at, im.crc = k.Mark.Off, k.at, k.Mark.CRC
	im.p.read.Store(k.Mark.Off)
	im.kept = true
	if k.note.Spool != nil {
		im.format = k.note.Format
	}
	return true, nil
}

// keepable is a writer whose work can be kept, where the source can be continued.
func (im *importer) keepable() (block.Keeper, bool) {
	w, ok := im.w.(block.Keeper)
	return w, ok && im.continuable()
}

// errAnew is in the errors of what cannot be continued, but may be had from the beginning.
var errAnew = errors.New("it begins anew")

// goOn makes the rest of an image whose begin was adopted. It returns how many bytes of the source came in all.
func (im *importer) goOn(k *Kept) (n int64, err error) {
	rest := bytesOf{r: im.s, size: im.s.Size, sum: im.hashed(), tell: im.readSome}
	if k.note.Spool != nil {
		n, err = im.spooled(rest, k.note.Spool)
	} else {
		n, err = im.stream(&rest)
	}
	if k.note.State != nil && api.Is(err, api.Corrupt) {
		// It may be what was kept that is damaged.
		err = api.Errorf(api.Unavailable, "it could not be continued (%w): %w", err, errAnew)
	}
	return n, err
}

// continuable reports whether another process can continue the import.
func (im *importer) continuable() bool {
	_, sums := im.sum.(encoding.BinaryMarshaler)
	return sums && im.s.Mark != nil && im.packed == ""
}

// place is what is to be recorded when off bytes of the image are there, in so far as it is about the source.
func (im *importer) place(off int64) (note keptNote, ok bool) {
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

// keep records an import: what the note says is there, and what is in the layer before at.
func (im *importer) keep(w block.Keeper, at int64, note keptNote) error {
	if note.Spool != nil {
		note.Format = im.format
	}
	b, err := json.Marshal(note)
	if err == nil {
		err = w.Keep(at, b)
	}
	im.kept = im.kept || err == nil
	return err
}

// leave ends a failed import: what may be continued stays, all else goes.
func (im *importer) leave(err error) error {
	passes := errors.Is(err, context.Canceled) || api.Is(err, api.Unavailable) && !origin.Changed(err) &&
		!errors.Is(err, errAnew)
	if k, ok := im.w.(block.Keeper); ok && im.kept && passes {
		return k.Leave()
	}
	return im.w.Abort()
}

// keepFeed keeps a raw import from time to time.
type keepFeed struct {
	feed
	im   *importer
	w    block.Keeper
	next time.Time
	last int64 // what was kept

	given, inside atomic.Int64 // bytes, and those before pieces that show whether they are the end
}

func (f *keepFeed) fill(buf []byte) ([]byte, int64, error) {
	b, hole, err := f.feed.fill(buf)
	f.given.Add(int64(len(b)) + hole)
	if t, ok := f.feed.(*tailFeed); ok && !t.done {
		f.inside.Store(f.given.Load())
	}
	return b, hole, err
}

func (f *keepFeed) news() <-chan struct{} { return nil }
func (f *keepFeed) when() time.Time       { return f.next }
func (f *keepFeed) due(int64) bool        { return !time.Now().Before(f.next) }

func (f *keepFeed) rest(off int64) error {
	im := f.im
	f.next = time.Now().Add(im.keepEvery())
	// What the end tells must be told by what is read anew.
	end := off > f.inside.Load()
	off += im.from
	if end || off == f.last || off%pieceSize != 0 {
		return nil
	}
	note, ok := im.place(off)
	if !ok {
		return nil
	}
	f.last = off
	return im.keep(f.w, off, note)
}

// hashed is where the bytes of the source go to be summed.
func (im *importer) hashed() hash.Hash {
	if im.s.Mark != nil && im.s.CRC {
		return &summed{im.sum, &im.crc}
	}
	return im.sum
}

// summed adds a CRC-32C to a checksum.
type summed struct {
	hash.Hash
	crc *uint32
}

func (s *summed) Write(p []byte) (int, error) {
	*s.crc = origin.CRC32C(*s.crc, p)
	return s.Hash.Write(p)
}
