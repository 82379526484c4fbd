package repo

import (
	"bytes"
	"context"
	"sync"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/target"
)

// packLookups is how many packs correctIndex looks up at once.
const packLookups = 16

// correctIndex takes missing packs out of an index file, which may be in the store although its session failed or lost
// its lock: a sweep may have deleted packs that no index file named. The other packs stay in the index, because other
// sessions may rely on them already. A sweep that deletes a pack after the look finds the index file afterwards
// (sweep.dropLate). plain is the file's content.
func (r *Repository) correctIndex(ctx context.Context, store target.Store, id blob.ID, plain []byte) error {
	for {
		name := indexFolder + id.String()
		if _, err := store.Stat(ctx, name); err != nil {
			if api.Is(err, api.NotFound) { // never written, or replaced by a sweep
				return nil
			}
			return api.Errorf(api.KindOf(err), "index file %.8s: %w", id, err)
		}
		missing, err := missingPacks(ctx, store, plain)
		if err != nil || len(missing) == 0 {
			return err
		}
		file, err := withoutPacks(plain, missing)
		if err != nil {
			return err
		}
		if file.Packs() > 0 { // durable before the old file is deleted
			var sealed []byte
			plain = file.Bytes()
			id, sealed = r.sealFile(plain)
			if err := store.Put(ctx, indexFolder+id.String(), sealed); err != nil {
				return api.Errorf(api.KindOf(err), "an index file without missing packs cannot be written: %w", err)
			}
		}
		if err := store.Delete(ctx, name); err != nil {
			return api.Errorf(api.KindOf(err), "index file %s, which names missing packs, cannot be deleted: %w", name, err)
		}
		if file.Packs() == 0 {
			return nil
		}
	}
}

// missingPacks are the packs of an index file that the store does not have.
func missingPacks(ctx context.Context, store target.Store, plain []byte) (map[blob.ID]bool, error) {
	var mu sync.Mutex
	missing := map[blob.ID]bool{}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(packLookups)
	_, err := index.Scan(bytes.NewReader(plain), func(p index.Pack) error {
		group.Go(func() error {
			_, err := store.Stat(ctx, packName(p.ID))
			switch {
			case api.Is(err, api.NotFound):
				mu.Lock()
				defer mu.Unlock()
				missing[p.ID] = true
			case err != nil:
				return api.Errorf(api.KindOf(err), "pack %.8s: %w", p.ID, err)
			}
			return nil
		})
		return nil
	})
	if waitErr := group.Wait(); err == nil {
		err = waitErr
	}
	return missing, err
}

// withoutPacks is an index file without some of its packs.
func withoutPacks(plain []byte, without map[blob.ID]bool) (*index.FileBuilder, error) {
	file := &index.FileBuilder{}
	session, err := index.Scan(bytes.NewReader(plain), func(p index.Pack) error {
		if !without[p.ID] {
			file.Add(p)
		}
		return nil
	})
	file.Session = session
	return file, err
}
