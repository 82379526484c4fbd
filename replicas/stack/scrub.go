package stack

import (
	"context"
	"errors"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/format"
)

// A scrub reads a finished layer and compares each chunk with its digest. What does not match is recorded beside the
// layer, and from then on a read of it is an error (EIO), for volumes that have the layer open as for readers, until a
// scrub finds the chunk whole again. A layer with damage is not merged: its content would get new digests.

// sound compares what the next merge would give new digests with the old ones, and records what is damaged, which is
// not merged then. A merge that was interrupted was looked at before it began.
func (r *Replica) sound(ctx context.Context, o MergeOptions) error {
	for {
		again, err := r.soundPair(ctx, o)
		if err != nil || !again {
			return err
		}
	}
}

func (r *Replica) soundPair(ctx context.Context, o MergeOptions) (again bool, err error) {
	d, m := r.disk, r.Meta()
	if m.Merge != nil {
		return false, nil
	}
	unlock, err := d.Lock()
	if err != nil {
		return false, err
	}
	g, err := r.choose(m)
	unlock()
	if g == nil || err != nil {
		return false, err
	}
	uids := []string{g.Lower, g.Upper}
	if !g.Up {
		slices.Reverse(uids)
	}
	var from *format.Index // what the layer that is copied holds
	for _, uid := range uids {
		l, err := d.OpenLayer(uid, d.Direct)
		if api.Is(err, api.Busy) {
			return false, nil // beginMerge finds out what that means
		}
		if err != nil {
			return false, err
		}
		var list []Damage
		if from == nil {
			list, err = d.CompareDigests(ctx, l, o.BytesPerSecond, nil)
			if err == nil && len(list) == 0 {
				from, err = format.IndexOf(l.Map)
			}
		} else {
			list, err = d.CompareDigests(ctx, l, o.BytesPerSecond, func(c int64) bool {
				if c*ChunkBlks >= from.Blocks {
					return false
				}
				k := from.Chunk(c)
				return k != format.ChunkKinds{}
			})
		}
		if err == nil && len(list) > 0 {
			_, err = d.RecordDamage(l, list)
			again = true
		}
		if err = errors.Join(err, l.Close()); again || err != nil {
			if err == nil {
				err = r.Knows(uid, list)
			}
			return again, err
		}
	}
	return false, nil
}

// Knows tells an open replica what is damaged of a layer: reads of that fail from now on, and others do not.
func (r *Replica) Knows(uid string, list []Damage) error {
	return r.name(r.onLoop(func() {
		for _, l := range r.layers {
			if l.Rec.UID == uid && l.Hydration == nil {
				l.Damage = list
			}
		}
	}))
}
