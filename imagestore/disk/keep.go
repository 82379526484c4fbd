package disk

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/source"
)

// A download of a raw image is kept on the disk now and then: the layer up to some chunk, the state of the checksum
// there, and the place in the source. So a restart costs what came since, not all of it. What is packed or is to be
// converted begins anew: it has no place in the layer that belongs to a place in the source.

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
	// Mark is where the source is to be continued.
	Mark source.Mark

	w   block.Keeper
	sum []byte
}

// keptNote is what is recorded beside the layer.
type keptNote struct {
	Mark source.Mark `json:"mark"`
	Sum  []byte      `json:"sum"` // state of the SHA-512
}

// FindKept looks for what was kept of an image; nil: nothing that could be used. Give it to Import, or Drop it.
func FindKept(ctx context.Context, on block.Layers, want Want) *Kept {
	r, ok := on.(block.Resumer)
	if !ok || len(want.Layers) != 1 {
		return nil
	}
	w, upTo, note, err := r.Resume(ctx, string(want.Layers[0]))
	if err != nil {
		return nil // it is made from the beginning then
	}
	var n keptNote
	k := &Kept{w: w}
	if err := json.Unmarshal(note, &n); err != nil || n.Mark.Off != upTo || upTo <= 0 || n.Mark.Size < upTo {
		k.Drop()
		return nil
	}
	k.Mark, k.sum = n.Mark, n.Sum
	return k
}

// Drop removes what was kept.
func (k *Kept) Drop() { _ = k.w.Abort() } // what cannot be removed is when the layer is made

// adopt begins with what was kept, if the source continues there.
func (im *importer) adopt(k *Kept) (bool, error) {
	if k == nil {
		return false, nil
	}
	state, ok := im.sum.(encoding.BinaryUnmarshaler)
	if im.s.Mark == nil || *im.s.Mark != k.Mark || !ok || state.UnmarshalBinary(k.sum) != nil {
		k.Drop()
		im.sum.Reset()
		if im.s.Mark != nil && im.s.Mark.Off > 0 {
			return false, api.Errorf(api.Unavailable, "what was kept of it cannot be used: it begins anew")
		}
		return false, nil
	}
	im.w, im.format = k.w, raw
	im.virtual, im.size = k.Mark.Size, k.Mark.Size
	im.from = k.Mark.Off
	im.p.read.Store(im.from)
	im.kept = true
	return true, nil
}

// leave ends a failed import: what may be continued stays, all else goes.
func (im *importer) leave(err error) error {
	passes := errors.Is(err, context.Canceled) || api.Is(err, api.Unavailable) && !source.Changed(err)
	if k, ok := im.w.(block.Keeper); ok && im.kept && passes {
		return k.Leave()
	}
	return im.w.Abort()
}

// keepFeed keeps a raw import from time to time.
type keepFeed struct {
	feed
	im   *importer
	next time.Time
}

func (f *keepFeed) due(int64) bool { return !time.Now().Before(f.next) }

func (f *keepFeed) rest(off int64) error {
	im := f.im
	off += im.from
	f.next = time.Now().Add(im.keepEvery())
	w, ok := im.w.(block.Keeper)
	state, sums := im.sum.(encoding.BinaryMarshaler)
	// Near the end it is not worth it, and what the end tells must be told by what is read anew.
	if !ok || !sums || off == 0 || off%pieceSize != 0 || im.s.Mark.Size-off < (heldBack+1)*pieceSize {
		return nil
	}
	sum, err := state.MarshalBinary()
	if err != nil {
		return err
	}
	mark := *im.s.Mark
	mark.Off = off
	note, err := json.Marshal(keptNote{Mark: mark, Sum: sum})
	if err != nil {
		return err
	}
	if err := w.Keep(off, note); err != nil {
		return err
	}
	im.kept = true
	return nil
}
