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
	"drover.io/drover/replicas/stack/format"
)

// end makes the target the data of the new layer, and puts that in the place of the two: commit 2.
func (w *merger) end(ctx context.Context) error {
	d, g := w.r.disk, w.seen
	dir := d.path(layersDir, g.Result)
	if err := tryLock(w.to, unix.LOCK_EX); err != nil { // the new folder is being worked on
		return err
	}
	if st, err := w.to.Stat(); err != nil {
		return err
	} else if st.Size() < w.size {
		if err := w.to.Truncate(w.size); err != nil {
			return err
		}
	}
	if err := file.RemoveAll(d.fs, dir); err != nil {
		return err
	}
	if err := d.fs.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := d.fs.Link(d.path(layersDir, g.target(), dataFile), dir+"/"+dataFile); err != nil {
		return err
	}
	rec, err := w.describe(ctx, dir)
	if err != nil {
		return err
	}
	return w.whenQuiet(ctx, func(ctx context.Context) error { return w.publish(ctx, dir, rec) })
}

// publish puts the result, which is there but for its record, in the place of the two.
func (w *merger) publish(ctx context.Context, dir string, rec layerRecord) error {
	r, d, g := w.r, w.r.disk, w.seen
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return err
	}
	unlock, err := d.lock() // nobody collects what nobody names yet
	if err != nil {
		return err
	}
	defer unlock()
	if err := errors.Join(d.fs.SyncDir(dir), d.fs.SyncDir(d.path(layersDir))); err != nil {
		return err
	}
	if len(w.damage) > 0 {
		if err := d.putDamage(g.Result, w.size, w.damage); err != nil {
			return err
		}
		defer d.tell(g.Result, w.damage)
	}
	if err := format.WriteMeta(d.fs, dir+"/"+layerFile, formatLayer, rec); err != nil {
		return err
	}
	own, err := d.openLayerAs(g.Result, d.direct, true)
	if err != nil {
		return err
	}
	release := func() {}
	if !w.beside { // beforehand: what is committed has to come to the data path
		if release, err = r.holdSoon(ctx); err != nil {
			return errors.Join(err, own.close())
		}
	}
	var gone []string
	err = r.commit(func(m *Meta) {
		m.merged()
		gone = m.prune() // its snapshot may have gone meanwhile
	})
	var old []*layer
	switch {
	case err != nil:
		err = errors.Join(err, own.close())
	case w.beside:
		err = errors.Join(own.close(), r.setMerge(nil), d.dropUnnamed(gone))
	default:
		old, err = r.replace(g, own)
	}
	release()
	if err != nil {
		return err
	}
	for _, l := range old {
		err = errors.Join(err, l.close())
	}
	slog.Info("layers merged", "volume", r.meta.Volume, "replica", r.meta.UID, "lower", g.Lower, "upper", g.Upper,
		"result", g.Result, "copied", w.copied)
	for _, uid := range []string{g.Lower, g.Upper} {
		err = errors.Join(err, d.toTrash(layersDir, gonePrefix, uid))
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
func (r *Replica) replace(g Merge, by *layer) (old []*layer, err error) {
	r.work.do(func() {
		err = r.onLoop(func() {
			k := slices.IndexFunc(r.layers, func(l *layer) bool { return l.rec.UID == g.Lower })
			old = slices.Clone(r.layers[k : k+2])
			r.layers = slices.Replace(slices.Clone(r.layers), k, k+2, by)
			r.fds = slices.Replace(slices.Clone(r.fds), k+1, k+3, int(by.data.Fd()))
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

// describe makes sums and map of the result. Chunks that the merge did not touch keep their digests.
func (w *merger) describe(ctx context.Context, dir string) (layerRecord, error) {
	rec := layerRecord{UID: w.seen.Result, Size: w.size, Durable: true, Created: time.Now().UTC().Truncate(time.Second)}
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
	if err := m.sums.Truncate(sumsHeader + (w.size+chunkSize-1)/chunkSize*sumSize); err != nil {
		return rec, err
	}
	rec.Root, err = format.RootDigest(m.sums, w.size, &m.kinds, func(c int64, sum [sumSize]byte) {
		if sum == noSum {
			w.damaged(c, min(chunkSize, w.size-c*chunkSize))
		}
	})
	if err != nil {
		return rec, err
	}
	st, err := w.to.Stat()
	if err != nil {
		return rec, err
	}
	rec.Allocated = allocated(st)
	err = atOnce(w.to.Datasync, m.sums.Datasync, m.mapped.Datasync,
		func() error { return format.SealCRCs(m.crcs, w.size) })
	return rec, errors.Join(err, m.sums.Chmod(0o444))
}

// AppendCRCs are the checksums of the result: those of the target, under a second name, since they are as large as a
// thousandth of its data. What is written into them says the same as before of every block that the target itself has,
// and it is asked for no others.
func (w *merger) crcsOf(target *layer, dir string, whole bool) (h file.Handle, taken bool, err error) {
	fsys, name := w.r.disk.fs, dir+"/"+crcsFile
	if !whole || target.crcs == nil {
		h, err = fsys.Open(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		return h, false, err
	}
	if err := fsys.Link(w.r.disk.path(layersDir, target.rec.UID, crcsFile), name); err != nil {
		return nil, false, err
	}
	h, err = fsys.Open(name, os.O_RDWR, 0)
	return h, true, err
}
