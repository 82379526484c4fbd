package stack

import (
	"context"
	"errors"
	"os"

	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// The map of what comes of a merge is made when all data has moved, and its digests with it: piece by piece, so that
// neither takes much room a second time. A piece's digests go into the target's own file, which becomes the result's as
// its data does; its pages go into mappedFile. Both are durable before stack.json says so, and only then are the same
// pages taken out of the maps of the two. So at any moment, after a crash too, what the two hold together is told below
// Mapped by the new map alone, and above it by theirs.

// mappedFile is the result's map on its way, in the target's folder.
const mappedFile = "mapped"

// mapPiece is how many pages of a map are there twice: 16 MiB, of 256 GiB.
const mapPiece = 4096

// mappedMap is the map of a layer that is being merged: below upto, the target has all that both held.
type mappedMap struct {
	format.BlockMap             // its own
	upto            int         // page
	result          *format.Map // of which that much is there; nil: the layer was emptied
}

func (m *mappedMap) Uniform(p int) (block.Kind, bool) {
	switch {
	case p >= m.upto:
		return m.BlockMap.Uniform(p)
	case m.result == nil:
		return block.Hole, true
	}
	return m.result.Uniform(p)
}

func (m *mappedMap) Load(p int, kinds *[pageBlocks]block.Kind) error {
	switch {
	case p >= m.upto:
		return m.BlockMap.Load(p, kinds)
	case m.result == nil:
		clear(kinds[:])
		return nil
	}
	return m.result.Load(p, kinds)
}

// target is the layer whose file becomes the result's.
func (g *Merge) target() string {
	if g.Up {
		return g.Upper
	}
	return g.Lower
}

// openMapped has an open layer that is being merged tell what it holds by the result's map, as far as that is there.
func (d *Disk) openMapped(l *layer) error {
	g, err := d.mergeOf(l.rec.UID)
	if err != nil || g == nil || g.Mapped == 0 {
		return err
	}
	l.m, l.mapped, err = d.mappedOf(l, g)
	return err
}

// mappedOf is the map of a layer that is being merged. It needs the file, if there is one.
func (d *Disk) mappedOf(l *layer, g *Merge) (_ format.BlockMap, h file.Handle, err error) {
	own := ownMap(l)
	if l.rec.UID != g.target() {
		return &mappedMap{own, g.Mapped, nil}, nil, nil
	}
	if h, err = d.fs.Open(d.path(layersDir, l.rec.UID, mappedFile), os.O_RDONLY, 0); err != nil {
		return nil, nil, err
	}
	w, err := format.ResumeMap(h, l.rec.Size, g.Mapped, g.MapSum)
	if err != nil {
		return nil, nil, errors.Join(err, h.Close())
	}
	return &mappedMap{own, g.Mapped, w.Written(l.rec.Size, g.Mapped, h)}, h, nil
}

// mapper makes map and digests of the result.
type mapper struct {
	w      *merger
	kinds  format.Index // what the result holds
	pages  *format.MapWriter
	mapped file.Handle
	sums   file.Handle // those of the target, where the two are of one size
	crcs   file.Handle
	own    bool // the result's checksums are the target's
	whole  bool // target and result are of one size; else the last chunk of the target was shorter
	piece  int  // pages
	// chunks that the merge had to do with: the others keep their digests
	touched map[int64]bool
}

// newMapper goes on with what is recorded. dir is the result's folder; what the target has already gets a name there.
func (w *merger) newMapper(dir string) (_ *mapper, err error) {
	d, g := w.r.disk, &w.seen
	_, target := w.ends()
	m := &mapper{w: w, kinds: format.NewIndex(w.size>>blockBits, uint16(block.Hole)), touched: map[int64]bool{},
		whole: target.rec.Size == w.size}
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
	if err = m.look(); err != nil {
		return nil, err
	}
	sums := d.path(layersDir, target.rec.UID, sumsFile)
	flag := os.O_RDWR | os.O_CREATE | os.O_EXCL
	if m.whole {
		if err = d.fs.Link(sums, dir+"/"+sumsFile); err != nil {
			return nil, err
		}
		flag = os.O_RDWR
	}
	if m.sums, err = d.fs.Open(dir+"/"+sumsFile, flag, 0o600); err != nil {
		return nil, err
	}
	if m.crcs, m.own, err = w.crcsOf(target, dir, m.whole); err != nil {
		return nil, err
	}
	// What is in the result's folder alone does not outlive a crash.
	if m.piece = len(m.kinds.Uniform); m.own {
		m.piece = d.piece
	}
	name, flag := d.path(layersDir, target.rec.UID, mappedFile), os.O_RDWR
	if g.Mapped == 0 {
		if err = file.RemoveAll(d.fs, name); err != nil {
			return nil, err
		}
		flag |= os.O_CREATE | os.O_EXCL
	}
	if m.mapped, err = d.fs.Open(name, flag, 0o600); err != nil {
		return nil, err
	}
	if err = d.fs.Link(name, dir+"/"+mapFile); err != nil {
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

// look finds out what the result holds, and which chunks the merge had to do with.
func (m *mapper) look() error {
	w := m.w
	for p := range m.kinds.Uniform {
		lower, upper, err := w.kinds(p)
		if err != nil {
			return err
		}
		vals := make([]uint16, m.kinds.PageLen(p))
		for i := range vals {
			k := union(lower[i], upper[i])
			vals[i] = uint16(k)
			if was := lower[i]; p >= w.seen.Mapped && (w.act(lower[i], upper[i]) != leaveBlock ||
				!w.seen.Up && k != was || w.seen.Up && k != upper[i]) {
				m.touched[(int64(p)<<pageBits+int64(i))/chunkBlks] = true
			}
		}
		m.kinds.Load(p, vals)
	}
	return nil
}

// run makes what is not recorded yet, all but the last piece so that it need not be made again.
func (m *mapper) run(ctx context.Context) error {
	pages := len(m.kinds.Uniform)
	for from := m.w.seen.Mapped; from < pages; {
		end := min(from+m.piece, pages)
		some := format.NewIndex(m.kinds.Blocks, uint16(block.Hole))
		copy(some.Uniform[from:end], m.kinds.Uniform[from:end])
		copy(some.Packed[from:end], m.kinds.Packed[from:end])
		if err := eachChunk(ctx, &some, m.chunk); err != nil {
			return err
		}
		if err := m.pages.Put(&m.kinds, from, end); err != nil {
			return err
		}
		if end < pages {
			if err := m.record(from, end); err != nil {
				return err
			}
		}
		from = end
	}
	return m.pages.Finish(m.kinds.Blocks)
}

// chunk gives a chunk its digest, and its blocks their checksums.
func (m *mapper) chunk(c int64, buf []byte) error {
	w := m.w
	if !m.touched[c] && m.whole {
		if _, target := w.ends(); !m.own {
			return format.CopyCRCs(m.crcs, target.crcs, c)
		}
		return nil
	}
	chunk, kinds := buf[:min(chunkSize, w.size-c*chunkSize)], m.kinds.Chunk(c)
	sum, err := format.ChunkSum(w.to, kinds, c, w.size, buf)
	if err == nil && kinds.Data { // else it is asked for no checksums, and they take room
		var whole bool
		if whole, err = w.whole(c, chunk); err == nil && whole {
			err = format.PutCRCs(m.crcs, c, chunk)
		} else if !whole {
			sum = noSum
		}
	}
	if err != nil {
		return err
	}
	_, err = m.sums.WriteAt(sum[:], sumsHeader+c*sumSize)
	return err
}

// record has stack.json say that a piece of the map is there.
func (m *mapper) record(from, end int) error {
	w, r, d := m.w, m.w.r, m.w.r.disk
	if err := m.pages.SaveTable(from, end); err != nil {
		return err
	}
	err := atOnce(m.mapped.Datasync, m.sums.Datasync, m.crcs.Datasync)
	if err = errors.Join(err, d.fs.SyncDir(d.path(layersDir, w.seen.target()))); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return err
	}
	next := w.seen
	next.Mapped, next.MapSum = end, m.pages.TableSum(end)
	if err := r.commit(func(meta *Meta) { meta.Merge = &next }); err != nil {
		return err
	}
	w.seen = next
	return w.turnMapsHeld()
}

// turnMaps has all that read the two ask the result's map as far as it is recorded, and empties theirs there.
func (w *merger) turnMaps() error {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	if err := w.r.isOpen(); err != nil {
		return err
	}
	return w.turnMapsHeld()
}

// turnMapsHeld does so. The caller has mu.
func (w *merger) turnMapsHeld() error {
	r, d := w.r, w.r.disk
	for _, l := range r.layers { // they change under mu alone
		if l.rec.UID != w.seen.Lower && l.rec.UID != w.seen.Upper {
			continue
		}
		m, h, err := d.mappedOf(l, &w.seen)
		if err != nil {
			return err
		}
		r.work.do(func() { // it builds no page meanwhile
			err = r.onLoop(func() { l.m, l.mapped, h = m, h, l.mapped })
		})
		if h != nil {
			err = errors.Join(err, h.Close())
		}
		if err != nil {
			return err
		}
	}
	for _, l := range []*layer{w.lower, w.upper} {
		if err := w.emptyMap(l); err != nil {
			return err
		}
	}
	return nil
}

// emptyMap takes out of a map the pages that nobody asks it for any more.
func (w *merger) emptyMap(l *layer) error {
	own, ok := ownMap(l).(*format.Map)
	if !ok {
		return nil
	}
	from, end := own.PackedRange(w.seen.Mapped)
	if from == end {
		return nil
	}
	h, err := w.r.disk.fs.Open(w.r.disk.path(layersDir, l.rec.UID, mapFile), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(w.freed.punch(h, from, end-from), h.Close())
}

// ownMap is the map that a layer had before it was merged.
func ownMap(l *layer) format.BlockMap {
	if m, ok := l.m.(*mappedMap); ok {
		return m.BlockMap
	}
	return l.m
}
