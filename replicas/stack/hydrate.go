package stack

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// A layer that a source has can be read here at once: hydrating/<uid> has its map and its digests, and keeps the chunks
// that somebody read. A block that is not there is fetched with its whole chunk, and compared with the digest before
// anybody gets it. A layer that its source has frozen has no digests yet: the source is trusted with it, as readers on
// the source's own disk trust it. The folder is no copy of the layer: who makes one does so beside it, and once that is
// finished readers come home to it (Replica.Home), and the folder goes.

const (
	hydratingDir    = "hydrating"
	hydratingFile   = "hydrating.json"
	haveFile        = "have.json"
	formatHydrating = "drover-hydrating"
	formatHave      = "drover-have"
)

// haveRecord is have.json: which chunks are in data, durably.
type haveRecord struct {
	Chunks []byte `json:"chunks"` // one bit each, the lowest first
}

// thirst are the layers of a disk that are open while they are hydrated.
type thirst struct {
	mu   sync.Mutex
	open map[string]*hydration
}

// hydration is one of them. It owns the goroutines that fetch, and the one that keeps in mind what is there; they end
// when its last user leaves.
type hydration struct {
	d      *Disk
	dir    string
	rec    hydratingRecord
	kinds  *format.Index
	data   file.Handle
	sums   file.Handle     // nil: its source had no digests yet
	crcs   file.Handle     // of the blocks in data, as a finished layer has them
	have   []atomic.Uint64 // a bit per chunk: it is in data
	failed atomic.Pointer[error]

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	slots  chan struct{} // fetches at once

	users   int // under thirst.mu
	mu      sync.Mutex
	wanted  map[int64]bool  // chunks being fetched
	failing map[int64]error // those of them that no source gave at the last try
	tell    map[*layer]func(chunk int64)
	changed chan struct{} // closed when a chunk came or the state changed
	dirty   bool          // have is not durable
}

// readsAtOnce is how many reads of one disk for others are under way.
const readsAtOnce = 16

// Fetches at once of one layer, how often what came is made durable, and pauses after a failure.
const (
	fetchesAtOnce = 4
	haveEvery     = 2 * time.Second
	fetchPause    = 100 * time.Millisecond
	fetchPauseMax = 2 * time.Second
)

// openHydrating opens a layer that sources supply.
func (d *Disk) openHydrating(uid string, flag int) (_ *layer, err error) {
	rec, err := d.hydratingRecord(uid)
	if err != nil {
		return nil, err
	}
	d.thirst.mu.Lock()
	defer d.thirst.mu.Unlock()
	h := d.thirst.open[uid]
	if h == nil {
		if h, err = d.beginHydration(rec); err != nil {
			return nil, err
		}
		if d.thirst.open == nil {
			d.thirst.open = map[string]*hydration{}
		}
		d.thirst.open[uid] = h
	}
	h.users++
	l := &layer{disk: d, rec: rec.layerRecord, hy: h}
	if l.data, err = d.fs.Open(h.dir+"/"+dataFile, os.O_RDONLY|flag, 0); err == nil {
		l.mapping, err = d.fs.Open(h.dir+"/"+mapFile, os.O_RDONLY, 0)
	}
	if err == nil {
		l.crcs, err = d.fs.Open(h.dir+"/"+crcsFile, os.O_RDONLY|flag, 0)
	}
	var st fs.FileInfo
	if err == nil {
		st, err = l.mapping.Stat()
	}
	if err == nil {
		l.m, err = format.OpenMap(l.mapping, st.Size(), rec.Size)
	}
	if err != nil {
		l.hy = nil
		h.leave(l)
		_ = l.close()
		return nil, err
	}
	return l, nil
}

func (d *Disk) beginHydration(rec hydratingRecord) (_ *hydration, err error) {
	chunks := (rec.Size + chunkSize - 1) / chunkSize
	h := &hydration{d: d, dir: d.path(hydratingDir, rec.UID), rec: rec, have: make([]atomic.Uint64, (chunks+63)/64),
		slots: make(chan struct{}, fetchesAtOnce), wanted: map[int64]bool{},
		failing: map[int64]error{}, tell: map[*layer]func(int64){}, changed: make(chan struct{})}
	defer func() {
		if err != nil {
			_ = h.closeFiles()
		}
	}()
	mapping, err := d.fs.Open(h.dir+"/"+mapFile, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer mapping.Close()
	st, err := mapping.Stat()
	if err != nil {
		return nil, err
	}
	m, err := format.OpenMap(mapping, st.Size(), rec.Size)
	if err != nil {
		return nil, err
	}
	if h.kinds, err = format.IndexOf(m); err != nil {
		return nil, err
	}
	if h.data, err = d.fs.Open(h.dir+"/"+dataFile, os.O_RDWR|d.direct, 0); err != nil {
		return nil, err
	}
	if rec.Root != "" {
		if h.sums, err = d.fs.Open(h.dir+"/"+sumsFile, os.O_RDONLY, 0); err != nil {
			return nil, err
		}
	}
	// An older version kept no checksums: a read judges the chunk by its digest then, and adds them.
	if h.crcs, err = d.fs.Open(h.dir+"/"+crcsFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err = h.crcs.Truncate(format.CRCsLength(rec.Size)); err != nil {
		return nil, err
	}
	var have haveRecord
	if err := format.ReadMeta(d.fs, h.dir+"/"+haveFile, formatHave, &have); err != nil && !errors.Is(err, fs.ErrNotExist) {
		slog.Warn("what is there of a layer is fetched again", "layer", rec.UID, "error", err)
		have.Chunks = nil
	}
	for c := range min(chunks, int64(len(have.Chunks))*8) {
		if have.Chunks[c/8]>>(c%8)&1 == 1 {
			h.set(c)
		}
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.wg.Go(h.keep)
	return h, nil
}

func (h *hydration) closeFiles() error {
	var errs []error
	for _, f := range []file.Handle{h.data, h.sums, h.crcs} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

func (h *hydration) set(c int64)      { h.have[c/64].Or(1 << (c % 64)) }
func (h *hydration) has(c int64) bool { return h.have[c/64].Load()>>(c%64)&1 == 1 }

// ready reports whether a range can be read, and asks for what lacks. It does not block.
func (h *hydration) ready(off, n int64) bool {
	ok := true
	for c := off / chunkSize; c <= (off+n-1)/chunkSize; c++ {
		if !h.has(c) {
			ok = false
			h.want(c)
		}
	}
	return ok
}

// want has a chunk fetched.
func (h *hydration) want(c int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.wanted[c] || h.has(c) || h.ctx.Err() != nil {
		return
	}
	h.wanted[c] = true
	h.wg.Go(func() { h.bring(c) })
}

// bring fetches a chunk, for as long as it takes.
func (h *hydration) bring(c int64) {
	for pause := fetchPause; ; pause = min(2*pause, fetchPauseMax) {
		err := h.fetch(c)
		if err == nil {
			h.came(c)
			return
		}
		if h.ctx.Err() != nil {
			return
		}
		h.fails(c, err)
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-h.ctx.Done():
			t.Stop()
			return
		}
	}
}

// fetch tries to fetch a chunk. It has a slot for the try alone: chunks that no source gives keep no other waiting.
func (h *hydration) fetch(c int64) error {
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
	case <-h.ctx.Done():
		return h.ctx.Err()
	}
	buf := alignedBuffer(int(min(chunkSize, h.rec.Size-c*chunkSize)))
	var checked atomic.Bool
	check := func(b []byte) error {
		if h.sums == nil {
			return nil
		}
		_, err := verified(h.sums, c, b)
		if err == nil {
			checked.Store(true)
		}
		return err
	}
	if err := h.d.fetch(h.ctx, h.rec.remote(), c*chunkSize, buf, check); err != nil {
		return err
	}
	if !checked.Load() { // once: it takes as long as all the rest
		if err := check(buf); err != nil {
			return err
		}
	}
	first := c * chunkBlks
	for b, end := first, first+int64(len(buf))>>blockBits; b < end; {
		v, n := h.kinds.Run(b, end)
		if block.Kind(v) == block.Data {
			if _, err := h.data.WriteAt(buf[(b-first)<<blockBits:][:n<<blockBits], b<<blockBits); err != nil {
				return classify(err)
			}
		}
		b += n
	}
	return classify(format.PutCRCs(h.crcs, c, buf))
}

// lose takes damaged chunks out of the data, and fetches them again.
func (h *hydration) lose(bad []Damage) {
	for _, g := range bad {
		c := g.Off / chunkSize
		h.have[c/64].And(^(uint64(1) << (c % 64)))
		h.want(c)
	}
	h.mu.Lock()
	h.dirty = true
	h.mu.Unlock()
}

// fails notes that no source gave a chunk.
func (h *hydration) fails(c int64, err error) {
	h.mu.Lock()
	is := h.failing[c] != nil
	h.failing[c] = err
	first := h.failed.Swap(&err) == nil
	h.mu.Unlock()
	if first {
		slog.Warn("no source gives a chunk of a layer; reads of the chunk wait", "layer", h.rec.UID, "disk", h.d.root,
			"offset", c*chunkSize, "error", err)
	}
	if !is {
		h.news(-1)
	}
}

// came takes note of a chunk.
func (h *hydration) came(c int64) {
	h.set(c)
	h.mu.Lock()
	delete(h.wanted, c)
	delete(h.failing, c)
	h.dirty = true
	ended := len(h.failing) == 0 && h.failed.Swap(nil) != nil
	h.mu.Unlock()
	if ended {
		slog.Info("sources give all chunks of a layer again", "layer", h.rec.UID, "disk", h.d.root)
	}
	h.news(c)
}

// news reports a chunk that came, or another change, to all readers of the layer.
func (h *hydration) news(c int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.changed)
	h.changed = make(chan struct{})
	for _, tell := range h.tell {
		tell(c)
	}
}

// listen calls fn with each chunk that came, or with -1 after another change. Fn must not block.
func (h *hydration) listen(l *layer, fn func(chunk int64)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tell[l] = fn
}

// await returns when a range can be read, or with the error of a chunk of it that no source gives.
func (h *hydration) await(off, n int64) error {
	for {
		h.mu.Lock()
		changed := h.changed
		h.mu.Unlock()
		if h.ready(off, n) {
			return nil
		}
		if err := h.lacks(off, n); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-h.ctx.Done():
			return api.Errorf(api.Unavailable, "layer %s is not hydrated any more", h.rec.UID)
		}
	}
}

// lacks is the error of a chunk that no source gives.
func (h *hydration) lacks(off, n int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for c := off / chunkSize; c <= (off+n-1)/chunkSize; c++ {
		if err := h.failing[c]; err != nil {
			return err
		}
	}
	return nil
}

// keep makes durable what is there, now and then.
func (h *hydration) keep() {
	tick := time.NewTicker(haveEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			h.note()
		case <-h.ctx.Done():
			return
		}
	}
}

func (h *hydration) note() {
	h.mu.Lock()
	dirty := h.dirty
	h.dirty = false
	h.mu.Unlock()
	if !dirty {
		return
	}
	rec := haveRecord{Chunks: make([]byte, len(h.have)*8)}
	for i := range h.have {
		v := h.have[i].Load()
		for k := range 8 {
			rec.Chunks[i*8+k] = byte(v >> (8 * k))
		}
	}
	// What fails is fetched again by the next process.
	err := atOnce(h.data.Datasync, h.crcs.Datasync)
	if err == nil {
		err = format.WriteMeta(h.d.fs, h.dir+"/"+haveFile, formatHave, rec)
	}
	if err != nil && !errors.Is(err, unix.ENOSPC) {
		slog.Warn("what is there of a layer is not kept in mind", "layer", h.rec.UID, "error", err)
	}
}

// leave ends the use by a layer. With the last one all fetching ends; the folder goes if nobody needs it any more.
func (h *hydration) leave(l *layer) {
	h.mu.Lock()
	delete(h.tell, l)
	h.mu.Unlock()
	h.d.background.Go(func() { // fetches are waited for, and the disk's lock
		h.d.thirst.mu.Lock()
		h.users--
		last := h.users == 0
		if last {
			h.mu.Lock()
			h.cancel() // nothing is wanted from here on
			h.mu.Unlock()
			h.wg.Wait()
			h.note()
			delete(h.d.thirst.open, h.rec.UID)
			_ = h.closeFiles() // all of it is only a hint
		}
		h.d.thirst.mu.Unlock()
		if last {
			h.d.dropHydrating()
		}
	})
}

// dropHydrating removes what was read of layers that are finished here by now, or that nobody names.
func (d *Disk) dropHydrating() {
	d.thirst.mu.Lock()
	defer d.thirst.mu.Unlock()
	entries, err := d.fs.ReadDir(d.path(hydratingDir))
	if err != nil || len(entries) == 0 {
		return
	}
	unlock, err := d.lock()
	if err != nil {
		return
	}
	defer unlock()
	names, err := d.named()
	if err != nil {
		return // as long as a record cannot be read nothing goes
	}
	for _, e := range entries {
		uid := e.Name()
		if d.thirst.open[uid] != nil {
			continue
		}
		if _, err := d.layerRecord(uid); err != nil && names[uid] {
			continue
		}
		if err := file.RemoveAll(d.fs, d.path(hydratingDir, uid)); err != nil {
			slog.Warn("what was read of a layer stays for now", "layer", uid, "disk", d.root, "error", err)
		}
	}
}

// DropHydrating removes, in the background, what was read of layers of sources and is not needed any more.
func (d *Disk) DropHydrating() { d.background.Go(d.dropHydrating) }
