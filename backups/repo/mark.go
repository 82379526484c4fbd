package repo

import (
	"context"
	"slices"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/tree"
)

const markBatch = 1024 // trees that are read with as few requests as possible

// marks has a bit for each blob of a table.
type marks []uint64

func (m marks) has(n int64) bool { return m[n/64]>>(n%64)&1 != 0 }
func (m marks) set(n int64)      { m[n/64] |= 1 << (n % 64) }

// marker marks the blobs that the snapshots need. Snapshots may come meanwhile.
type marker struct {
	r         *Repository
	list      listFunc
	blobs     *Blobs       // finds all blobs
	table     *index.Table // of the blobs that have marks
	files     map[blob.ID]struct{}
	snapshots map[blob.ID]struct{}

	mu    sync.Mutex
	marks marks
	trees []blob.ID            // to read
	young map[blob.ID]struct{} // trees that the table does not have
}

// listFunc lists snapshots.
type listFunc func(ctx context.Context) ([]SnapshotFile, error)

// newMarker marks blobs of the table of blobs, which has the index files, for the snapshots of list.
func newMarker(r *Repository, list listFunc, blobs *Blobs, files []namedFile) *marker {
	m := &marker{r: r, list: list, blobs: blobs, table: blobs.table, files: map[blob.ID]struct{}{},
		snapshots: map[blob.ID]struct{}{}, marks: make(marks, blobs.table.Len()/64+1), young: map[blob.ID]struct{}{}}
	for _, f := range files {
		m.files[f.id] = struct{}{}
	}
	return m
}

// catchUp marks the blobs of all snapshots that exist, until a list has no new one. A blob that is missing, and a
// snapshot or tree that cannot be read, are errors: without knowing all that is needed, a sweep deletes nothing.
func (m *marker) catchUp(ctx context.Context) error {
	for {
		files, err := m.list(ctx)
		if err != nil {
			return err
		}
		var added []SnapshotFile
		for _, f := range files {
			if _, ok := m.snapshots[f.ID]; !ok {
				added = append(added, f)
			}
		}
		if len(added) == 0 {
			return nil
		}
		// Index files are older than the snapshots that need them, so they are listed afterwards.
		if err := m.readNewIndexFiles(ctx); err != nil {
			return err
		}
		if err := m.markSnapshots(ctx, added); err != nil {
			return err
		}
	}
}

// readNewIndexFiles makes the blobs of sessions known that ended meanwhile. Their packs are no concern of the sweep.
func (m *marker) readNewIndexFiles(ctx context.Context) error {
	files, err := listFolder(ctx, m.r.store, indexFolder)
	if err != nil {
		return err
	}
	for _, f := range files {
		if _, ok := m.files[f.id]; ok {
			continue
		}
		_, err := m.r.scanIndexFile(ctx, f, func(p index.Pack) error {
			if p.Hidden || p.Damaged {
				return nil
			}
			return m.blobs.addPack(ctx, p.ID, slices.Clone(p.Entries))
		})
		if err != nil {
			return err
		}
		m.files[f.id] = struct{}{}
	}
	return nil
}

func (m *marker) markSnapshots(ctx context.Context, files []SnapshotFile) error {
	for _, f := range files {
		m.snapshots[f.ID] = struct{}{}
	}
	err := m.r.LoadSnapshots(ctx, files, func(_ int, s Snapshot, err error) error {
		if api.Is(err, api.NotFound) { // deleted meanwhile
			return nil
		}
		if err != nil {
			return err
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.markTree(ctx, *s.Tree)
	})
	if err != nil {
		return err
	}
	for len(m.trees) > 0 {
		n := max(len(m.trees)-markBatch, 0)
		batch := slices.Clone(m.trees[n:])
		m.trees = m.trees[:n]
		err := m.blobs.ReadMany(ctx, blob.Tree, batch, func(_ int, plain []byte, err error) error {
			if err != nil {
				return err
			}
			return m.markContent(ctx, plain)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// markTree marks a tree, with mu held.
func (m *marker) markTree(ctx context.Context, id blob.ID) error {
	first, err := m.mark(ctx, id, blob.Tree)
	if first {
		m.trees = append(m.trees, id)
	}
	return err
}

// mark marks a blob, with mu held; first says that a tree was not marked before.
func (m *marker) mark(ctx context.Context, id blob.ID, kind blob.Kind) (first bool, err error) {
	n, ok, err := m.table.Number(id, kind)
	switch {
	case err != nil:
		return false, err
	case ok && m.marks.has(n):
		return false, nil
	case ok:
		m.marks.set(n)
		return true, nil
	}
	known, err := m.blobs.Has(ctx, id, kind)
	if err != nil {
		return false, err
	}
	if !known {
		return false, api.Errorf(api.Corrupt, "a snapshot needs %v blob %s, which no index file names; "+
			"`restic check` lists the damaged snapshots", kind, id)
	}
	if _, seen := m.young[id]; seen || kind != blob.Tree {
		return false, nil
	}
	m.young[id] = struct{}{}
	return true, nil
}

// markContent marks what a tree names.
func (m *marker) markContent(ctx context.Context, plain []byte) error {
	nodes, err := tree.Decode(plain)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range nodes {
		for _, id := range n.Content {
			if _, err := m.mark(ctx, id, blob.Data); err != nil {
				return err
			}
		}
		if n.Subtree != (blob.ID{}) {
			if err := m.markTree(ctx, n.Subtree); err != nil {
				return err
			}
		}
	}
	return nil
}
