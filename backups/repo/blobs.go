package repo

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/pack"
)

const (
	indexReaders = 8       // index files that LoadIndex reads at once
	indexMemory  = 4 << 20 // bytes of these files, sealed
	addedLimit   = 1 << 17 // blobs in memory, 15 MiB, before they are merged into the table
	tableName    = "index"
)

// Blobs knows which blob of the repository lies where: by the index files that LoadIndex read, and by the packs that
// the session's Writer added. Methods are safe for concurrent use.
type Blobs struct {
	r     *Repository
	limit int // addedLimit, smaller in tests

	building sync.Mutex   // one table is built at a time
	moved    *index.Table // of index files that replaced known ones, guarded by building; nil: none; see readMoved

	mu    sync.RWMutex
	table *index.Table
	added []*addedBlobs        // the last one grows, those before are being merged into the table
	files map[blob.ID]struct{} // index files that the session read or wrote
}

type blobHandle struct {
	id   blob.ID
	kind blob.Kind
}

// addedBlobs are blobs of packs that the session wrote.
type addedBlobs struct {
	packs []index.Pack
	at    map[blobHandle]struct{ pack, entry uint32 }
}

func newAddedBlobs() *addedBlobs {
	return &addedBlobs{at: map[blobHandle]struct{ pack, entry uint32 }{}}
}

// LoadIndex reads all index files that the local table does not cover yet. Packs that only damaged index files name are
// read by their headers, and count as marked (repair_index.go). The caller closes Blobs.
func (r *Repository) LoadIndex(ctx context.Context) (*Blobs, error) {
	t, err := r.loadTable(ctx, true)
	if err != nil {
		return nil, err
	}
	b := r.blobsOf(t)
	b.addFiles(t.Files()...)
	return b, nil
}

func (r *Repository) blobsOf(t *index.Table) *Blobs {
	return &Blobs{r: r, limit: addedLimit, table: t, added: []*addedBlobs{newAddedBlobs()}, files: map[blob.ID]struct{}{}}
}

// addFiles records index files on which answers of Blobs stand.
func (b *Blobs) addFiles(ids ...blob.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, id := range ids {
		b.files[id] = struct{}{}
	}
}

// IsCurrent reports whether all index files that the session read or wrote still exist. If not, a sweep may have hidden
// packs whose blobs the session found: the session loads the index again before the session relies on these blobs.
func (b *Blobs) IsCurrent(ctx context.Context) (bool, error) {
	files, err := listFolder(ctx, b.r.store, indexFolder)
	if err != nil {
		return false, err
	}
	b.mu.RLock()
	defer b.mu.RUnlock()
	found := 0
	for _, f := range files {
		if _, ok := b.files[f.id]; ok {
			found++
		}
	}
	return found == len(b.files), nil
}

// sharedTable is the table that the sessions of a repository share. The holder of turn loads the index.
type sharedTable struct {
	turn  chan struct{}
	table *index.Table // of the last session that loaded the index; closed after its last session
}

func newSharedTable() *sharedTable { return &sharedTable{turn: make(chan struct{}, 1)} }

// loadTable returns a table of all index files. With cached, the base is the table of another session, or the one in
// the cache. While one session of this Repository loads the index, the other ones wait: they need the same files.
func (r *Repository) loadTable(ctx context.Context, cached bool) (*index.Table, error) {
	select {
	case r.shared.turn <- struct{}{}:
		defer func() { <-r.shared.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	for range listAttempts {
		files, err := r.listIndex(ctx)
		if err != nil {
			return nil, err
		}
		var base *index.Table
		if cached {
			base = r.openBase()
		}
		t, err := r.updateTable(ctx, base, files)
		switch {
		case errors.Is(err, errTableDamaged):
			cached = false
		case api.Is(err, api.Corrupt):
			// For this session alone: the next one may read the index file well.
			if t, err = r.recoverTable(ctx); !api.Is(err, api.NotFound) {
				return t, err
			}
		case !api.Is(err, api.NotFound): // an index file vanishes when a sweep has replaced the file
			if err == nil {
				r.shared.table = t
			}
			return t, err
		}
	}
	return nil, api.Errorf(api.Busy, "repository %.8s: the index files change all the time; try again", r.ID())
}

// openBase returns the table of another session, or that in the cache, or nil: then all index files are read.
func (r *Repository) openBase() *index.Table {
	if t := r.shared.table; t != nil && t.Share() {
		return t
	}
	base, _ := index.OpenTable(filepath.Join(r.cacheFolder(), tableName), r.tableOwner())
	return base
}

// listIndex lists the index files twice: a list may miss a file that a sweep replaces meanwhile, together with the new
// file.
func (r *Repository) listIndex(ctx context.Context) (files []namedFile, err error) {
	listed := map[blob.ID]struct{}{}
	for range 2 {
		more, err := listFolder(ctx, r.store, indexFolder)
		if err != nil {
			return nil, err
		}
		for _, f := range more {
			if _, twice := listed[f.id]; !twice {
				files = append(files, f)
			}
			listed[f.id] = struct{}{}
		}
	}
	return files, nil
}

// tableOwner ties a table to the repository.
func (r *Repository) tableOwner() blob.ID { return blob.Sum([]byte(r.ID())) }

var errTableDamaged = errors.New("the local index table is damaged")

// updateTable returns base if base covers just files, or a new table.
func (r *Repository) updateTable(ctx context.Context, base *index.Table, files []namedFile) (
	t *index.Table, err error) {
	added, vanished := map[blob.ID]namedFile{}, map[blob.ID]struct{}{}
	for _, f := range files {
		added[f.id] = f
	}
	if base != nil {
		for _, id := range base.Files() {
			if _, ok := added[id]; !ok {
				vanished[id] = struct{}{}
			}
			delete(added, id)
		}
		if len(added) == 0 && len(vanished) == 0 {
			return base, nil
		}
		defer func() { err = errors.Join(err, base.Close()) }()
	}
	return r.buildTable(ctx, base, vanished, added)
}

// buildTable builds a table of base without the packs of vanished index files, and of added ones.
func (r *Repository) buildTable(ctx context.Context, base *index.Table, vanished map[blob.ID]struct{},
	added map[blob.ID]namedFile) (t *index.Table, err error) {
	b, err := index.NewTableBuilder(r.cacheFolder(), r.tableOwner(), base, vanished)
	if err != nil {
		return nil, damagedTable(err)
	}
	return r.fillTable(ctx, b, added, tableName)
}

// buildReaderTable builds a table of index files with the blobs of hidden packs, for one session that reads alone.
func (r *Repository) buildReaderTable(ctx context.Context, files map[blob.ID]namedFile) (*index.Table, error) {
	b, err := index.NewTableBuilder(r.cacheFolder(), r.tableOwner(), nil, nil)
	if err != nil {
		return nil, err
	}
	b.WithHidden()
	return r.fillTable(ctx, b, files, "")
}

// fillTable reads index files into a table of a name; empty: without a name.
func (r *Repository) fillTable(ctx context.Context, b *index.TableBuilder, added map[blob.ID]namedFile, name string) (
	t *index.Table, err error) {
	defer func() { err = errors.Join(err, b.Close()) }()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(indexReaders)
	memory := semaphore.NewWeighted(indexMemory)
	for _, f := range added {
		add, size := b.AddFile(f.id), min(max(f.Size, 0), indexMemory)
		group.Go(func() error {
			if err := memory.Acquire(ctx, size); err != nil {
				return err
			}
			defer memory.Release(size)
			_, err := r.scanIndexFile(ctx, f, add)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	t, err = b.Finish(name)
	return t, damagedTable(err)
}

// damagedTable tells damage of the base from that of an index file.
func damagedTable(err error) error {
	if api.Is(err, api.Corrupt) {
		return errors.Join(errTableDamaged, err)
	}
	return err
}

// scanIndexFile reads an index file and calls each with the packs in the file; session is the session that wrote the
// file.
func (r *Repository) scanIndexFile(ctx context.Context, f namedFile, each func(index.Pack) error) (
	session string, err error) {
	err = r.loadFile(ctx, f, indexLimit, indexPlain, func(plain io.Reader) error {
		session, err = index.Scan(plain, each)
		return err
	})
	if err != nil {
		err = api.Errorf(api.KindOf(err), "repository %.8s: index file %.8s: %w", r.ID(), f.id, err)
		if api.Is(err, api.Corrupt) {
			err = api.Errorf(api.Corrupt, "%w; `drover backup verify` makes the index whole again", err)
		}
		return "", err
	}
	return session, nil
}

// Has reports whether the repository has a blob outside of damaged packs, or the session's Writer wrote the blob.
// Before the Writer's next Flush the blob may not be durable.
func (b *Blobs) Has(ctx context.Context, id blob.ID, kind blob.Kind) (bool, error) {
	_, ok, err := b.find(ctx, id, kind, false)
	return ok, err
}

// Find returns where a blob lies.
func (b *Blobs) Find(ctx context.Context, id blob.ID, kind blob.Kind) (index.Location, bool, error) {
	return b.find(ctx, id, kind, true)
}

// find looks a blob up; only with place the location is complete. A damaged table is built again from the index files.
func (b *Blobs) find(ctx context.Context, id blob.ID, kind blob.Kind, place bool) (
	l index.Location, ok bool, err error) {
	for range 2 {
		var t *index.Table
		if l, ok, t, err = b.lookUp(id, kind, place); !api.Is(err, api.Corrupt) {
			break
		}
		if err := b.replaceDamaged(ctx, t); err != nil {
			return l, false, err
		}
	}
	return l, ok, err
}

// HasMarks reports whether a verification found damaged packs, so that snapshots may need blobs that Has does not know.
func (b *Blobs) HasMarks() bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.table != nil && b.table.HasMarks()
}

func (b *Blobs) lookUp(id blob.ID, kind blob.Kind, place bool) (l index.Location, ok bool, t *index.Table, err error) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, a := range b.added {
		if at, ok := a.at[blobHandle{id, kind}]; ok {
			p := a.packs[at.pack]
			return index.Location{Pack: p.ID, Entry: p.Entries[at.entry]}, true, b.table, nil
		}
	}
	if b.table == nil {
		return l, false, nil, api.Errorf(api.Unavailable, "repository %.8s: the index is closed", b.r.ID())
	}
	if place {
		l, ok, err = b.table.Find(id, kind)
	} else {
		ok, err = b.table.Has(id, kind)
	}
	return l, ok, b.table, err
}

// findAll returns all known locations of a blob, the best first.
func (b *Blobs) findAll(id blob.ID, kind blob.Kind) (all []index.Location, err error) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, a := range b.added {
		if at, ok := a.at[blobHandle{id, kind}]; ok {
			p := a.packs[at.pack]
			all = append(all, index.Location{Pack: p.ID, Entry: p.Entries[at.entry]})
		}
	}
	if b.table == nil {
		return all, api.Errorf(api.Unavailable, "repository %.8s: the index is closed", b.r.ID())
	}
	listed, err := b.table.FindAll(id, kind)
	return append(all, listed...), err
}

// replaceDamaged builds a new table, unless another caller did.
func (b *Blobs) replaceDamaged(ctx context.Context, damaged *index.Table) error {
	b.building.Lock()
	defer b.building.Unlock()
	if b.currentTable() != damaged {
		return nil
	}
	t, err := b.r.loadTable(ctx, false)
	if err != nil {
		return err
	}
	b.addFiles(t.Files()...)
	return b.swapTable(t, 0)
}

func (b *Blobs) currentTable() *index.Table {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.table
}

// swapTable replaces the table, and forgets the first n of the added blobs, which the new table has.
func (b *Blobs) swapTable(t *index.Table, n int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.table == nil {
		return t.Close()
	}
	old := b.table
	b.table, b.added = t, b.added[n:]
	return old.Close()
}

// addPack makes the blobs of a durable pack known. From time to time addPack merges the known blobs into the table, to
// bound the memory.
func (b *Blobs) addPack(ctx context.Context, id blob.ID, entries []pack.Entry) error {
	b.mu.Lock()
	a := b.added[len(b.added)-1]
	for i, e := range entries {
		a.at[blobHandle{e.ID, e.Kind}] = struct{ pack, entry uint32 }{uint32(len(a.packs)), uint32(i)}
	}
	a.packs = append(a.packs, index.Pack{ID: id, Entries: entries})
	full := len(a.at) >= b.limit
	if full {
		b.added = append(b.added, newAddedBlobs())
	}
	b.mu.Unlock()
	if !full {
		return nil
	}
	err := b.mergeAdded()
	if api.Is(err, api.Corrupt) {
		err = b.replaceDamaged(ctx, b.currentTable())
	}
	return err
}

// mergeAdded builds a table of the table and all added blobs but the last ones, which may still grow.
func (b *Blobs) mergeAdded() (err error) {
	b.building.Lock()
	defer b.building.Unlock()
	b.mu.RLock()
	base, added := b.table, b.added[:len(b.added)-1]
	b.mu.RUnlock()
	if base == nil || len(added) == 0 {
		return nil
	}
	builder, err := index.NewTableBuilder(b.r.cacheFolder(), b.r.tableOwner(), base, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, builder.Close()) }()
	for _, a := range added {
		for _, p := range a.packs {
			if err := builder.Add(p); err != nil {
				return err
			}
		}
	}
	// Without a name: other sessions read these blobs from the index files, which may not be durable yet.
	t, err := builder.Finish("")
	if err != nil {
		return err
	}
	return b.swapTable(t, len(added))
}

// Close closes the table.
func (b *Blobs) Close() error {
	b.building.Lock()
	defer b.building.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	t, moved := b.table, b.moved
	b.table, b.moved = nil, nil
	if t == nil {
		return nil
	}
	err := t.Close()
	if moved != nil {
		err = errors.Join(err, moved.Close())
	}
	return err
}
