package repo

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/pack"
)

const (
	copyLimit   = 1 << 20 // blobs that a sweep copies; the next sweep copies the rest
	copyReaders = 4
)

// copyBlobs copies the needed blobs of packs into new packs, durably, and returns the packs of which it copied all. A
// damaged blob is no reason to end the sweep: its pack stays.
func (s *sweep) copyBlobs(ctx context.Context, v *view, packs []blob.ID) (copied []blob.ID, err error) {
	if len(packs) == 0 {
		return nil, nil
	}
	needed, err := v.neededBlobs(packs)
	if err != nil {
		return nil, err
	}
	w, err := NewWriter(ctx, v.blobs, s.o.Writer)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(copyReaders)
	whole := make([]bool, len(packs))
	for i, id := range packs {
		if len(needed[id]) == 0 { // beyond copyLimit
			continue
		}
		group.Go(func() (err error) {
			whole[i], err = s.copyPack(groupCtx, w, needed[id])
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	if err := w.Flush(ctx); err != nil {
		return nil, err
	}
	for i, id := range packs {
		if whole[i] {
			copied = append(copied, id)
		}
	}
	s.stats.CopiedBlobs = w.Stats().NewBlobs
	return copied, nil
}

// neededBlobs are the marked blobs of packs, in the order of their offsets, of as many packs as copyLimit allows.
func (v *view) neededBlobs(packs []blob.ID) (map[blob.ID][]*foundBlob, error) {
	byNumber, err := v.packsByNumber()
	if err != nil {
		return nil, err
	}
	// The packs with the least to copy come first.
	slices.SortFunc(packs, func(a, b blob.ID) int {
		return cmp.Or(cmp.Compare(v.packs.find(a).used, v.packs.find(b).used), bytes.Compare(a[:], b[:]))
	})
	counts := map[blob.ID]int{}
	for _, id := range packs {
		counts[id] = 0
	}
	each := func(row func(id blob.ID, e pack.Entry)) error {
		return v.marker.table.Each(func(r index.Row) error {
			id := byNumber[r.Pack].id
			if _, ok := counts[id]; ok && v.marker.marks.has(r.Number) {
				row(id, r.Entry)
			}
			return nil
		})
	}
	if err := each(func(id blob.ID, _ pack.Entry) { counts[id]++ }); err != nil {
		return nil, err
	}
	left := copyLimit
	for _, id := range packs {
		if left -= counts[id]; left < 0 {
			delete(counts, id)
		}
	}
	needed := map[blob.ID][]*foundBlob{}
	err = each(func(id blob.ID, e pack.Entry) {
		needed[id] = append(needed[id], &foundBlob{Location: index.Location{Pack: id, Entry: e}})
	})
	for _, blobs := range needed {
		slices.SortFunc(blobs, func(a, b *foundBlob) int { return cmp.Compare(a.Offset, b.Offset) })
	}
	return needed, err
}

// copyPack copies blobs of one pack. Each blob is compared with its id: the pack is deleted after the copy.
func (s *sweep) copyPack(ctx context.Context, w *Writer, blobs []*foundBlob) (whole bool, err error) {
	scratch := scratchPool.Get().(*[]byte)
	defer scratchPool.Put(scratch)
	for _, run := range splitRuns(blobs) {
		if sound, err := s.copyRun(ctx, w, run, scratch); err != nil || !sound {
			return false, err
		}
	}
	return true, nil
}

// copyRun copies neighbours. sound is false if one of them is damaged.
func (s *sweep) copyRun(ctx context.Context, w *Writer, run []*foundBlob, scratch *[]byte) (sound bool, err error) {
	release, err := s.r.reserveRun(MoveContext(ctx), run)
	if err != nil {
		return false, err
	}
	defer release()
	from, last := int64(run[0].Offset), run[len(run)-1]
	sealed, err := readRange(ctx, s.r.store, packName(last.Pack), from, int64(last.Offset)+int64(last.Length)-from)
	if IsDamage(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, f := range run {
		at := int64(f.Offset) - from
		stored, plain, err := s.r.openStored(f.Location, sealed[at:at+int64(f.Length)], *scratch)
		if err != nil || len(stored) > w.blobLimit() {
			return false, nil //nolint:nilerr // the pack stays, and verification reports damage
		}
		if f.Plain > 0 && cap(plain) > cap(*scratch) {
			*scratch = plain[:0]
		}
		if err := w.store(ctx, f.Kind, f.ID, stored, int(f.Plain), int64(len(plain))); err != nil {
			return false, w.fail(err)
		}
	}
	return true, nil
}
