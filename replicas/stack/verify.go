package stack

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/format"
)

// Reads of finished layers are compared with the checksums of their blocks before they are answered. What does not
// match is in doubt: the chunk is read again and compared with its digest, in the worker, and what is known to be
// damaged is looked at again in the same way, since it may have been repaired. So damage is never served, whether a
// scrub has found it or not.
//
// The checksums are read page by page (4 MiB of data each), while the data itself is, and kept in memory up to a bound.

const (
	crcPagesOwn = 64       // pages that a replica may keep in any case
	crcPagesAll = 16 << 10 // that all replicas of the process may keep together: 64 MiB, of 64 GiB of data
	crcSlab     = 16       // pages that are allocated at once
)

// crcPagesUsed counts the pages of all replicas, beyond what each may have in any case.
var crcPagesUsed atomic.Int64

// crcPage is a page of a layer's checksums. It belongs to the loop's thread.
type crcPage struct {
	op    uring.Op
	r     *Replica
	l     *layer
	n     int64
	crc   []byte
	waits *part // reads that are there and wait for it
	ready bool
	used  bool // since the hand passed
}

// crcCache is what a replica keeps of its layers' checksums.
type crcCache struct {
	pages []*crcPage
	hand  int
	slab  []byte
}

// crcsOfBlock is the page with the checksum of a block, which may still be on its way.
func (r *Replica) crcsOfBlock(l *layer, b int64) *crcPage {
	n := b >> format.CRCPageBits
	if page := l.pages[n]; page != nil {
		return page
	}
	page := r.takePage()
	page.l, page.n, page.ready, page.used = l, n, false, true
	if l.pages == nil {
		l.pages = map[int64]*crcPage{}
	}
	l.pages[n] = page
	r.inflight++ // nobody closes the file meanwhile
	r.ring.Read(&page.op, int(l.crcs.Fd()), page.crc, n*format.CRCPageSize)
	return page
}

// takePage is a page that nobody waits for.
func (r *Replica) takePage() *crcPage {
	c := &r.crcs
	if len(c.pages) >= crcPagesOwn && crcPagesUsed.Load() >= crcPagesAll {
		for range 2 * len(c.pages) {
			c.hand = (c.hand + 1) % len(c.pages)
			page := c.pages[c.hand]
			if page.ready && !page.used {
				page.forget()
				return page
			}
			page.used = page.used && !page.ready
		}
	}
	if len(c.slab) == 0 {
		c.slab = alignedBuffer(crcSlab * int(format.CRCPageSize))
	}
	page := &crcPage{r: r, crc: c.slab[:format.CRCPageSize:format.CRCPageSize]}
	c.slab = c.slab[format.CRCPageSize:]
	page.op.Ctx, page.op.Done = page, crcsRead
	if c.pages = append(c.pages, page); len(c.pages) > crcPagesOwn {
		crcPagesUsed.Add(1)
	}
	return page
}

// forget takes the page out of its layer.
func (p *crcPage) forget() {
	if p.l != nil && p.l.pages[p.n] == p {
		delete(p.l.pages, p.n)
	}
	p.l = nil
}

// dropPages gives back what the cache takes. The replica is closed.
func (r *Replica) dropPages() {
	if n := len(r.crcs.pages) - crcPagesOwn; n > 0 {
		crcPagesUsed.Add(int64(-n))
	}
	r.crcs = crcCache{}
}

func crcsRead(op *uring.Op, res int32) {
	page := op.Ctx.(*crcPage)
	r := page.r
	if again(res) {
		r.ring.Read(op, int(page.l.crcs.Fd()), page.crc, page.n*format.CRCPageSize)
		return
	}
	list := page.waits
	page.waits = nil
	page.ready = true
	ok := int(res) == len(page.crc)
	if !ok {
		page.forget()
	}
	for list != nil {
		p := list
		list = p.next
		p.next = nil
		if ok {
			r.compare(p)
		} else {
			r.doubt(p)
		}
	}
	r.leave()
}

// compare ends a read of a layer whose bytes are there, once they were compared.
func (r *Replica) compare(p *part) {
	l := r.layers[p.src-1]
	moved, gave := r.merge.movedTo(r.layers, p.src-1)
	for p.good < len(p.all) {
		b := (p.at + int64(p.good)) >> blockBits
		page := r.crcsOfBlock(l, b)
		if !page.ready {
			p.next, page.waits = page.waits, p
			return
		}
		page.used = true
		crcs := page.crc[b&(format.CRCPageBlocks-1)*crcSize:]
		for ; len(crcs) > 0 && p.good < len(p.all); crcs = crcs[crcSize:] {
			if blk := p.all[p.good:][:blockSize]; format.BlockCRC(blk) != binary.LittleEndian.Uint32(crcs) {
				if p.at+int64(p.good) >= moved {
					r.doubt(p)
					return
				}
				switch known, whole := r.given(p, gave, blk); {
				case !known:
					return // p waits for the checksums
				case !whole:
					r.doubt(p)
					return
				}
			}
			p.good += int(blockSize)
		}
	}
	r.ended(p, nil)
}

// ended ends a part of a read.
func (r *Replica) ended(p *part, err error) {
	f := p.f
	if err != nil {
		f.err = err
	}
	if p.free() {
		f.end(f.err)
	}
}

// doubt has the digests decide on a read.
func (r *Replica) doubt(p *part) {
	l := r.layers[p.src-1]
	moved, gave := r.merge.movedTo(r.layers, p.src-1)
	moved = min(max((moved+chunkSize-1)&^(chunkSize-1)-p.at, 0), int64(len(p.all)))
	r.work.put(func() {
		rest, at := p.all[moved:], p.at+moved
		lost := !l.judgeMoved(p.all[:moved], p.at, gave)
		var bad []Damage
		var err error
		if len(rest) > 0 {
			bad, err = l.judge(rest, at)
		}
		if err != nil {
			slog.Error("a read is neither sound nor known to be damaged; it fails", "layer", l.rec.UID, "disk", l.disk.root,
				"offset", p.at, "error", err)
		}
		r.ring.Post(func() {
			off, n := at, int64(len(rest))
			if len(bad) > 0 && l.hy != nil {
				l.hy.lose(bad)
				r.ended(p, ErrNotFetched)
				return
			}
			if err == nil && n > 0 && l.hy == nil {
				l.disk.learn(l, off, n, bad)
				l.damage = replaceDamage(l.damage, off, n, bad)
			}
			for b := off >> blockBits; n > 0 && b <= (off+n-1)>>blockBits; b += format.CRCPageBlocks { // it may be put right
				if page := l.pages[b>>format.CRCPageBits]; page != nil && page.ready {
					page.forget()
				}
			}
			switch {
			case lost || len(bad) > 0:
				r.ended(p, ErrDamaged)
			case err != nil:
				r.ended(p, unix.EIO)
			default:
				r.ended(p, nil)
			}
		})
	})
}

// judge reads the chunks of a range anew and compares them with their digests. What is whole is put into buf.
func (l *layer) judge(buf []byte, at int64) (bad []Damage, err error) {
	d := l.disk
	dir := layersDir
	if l.hy != nil {
		dir = hydratingDir
	}
	sums, err := d.fs.Open(d.path(dir, l.rec.UID, sumsFile), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) { // nothing tells what is right
		from := at &^ (chunkSize - 1)
		return []Damage{{from, min((at+int64(len(buf))+chunkSize-1)&^(chunkSize-1), l.rec.Size) - from}}, nil
	}
	if err != nil {
		return nil, err
	}
	defer sums.Close()
	room := alignedBuffer(int(chunkSize))
	for c := at / chunkSize; c*chunkSize < at+int64(len(buf)); c++ {
		off := c * chunkSize
		chunk := room[:min(chunkSize, l.rec.Size-off)]
		var want [sumSize]byte
		_, err := sums.ReadAt(want[:], sumsHeader+c*sumSize)
		n, rerr := l.data.ReadAt(chunk, off)
		err = errors.Join(err, rerr)
		hole := want == [sumSize]byte{} && format.IsZero(chunk) // it has no digest
		if n < len(chunk) || sha256.Sum256(chunk) != want && !hole {
			slog.Error("a layer is damaged", "layer", l.rec.UID, "disk", d.root, "offset", off,
				"length", len(chunk), "error", err)
			bad = append(bad, Damage{off, int64(len(chunk))})
			continue
		}
		if l.hy != nil {
			_ = format.PutCRCs(l.hy.crcs, c, chunk) // without them the next read judges the chunk again
		}
		if off < at {
			copy(buf, chunk[at-off:])
		} else {
			copy(buf[off-at:], chunk)
		}
	}
	return bad, nil
}

// replaceDamage is list with what was found in the chunks of a range.
func replaceDamage(list []Damage, off, n int64, bad []Damage) []Damage {
	from, to := off&^(chunkSize-1), (off+n+chunkSize-1)&^(chunkSize-1)
	var out []Damage
	add := func(from, to int64) {
		if from >= to {
			return
		}
		if k := len(out) - 1; k >= 0 && out[k].Off+out[k].Len == from {
			out[k].Len += to - from
			return
		}
		out = append(out, Damage{from, to - from})
	}
	for _, g := range list {
		if g.Off < from {
			add(g.Off, min(g.Off+g.Len, from))
		}
	}
	for _, g := range bad {
		add(g.Off, g.Off+g.Len)
	}
	for _, g := range list {
		if g.Off+g.Len > to {
			add(max(g.Off, to), g.Off+g.Len)
		}
	}
	return out
}

// learn records what a read found in a range of a layer, and tells it to whoever has the layer open. It does not wait.
func (d *Disk) learn(l *layer, off, n int64, bad []Damage) {
	uid, size := l.rec.UID, l.rec.Size
	if len(bad) == 0 && !hits(l.damage, off, n) {
		return // its checksums are wrong; a scrub puts them right
	}
	d.background.Go(func() {
		unlock, err := d.lock()
		if err != nil {
			slog.Error("damage cannot be recorded", "disk", d.root, "layer", uid, "error", err)
			return
		}
		was := d.damaged(uid, size)
		now := replaceDamage(was, off, n, bad)
		if !slices.Equal(was, now) {
			err = d.putDamage(uid, size, now)
		}
		unlock()
		if err != nil {
			slog.Error("damage cannot be recorded", "disk", d.root, "layer", uid, "error", err)
		}
		if err != nil || !slices.Equal(was, now) {
			d.tell(uid, now)
		}
	})
}

// tell lets the replicas that are open here know what is damaged of a layer, and whoever watches.
func (d *Disk) tell(uid string, list []Damage) {
	for _, r := range d.opened() {
		if err := r.Knows(uid, list); err != nil {
			slog.Warn("an open replica cannot be told of damage", "replica", r.dir, "layer", uid, "error", err)
		}
	}
	if fn := d.onDamage.Load(); fn != nil {
		(*fn)(uid)
	}
}

// OnDamage has fn called when a read has found that a layer is damaged, or not any more. It must not wait for anything.
func (d *Disk) OnDamage(fn func(layer string)) { d.onDamage.Store(&fn) }

func (d *Disk) opened() []*Replica {
	d.openMu.Lock()
	defer d.openMu.Unlock()
	list := make([]*Replica, 0, len(d.open))
	for r := range d.open {
		list = append(list, r)
	}
	return list
}

func (d *Disk) setOpen(r *Replica, open bool) {
	d.openMu.Lock()
	defer d.openMu.Unlock()
	if !open {
		delete(d.open, r)
		return
	}
	if d.open == nil {
		d.open = map[*Replica]bool{}
	}
	d.open[r] = true
}

// finished lets the replicas that are open here know that a layer has got its map and its digests.
func (d *Disk) finished(uid string) error {
	var errs []error
	for _, r := range d.opened() {
		errs = append(errs, r.name(r.finished(uid)))
	}
	return errors.Join(errs...)
}

func (r *Replica) finished(uid string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isOpen() != nil || !slices.Contains(r.Meta().Layers, uid) {
		return nil
	}
	return ignoreKind(r.know(uid), api.NotFound)
}

// know takes over the map and the checksums of a layer that was finished after it was opened: from then on reads of it
// are compared, and what it holds is no longer asked of its file, which a merge changes. The caller has mu.
func (r *Replica) know(uid string) error {
	k := -1
	err := r.onLoop(func() {
		k = slices.IndexFunc(r.layers, func(l *layer) bool {
			return l.rec.UID == uid && l.hy == nil && (l.mapping == nil || l.crcs == nil)
		})
	})
	if k < 0 || err != nil {
		return err
	}
	now := &layer{disk: r.disk}
	if now.rec, err = r.disk.layerRecord(uid); err == nil {
		err = r.disk.openTables(now, r.disk.direct)
	}
	if err != nil {
		return errors.Join(err, now.close())
	}
	r.work.do(func() { // it builds no page meanwhile
		err = r.onLoop(func() {
			l := r.layers[k] // they change under mu alone
			if l.rec = now.rec; l.mapping == nil {
				l.m, l.mapping, now.mapping = now.m, now.mapping, nil
			}
			if l.crcs == nil {
				l.crcs, now.crcs = now.crcs, nil
			}
		})
	})
	return errors.Join(err, now.close())
}

func ignoreKind(err error, kind api.Kind) error {
	if api.Is(err, kind) {
		return nil
	}
	return err
}

// mendCRCs is rightCRCs where a failure does no harm.
func (d *Disk) mendCRCs(l *layer, c int64, buf []byte) {
	if err := d.rightCRCs(l, c, buf); err != nil {
		slog.Warn("checksums of a layer cannot be compared", "disk", d.root, "layer", l.rec.UID, "error", err)
	}
}
