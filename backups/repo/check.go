package repo

import (
	"context"
	"errors"
	"slices"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/keys"
	"drover.io/drover/backups/repo/tree"
)

// objectsLimit is how many damaged objects a Damage names.
const objectsLimit = 1024

// Damage is what a repository lost.
type Damage struct {
	Objects   []string              // names of damaged key files, index files and snapshots, and of missing packs
	Blobs     map[blob.ID]blob.Kind // that snapshots need, and no pack has whole
	Snapshots []blob.ID             // that need such blobs, or are damaged themselves
}

// IsZero reports whether nothing is damaged.
func (d *Damage) IsZero() bool { return len(d.Objects) == 0 && len(d.Blobs) == 0 }

func (d *Damage) addObject(name string) {
	if len(d.Objects) < objectsLimit {
		d.Objects = append(d.Objects, name)
	}
}

// Check compares all objects but the packs with their names, and looks for every blob that a snapshot needs: in the
// index, outside of the packs that Verify marked, and in a pack that exists. Missing packs get marks. Errors say
// nothing about the repository.
func (r *Repository) Check(ctx context.Context, o WriterOptions) (damage Damage, err error) {
	damage.Blobs = map[blob.ID]blob.Kind{}
	err = r.withSession(ctx, func(lock *Lock) error {
		o.Lock = lock
		c := &checker{r: r.withoutCache(), damage: &damage, seen: map[blob.ID]bool{}}
		return c.run(lock.Context(), o)
	})
	if err != nil {
		err = api.Errorf(api.KindOf(err), "repository %.8s: the check ended early: %w", r.ID(), err)
	}
	return damage, err
}

type checker struct {
	r      *Repository // without a cache
	blobs  *Blobs
	damage *Damage

	mu    sync.Mutex
	trees []blob.ID        // to read
	seen  map[blob.ID]bool // trees; true: the tree, or a part of it, is damaged
}

func (c *checker) run(ctx context.Context, o WriterOptions) (err error) {
	if err := c.checkFiles(ctx); err != nil {
		return err
	}
	if c.blobs, err = c.r.LoadIndex(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.blobs.Close()) }()
	lost, err := c.lostPacks(ctx)
	if err != nil {
		return err
	}
	if len(lost) > 0 {
		if _, err := c.r.retire(ctx, lost, o); err != nil {
			return err
		}
		again, err := c.r.LoadIndex(ctx)
		if err != nil {
			return err
		}
		err = c.blobs.Close()
		if c.blobs = again; err != nil {
			return err
		}
	}
	if err := c.checkSnapshots(ctx); err != nil {
		return err
	}
	return c.r.CheckStore(ctx) // an empty mount point lacks all blobs, or the snapshots that need them
}

// checkFiles compares key files and index files with their names.
func (c *checker) checkFiles(ctx context.Context) error {
	keyFiles, err := listFolder(ctx, c.r.store, keysFolder)
	if err != nil {
		return err
	}
	indexFiles, err := c.r.listIndex(ctx)
	if err != nil {
		return err
	}
	for i, f := range slices.Concat(keyFiles, indexFiles) {
		limit := int64(indexLimit)
		if i < len(keyFiles) {
			limit = keys.FileLimit
		}
		_, err := readNamed(ctx, c.r.store, f, limit)
		switch {
		case api.Is(err, api.NotFound): // replaced meanwhile
		case api.Is(err, api.Corrupt):
			c.damage.addObject(f.Name)
		case err != nil:
			return err
		}
	}
	return nil
}

// lostPacks are the packs of the index that the store does not have.
func (c *checker) lostPacks(ctx context.Context) (lost []DamagedPack, err error) {
	packs, err := c.r.listPacks(ctx)
	if err != nil {
		return nil, err
	}
	names, err := c.blobs.table.Packs()
	if err != nil {
		return nil, err
	}
	for _, id := range names {
		if packs.find(id) != nil {
			continue
		}
		_, err := c.r.store.Stat(ctx, packName(id)) // younger than the list, or lost
		if api.Is(err, api.NotFound) {
			lost = append(lost, DamagedPack{id, err})
			c.damage.addObject(packName(id))
		} else if err != nil {
			return nil, err
		}
	}
	return lost, nil
}

// checkSnapshots reads each tree once. If that finds damage, it reads the trees again for each snapshot.
func (c *checker) checkSnapshots(ctx context.Context) error {
	files, err := c.r.ListSnapshots(ctx)
	if err != nil {
		return err
	}
	var snapshots []Snapshot
	for _, f := range files {
		s, err := c.r.LoadSnapshot(ctx, f)
		switch {
		case api.Is(err, api.NotFound): // deleted meanwhile
			continue
		case api.Is(err, api.Corrupt), api.Is(err, api.Unsupported):
			c.damage.addObject(f.file.Name)
			c.damage.Snapshots = append(c.damage.Snapshots, f.ID)
			continue
		case err != nil:
			return err
		}
		snapshots = append(snapshots, s)
		c.addTree(*s.Tree)
		if err := c.readTrees(ctx); err != nil {
			return err
		}
	}
	if len(c.damage.Blobs) == 0 {
		return nil
	}
	clear(c.seen)
	for _, s := range snapshots {
		damaged, err := c.isDamaged(ctx, *s.Tree, 0)
		if err != nil {
			return err
		}
		if damaged {
			c.damage.Snapshots = append(c.damage.Snapshots, s.ID)
		}
	}
	return nil
}

func (c *checker) addTree(id blob.ID) {
	if _, seen := c.seen[id]; !seen {
		c.seen[id] = false
		c.trees = append(c.trees, id)
	}
}

func (c *checker) readTrees(ctx context.Context) error {
	for len(c.trees) > 0 {
		n := max(len(c.trees)-markBatch, 0)
		batch := slices.Clone(c.trees[n:])
		c.trees = c.trees[:n]
		err := c.blobs.ReadMany(ctx, blob.Tree, batch, func(i int, plain []byte, err error) error {
			var nodes []tree.Node
			if err == nil {
				nodes, err = tree.Decode(plain)
			}
			if err != nil {
				return c.addBlob(batch[i], blob.Tree)
			}
			return c.addNodes(ctx, nodes)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) addNodes(ctx context.Context, nodes []tree.Node) error {
	for _, n := range nodes {
		for _, id := range n.Content {
			if has, err := c.blobs.Has(ctx, id, blob.Data); err != nil {
				return err
			} else if !has {
				if err := c.addBlob(id, blob.Data); err != nil {
					return err
				}
			}
		}
		if n.Subtree != (blob.ID{}) {
			c.mu.Lock()
			c.addTree(n.Subtree)
			c.mu.Unlock()
		}
	}
	return nil
}

func (c *checker) addBlob(id blob.ID, kind blob.Kind) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.damage.Blobs[id] = kind; len(c.damage.Blobs) > damagedLimit {
		return api.Errorf(api.Unsupported, "more than %d blobs are damaged; restore the store from a copy", damagedLimit)
	}
	return nil
}

// treeDepth bounds the folders in folders: other programs back up deep ones.
const treeDepth = 4096

// isDamaged reports whether a tree needs a damaged blob.
func (c *checker) isDamaged(ctx context.Context, id blob.ID, depth int) (damaged bool, err error) {
	if damaged, seen := c.seen[id]; seen {
		return damaged, nil
	}
	if _, damaged = c.damage.Blobs[id]; damaged || depth > treeDepth {
		return damaged, nil
	}
	nodes, err := c.blobs.ReadTree(ctx, id)
	if IsDamage(err) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	for _, n := range nodes {
		for _, content := range n.Content {
			_, bad := c.damage.Blobs[content]
			damaged = damaged || bad
		}
		if n.Subtree != (blob.ID{}) {
			below, err := c.isDamaged(ctx, n.Subtree, depth+1)
			if err != nil {
				return false, err
			}
			damaged = damaged || below
		}
	}
	c.seen[id] = damaged
	return damaged, nil
}
