package stack

import (
	"context"
	"errors"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/format"
)

// mergePicker picks the next two layers of a replica to merge, and compares the layers with their digests before.
type mergePicker struct {
	disk    *Disk
	replica mergedReplica
}

// mergedReplica is the part of a replica that the picker needs.
type mergedReplica interface {
	Meta() Meta
	Knows(uid string, list []Damage) error
	hydratingLayers() (map[string]bool, error)
}

func (r *Replica) mergePicker() mergePicker { return mergePicker{r.disk, r} }

// choosePair chooses two layers that may be merged. The caller has the disk's lock.
func (p mergePicker) choosePair(m Meta) (*Merge, error) {
	d := p.disk
	others, err := d.namedByOthers(m.UID)
	if err != nil {
		return nil, err
	}
	remote, err := p.replica.hydratingLayers()
	if err != nil {
		return nil, err
	}
	needed := map[string]bool{}
	for _, s := range m.Snapshots {
		needed[s.Layer] = true
	}
	for _, two := range m.mergeablePairs(needed) {
		lower, upper := two[0], two[1]
		if others[lower] || others[upper] || remote[lower] || remote[upper] {
			continue
		}
		a, aerr := d.Record(lower)
		b, berr := d.Record(upper)
		if api.Is(aerr, api.NotFound) || api.Is(berr, api.NotFound) {
			continue // frozen, or remote
		}
		if err := errors.Join(aerr, berr); err != nil {
			return nil, err
		}
		if len(d.KnownDamage(lower, a.Size)) > 0 || len(d.KnownDamage(upper, b.Size)) > 0 {
			continue // damage would get matching digests
		}
		// The larger file is the target, unless the file is shorter than the result.
		up := b.Data >= a.Data || a.Size < b.Size
		return &Merge{Lower: lower, Upper: upper, Result: string(api.NewUID()), Up: up}, nil
	}
	return nil, nil
}

// checkPairs compares the chunks that get new digests in the next merge with their old digests, and records damage,
// which excludes a layer from merges. An interrupted merge was checked before its begin.
func (p mergePicker) checkPairs(ctx context.Context, o MergeOptions) error {
	for {
		again, err := p.checkPair(ctx, o)
		if err != nil || !again {
			return err
		}
	}
}

func (p mergePicker) checkPair(ctx context.Context, o MergeOptions) (again bool, err error) {
	d, m := p.disk, p.replica.Meta()
	if m.Merge != nil {
		return false, nil
	}
	unlock, err := d.Lock()
	if err != nil {
		return false, err
	}
	g, err := p.choosePair(m)
	unlock()
	if g == nil || err != nil {
		return false, err
	}
	uids := []string{g.Lower, g.Upper}
	if err := d.CheckUnread(uids...); err != nil { // before the layers are read in vain
		return false, err
	}
	if !g.Up {
		slices.Reverse(uids)
	}
	var from *format.Index // the map of the layer to copy
	for _, uid := range uids {
		l, err := d.OpenLayer(uid, d.Direct)
		if api.Is(err, api.Busy) {
			return false, nil // beginMerge reports the readers
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
				if c*chunkBlks >= from.Blocks {
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
				err = p.replica.Knows(uid, list)
			}
			return again, err
		}
	}
	return false, nil
}
