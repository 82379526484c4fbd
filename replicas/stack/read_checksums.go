package stack

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// Reads of finished layers compare the blocks with their checksums before the answer. After a mismatch the worker reads
// the chunk again and compares the chunk with its digest; known damage is compared in the same way, because a repair
// may have come meanwhile. So no read returns damage, whether a scrub has found the damage or not.
//
// The data path reads the checksums in pages (of 4 MiB of data), together with the data, and keeps a bounded number of
// pages in memory.

const (
	crcPagesOwn = 64       // pages that a replica may keep in any case
	crcPagesAll = 16 << 10 // pages of all replicas of the process: 64 MiB, for 64 GiB of data
	crcSlab     = 16       // pages that are allocated at once
)

// crcPagesUsed counts the pages of all replicas, beyond crcPagesOwn of each.
var crcPagesUsed atomic.Int64

// crcPage is a page of a layer's checksums. It belongs to the loop's thread.
type crcPage struct {
	op    uring.Op
	r     *Replica
	l     *layer.Layer
	n     int64
	crc   []byte
	waits *part // reads that wait for the page
	ready bool
	used  bool // since the hand passed
}

// crcPageKey names a page of the checksums of a layer.
type crcPageKey struct {
	l *layer.Layer
	n int64
}

// forgetRange drops the pages with checksums of a range of a layer, so that the next read reads them again. Pages that
// are being read stay.
func (c *crcCache) forgetRange(l *layer.Layer, off, end int64) {
	for n := off >> blockBits >> format.CRCPageBits; n<<format.CRCPageBits<<blockBits < end; n++ {
		if page := c.at[crcPageKey{l, n}]; page != nil && page.ready {
			page.forget()
		}
	}
}

// crcCache holds pages with checksums of a replica's layers.
type crcCache struct {
	pages []*crcPage
	at    map[crcPageKey]*crcPage
	hand  int
	slab  []byte
}

// crcsOfBlock returns the page with the checksum of a block, and starts the read of a missing page.
func (r *Replica) crcsOfBlock(l *layer.Layer, b int64) *crcPage {
	n := b >> format.CRCPageBits
	if page := r.crcs.at[crcPageKey{l, n}]; page != nil {
		return page
	}
	page := r.crcs.takePage(r)
	page.l, page.n, page.ready, page.used = l, n, false, true
	if r.crcs.at == nil {
		r.crcs.at = map[crcPageKey]*crcPage{}
	}
	r.crcs.at[crcPageKey{l, n}] = page
	r.inflight++ // keeps the file open
	r.ring.Read(&page.op, int(l.CRCs.Fd()), page.crc, n*format.CRCPageSize)
	return page
}

// takePage returns a page that no read waits for.
func (c *crcCache) takePage(r *Replica) *crcPage {
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
		c.slab = block.AlignedBuffer(crcSlab * int(format.CRCPageSize))
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

// freePages gives back the memory of the cache. The replica is closed.
func (c *crcCache) freePages() {
	if n := len(c.pages) - crcPagesOwn; n > 0 {
		crcPagesUsed.Add(int64(-n))
	}
	*c = crcCache{}
}

func crcsRead(op *uring.Op, res int32) {
	page := op.Ctx.(*crcPage)
	r := page.r
	if mustRetry(res) {
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
			r.compareChecksums(p)
		} else {
			r.judgeRead(p)
		}
	}
	r.endOperation()
}

// compareChecksums compares the bytes of a read of a layer, and then ends the read.
func (r *Replica) compareChecksums(p *part) {
	l := r.layers[p.src-1]
	moved, gave := r.merge.Moved(r.layers, p.src-1)
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
					r.judgeRead(p)
					return
				}
				switch known, whole := r.matchesGiver(p, gave, blk); {
				case !known:
					return // p waits for the checksums
				case !whole:
					r.judgeRead(p)
					return
				}
			}
			p.good += int(blockSize)
		}
	}
	r.endReadPart(p, nil)
}

// endReadPart ends a part of a read.
func (r *Replica) endReadPart(p *part, err error) {
	f := p.f
	if err != nil {
		f.err = err
	}
	if p.free() {
		f.endRequest(f.err)
	}
}

// judgeRead compares the digests of a read in the worker, and then ends the read.
func (r *Replica) judgeRead(p *part) {
	l := r.layers[p.src-1]
	moved, gave := r.merge.Moved(r.layers, p.src-1)
	moved = min(max((moved+chunkSize-1)&^(chunkSize-1)-p.at, 0), int64(len(p.all)))
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
				r.endReadPart(p, ErrNotFetched)
				return
			}
			if err == nil && n > 0 && l.Hydration == nil {
				l.Store.Learn(l, off, n, bad)
				l.Damage = layer.ReplaceDamage(l.Damage, off, n, bad)
			}
			if n > 0 {
				r.crcs.forgetRange(l, off, off+n) // a repair may correct the checksums
			}
			switch {
			case lost || len(bad) > 0:
				r.endReadPart(p, ErrDamaged)
			case err != nil:
				r.endReadPart(p, unix.EIO)
			default:
				r.endReadPart(p, nil)
			}
		})
	})
}

func (r *Replica) layerFinished(uid string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isOpen() != nil || !slices.Contains(r.Meta().Layers, uid) {
		return nil
	}
	return layer.IgnoreKind(r.adoptFinished(uid), api.NotFound)
}

// adoptFinished takes over the map and the checksums of a layer that was finished after it was opened: from then on
// reads of it are compared, and what it holds is no longer asked of its file, which a merge changes. The caller has mu.
func (r *Replica) adoptFinished(uid string) error {
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
