package repo

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"golang.org/x/time/rate"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/pack"
)

// A verification reads whole packs and compares all bytes: the name of the pack, the seal and the id of each blob, and
// the header with the index. A pack with a difference, and a pack that the store lost, get a mark in a new index file.
// From then on no new session relies on the pack: a backup that reads such a chunk stores the chunk again. The blobs of
// the pack that can be read are copied into new packs. A sweep deletes the damaged pack when no snapshot needs the pack
// any more. A marked pack that is whole, because the store has the pack again, loses the mark.

// Bounds of one call of Verify.
const (
	verifyPacks   = 512
	verifyEntries = 1 << 18
	wholePack     = 160 << 20 // larger packs, which no known program writes, are compared blob by blob
)

// VerifyOptions say which packs Verify reads.
type VerifyOptions struct {
	After  blob.ID       // the packs behind this name
	Until  blob.ID       // up to this name
	Rate   *rate.Limiter // of bytes; nil: no limit. The burst is at least largestPack
	Writer WriterOptions // for copies of the blobs of damaged packs
}

// VerifyStats tell the result of Verify.
type VerifyStats struct {
	Packs    int
	Bytes    int64
	Last     blob.ID // name of the last pack that was read, or Until if all were
	Done     bool    // all packs until Until were read
	Damaged  []DamagedPack
	Copied   int64 // blobs of damaged packs that are safe now
	Marked   bool  // packs had marks before, perhaps of another cluster
	Repaired bool  // index files were damaged, and are repaired as far as the store permits

	whole map[blob.ID]bool // packs with a mark that are whole
}

// DamagedPack is a pack whose bytes differ, or which is missing.
type DamagedPack struct {
	ID  blob.ID
	Err error
}

// Verify reads some of the packs that the index names, and at the end of the range all index files. Errors say nothing
// about the packs; IsPartMissing tells that of a store without a part of its packs. Also after an error, every damaged
// pack up to stats.Last has a mark. No whole pack has a mark, unless a sweep ran at the same time.
func (r *Repository) Verify(ctx context.Context, o VerifyOptions) (stats VerifyStats, err error) {
	stats.Last = o.After
	err = r.withSession(ctx, func(lock *Lock) error {
		o.Writer.Lock = lock
		stats, err = r.verify(lock.Context(), o)
		return err
	})
	if len(stats.whole) > 0 || stats.Done {
		done, e := r.repairDamagedIndex(ctx, stats.whole)
		stats.Repaired, err = done.damaged, errors.Join(err, e)
		switch {
		case e != nil && len(stats.whole) > 0 && !api.Is(e, api.Busy): // they keep their marks
			stats = VerifyStats{Last: o.After}
		case e != nil:
			stats.Done = false
		}
	}
	if err != nil {
		err = api.Errorf(api.KindOf(err), "repository %.8s: the verification ended early: %w", r.ID(), err)
	}
	return stats, err
}

// withSession calls do within a shared session.
func (r *Repository) withSession(ctx context.Context, do func(*Lock) error) (err error) {
	lock, err := r.Lock(ctx, Shared)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLockTimeout)
		defer cancel()
		err = errors.Join(err, lock.Close(ctx))
	}()
	return do(lock)
}

func (r *Repository) verify(ctx context.Context, o VerifyOptions) (stats VerifyStats, err error) {
	stats = VerifyStats{Last: o.After, whole: map[blob.ID]bool{}}
	chosen, done, err := r.chooseVerified(ctx, o, &stats)
	if err != nil {
		return stats, err
	}
	var ended error // why the packs behind stats.Last were not read
	missing := sync.OnceValue(func() error { return r.checkMissing(ctx) })
	for _, p := range chosen {
		n, err := r.verifyPack(ctx, o.Rate, p)
		if IsDamage(err) { // a network may damage bytes, too
			n, err = r.verifyPack(ctx, o.Rate, p)
		}
		if api.Is(err, api.NotFound) && !p.marked {
			err = cmp.Or(missing(), err)
		}
		switch {
		case IsDamage(err):
			stats.Damaged = append(stats.Damaged, DamagedPack{p.id, err})
		case err != nil:
			ended = err
		case p.marked:
			stats.whole[p.id] = true
		}
		if ended != nil {
			break
		}
		stats.Packs, stats.Bytes, stats.Last = stats.Packs+1, stats.Bytes+n, p.id
	}
	if stats.Done = done && ended == nil; stats.Done {
		stats.Last = o.Until
	}
	if stats.Copied, err = r.retire(ctx, stats.Damaged, o.Writer); err != nil {
		return VerifyStats{Last: o.After}, err
	}
	return stats, ended
}

// checkMissing returns the error of a store that lacks a part of its packs, or nil.
func (r *Repository) checkMissing(ctx context.Context) (err error) {
	b, err := r.LoadIndex(ctx)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(b.Close(), err) }()
	_, err = r.lostPacks(ctx, b.table)
	return err
}

// indexedPack is a pack with the entries that the index has of it.
type indexedPack struct {
	id      blob.ID
	entries []pack.Entry
	marked  bool
}

// chooseVerified returns the next packs in the order of their names; done says that no more packs follow until o.Until.
func (r *Repository) chooseVerified(ctx context.Context, o VerifyOptions, stats *VerifyStats) (chosen []indexedPack,
	done bool, err error) {
	b, err := r.LoadIndex(ctx)
	if err != nil {
		return nil, false, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	stats.Marked = b.HasMarks()
	names, err := b.table.Packs()
	if err != nil {
		return nil, false, err
	}
	ids := slices.DeleteFunc(slices.Clone(names), func(id blob.ID) bool {
		return bytes.Compare(id[:], o.After[:]) <= 0 || bytes.Compare(id[:], o.Until[:]) > 0
	})
	slices.SortFunc(ids, func(a, b blob.ID) int { return bytes.Compare(a[:], b[:]) })
	ids = slices.Compact(ids)
	done = len(ids) <= verifyPacks
	ids = ids[:min(len(ids), verifyPacks)]
	entries, total := map[blob.ID][]pack.Entry{}, 0
	for _, id := range ids {
		entries[id] = nil
	}
	err = b.table.Each(func(row index.Row) error {
		id := names[row.Pack]
		if _, is := entries[id]; is {
			entries[id] = append(entries[id], row.Entry)
			total++
		}
		for total > verifyEntries && len(entries) > 1 { // the last packs wait for the next call
			last := ids[len(ids)-1]
			total -= len(entries[last])
			delete(entries, last)
			ids, done = ids[:len(ids)-1], false
		}
		return nil
	})
	if err != nil {
		return nil, false, err
	}
	marks, err := b.table.Marks()
	for _, id := range ids {
		chosen = append(chosen, indexedPack{id, entries[id], marks[id]})
	}
	return chosen, done, err
}

// verifyPack reads a pack and returns the number of bytes. Damage is an error of kind Corrupt or NotFound.
func (r *Repository) verifyPack(ctx context.Context, limit *rate.Limiter, p indexedPack) (n int64, err error) {
	o, err := r.store.Stat(ctx, packName(p.id))
	if err != nil {
		return 0, err
	}
	if limit != nil {
		if err := limit.WaitN(ctx, int(min(o.Size, int64(limit.Burst())))); err != nil {
			return 0, err
		}
	}
	release, err := r.options.Reads.Reserve(ctx, min(o.Size, wholePack))
	if err != nil {
		return 0, err
	}
	defer release()
	var body []byte
	get := func(off, n int64) ([]byte, error) { return readRange(ctx, r.store, packName(p.id), off, n) }
	if o.Size <= wholePack {
		if body, err = get(0, o.Size); err != nil {
			return 0, err
		}
		if blob.Sum(body) != p.id {
			return o.Size, api.Errorf(api.Corrupt, "the bytes do not match the name")
		}
		get = func(off, n int64) ([]byte, error) { return body[off : off+n : off+n], nil }
	}
	header, err := pack.ReadHeader(r.key, o.Size, func(off, n int64) ([]byte, error) {
		b, err := get(off, n)
		return bytes.Clone(b), err // the header is opened in place
	})
	if err != nil {
		return o.Size, err
	}
	return o.Size, r.verifyBlobs(p, header, get)
}

// verifyBlobs opens all blobs of a pack, and compares the header with the index.
func (r *Repository) verifyBlobs(p indexedPack, header []pack.Entry, get func(off, n int64) ([]byte, error)) error {
	for _, e := range p.entries {
		i, found := slices.BinarySearchFunc(header, e, func(a, b pack.Entry) int { return cmp.Compare(a.Offset, b.Offset) })
		if !found || header[i] != e {
			return api.Errorf(api.Corrupt, "the index and the header of the pack differ at %v blob %s", e.Kind, e.ID)
		}
	}
	scratch := scratchPool.Get().(*[]byte)
	defer scratchPool.Put(scratch)
	for _, e := range header {
		sealed, err := get(int64(e.Offset), int64(e.Length))
		if err != nil {
			return err
		}
		plain, err := r.openBlob(index.Location{Pack: p.id, Entry: e}, sealed, *scratch)
		if err != nil {
			return api.Errorf(api.KindOf(err), "%v blob %s: %w", e.Kind, e.ID, err)
		}
		if e.Plain > 0 && cap(plain) > cap(*scratch) {
			*scratch = plain[:0]
		}
	}
	return nil
}

// retire marks damaged packs, and copies their blobs that can be read, or that the cache has, and that no other pack
// has.
func (r *Repository) retire(ctx context.Context, packs []DamagedPack, o WriterOptions) (copied int64, err error) {
	if len(packs) == 0 {
		return 0, nil
	}
	if err := r.CheckStore(ctx); err != nil { // an empty mount point lacks all packs
		return 0, err
	}
	damaged := map[blob.ID]bool{}
	for _, p := range packs {
		damaged[p.ID] = true
	}
	if err := r.mark(ctx, damaged, o.Lock); err != nil {
		return 0, err
	}
	b, err := r.LoadIndex(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	blobs, err := b.onlyDamaged(damaged)
	if err != nil || len(blobs) == 0 {
		return 0, err
	}
	w, err := NewWriter(ctx, b, o)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	for _, l := range blobs {
		plain, cached := r.readCachedTree(l, nil) // the pack has its mark already, so a cached copy hides nothing
		if !cached {
			var err error
			if plain, err = b.readAt(ctx, l, nil); IsDamage(err) {
				continue
			} else if err != nil {
				return 0, err
			}
		}
		if len(plain) > w.blobLimit() {
			continue // of another program: only the damaged pack has the blob
		}
		added, err := w.AddKnown(ctx, l.Kind, l.ID, plain)
		if err != nil {
			return 0, err
		}
		if added {
			copied++
		}
	}
	return copied, w.Flush(ctx)
}

// mark writes an index file that marks packs, unless they have a mark. The session keeps its lock meanwhile, so that a
// sweep does not replace the file.
func (r *Repository) mark(ctx context.Context, packs map[blob.ID]bool, lock *Lock) error {
	marked := map[blob.ID]bool{}
	files, err := r.listIndex(ctx)
	if err != nil {
		return err
	}
	for _, f := range files {
		_, err := r.scanIndexFile(ctx, f, func(p index.Pack) error {
			if p.Damaged {
				marked[p.ID] = true
			}
			return nil
		})
		if err != nil && !IsDamage(err) { // replaced by a sweep, or damaged; a second mark does no harm
			return err
		}
	}
	var file index.FileBuilder
	if lock != nil {
		file.Session = lock.ID()
	}
	for id := range packs {
		if !marked[id] {
			file.Add(index.Pack{ID: id, Damaged: true})
		}
	}
	if file.Packs() == 0 {
		return nil
	}
	if _, err := r.saveFile(ctx, indexFolder, file.Bytes()); err != nil {
		return api.Errorf(api.KindOf(err), "an index file with marks cannot be written: %w", err)
	}
	return nil
}

// damagedLimit bounds the blobs that one call copies or reports.
const damagedLimit = 1 << 18

// onlyDamaged returns the blobs that only damaged packs have, in the order of the packs; of packs alone, if not nil.
func (b *Blobs) onlyDamaged(packs map[blob.ID]bool) (blobs []index.Location, err error) {
	names, err := b.table.Packs()
	if err != nil {
		return nil, err
	}
	var last blobHandle
	first := true
	err = b.table.Each(func(row index.Row) error {
		h := blobHandle{row.ID, row.Kind}
		again := !first && h == last
		last, first = h, false
		if again || !row.Damaged || packs != nil && !packs[names[row.Pack]] || len(blobs) == damagedLimit {
			return nil
		}
		blobs = append(blobs, index.Location{Pack: names[row.Pack], Entry: row.Entry})
		return nil
	})
	slices.SortFunc(blobs, func(x, y index.Location) int {
		return cmp.Or(bytes.Compare(x.Pack[:], y.Pack[:]), cmp.Compare(x.Offset, y.Offset))
	})
	return blobs, err
}
