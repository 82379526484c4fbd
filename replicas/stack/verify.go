package stack

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
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
	l     *layer.Layer
	n     int64
	crc   []byte
	waits *part // reads that are there and wait for it
	ready bool
	used  bool // since the hand passed
}

// crcPageKey names a page of the checksums of a layer.
type crcPageKey struct {
	l *layer.Layer
	n int64
}

// forget drops the pages with checksums of a range of a layer, so that the next read reads them again. Pages that are
// being read stay.
func (c *crcCache) forget(l *layer.Layer, off, end int64) {
	for n := off >> BlockBits >> format.CRCPageBits; n<<format.CRCPageBits<<BlockBits < end; n++ {
		if page := c.at[crcPageKey{l, n}]; page != nil && page.ready {
			page.forget()
		}
	}
}

// crcCache is what a replica keeps of its layers' checksums.
type crcCache struct {
	pages []*crcPage
	at    map[crcPageKey]*crcPage
	hand  int
	slab  []byte
}

// crcsOfBlock is the page with the checksum of a block, which may still be on its way.
func (r *Replica) crcsOfBlock(l *layer.Layer, b int64) *crcPage {
	n := b >> format.CRCPageBits
	if page := r.crcs.at[crcPageKey{l, n}]; page != nil {
		return page
	}
	page := r.takePage()
	page.l, page.n, page.ready, page.used = l, n, false, true
	if r.crcs.at == nil {
		r.crcs.at = map[crcPageKey]*crcPage{}
	}
	r.crcs.at[crcPageKey{l, n}] = page
	r.inflight++ // nobody closes the file meanwhile
	r.ring.Read(&page.op, int(l.CRCs.Fd()), page.crc, n*format.CRCPageSize)
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
		c.slab = diskfs.AlignedBuffer(crcSlab * int(format.CRCPageSize))
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
	if at := p.r.crcs.at; p.l != nil && at[crcPageKey{p.l, p.n}] == p {
		delete(at, crcPageKey{p.l, p.n})
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
		r.ring.Read(op, int(page.l.CRCs.Fd()), page.crc, page.n*format.CRCPageSize)
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
	moved, gave := r.merge.Moved(r.layers, p.src-1)
	for p.good < len(p.all) {
		b := (p.at + int64(p.good)) >> BlockBits
		page := r.crcsOfBlock(l, b)
		if !page.ready {
			p.next, page.waits = page.waits, p
			return
		}
		page.used = true
		crcs := page.crc[b&(format.CRCPageBlocks-1)*CRCSize:]
		for ; len(crcs) > 0 && p.good < len(p.all); crcs = crcs[CRCSize:] {
			if blk := p.all[p.good:][:BlockSize]; format.BlockCRC(blk) != binary.LittleEndian.Uint32(crcs) {
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
			p.good += int(BlockSize)
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
	moved, gave := r.merge.Moved(r.layers, p.src-1)
	moved = min(max((moved+ChunkSize-1)&^(ChunkSize-1)-p.at, 0), int64(len(p.all)))
	r.work.put(func() {
		rest, at := p.all[moved:], p.at+moved
		lost := !l.JudgeMoved(p.all[:moved], p.at, gave)
		var bad []Damage
		var err error
		if len(rest) > 0 {
			bad, err = l.Judge(rest, at)
		}
		if err != nil {
			slog.Error("a read is neither sound nor known to be damaged; it fails", "layer", l.Rec.UID, "disk", l.Store.Root,
				"offset", p.at, "error", err)
		}
		r.ring.Post(func() {
			off, n := at, int64(len(rest))
			if len(bad) > 0 && l.Hydration != nil {
				l.Hydration.Lose(bad)
				r.ended(p, ErrNotFetched)
				return
			}
			if err == nil && n > 0 && l.Hydration == nil {
				l.Store.Learn(l, off, n, bad)
				l.Damage = layer.ReplaceDamage(l.Damage, off, n, bad)
			}
			if n > 0 {
				r.crcs.forget(l, off, off+n) // a repair may correct the checksums
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

func (r *Replica) finished(uid string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isOpen() != nil || !slices.Contains(r.Meta().Layers, uid) {
		return nil
	}
	return layer.IgnoreKind(r.know(uid), api.NotFound)
}

// know takes over the map and the checksums of a layer that was finished after it was opened: from then on reads of it
// are compared, and what it holds is no longer asked of its file, which a merge changes. The caller has mu.
func (r *Replica) know(uid string) error {
	k := -1
	err := r.onLoop(func() {
		k = slices.IndexFunc(r.layers, func(l *layer.Layer) bool {
			return l.Rec.UID == uid && l.Hydration == nil && (l.MapFile == nil || l.CRCs == nil)
		})
	})
	if k < 0 || err != nil {
		return err
	}
	now := &layer.Layer{Store: r.disk.Store}
	if now.Rec, err = r.disk.Record(uid); err == nil {
		err = r.disk.OpenTables(now, r.disk.Direct)
	}
	if err != nil {
		return errors.Join(err, now.Close())
	}
	r.work.do(func() { // it builds no page meanwhile
		err = r.onLoop(func() {
			l := r.layers[k] // they change under mu alone
			if l.Rec = now.Rec; l.MapFile == nil {
				l.Map, l.MapFile, now.MapFile = now.Map, now.MapFile, nil
			}
			if l.CRCs == nil {
				l.CRCs, now.CRCs = now.CRCs, nil
			}
		})
	})
	return errors.Join(err, now.Close())
}
