package mover

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
)

// CopyOptions describe a copy.
type CopyOptions struct {
	Program string // of the new snapshot
	// Tags returns the tags of the new snapshot, right before the commit; its error ends the copy.
	Tags     func(ctx context.Context, origin repo.Snapshot, result Result) ([]string, error)
	Writer   repo.WriterOptions
	Progress *Progress
}

// Copy copies the backup of a snapshot into another repository. The new snapshot has the time, host and paths of the
// origin, by which restic groups snapshots. Copy reads only the blobs that the other repository lacks;
// all blobs keep their ids, and are sealed with the other key. Both repositories are locked until Copy returns. Errors
// and the result are those of Backup; NotFound or Corrupt: the origin lacks the snapshot or a blob.
func Copy(ctx context.Context, from *repo.Repository, id blob.ID, to *repo.Repository, o CopyOptions) (
	result Result, err error) {
	origin, err := from.Lock(ctx, repo.Shared)
	if err != nil {
		return result, err
	}
	defer func() { _ = closeLock(ctx, origin) }() // a lock that stays is stale in 30 minutes
	lock, err := to.Lock(ctx, repo.Shared)
	if err != nil {
		return result, err
	}
	defer func() {
		if closeErr := closeLock(ctx, lock); err != nil {
			err = errors.Join(err, closeErr)
		}
	}()
	session, cancel := context.WithCancelCause(lock.Context())
	defer cancel(nil)
	defer context.AfterFunc(origin.Context(), func() { cancel(context.Cause(origin.Context())) })()
	if o.Progress == nil {
		o.Progress = &Progress{}
	}
	o.Writer.Lock = lock
	for range attempts {
		o.Progress.reset()
		if result, err = attemptCopy(session, from, id, to, o); !errors.Is(err, errSwept) {
			if cause := context.Cause(session); err != nil && cause != nil {
				err = errors.Join(cause, err)
			}
			return result, err
		}
	}
	return result, api.Errorf(api.Busy, "copy of backup %.8s: sweeps took needed blobs away in each of %d attempts; try "+
		"again", id, attempts)
}

// attemptCopy copies with the indexes of now.
func attemptCopy(ctx context.Context, from *repo.Repository, id blob.ID, to *repo.Repository, o CopyOptions) (
	result Result, err error) {
	source, err := from.LoadIndex(ctx)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	file, err := from.FindSnapshot(ctx, id)
	if err != nil {
		return result, err
	}
	origin, err := from.LoadSnapshot(ctx, file)
	if err != nil {
		return result, err
	}
	m, err := manifest.Open(ctx, source, origin)
	if err != nil {
		return result, err
	}
	known, err := to.LoadIndex(ctx)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, known.Close()) }()
	w, err := repo.NewWriter(ctx, known, o.Writer)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	o.Progress.total.Store(m.Size)
	o.Progress.complete.Store(true)
	c := &copier{source: source, w: w, seen: map[blob.ID]struct{}{}, progress: o.Progress, size: m.Size}
	if err := c.copyTrees(ctx, []blob.ID{*origin.Tree}, 0); err != nil {
		return result, err
	}
	if err := w.Flush(ctx); err != nil {
		return result, err
	}
	o.Progress.done.Store(m.Size)
	result = Result{Read: c.read.Load(), WriterStats: w.Stats()}
	s := repo.Snapshot{Time: origin.Time, Tree: origin.Tree, Paths: origin.Paths,
		Hostname: origin.Hostname, Username: "drover", Program: o.Program}
	if s.Tags, err = o.Tags(ctx, origin, result); err != nil {
		return result, err
	}
	if err := confirm(ctx, to, known, s); err != nil {
		return result, err
	}
	result.Snapshot, err = commit(ctx, to, o.Writer.Lock, known, s)
	return result, err
}

const (
	treesAtOnce = 64 // folders in memory for each level
	treeLevels  = 16 // of a snapshot's folders
)

// copier copies the blobs of a snapshot. The tree of a folder is added after all that the folder names.
type copier struct {
	source   *repo.Blobs
	w        *repo.Writer
	seen     map[blob.ID]struct{} // trees that are copied with all below
	progress *Progress
	size     int64 // of the backup

	read, done atomic.Int64
}

// openTree is a folder to copy.
type openTree struct {
	id    blob.ID
	plain []byte
	nodes []tree.Node
}

// copyTrees copies folders with all that they name. It reads the trees also if the other repository has them: a sweep
// may have left a tree without all blobs that the tree names.
func (c *copier) copyTrees(ctx context.Context, ids []blob.ID, level int) error {
	if level == treeLevels {
		return api.Errorf(api.Unsupported, "the snapshot has more than %d levels of folders", treeLevels)
	}
	ids = slices.DeleteFunc(slices.Clone(ids), func(id blob.ID) bool {
		_, seen := c.seen[id]
		c.seen[id] = struct{}{}
		return seen
	})
	for batch := range slices.Chunk(ids, treesAtOnce) {
		opened, err := c.openTrees(ctx, batch)
		if err != nil {
			return err
		}
		var below, data []blob.ID
		for _, t := range opened {
			for _, n := range t.nodes {
				if n.Type == tree.Folder {
					below = append(below, n.Subtree)
				}
				data = append(data, n.Content...)
			}
		}
		if err := c.copyTrees(ctx, below, level+1); err != nil {
			return err
		}
		if err := c.copyData(ctx, data); err != nil {
			return err
		}
		for _, t := range opened {
			if _, err := c.w.AddKnown(ctx, blob.Tree, t.id, t.plain); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *copier) openTrees(ctx context.Context, ids []blob.ID) ([]openTree, error) {
	opened := make([]openTree, len(ids))
	err := c.source.ReadMany(repo.MoveContext(ctx), blob.Tree, ids, func(i int, plain []byte, err error) error {
		if err != nil {
			return err
		}
		nodes, err := tree.Decode(plain)
		opened[i] = openTree{ids[i], slices.Clone(plain), nodes}
		return err
	})
	return opened, err
}

// copyData copies data blobs. A blob may be listed several times.
func (c *copier) copyData(ctx context.Context, ids []blob.ID) error {
	times := map[blob.ID]int64{}
	var missing []blob.ID
	for _, id := range ids {
		times[id]++
		if times[id] > 1 {
			continue
		}
		has, err := c.w.Has(ctx, id, blob.Data)
		if err != nil {
			return err
		}
		if !has {
			missing = append(missing, id)
		}
	}
	err := c.source.ReadMany(repo.MoveContext(ctx), blob.Data, missing, func(i int, plain []byte, err error) error {
		if err != nil {
			return err
		}
		if _, err := c.w.AddKnown(ctx, blob.Data, missing[i], plain); err != nil {
			return err
		}
		c.read.Add(int64(len(plain)))
		c.count(int64(len(plain)) * times[missing[i]])
		return nil
	})
	if err != nil {
		return err
	}
	for _, id := range missing {
		delete(times, id)
	}
	for id, n := range times {
		l, ok, err := c.source.Find(ctx, id, blob.Data)
		if err != nil {
			return err
		}
		if ok { // the blob's own length is enough for the progress
			c.count(max(int64(l.Plain), int64(l.Length)) * n)
		}
	}
	return nil
}

// count counts bytes of the backup that are done.
func (c *copier) count(n int64) {
	c.progress.done.Store(min(c.done.Add(n), c.size))
}
