package layer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

const (
	damageFile    = "damage.json"
	formatDamage  = "drover-damage"
	maxDamageList = 4096 // ranges; more: the whole layer
)

// Damage is a range of a layer, in bytes, with content that does not match its digest.
type Damage struct {
	Off int64 `json:"off"`
	Len int64 `json:"len"`
}

type damageRecord struct {
	UID    string    `json:"uid"`
	At     time.Time `json:"at"`
	Ranges []Damage  `json:"ranges"`
}

// KnownDamage reads the record of damage of a layer of size bytes; an unreadable record stands for the whole layer.
func (d *Store) KnownDamage(uid string, size int64) []Damage {
	var rec damageRecord
	err := format.ReadMeta(d.FS, d.Join(Dir, uid, damageFile), formatDamage, &rec)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil || rec.UID != uid:
		return []Damage{{0, size}}
	}
	return rec.Ranges
}

// Damaged returns the known damage of a finished layer.
func (d *Store) Damaged(uid string) []Damage {
	rec, err := d.Record(uid)
	if err != nil {
		return nil
	}
	return d.KnownDamage(uid, rec.Size)
}

// Hits reports whether a range touches damage.
func Hits(list []Damage, off, n int64) bool {
	for _, g := range list {
		if off < g.Off+g.Len && g.Off < off+n {
			return true
		}
	}
	return false
}

// DamagedStill compares the damaged chunks of a layer with their digests again.
func (d *Store) DamagedStill(ctx context.Context, uid string) (list []Damage, err error) {
	known := d.Damaged(uid)
	if len(known) == 0 {
		return nil, nil
	}
	l, err := d.OpenLayer(uid, d.Direct)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err = errors.Join(err, l.Close()); err != nil {
			err = fmt.Errorf("compare layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	list, err = d.CompareDigests(ctx, l, 0, func(c int64) bool { return Hits(known, c*chunkSize, chunkSize) })
	if err != nil {
		return nil, err
	}
	return d.RecordDamage(l, list)
}

// RecordDamage replaces the record of damage of a layer.
func (d *Store) RecordDamage(l *Layer, list []Damage) ([]Damage, error) {
	uid := l.Rec.UID
	if len(list) > maxDamageList {
		list = []Damage{{0, l.Rec.Size}}
	}
	unlock, err := d.Lock()
	if err != nil {
		return list, err
	}
	defer unlock()
	if slices.Equal(d.KnownDamage(uid, l.Rec.Size), list) {
		return list, nil
	}
	return list, d.PutDamage(uid, l.Rec.Size, list)
}

// PutDamage writes the record of damage, or removes an empty record. The caller has the disk's lock.
func (d *Store) PutDamage(uid string, size int64, list []Damage) error {
	if len(list) == 0 {
		err := file.RemoveAll(d.FS, d.Join(Dir, uid, damageFile))
		return errors.Join(err, d.FS.SyncDir(d.Join(Dir, uid)))
	}
	if len(list) > maxDamageList {
		list = []Damage{{0, size}}
	}
	return format.WriteMeta(d.FS, d.Join(Dir, uid, damageFile), formatDamage,
		damageRecord{uid, time.Now().UTC().Truncate(time.Second), list})
}

// Refuses reports whether a read of a layer touches damage, and whether the layer as a whole is damaged: then no digest
// can tell the right content.
func (l *Layer) Refuses(off, n int64) (whole, hit bool) {
	if len(l.Damage) == 0 {
		return false, false
	}
	return l.Damage[0] == Damage{0, l.Rec.Size}, Hits(l.Damage, off, n)
}

// Judge reads the chunks of a range again and compares each chunk with its digest. Sound content goes into buf.
func (l *Layer) Judge(buf []byte, at int64) (bad []Damage, err error) {
	d := l.Store
	dir := Dir
	if l.Hydration != nil {
		dir = HydratingDir
	}
	sums, err := d.FS.Open(d.Join(dir, l.Rec.UID, SumsFile), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) { // no digest can tell the right content
		from := at &^ (chunkSize - 1)
		return []Damage{{from, min((at+int64(len(buf))+chunkSize-1)&^(chunkSize-1), l.Rec.Size) - from}}, nil
	}
	if err != nil {
		return nil, err
	}
	defer sums.Close()
	room := block.AlignedBuffer(int(chunkSize))
	for c := at / chunkSize; c*chunkSize < at+int64(len(buf)); c++ {
		off := c * chunkSize
		chunk := room[:min(chunkSize, l.Rec.Size-off)]
		var want [sumSize]byte
		_, err := sums.ReadAt(want[:], sumsHeader+c*sumSize)
		n, rerr := l.Data.ReadAt(chunk, off)
		err = errors.Join(err, rerr)
		hole := want == [sumSize]byte{} && format.IsZero(chunk) // without a digest
		if n < len(chunk) || sha256.Sum256(chunk) != want && !hole {
			slog.Error("a layer is damaged", "layer", l.Rec.UID, "disk", d.Root, "offset", off,
				"length", len(chunk), "error", err)
			bad = append(bad, Damage{off, int64(len(chunk))})
			continue
		}
		if l.Hydration != nil {
			_ = format.PutCRCs(l.Hydration.crcs, c, chunk) // without checksums the next read judges the chunk again
		}
		if off < at {
			copy(buf, chunk[at-off:])
		} else {
			copy(buf[off-at:], chunk)
		}
	}
	return bad, nil
}

// ReplaceDamage replaces the part of list in the chunks of a range by bad.
func ReplaceDamage(list []Damage, off, n int64, bad []Damage) []Damage {
	from, to := off&^(chunkSize-1), (off+n+chunkSize-1)&^(chunkSize-1)
	var out []Damage
	add := func(from, to int64) {
		if from >= to {
			return
		}
		if k := len(out) - 1; k >= 0 && out[k].Off+out[k].Len == from {
			out[k].Len += to - from
			return
		}
		out = append(out, Damage{from, to - from})
	}
	for _, g := range list {
		if g.Off < from {
			add(g.Off, min(g.Off+g.Len, from))
		}
	}
	for _, g := range bad {
		add(g.Off, g.Off+g.Len)
	}
	for _, g := range list {
		if g.Off+g.Len > to {
			add(max(g.Off, to), g.Off+g.Len)
		}
	}
	return out
}

// Learn records, in the background, the damage that a read found in a range of a layer, and notifies the observer.
func (d *Store) Learn(l *Layer, off, n int64, bad []Damage) {
	uid, size := l.Rec.UID, l.Rec.Size
	if len(bad) == 0 && !Hits(l.Damage, off, n) {
		return // only checksums are wrong; a scrub corrects the checksums
	}
	d.Go(func() {
		unlock, err := d.Lock()
		if err != nil {
			slog.Error("damage cannot be recorded", "disk", d.Root, "layer", uid, "error", err)
			return
		}
		was := d.KnownDamage(uid, size)
		now := ReplaceDamage(was, off, n, bad)
		if !slices.Equal(was, now) {
			err = d.PutDamage(uid, size, now)
		}
		unlock()
		if err != nil {
			slog.Error("damage cannot be recorded", "disk", d.Root, "layer", uid, "error", err)
		}
		if err != nil || !slices.Equal(was, now) {
			d.Observer.Damaged(uid, now)
		}
	})
}
