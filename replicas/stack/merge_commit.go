package stack

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// completeMerge makes the new layer of the target's file, and replaces the two layers: commit 2.
func (w *merger) completeMerge(ctx context.Context) error {
	d, g := w.r.disk, w.seen
	dir := d.Join(layer.Dir, g.Result)
	if err := diskfs.TryLock(w.to, unix.LOCK_EX); err != nil { // marks the new layer as in the making
		return err
	}
	if st, err := w.to.Stat(); err != nil {
		return err
	} else if st.Size() < w.size {
		if err := w.to.Truncate(w.size); err != nil {
			return err
		}
	}
	if err := file.RemoveAll(d.FS, dir); err != nil {
		return err
	}
	if err := d.FS.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := d.FS.Link(d.Join(layer.Dir, g.Target(), layer.DataFile), dir+"/"+layer.DataFile); err != nil {
		return err
	}
	rec, err := w.describeResult(ctx, dir)
	if err != nil {
		return err
	}
	return w.whenQuiet(ctx, func(ctx context.Context) error { return w.publishResult(ctx, dir, rec) })
}

// publishResult writes the record of the result and replaces the two layers.
func (w *merger) publishResult(ctx context.Context, dir string, rec layer.Record) error {
	r, d, g := w.r, w.r.disk, w.seen
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return err
	}
	unlock, err := d.Lock() // no process collects the new layer meanwhile
	if err != nil {
		return err
	}
	defer unlock()
	if err := errors.Join(d.FS.SyncDir(dir), d.FS.SyncDir(d.Join(layer.Dir))); err != nil {
		return err
	}
	if len(w.damage) > 0 {
		if err := d.PutDamage(g.Result, w.size, w.damage); err != nil {
			return err
		}
		defer d.Observer.Damaged(g.Result, w.damage)
	}
	if err := format.WriteMeta(d.FS, dir+"/"+layer.LayerFile, layer.FormatLayer, rec); err != nil {
		return err
	}
	own, err := d.OpenLayerAs(g.Result, d.Direct, true)
	if err != nil {
		return err
	}
	release := func() {}
	if !w.beside { // before the commit, which the data path must follow
		if release, err = r.holdSoon(ctx); err != nil {
			return errors.Join(err, own.Close())
		}
	}
	var gone []string
	err = r.commitChange(func(m *Meta) {
		m.replaceMerged()
		gone = m.pruneBranches() // the snapshot may have been deleted meanwhile
	})
	var old []*layer.Layer
	switch {
	case err != nil:
		err = errors.Join(err, own.Close())
	case w.beside:
		err = errors.Join(own.Close(), r.setMerge(nil), d.dropUnnamed(gone))
	default:
		old, err = r.replaceLayers(g, own)
	}
	release()
	if err != nil {
		return err
	}
	for _, l := range old {
		err = errors.Join(err, l.Close())
	}
	slog.Info("layers merged", "volume", r.meta.Volume, "replica", r.meta.UID, "lower", g.Lower, "upper", g.Upper,
		"result", g.Result, "copied", w.copied)
	for _, uid := range []string{g.Lower, g.Upper} {
		err = errors.Join(err, d.toTrash(layer.Dir, gonePrefix, uid))
	}
	return err
}

// replaceMerged replaces the two layers by the result.
func (m *Meta) replaceMerged() {
	g := m.Merge
	if k := slices.Index(m.Layers, g.Lower); k >= 0 {
		m.Layers = slices.Replace(slices.Clone(m.Layers), k, k+2, g.Result)
	} else {
		below := ""
		m.Branches = slices.DeleteFunc(slices.Clone(m.Branches), func(b Branch) bool {
			if b.Layer == g.Lower {
				below = b.Below
			}
			return b.Layer == g.Lower
		})
		for i := range m.Branches {
			b := &m.Branches[i]
			if b.Layer == g.Upper {
				b.Layer, b.Below = g.Result, below
			}
			if b.Below == g.Upper {
				b.Below = g.Result
			}
		}
	}
	m.Snapshots = slices.Clone(m.Snapshots)
	for i := range m.Snapshots {
		if m.Snapshots[i].Layer == g.Upper {
			m.Snapshots[i].Layer = g.Result
		}
	}
	m.Merge = nil
}

// replaceLayers gives the data path one layer for two, while I/O is held, and returns the two.
func (r *Replica) replaceLayers(g Merge, by *layer.Layer) (old []*layer.Layer, err error) {
	r.work.do(func() {
		err = r.onLoop(func() {
			k := slices.IndexFunc(r.layers, func(l *layer.Layer) bool { return l.Rec.UID == g.Lower })
			old = slices.Clone(r.layers[k : k+2])
			r.layers = slices.Replace(slices.Clone(r.layers), k, k+2, by)
			r.fds = slices.Replace(slices.Clone(r.fds), k+1, k+3, int(by.Data.Fd()))
			r.idx.Remap(func(v uint16) uint16 {
				if v != unbuilt && v > fromLayer+uint16(k) {
					return v - 1
				}
				return v
			})
			r.merge = nil
		})
	})
	return old, err
}

// describeResult makes the digests and the map of the result. Unchanged chunks keep their digests.
func (w *merger) describeResult(ctx context.Context, dir string) (layer.Record, error) {
	rec := layer.Record{UID: w.seen.Result, Size: w.size, Durable: true, Created: time.Now().UTC().Truncate(time.Second)}
	m, err := w.newMapper(dir)
	if err != nil {
		return rec, err
	}
	defer m.close()
	if err := m.makeMap(ctx); err != nil {
		return rec, err
	}
	rec.Data, rec.Zero = m.kinds.Held()
	if _, err := m.sums.WriteAt(format.SumsHeaderOf(w.size), 0); err != nil {
		return rec, err
	}
	if err := m.sums.Truncate(sumsHeader + (w.size+chunkSize-1)/chunkSize*sumSize); err != nil {
		return rec, err
	}
	rec.Root, err = format.RootDigest(m.sums, w.size, &m.kinds, func(c int64, sum [sumSize]byte) {
		if sum == format.NoSum {
			w.recordDamage(c, min(chunkSize, w.size-c*chunkSize))
		}
	})
	if err != nil {
		return rec, err
	}
	st, err := w.to.Stat()
	if err != nil {
		return rec, err
	}
	rec.Allocated = diskfs.Allocated(st)
	err = diskfs.AtOnce(w.to.Datasync, m.sums.Datasync, m.mapped.Datasync,
		func() error { return format.SealCRCs(m.crcs, w.size) })
	return rec, errors.Join(err, m.sums.Chmod(0o444))
}
