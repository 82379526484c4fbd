package layer

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
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Hydration serves reads of a layer before the disk has a copy: hydrating/<uid> holds the map, the digests, and the
// chunks that readers needed so far. Hydration fetches the whole chunk of a missing block, and compares the chunk with
// its digest before a reader gets the block. A frozen layer of a source has no digests yet: hydration trusts the source
// like a reader on the source's disk does. The folder is no copy of the layer: a copy is made in layers/, and when the
// copy is finished, readers change to the copy (Replica.Localize) and the folder is deleted.

// Names and formats of a hydration's files.
const (
	HydratingDir    = "hydrating"
	hydratingFile   = "hydrating.json"
	haveFile        = "have.json"
	formatHydrating = "drover-hydrating"
	formatHave      = "drover-have"
)

// haveRecord is have.json: the chunks that are durable in data.
type haveRecord struct {
	Chunks []byte `json:"chunks"` // one bit each, the lowest first
}

// hydrations holds the open hydrations of a disk, by the uid of the layer.
type hydrations struct {
	mu   sync.Mutex
	open map[string]*Hydration
}

// Hydration fetches the chunks of one layer. It owns the goroutines that fetch and the goroutine that saves have.json;
// all end when the last user leaves.
type Hydration struct {
	d      *Store
	dir    string
	Rec    hydratingRecord
	Kinds  *format.Index
	data   file.Handle
	sums   file.Handle     // nil: the source had no digests yet
	crcs   file.Handle     // of the blocks in data, as a finished layer has them
	have   []atomic.Uint64 // a bit per chunk: data holds the chunk
	Failed atomic.Pointer[error]

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	slots  chan struct{} // fetches at once

	users   int // guarded by hydrations.mu
	Mu      sync.Mutex
	wanted  map[int64]bool  // chunks being fetched
	Failing map[int64]error // wanted chunks that no source supplied at the last try
	tell    map[*Layer]func(chunk int64)
	changed chan struct{} // closed when a chunk arrived or the state changed
	dirty   bool          // have is not durable
}

// readsAtOnce bounds the reads of one disk for other disks.
const readsAtOnce = 16

// Fetches of one layer at once, the interval between saves of have.json, and the pauses after a failure.
const (
	FetchesAtOnce = 4
	haveEvery     = 2 * time.Second
	fetchPause    = 100 * time.Millisecond
	fetchPauseMax = 2 * time.Second
)

// openHydrating opens a layer that sources supply.
func (d *Store) openHydrating(uid string, flag int) (_ *Layer, err error) {
	rec, err := d.hydratingRecord(uid)
	if err != nil {
		return nil, err
	}
	d.hydrations.mu.Lock()
	defer d.hydrations.mu.Unlock()
	h := d.hydrations.open[uid]
	if h == nil {
		if h, err = d.beginHydration(rec); err != nil {
			return nil, err
		}
		if d.hydrations.open == nil {
			d.hydrations.open = map[string]*Hydration{}
		}
		d.hydrations.open[uid] = h
	}
	h.users++
	l := &Layer{Store: d, Rec: rec.Record, Hydration: h}
	if l.Data, err = d.FS.Open(h.dir+"/"+DataFile, os.O_RDONLY|flag, 0); err == nil {
		l.MapFile, err = d.FS.Open(h.dir+"/"+MapFile, os.O_RDONLY, 0)
	}
	if err == nil {
		l.CRCs, err = d.FS.Open(h.dir+"/"+CRCsFile, os.O_RDONLY|flag, 0)
	}
	var st fs.FileInfo
	if err == nil {
		st, err = l.MapFile.Stat()
	}
	if err == nil {
		l.Map, err = format.OpenMap(l.MapFile, st.Size(), rec.Size)
	}
	if err != nil {
		l.Hydration = nil
		h.endUse(l)
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

func (d *Store) beginHydration(rec hydratingRecord) (_ *Hydration, err error) {
	chunks := (rec.Size + chunkSize - 1) / chunkSize
	h := &Hydration{d: d, dir: d.Join(HydratingDir, rec.UID), Rec: rec, have: make([]atomic.Uint64, (chunks+63)/64),
		slots: make(chan struct{}, FetchesAtOnce), wanted: map[int64]bool{},
		Failing: map[int64]error{}, tell: map[*Layer]func(int64){}, changed: make(chan struct{})}
	defer func() {
		if err != nil {
			_ = h.closeFiles()
		}
	}()
	mapping, err := d.FS.Open(h.dir+"/"+MapFile, os.O_RDONLY, 0)
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
	if h.Kinds, err = format.IndexOf(m); err != nil {
		return nil, err
	}
	if h.data, err = d.FS.Open(h.dir+"/"+DataFile, os.O_RDWR|d.Direct, 0); err != nil {
		return nil, err
	}
	if rec.Root != "" {
		if h.sums, err = d.FS.Open(h.dir+"/"+SumsFile, os.O_RDONLY, 0); err != nil {
			return nil, err
		}
	}
	// An older version kept no checksums: then a read compares the digest, and adds the checksums.
	if h.crcs, err = d.FS.Open(h.dir+"/"+CRCsFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err = h.crcs.Truncate(format.CRCsLength(rec.Size)); err != nil {
		return nil, err
	}
	var have haveRecord
	if err := format.ReadMeta(d.FS, h.dir+"/"+haveFile, formatHave, &have); err != nil && !errors.Is(err, fs.ErrNotExist) {
		slog.Warn("the record of fetched chunks cannot be read: they are fetched again", "layer", rec.UID, "error", err)
		have.Chunks = nil
	}
	for c := range min(chunks, int64(len(have.Chunks))*8) {
		if have.Chunks[c/8]>>(c%8)&1 == 1 {
			h.setChunk(c)
		}
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.wg.Go(h.saveAtIntervals)
	return h, nil
}

func (h *Hydration) closeFiles() error {
	var errs []error
	for _, f := range []file.Handle{h.data, h.sums, h.crcs} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

func (h *Hydration) setChunk(c int64)      { h.have[c/64].Or(1 << (c % 64)) }
func (h *Hydration) hasChunk(c int64) bool { return h.have[c/64].Load()>>(c%64)&1 == 1 }

// Ready reports whether a range can be read, and starts the fetch of missing chunks. Ready does not block.
func (h *Hydration) Ready(off, n int64) bool {
	ok := true
	for c := off / chunkSize; c <= (off+n-1)/chunkSize; c++ {
		if !h.hasChunk(c) {
			ok = false
			h.wantChunk(c)
		}
	}
	return ok
}

// wantChunk starts the fetch of a chunk.
func (h *Hydration) wantChunk(c int64) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	if h.wanted[c] || h.hasChunk(c) || h.ctx.Err() != nil {
		return
	}
	h.wanted[c] = true
	h.wg.Go(func() { h.fetchUntilDone(c) })
}

// fetchUntilDone fetches a chunk, and tries again after failures until the hydration ends.
func (h *Hydration) fetchUntilDone(c int64) {
	for pause := fetchPause; ; pause = min(2*pause, fetchPauseMax) {
		err := h.fetchChunk(c)
		if err == nil {
			h.chunkArrived(c)
			return
		}
		if h.ctx.Err() != nil {
			return
		}
		h.chunkFailed(c, err)
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-h.ctx.Done():
			t.Stop()
			return
		}
	}
}

// fetchChunk tries to fetch a chunk once. fetchChunk holds a slot only during the try, so that a chunk without a source
// does not delay other chunks.
func (h *Hydration) fetchChunk(c int64) error {
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
	case <-h.ctx.Done():
		return h.ctx.Err()
	}
	buf := block.AlignedBuffer(int(min(chunkSize, h.Rec.Size-c*chunkSize)))
	var checked atomic.Bool
	check := func(b []byte) error {
		if h.sums == nil {
			return nil
		}
		_, err := VerifyChunk(h.sums, c, b)
		if err == nil {
			checked.Store(true)
		}
		return err
	}
	if err := h.d.fetch(h.ctx, h.Rec.Remote(), c*chunkSize, buf, check); err != nil {
		return err
	}
	if !checked.Load() { // once, because the digest costs as much as the rest
		if err := check(buf); err != nil {
			return err
		}
	}
	first := c * chunkBlks
	for b, end := first, first+int64(len(buf))>>blockBits; b < end; {
		v, n := h.Kinds.Run(b, end)
		if block.Kind(v) == block.Data {
			if _, err := h.data.WriteAt(buf[(b-first)<<blockBits:][:n<<blockBits], b<<blockBits); err != nil {
				return diskfs.Classify(err)
			}
		}
		b += n
	}
	return diskfs.Classify(format.PutCRCs(h.crcs, c, buf))
}

// Lose drops damaged chunks and fetches the chunks again.
func (h *Hydration) Lose(bad []Damage) {
	for _, g := range bad {
		c := g.Off / chunkSize
		h.have[c/64].And(^(uint64(1) << (c % 64)))
		h.wantChunk(c)
	}
	h.Mu.Lock()
	h.dirty = true
	h.Mu.Unlock()
}

// chunkFailed records that no source supplied a chunk.
func (h *Hydration) chunkFailed(c int64, err error) {
	h.Mu.Lock()
	is := h.Failing[c] != nil
	h.Failing[c] = err
	first := h.Failed.Swap(&err) == nil
	h.Mu.Unlock()
	if first {
		slog.Warn("no source gives a chunk of a layer; reads of the chunk wait", "layer", h.Rec.UID, "disk", h.d.Root,
			"offset", c*chunkSize, "error", err)
	}
	if !is {
		h.notifyReaders(-1)
	}
}

// chunkArrived records that a chunk arrived.
func (h *Hydration) chunkArrived(c int64) {
	h.setChunk(c)
	h.Mu.Lock()
	delete(h.wanted, c)
	delete(h.Failing, c)
	h.dirty = true
	ended := len(h.Failing) == 0 && h.Failed.Swap(nil) != nil
	h.Mu.Unlock()
	if ended {
		slog.Info("sources give all chunks of a layer again", "layer", h.Rec.UID, "disk", h.d.Root)
	}
	h.notifyReaders(c)
}

// notifyReaders reports an arrived chunk, or another change (-1), to all readers of the layer.
func (h *Hydration) notifyReaders(c int64) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	close(h.changed)
	h.changed = make(chan struct{})
	for _, tell := range h.tell {
		tell(c)
	}
}

// Listen calls fn with each chunk that arrives, or with -1 after another change. Fn must not block.
func (h *Hydration) Listen(l *Layer, fn func(chunk int64)) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	h.tell[l] = fn
}

// Await returns when a range can be read, or with the error of a chunk that no source supplies.
func (h *Hydration) Await(off, n int64) error {
	for {
		h.Mu.Lock()
		changed := h.changed
		h.Mu.Unlock()
		if h.Ready(off, n) {
			return nil
		}
		if err := h.failureIn(off, n); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-h.ctx.Done():
			return api.Errorf(api.Unavailable, "layer %s is not hydrated any more", h.Rec.UID)
		}
	}
}

// failureIn returns the error of a chunk in the range that no source supplies.
func (h *Hydration) failureIn(off, n int64) error {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	for c := off / chunkSize; c <= (off+n-1)/chunkSize; c++ {
		if err := h.Failing[c]; err != nil {
			return err
		}
	}
	return nil
}

// saveAtIntervals saves the state at intervals.
func (h *Hydration) saveAtIntervals() {
	tick := time.NewTicker(haveEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			h.SaveState()
		case <-h.ctx.Done():
			return
		}
	}
}

// SaveState makes fetched chunks durable and records them in have.json.
func (h *Hydration) SaveState() {
	h.Mu.Lock()
	dirty := h.dirty
	h.dirty = false
	h.Mu.Unlock()
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
	// After a failure the next process fetches the chunks again.
	err := diskfs.AtOnce(h.data.Datasync, h.crcs.Datasync)
	if err == nil {
		err = format.WriteMeta(h.d.FS, h.dir+"/"+haveFile, formatHave, rec)
	}
	if err != nil && !errors.Is(err, unix.ENOSPC) {
		slog.Warn("the record of fetched chunks cannot be written", "layer", h.Rec.UID, "error", err)
	}
}

// endUse ends the use by an open layer. With the last user all fetches end, and an unneeded folder is deleted.
func (h *Hydration) endUse(l *Layer) {
	h.Mu.Lock()
	delete(h.tell, l)
	h.Mu.Unlock()
	h.d.Go(func() { // waits for fetches and for the disk's lock
		h.d.hydrations.mu.Lock()
		h.users--
		last := h.users == 0
		if last {
			h.Mu.Lock()
			h.cancel() // no fetch starts from here on
			h.Mu.Unlock()
			h.wg.Wait()
			h.SaveState()
			delete(h.d.hydrations.open, h.Rec.UID)
			_ = h.closeFiles() // the files are only a cache
		}
		h.d.hydrations.mu.Unlock()
		if last {
			h.d.dropHydrating()
		}
	})
}

// dropHydrating deletes the folders of layers that are finished on this disk by now, or that no record names.
func (d *Store) dropHydrating() {
	d.hydrations.mu.Lock()
	defer d.hydrations.mu.Unlock()
	entries, err := d.FS.ReadDir(d.Join(HydratingDir))
	if err != nil || len(entries) == 0 {
		return
	}
	unlock, err := d.Lock()
	if err != nil {
		return
	}
	defer unlock()
	names, err := d.records.Named()
	if err != nil {
		return // nothing is deleted while a record is unreadable
	}
	for _, e := range entries {
		uid := e.Name()
		if d.hydrations.open[uid] != nil {
			continue
		}
		if _, err := d.Record(uid); err != nil && names[uid] {
			continue
		}
		if err := file.RemoveAll(d.FS, d.Join(HydratingDir, uid)); err != nil {
			slog.Warn("the folder of a hydration stays for now", "layer", uid, "disk", d.Root, "error", err)
		}
	}
}

// DropHydrating deletes, in the background, the folders of hydrated layers that are not needed any more.
func (d *Store) DropHydrating() { d.Go(d.dropHydrating) }
