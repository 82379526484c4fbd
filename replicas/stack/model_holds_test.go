package stack

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// mhold is the model of a held snapshot.
type mhold struct {
	uid       string
	cut       block.SnapshotCut
	layers    []string
	size      int64
	img       image
	open      bool // the hold may or may not exist
	releasing bool
}

func (w *model) hold(d deed) error {
	v, s := w.snap(d.A, d.B)
	if s == nil || len(w.holds) >= 3 {
		return nil
	}
	h := &mhold{uid: string(api.NewUID()), cut: block.SnapshotCut{UID: s.uid}, size: s.size, img: s.img, open: true}
	w.holds = append(w.holds, h)
	layers, size, err := w.d.HoldSnapshot(context.Background(), h.uid, "b", v.uid, h.cut)
	if api.Is(err, api.Busy) && !w.p.fs.Killed() {
		w.holds = w.holds[:len(w.holds)-1]
		return nil
	}
	if err != nil {
		return err
	}
	if h.layers, h.open = layers, false; size != h.size {
		return fmt.Errorf("a snapshot of %d bytes is held with %d", h.size, size)
	}
	return nil
}

func (w *model) release(d deed) error {
	if len(w.holds) == 0 {
		return nil
	}
	h := w.holds[d.A%uint64(len(w.holds))]
	h.releasing = true
	err := w.d.ReleaseSnapshot(h.uid)
	if err == nil {
		w.holds = slices.DeleteFunc(w.holds, func(o *mhold) bool { return o == h })
	}
	return err
}

// digest makes the digests of a held snapshot.
func (w *model) digest(d deed) error {
	if len(w.holds) == 0 {
		return nil
	}
	err := w.d.MakeDigests(context.Background(), w.holds[d.A%uint64(len(w.holds))].layers)
	if api.Is(err, api.Busy) && !w.p.fs.Killed() {
		return nil
	}
	return err
}

// recountHolds finds out which interrupted holds took effect.
func (w *model) recountHolds() error {
	held, err := w.d.HeldSnapshots()
	if err != nil {
		return err
	}
	var list []*mhold
	for _, h := range w.holds {
		_, is := held[h.uid]
		switch {
		case is && h.open: // the pin answers, even without the replica
			if h.layers, _, err = w.d.HoldSnapshot(context.Background(), h.uid, "b", h.uid, h.cut); err != nil {
				return err
			}
		case !is && !h.open && !h.releasing:
			return fmt.Errorf("hold %s is gone", h.uid)
		case !is:
			continue
		}
		h.open, h.releasing = false, false
		list = append(list, h)
	}
	w.holds = list
	return nil
}

func (w *model) checkHolds() error {
	for _, h := range w.holds {
		if err := w.checkStack(h.layers, h.size, h.img); err != nil {
			return fmt.Errorf("hold %s: %w", h.uid, err)
		}
	}
	return nil
}

// releaseAll ends all holds, also one whose interrupted end a loss of power took back.
func (w *model) releaseAll() error {
	held, err := w.d.HeldSnapshots()
	errs := []error{err}
	for uid := range held {
		errs = append(errs, w.d.ReleaseSnapshot(uid))
	}
	w.holds = nil
	return errors.Join(errs...)
}

// sameDigests compares the known digests of a source with the bytes that readers get.
func sameDigests(src block.Source) error {
	for _, h := range hot(src.Size()) {
		for c := h.Off / chunkSize; c*chunkSize < h.Off+h.Len; c++ {
			sum, known := src.(block.DigestSource).Digest(c)
			if !known {
				continue
			}
			b := make([]byte, min(chunkSize, src.Size()-c*chunkSize))
			if _, err := src.ReadAt(b, c*chunkSize); err != nil {
				return err
			}
			if sum != sha256.Sum256(b) {
				return fmt.Errorf("chunk %d has the digest of other bytes", c)
			}
		}
	}
	return nil
}
