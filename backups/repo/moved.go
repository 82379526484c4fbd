package repo

import (
	"context"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
)

// readMoved reads a blob of missing packs from other packs, where sweeps copied the blob. A hidden pack counts: the
// sweep waits for this session if the snapshot was deleted meanwhile. found is false if no index file names another
// pack. The index of the session does not change, since the index tells what the session stores.
func (b *Blobs) readMoved(ctx context.Context, id blob.ID, kind blob.Kind, into []byte) (
	plain []byte, found bool, err error) {
	for again := range 2 {
		all, err := b.findMoved(ctx, id, kind, again > 0)
		if err != nil {
			return nil, false, err
		}
		for _, l := range all {
			plain, err := b.readAt(ctx, l, into)
			if err == nil || !IsDamage(err) {
				return plain, err == nil, err
			}
		}
	}
	return nil, false, nil
}

// findMoved returns the locations of a blob in the present index files, or, unless again, in those of the last call.
func (b *Blobs) findMoved(ctx context.Context, id blob.ID, kind blob.Kind, again bool) ([]index.Location, error) {
	b.building.Lock()
	defer b.building.Unlock()
	known := b.currentTable()
	if known == nil {
		return nil, api.Errorf(api.Unavailable, "repository %.8s: the index is closed", b.r.ID())
	}
	if again || b.moved == nil {
		if err := b.loadMoved(ctx, known); err != nil {
			return nil, err
		}
	}
	if b.moved == nil {
		return nil, nil
	}
	return b.moved.FindAll(id, kind)
}

// loadMoved builds the table of the present index files, unless the session, or the last call, knows all. The caller
// holds building.
func (b *Blobs) loadMoved(ctx context.Context, known *index.Table) error {
	for range listAttempts {
		files, err := b.r.listIndex(ctx)
		if err != nil {
			return err
		}
		added := map[blob.ID]namedFile{}
		for _, f := range files {
			added[f.id] = f
		}
		if coversFiles(known, added) || b.moved != nil && coversFiles(b.moved, added) {
			return nil
		}
		t, err := b.r.buildReaderTable(ctx, added)
		if api.Is(err, api.NotFound) { // an index file vanishes when a sweep has replaced the file
			continue
		}
		if err != nil {
			return err
		}
		former := b.moved
		b.moved = t
		if former != nil {
			return former.Close()
		}
		return nil
	}
	return api.Errorf(api.Busy, "repository %.8s: the index files change all the time; try again", b.r.ID())
}

// coversFiles reports whether a table is one of just these index files.
func coversFiles(t *index.Table, files map[blob.ID]namedFile) bool {
	return len(t.Files()) == len(files) && !slices.ContainsFunc(t.Files(), func(id blob.ID) bool {
		_, exists := files[id]
		return !exists
	})
}
