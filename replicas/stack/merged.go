package stack

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// end makes the target the data of the new layer, and puts that in the place of the two: commit 2.
func (w *merger) end(ctx context.Context) error {
	d, g := w.r.disk, w.seen
	dir := d.Join(layer.Dir, g.Result)
	if err := diskfs.TryLock(w.to, unix.LOCK_EX); err != nil { // the new folder is being worked on
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
	rec, err := w.describe(ctx, dir)
	if err != nil {
		return err
	}
	return w.whenQuiet(ctx, func(ctx context.Context) error { return w.publish(ctx, dir, rec) })
}

// publish puts the result, which is there but for its record, in the place of the two.
func (w *merger) publish(ctx context.Context, dir string, rec layer.Record) error {
	r, d, g := w.r, w.r.disk, w.seen
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return err
	}
	unlock, err := d.Lock() // nobody collects what nobody names yet
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
	if !w.beside { // beforehand: what is committed has to come to the data path
		if release, err = r.holdSoon(ctx); err != nil {
			return errors.Join(err, own.Close())
		}
	}
	var gone []string
	err = r.commit(func(m *Meta) {
		m.merged()
		gone = m.prune() // its snapshot may have gone meanwhile
	})
	var old []*layer.Layer
	switch {
	case err != nil:
		err = errors.Join(err, own.Close())
	case w.beside:
		err = errors.Join(own.Close(), r.setMerge(nil), d.dropUnnamed(gone))
	default:
		old, err = r.replace(g, own)
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

// merged puts the result in the place of the two.
func (m *Meta) merged() {
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

// replace gives the data path one layer for two, while I/O is held. It returns the two.
func (r *Replica) replace(g Merge, by *layer.Layer) (old []*layer.Layer, err error) {
	r.work.do(func() {
		err = r.onLoop(func() {
			k := slices.IndexFunc(r.layers, func(l *layer.Layer) bool { return l.Rec.UID == g.Lower })
			old = slices.Clone(r.layers[k : k+2])
			r.layers = slices.Replace(slices.Clone(r.layers), k, k+2, by)
			r.fds = slices.Replace(slices.Clone(r.fds), k+1, k+3, int(by.Data.Fd()))
			r.idx.Remap(func(v uint16) uint16 {
				if v != Unbuilt && v > FromLayer+uint16(k) {
					return v - 1
				}
				return v
			})
			r.merge = nil
		})
	})
	return old, err
}

// describe makes sums and map of the result. Chunks that the merge did not touch keep their digests.
func (w *merger) describe(ctx context.Context, dir string) (layer.Record, error) {
	rec := layer.Record{UID: w.seen.Result, Size: w.size, Durable: true, Created: time.Now().UTC().Truncate(time.Second)}
	m, err := w.newMapper(dir)
	if err != nil {
		return rec, err
	}
	defer m.close()
	if err := m.run(ctx); err != nil {
		return rec, err
	}
	rec.Data, rec.Zero = m.kinds.Held()
	if _, err := m.sums.WriteAt(format.SumsHeaderOf(w.size), 0); err != nil {
		return rec, err
	}
	if err := m.sums.Truncate(SumsHeader + (w.size+ChunkSize-1)/ChunkSize*SumSize); err != nil {
		return rec, err
	}
	rec.Root, err = format.RootDigest(m.sums, w.size, &m.kinds, func(c int64, sum [SumSize]byte) {
		if sum == noSum {
			w.damaged(c, min(ChunkSize, w.size-c*ChunkSize))
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

// AppendCRCs are the checksums of the result: those of the target, under a second name, since they are as large as a
// thousandth of its data. What is written into them says the same as before of every block that the target itself has,
// and it is asked for no others.
func (w *merger) crcsOf(target *layer.Layer, dir string, whole bool) (h file.Handle, taken bool, err error) {
	fsys, name := w.r.disk.FS, dir+"/"+layer.CRCsFile
	if !whole || target.CRCs == nil {
		h, err = fsys.Open(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		return h, false, err
	}
	if err := fsys.Link(w.r.disk.Join(layer.Dir, target.Rec.UID, layer.CRCsFile), name); err != nil {
		return nil, false, err
	}
	h, err = fsys.Open(name, os.O_RDWR, 0)
	return h, true, err
}
