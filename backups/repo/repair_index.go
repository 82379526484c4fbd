package repo

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/pack"
)

// An index file may be damaged or lost while the named packs are whole. Each pack has a header with the places of the
// blobs. So the headers of the packs that no other index file names replace the file.
//
// Until a repair, LoadIndex reads the headers of unnamed packs, and marks the packs in the table of the session alone:
// reads find the blobs, and a backup stores the blobs again, because a sweep may be about to delete an unnamed pack. A
// repair never runs at the time of a sweep. The repair names the packs in new index files, and then deletes the damaged
// files.

// recoverTable is loadTable for a repository with damaged index files.
func (r *Repository) recoverTable(ctx context.Context) (t *index.Table, err error) {
	b, err := index.NewTableBuilder(r.cacheFolder(), r.tableOwner(), nil, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	packs, _, err := r.scanIndex(ctx, func(f namedFile) func(index.Pack) error { return b.AddFile(f.id) })
	if err != nil {
		return nil, err
	}
	err = r.readUnnamed(ctx, packs, func(p index.Pack) error {
		if err := b.Add(p); err != nil {
			return err
		}
		return b.Add(index.Pack{ID: p.ID, Damaged: true})
	})
	if err != nil {
		return nil, err
	}
	t, err = b.Finish("")
	return t, damagedTable(err)
}

// scanIndex lists the packs, and then reads all index files: a pack is in the store before an index file names the
// pack. add returns the function for the packs of a file.
func (r *Repository) scanIndex(ctx context.Context, add func(namedFile) func(index.Pack) error) (packs *packUses,
	damaged []namedFile, err error) {
	if packs, err = r.listPacks(ctx); err != nil {
		return nil, nil, err
	}
	files, err := r.listIndex(ctx)
	if err != nil {
		return nil, nil, err
	}
	for i, f := range files {
		var named []blob.ID
		each := add(f)
		_, err := r.scanIndexFile(ctx, f, func(p index.Pack) error {
			if !p.Damaged {
				named = append(named, p.ID)
			}
			return each(p)
		})
		if api.Is(err, api.Corrupt) { // the packs that were read before the damage count as unnamed
			damaged = append(damaged, f)
			continue
		} else if err != nil {
			return nil, nil, err
		}
		for _, id := range named {
			packs.addFile(id, i)
		}
	}
	return packs, damaged, nil
}

// readUnnamed reads the headers of the packs that no index file names, several at once, and calls each with one pack at
// a time. A pack whose header cannot be read is left out.
func (r *Repository) readUnnamed(ctx context.Context, packs *packUses, each func(index.Pack) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(indexReaders)
	var mu sync.Mutex
	for p := range packs.all() {
		if p.indexed {
			continue
		}
		group.Go(func() error {
			entries, err := pack.ReadHeader(r.key, p.size, func(off, n int64) ([]byte, error) {
				return readRange(ctx, r.store, packName(p.id), off, n)
			})
			if IsDamage(err) {
				return nil
			} else if err != nil {
				return api.Errorf(api.KindOf(err), "pack %.8s: the header cannot be read: %w", p.id, err)
			}
			mu.Lock()
			defer mu.Unlock()
			return each(index.Pack{ID: p.id, Entries: entries})
		})
	}
	return group.Wait()
}

// indexRepair is the outcome of a repair.
type indexRepair struct {
	damaged bool // index files were damaged; a store without permission to delete keeps them
	changed bool // packs got their place in the index, or lost a mark
}

// repairDamagedIndex is repairIndex if an index file is damaged or whole packs have marks.
func (r *Repository) repairDamagedIndex(ctx context.Context, whole map[blob.ID]bool) (done indexRepair, err error) {
	if len(whole) == 0 {
		if damaged, err := r.damagedIndexFiles(ctx); err != nil || len(damaged) == 0 {
			return done, err
		}
	}
	return r.repairIndex(ctx, whole)
}

// damagedIndexFiles reads all index files.
func (r *Repository) damagedIndexFiles(ctx context.Context) (damaged []namedFile, err error) {
	files, err := r.listIndex(ctx)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		_, err := r.scanIndexFile(ctx, f, func(index.Pack) error { return nil })
		switch {
		case api.Is(err, api.NotFound): // replaced meanwhile
		case api.Is(err, api.Corrupt):
			damaged = append(damaged, f)
		case err != nil:
			return nil, err
		}
	}
	return damaged, nil
}

// repairIndex names the packs that no index file names, takes the marks of whole packs back, and deletes damaged index
// files. A store without permission to delete keeps marks and files.
func (r *Repository) repairIndex(ctx context.Context, whole map[blob.ID]bool) (done indexRepair, err error) {
	lock, err := r.Lock(ctx, Sweeping) // so that no sweep deletes a pack that the repair names
	if err != nil {
		return done, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLockTimeout)
		defer cancel()
		err = errors.Join(err, lock.Close(ctx))
	}()
	s := &sweep{r: r, lock: lock}
	done, err = s.repairIndex(lock.Context(), whole)
	if err != nil {
		err = api.Errorf(api.KindOf(err), "the index cannot be repaired: %w", err)
	}
	return done, err
}

func (s *sweep) repairIndex(ctx context.Context, whole map[blob.ID]bool) (done indexRepair, err error) {
	var marking []namedFile // index files that mark whole packs
	packs, old, err := s.r.scanIndex(ctx, func(f namedFile) func(index.Pack) error {
		return func(p index.Pack) error {
			if n := len(marking); p.Damaged && whole[p.ID] && (n == 0 || marking[n-1] != f) {
				marking = append(marking, f)
			}
			return nil
		}
	})
	if err != nil {
		return done, err
	}
	done.damaged = len(old) > 0
	var file index.FileBuilder
	save := func() error {
		if file.Packs() == 0 {
			return nil
		}
		done.changed = true
		_, err := s.r.saveFile(ctx, indexFolder, file.Bytes())
		file = index.FileBuilder{}
		return err
	}
	err = s.r.readUnnamed(ctx, packs, func(p index.Pack) error {
		if file.Full(len(p.Entries)) {
			if err := save(); err != nil {
				return err
			}
		}
		file.Add(p)
		return nil
	})
	if err == nil {
		err = save()
	}
	if err != nil || len(old)+len(marking) == 0 {
		return done, err
	}
	if err := s.checkPermission(ctx); api.Is(err, api.Denied) {
		return done, nil
	} else if err != nil {
		return done, err
	}
	for _, f := range marking {
		file.Session, err = s.r.scanIndexFile(ctx, f, func(p index.Pack) error {
			if !p.Damaged || !whole[p.ID] {
				file.Add(p)
			}
			return nil
		})
		if err == nil {
			err = save()
		}
		if err != nil {
			return done, err
		}
		old = append(old, f)
	}
	names := make([]string, len(old))
	for i, f := range old {
		names[i] = f.Name
	}
	done.changed = true
	return done, s.deleteObjects(ctx, names)
}
