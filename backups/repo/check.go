package repo

import (
	"context"
	"errors"
	"slices"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
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
	Lost      int                   // damaged snapshots: nothing has the content
	Repaired  bool                  // the index was damaged, or lacked packs, and is repaired
}

// IsZero reports whether nothing is damaged.
func (d *Damage) IsZero() bool { return len(d.Objects) == 0 && len(d.Blobs) == 0 }

func (d *Damage) addObject(name string) {
	if len(d.Objects) < objectsLimit {
		d.Objects = append(d.Objects, name)
	}
}

// Check compares all objects but the packs with their names, and looks for every blob that a snapshot needs: in the
// index, outside of the packs that Verify marked, and in a pack that exists. Check repairs an index that lacks needed
// blobs, and looks again. Missing packs get marks. Errors say nothing about the repository; IsPartMissing tells that of
// a store without a part of its packs.
func (r *Repository) Check(ctx context.Context, o WriterOptions) (Damage, error) {
	damage, unnamed, err := r.checkOnce(ctx, o)
	if unnamed && (err == nil || errors.Is(err, errManyDamaged)) {
		var done indexRepair
		if done, err = r.repairIndex(ctx, nil); done.changed && err == nil {
			damage, _, err = r.checkOnce(ctx, o)
			damage.Repaired = true
		}
	}
	if err != nil {
		err = api.Errorf(api.KindOf(err), "repository %.8s: the check ended early: %w", r.ID(), err)
	}
	return damage, err
}

// checkOnce is Check without repairs; unnamed says that snapshots need blobs that no index file names.
func (r *Repository) checkOnce(ctx context.Context, o WriterOptions) (damage Damage, unnamed bool, err error) {
	damage.Blobs = map[blob.ID]blob.Kind{}
	c := &checker{r: r.withoutCache(), damage: &damage, seen: map[blob.ID]bool{}}
	err = r.withSession(ctx, func(lock *Lock) error {
		o.Lock = lock
		return c.run(lock.Context(), o)
	})
	return damage, c.unnamed, err
}

type checker struct {
	r      *Repository // without a cache
	blobs  *Blobs
	marks  map[blob.ID]bool // packs that index files mark
	damage *Damage

	mu      sync.Mutex
	trees   []blob.ID        // to read
	seen    map[blob.ID]bool // trees; true: the tree, or a part of it, is damaged
	unnamed bool             // snapshots need blobs that no index file names
}

func (c *checker) run(ctx context.Context, o WriterOptions) (err error) {
	if err := c.checkFiles(ctx); err != nil {
		return err
	}
	if c.blobs, err = c.r.LoadIndex(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.blobs.Close()) }()
	lost, err := c.r.lostPacks(ctx, c.blobs.table)
	if err != nil {
		return err
	}
	for _, p := range lost {
		c.damage.addObject(packName(p.ID))
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
	if c.marks, err = c.blobs.table.Marks(); err != nil {
		return err
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
	for _, f := range keyFiles {
		_, err := readNamed(ctx, c.r.store, f, keys.FileLimit)
		switch {
		case api.Is(err, api.NotFound): // replaced meanwhile
		case api.Is(err, api.Corrupt):
			c.damage.addObject(f.Name)
		case err != nil:
			return err
		}
	}
	damaged, err := c.r.damagedIndexFiles(ctx)
	for _, f := range damaged {
		c.damage.addObject(f.Name)
	}
	return err
}

// A store without missingLeast packs or more, and a tenth of all, probably lacks a disk or a mount; so does a store
// without any.
const (
	missingLeast = 16
	missingShare = 10
)

var errPartMissing = errors.New("a part of the store is missing")

// IsPartMissing reports whether err says that the store lacks many packs, probably because a part of the store is away,
// as one disk of several. The packs may come back, and get no marks.
func IsPartMissing(err error) bool { return errors.Is(err, errPartMissing) }

// lostPacks are the packs of an index table that the store does not have. Too many without a mark are an error that
// IsPartMissing tells.
func (r *Repository) lostPacks(ctx context.Context, t *index.Table) (lost []DamagedPack, err error) {
	packs, err := r.listPacks(ctx)
	if err != nil {
		return nil, err
	}
	names, err := t.Packs()
	if err != nil {
		return nil, err
	}
	marks, err := t.Marks()
	if err != nil {
		return nil, err
	}
	unlisted, unmarked := map[blob.ID]bool{}, 0
	for _, id := range names {
		if packs.find(id) == nil && !unlisted[id] {
			unlisted[id] = true
			if !marks[id] {
				unmarked++
			}
		}
	}
	for id := range unlisted {
		_, err := r.store.Stat(ctx, packName(id)) // younger than the list, or lost
		switch {
		case err == nil:
			continue
		case !api.Is(err, api.NotFound):
			return nil, err
		}
		lost = append(lost, DamagedPack{id, err})
		if unmarked >= missingLeast && unmarked*missingShare >= len(names) || unmarked > 1 && unmarked == len(names) {
			if err := r.CheckStore(ctx); err != nil { // an empty mount point lacks all packs
				return nil, err
			}
			return nil, api.Errorf(api.Unavailable, "%w: the store lacks %d of %d packs; mount or restore the rest of the "+
				"folder or bucket; if the packs are lost for good, run `restic rebuild-index`", errPartMissing, unmarked,
				len(names))
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
			c.damage.Lost++
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
				return c.addBlob(ctx, batch[i], blob.Tree)
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
				if err := c.addBlob(ctx, id, blob.Data); err != nil {
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

var errManyDamaged = api.Errorf(api.Unsupported, "more than %d blobs are damaged; restore the store from a copy",
	damagedLimit)

func (c *checker) addBlob(ctx context.Context, id blob.ID, kind blob.Kind) error {
	has, err := c.blobs.Has(ctx, id, kind)
	if err != nil {
		return err
	}
	l, _, err := c.blobs.Find(ctx, id, kind)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unnamed = c.unnamed || !has && !c.marks[l.Pack]
	if c.damage.Blobs[id] = kind; len(c.damage.Blobs) > damagedLimit {
		return errManyDamaged
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
