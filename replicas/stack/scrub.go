package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// A scrub reads a finished layer and compares each chunk with its digest. What does not match is recorded beside the
// layer, and from then on a read of it is an error (EIO), for volumes that have the layer open as for readers, until a
// scrub finds the chunk whole again. A layer with damage is not merged: its content would get new digests.

const (
	damageFile    = "damage.json"
	formatDamage  = "drover-damage"
	maxDamageList = 4096 // ranges; more: the whole layer
)

// Damage is a range of a layer, in bytes, whose content is not what its digest says.
type Damage struct {
	Off int64 `json:"off"`
	Len int64 `json:"len"`
}

type damageRecord struct {
	UID    string    `json:"uid"`
	At     time.Time `json:"at"`
	Ranges []Damage  `json:"ranges"`
}

// damaged reads what is known of a layer; a record that cannot be read stands for the whole layer.
func (d *Disk) damaged(uid string, size int64) []Damage {
	var rec damageRecord
	err := format.ReadMeta(d.fs, d.path(layersDir, uid, damageFile), formatDamage, &rec)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil || rec.UID != uid:
		return []Damage{{0, size}}
	}
	return rec.Ranges
}

// Damaged is what is known to be damaged of a finished layer.
func (d *Disk) Damaged(uid string) []Damage {
	rec, err := d.layerRecord(uid)
	if err != nil {
		return nil
	}
	return d.damaged(uid, rec.Size)
}

// hits reports whether a range touches damage.
func hits(list []Damage, off, n int64) bool {
	for _, g := range list {
		if off < g.Off+g.Len && g.Off < off+n {
			return true
		}
	}
	return false
}

// Scrub compares a layer with its digests, at the caller's pace (bytes per second; 0: as fast as it goes), records what
// is damaged, and returns it. A frozen layer has no digests yet: an error of kind unavailable.
func (d *Disk) Scrub(ctx context.Context, uid string, rate int64) (list []Damage, err error) {
	l, err := d.openLayer(uid, d.direct)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err = errors.Join(err, l.close()); err != nil {
			err = fmt.Errorf("scrub layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if _, frozen := l.m.(*frozenMap); frozen {
		return nil, api.Errorf(api.Unavailable, "it has no digests yet")
	}
	if list, err = d.compare(ctx, l, rate, nil); err != nil {
		return nil, err
	}
	return d.note(l, list)
}

// damagedStill looks at what is known to be damaged of a layer anew.
func (d *Disk) damagedStill(ctx context.Context, uid string) (list []Damage, err error) {
	known := d.Damaged(uid)
	if len(known) == 0 {
		return nil, nil
	}
	l, err := d.openLayer(uid, d.direct)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err = errors.Join(err, l.close()); err != nil {
			err = fmt.Errorf("compare layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	list, err = d.compare(ctx, l, 0, func(c int64) bool { return hits(known, c*chunkSize, chunkSize) })
	if err != nil {
		return nil, err
	}
	return d.note(l, list)
}

// note records what is damaged of a layer.
func (d *Disk) note(l *layer, list []Damage) ([]Damage, error) {
	uid := l.rec.UID
	if len(list) > maxDamageList {
		list = []Damage{{0, l.rec.Size}}
	}
	unlock, err := d.lock()
	if err != nil {
		return list, err
	}
	defer unlock()
	if slices.Equal(d.damaged(uid, l.rec.Size), list) {
		return list, nil
	}
	return list, d.putDamage(uid, l.rec.Size, list)
}

// putDamage writes the record, or removes it. The caller has the disk's lock.
func (d *Disk) putDamage(uid string, size int64, list []Damage) error {
	if len(list) == 0 {
		err := file.RemoveAll(d.fs, d.path(layersDir, uid, damageFile))
		return errors.Join(err, d.fs.SyncDir(d.path(layersDir, uid)))
	}
	if len(list) > maxDamageList {
		list = []Damage{{0, size}}
	}
	return format.WriteMeta(d.fs, d.path(layersDir, uid, damageFile), formatDamage,
		damageRecord{uid, time.Now().UTC().Truncate(time.Second), list})
}

// compare finds the chunks of a layer that do not match. Where the map or the digests themselves are damaged, nothing
// of the layer can be trusted.
// If only is set, it says which chunks to look at.
func (d *Disk) compare(ctx context.Context, l *layer, rate int64, only func(c int64) bool) (list []Damage, err error) {
	all := []Damage{{0, l.rec.Size}}
	kinds, err := format.IndexOf(l.m)
	if api.Is(err, api.Corrupt) {
		return all, nil
	} else if err != nil {
		return nil, err
	}
	sums, err := d.fs.Open(d.path(layersDir, l.rec.UID, sumsFile), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return all, nil
	} else if err != nil {
		return nil, err
	}
	defer sums.Close()
	var head [sumsHeader]byte
	if _, err := sums.ReadAt(head[:], 0); err != nil || string(head[:]) != string(format.SumsHeaderOf(l.rec.Size)) {
		return all, nil
	}
	if root, err := format.RootDigest(sums, l.rec.Size, kinds); err != nil || root != l.rec.Root {
		return all, nil
	}
	buf := alignedBuffer(int(chunkSize))
	began, done := time.Now(), int64(0)
	for c := range kinds.Chunks() {
		if only != nil && !only(c) {
			continue
		}
		k := kinds.Chunk(c)
		var want [sumSize]byte
		if _, err := sums.ReadAt(want[:], sumsHeader+c*sumSize); err != nil {
			return nil, err
		}
		sum, err := format.ChunkSum(l.data, k, c, l.rec.Size, buf)
		if err != nil || sum != want { // what cannot be read is damaged as well
			g := Damage{c * chunkSize, min(chunkSize, l.rec.Size-c*chunkSize)}
			if n := len(list); n > 0 && list[n-1].Off+list[n-1].Len == g.Off {
				list[n-1].Len += g.Len
			} else {
				list = append(list, g)
			}
		} else if k.Data {
			d.mendCRCs(l, c, buf[:min(chunkSize, l.rec.Size-c*chunkSize)])
		}
		if k.Data {
			done += chunkSize
		}
		if err := pace(ctx, began, done, rate); err != nil {
			return nil, err
		}
	}
	return list, nil
}

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
	unlock, err := d.lock()
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
		l, err := d.openLayer(uid, d.direct)
		if api.Is(err, api.Busy) {
			return false, nil // beginMerge finds out what that means
		}
		if err != nil {
			return false, err
		}
		var list []Damage
		if from == nil {
			list, err = d.compare(ctx, l, o.BytesPerSecond, nil)
			if err == nil && len(list) == 0 {
				from, err = format.IndexOf(l.m)
			}
		} else {
			list, err = d.compare(ctx, l, o.BytesPerSecond, func(c int64) bool {
				if c*chunkBlks >= from.Blocks {
					return false
				}
				k := from.Chunk(c)
				return k != format.ChunkKinds{}
			})
		}
		if err == nil && len(list) > 0 {
			_, err = d.note(l, list)
			again = true
		}
		if err = errors.Join(err, l.close()); again || err != nil {
			if err == nil {
				err = r.Knows(uid, list)
			}
			return again, err
		}
	}
	return false, nil
}

// pace waits until done bytes since began are no more than rate allows, and for the end of ctx.
func pace(ctx context.Context, began time.Time, done, rate int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if rate <= 0 {
		return nil
	}
	ahead := time.Duration(float64(done)/float64(rate)*float64(time.Second)) - time.Since(began)
	if ahead <= 0 {
		return nil
	}
	t := time.NewTimer(ahead)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Knows tells an open replica what is damaged of a layer: reads of that fail from now on, and others do not.
func (r *Replica) Knows(uid string, list []Damage) error {
	return r.name(r.onLoop(func() {
		for _, l := range r.layers {
			if l.rec.UID == uid && l.hy == nil {
				l.damage = list
			}
		}
	}))
}

// refuses reports whether a read of a layer touches damage, and whether it is the layer as a whole that is damaged: its
// map or its digests are, and do not tell what is right.
func (l *layer) refuses(off, n int64) (whole, hit bool) {
	if len(l.damage) == 0 {
		return false, false
	}
	return l.damage[0] == Damage{0, l.rec.Size}, hits(l.damage, off, n)
}
