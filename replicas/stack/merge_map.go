package stack

import (
	"context"
	"errors"
	"os"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// The merge makes the map and the digests of the result after all data has moved, piece by piece, so that neither
// exists twice. The digests of a piece go into the target's own file, which becomes the result's file; the pages go
// into MergedMapFile. Both are durable before the record in stack.json, and only then the same pages are freed in the
// maps of the two layers. So at any moment, also after a crash, the new map holds the pages below Mapped and the old
// maps the rest.

// mapPiece is how many pages of a map exist twice: 16 MiB, for 256 GiB of data.
const mapPiece = 4096

// mapper makes the map and the digests of the result.
type mapper struct {
	w      *merger
	kinds  format.Index // the map of the result
	pages  *format.MapWriter
	mapped file.Handle
	sums   file.Handle // the target's file, if target and result have one size
	crcs   file.Handle
	own    bool // the result's checksums are the target's
	whole  bool // target and result are of one size; else the last chunk of the target was shorter
	piece  int  // pages
	// chunks with changes; other chunks keep their digests
	touched map[int64]bool
}

// newMapper continues the recorded part of the map. dir is the result's folder; files of the target get a second name
// there.
func (w *merger) newMapper(dir string) (_ *mapper, err error) {
	d, g := w.r.disk, &w.seen
	_, target := w.emptiedAndTarget()
	m := &mapper{w: w, kinds: format.NewIndex(w.size>>blockBits, uint16(block.Hole)), touched: map[int64]bool{},
		whole: target.Rec.Size == w.size}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	if g.Mapped > 0 {
		if err = w.turnMaps(); err != nil {
			return nil, err
		}
	}
	if err = m.readKinds(); err != nil {
		return nil, err
	}
	sums := d.Join(layer.Dir, target.Rec.UID, layer.SumsFile)
	flag := os.O_RDWR | os.O_CREATE | os.O_EXCL
	if m.whole {
		if err = d.FS.Link(sums, dir+"/"+layer.SumsFile); err != nil {
			return nil, err
		}
		flag = os.O_RDWR
	}
	if m.sums, err = d.FS.Open(dir+"/"+layer.SumsFile, flag, 0o600); err != nil {
		return nil, err
	}
	if m.crcs, m.own, err = w.resultCRCs(target, dir, m.whole); err != nil {
		return nil, err
	}
	// Files that only the result's folder has do not survive a crash.
	if m.piece = len(m.kinds.Uniform); m.own {
		m.piece = d.piece
	}
	name, flag := d.Join(layer.Dir, target.Rec.UID, layer.MergedMapFile), os.O_RDWR
	if g.Mapped == 0 {
		if err = file.RemoveAll(d.FS, name); err != nil {
			return nil, err
		}
		flag |= os.O_CREATE | os.O_EXCL
	}
	if m.mapped, err = d.FS.Open(name, flag, 0o600); err != nil {
		return nil, err
	}
	if err = d.FS.Link(name, dir+"/"+layer.MapFile); err != nil {
		return nil, err
	}
	m.pages, err = format.ResumeMap(m.mapped, w.size, g.Mapped, g.MapSum)
	return m, err
}

func (m *mapper) close() {
	for _, h := range []file.Handle{m.mapped, m.sums, m.crcs} {
		if h != nil {
			_ = h.Close()
		}
	}
}

// readKinds reads the kinds of the result, and finds the chunks with changes.
func (m *mapper) readKinds() error {
	w := m.w
	for p := range m.kinds.Uniform {
		lower, upper, err := w.loadKinds(p)
		if err != nil {
			return err
		}
		vals := make([]uint16, m.kinds.PageLen(p))
		for i := range vals {
			k := kindInResult(lower[i], upper[i])
			vals[i] = uint16(k)
			if was := lower[i]; p >= w.seen.Mapped && (w.actionFor(lower[i], upper[i]) != leaveBlock ||
				!w.seen.Up && k != was || w.seen.Up && k != upper[i]) {
				m.touched[(int64(p)<<pageBits+int64(i))/chunkBlks] = true
			}
		}
		m.kinds.Load(p, vals)
	}
	return nil
}

// makeMap makes the rest of the map, and records all pieces but the last.
func (m *mapper) makeMap(ctx context.Context) error {
	pages := len(m.kinds.Uniform)
	for from := m.w.seen.Mapped; from < pages; {
		end := min(from+m.piece, pages)
		some := format.NewIndex(m.kinds.Blocks, uint16(block.Hole))
		copy(some.Uniform[from:end], m.kinds.Uniform[from:end])
		copy(some.Packed[from:end], m.kinds.Packed[from:end])
		if err := layer.EachChunk(ctx, &some, m.digestChunk); err != nil {
			return err
		}
		if err := m.pages.Put(&m.kinds, from, end); err != nil {
			return err
		}
		if end < pages {
			if err := m.recordPiece(from, end); err != nil {
				return err
			}
		}
		from = end
	}
	return m.pages.Finish(m.kinds.Blocks)
}

// digestChunk gives a chunk its digest, and its blocks their checksums.
func (m *mapper) digestChunk(c int64, buf []byte) error {
	w := m.w
	if !m.touched[c] && m.whole {
		if _, target := w.emptiedAndTarget(); !m.own {
			return format.CopyCRCs(m.crcs, target.CRCs, c)
		}
		return nil
	}
	chunk, kinds := buf[:min(chunkSize, w.size-c*chunkSize)], m.kinds.Chunk(c)
	sum, err := format.ChunkSum(w.to, kinds, c, w.size, buf)
	if err == nil && kinds.Data { // no reader needs other checksums
		var whole bool
		if whole, err = w.chunkSound(c, chunk); err == nil && whole {
			err = format.PutCRCs(m.crcs, c, chunk)
		} else if !whole {
			sum = format.NoSum
		}
	}
	if err != nil {
		return err
	}
	_, err = m.sums.WriteAt(sum[:], sumsHeader+c*sumSize)
	return err
}

// recordPiece records a piece of the map in stack.json.
func (m *mapper) recordPiece(from, end int) error {
	w, r, d := m.w, m.w.r, m.w.r.disk
	if err := m.pages.SaveTable(from, end); err != nil {
		return err
	}
	err := diskfs.AtOnce(m.mapped.Datasync, m.sums.Datasync, m.crcs.Datasync)
	if err = errors.Join(err, d.FS.SyncDir(d.Join(layer.Dir, w.seen.Target()))); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return err
	}
	next := w.seen
	next.Mapped, next.MapSum = end, m.pages.TableSum(end)
	if err := r.commitChange(func(meta *Meta) { meta.Merge = &next }); err != nil {
		return err
	}
	w.seen = next
	return w.turnMapsHeld()
}

// turnMaps switches readers of the layers to the recorded part of the result's map, and frees that part in the layers'
// own maps.
func (w *merger) turnMaps() error {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	if err := w.r.isOpen(); err != nil {
		return err
	}
	return w.turnMapsHeld()
}

// turnMapsHeld is turnMaps with mu held.
func (w *merger) turnMapsHeld() error {
	r, d := w.r, w.r.disk
	for _, l := range r.layers { // they change under mu alone
		if l.Rec.UID != w.seen.Lower && l.Rec.UID != w.seen.Upper {
			continue
		}
		m, h, err := d.MergedMap(l, &w.seen)
		if err != nil {
			return err
		}
		r.work.do(func() { // the worker builds no page meanwhile
			err = r.onLoop(func() { l.Map, l.MergedMapFile, h = m, h, l.MergedMapFile })
		})
		if h != nil {
			err = errors.Join(err, h.Close())
		}
		if err != nil {
			return err
		}
	}
	for _, l := range []*layer.Layer{w.lower, w.upper} {
		if err := w.emptyMap(l); err != nil {
			return err
		}
	}
	return nil
}

// emptyMap frees the recorded pages in the map of a layer.
func (w *merger) emptyMap(l *layer.Layer) error {
	own, ok := layer.OwnMap(l).(*format.Map)
	if !ok {
		return nil
	}
	from, end := own.PackedRange(w.seen.Mapped)
	if from == end {
		return nil
	}
	h, err := w.r.disk.FS.Open(w.r.disk.Join(layer.Dir, l.Rec.UID, layer.MapFile), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(w.freed.Punch(h, from, end-from), h.Close())
}
