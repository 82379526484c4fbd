package repo

import (
	"context"
	"errors"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/pack"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/backups/target"
	"drover.io/drover/block"
	"drover.io/drover/block/budget"
	"drover.io/drover/block/pace"
)

// Defaults and bounds of a Writer.
const (
	DefaultPackSize = 32 << 20
	DefaultMemory   = 256 << 20

	largestPack = 128 << 20 // as in restic
	packHeader  = 256       // room for the header of a pack with a single blob
	mostPacks   = 256
	mostUploads = 4 // packs that are hashed and sent at once
	indexStep   = 30 * time.Second
	indexPacks  = 256
)

// WriterOptions bound a Writer.
type WriterOptions struct {
	PackSize int          // most bytes of a pack; 0: DefaultPackSize
	Memory   int64        // bytes of all packs that are filled or sent, at least three packs; 0: DefaultMemory
	Pacer    *pace.Pacer  // of the node, for packs; nil: never waits
	Budget   *budget.Part // has the packs until Close; nil: no bound
	Beside   int64        // bytes of other buffers of the session, to reserve, too
	Lock     *Lock        // of the session: a sweep leaves the packs of a session that runs alone; nil in tests
}

// WriterStats counts the work of a Writer.
type WriterStats struct {
	KnownBlobs, NewBlobs int64
	PlainBytes           int64 // of new blobs, before compression
	Packs, StoredBytes   int64 // of durable packs
}

// Writer adds blobs to the repository. The goroutines that call Add hash, compress and seal; the Writer's own
// goroutines send full packs, and write an index file every 30 seconds or 256 packs. Methods are safe for concurrent
// use.
type Writer struct {
	r        *Repository
	blobs    *Blobs
	packSize int
	lock     *Lock
	pacer    *pace.Pacer
	release  func() // of the memory

	ctx        context.Context // ends with the session, with the first error and with Close
	end        context.CancelCauseFunc
	goroutines sync.WaitGroup
	buffers    chan []byte    // free memory of packs
	allowed    chan struct{}  // one for each buffer that may still be allocated
	uploads    chan *openPack // full packs; never blocks: the Writer has no more packs than buffers

	indexing sync.Mutex // one index file is written at a time; held without mu

	mu         sync.Mutex
	open       [blob.Kinds]*openPack   // the pack that grows
	pending    map[blobHandle]struct{} // blobs in packs that are not durable yet
	unfinished map[*openPack]struct{}
	unindexed  index.FileBuilder // durable packs
	stats      WriterStats
}

// openPack is a pack from the first blob until the pack is durable.
type openPack struct {
	builder *pack.Builder
	buffer  []byte
	sealing int  // calls of Add that seal into the pack
	full    bool // no more blobs; uploaded when sealing is 0
	done    chan struct{}
}

// NewWriter starts a Writer within a session: session is Lock.Context, and blobs were loaded under this lock. NewWriter
// waits for the memory of the session. The caller closes the Writer.
func NewWriter(session context.Context, blobs *Blobs, o WriterOptions) (*Writer, error) {
	if o.PackSize == 0 {
		o.PackSize = DefaultPackSize
	}
	if o.Memory == 0 {
		o.Memory = DefaultMemory
	}
	if o.PackSize <= packHeader || o.PackSize > largestPack {
		return nil, api.Errorf(api.Invalid, "packs of %d bytes: not allowed; at most %d are", o.PackSize, largestPack)
	}
	packs := int(min(max(o.Memory/int64(o.PackSize), 3), mostPacks))
	release, err := o.Budget.Reserve(session, int64(packs)*int64(o.PackSize)+o.Beside)
	if err != nil {
		return nil, err
	}
	w := &Writer{r: blobs.r, release: release, blobs: blobs, packSize: o.PackSize, lock: o.Lock, pacer: o.Pacer,
		buffers: make(chan []byte, packs), allowed: make(chan struct{}, packs), uploads: make(chan *openPack, packs),
		pending: map[blobHandle]struct{}{}, unfinished: map[*openPack]struct{}{}}
	for range packs {
		w.allowed <- struct{}{}
	}
	w.ctx, w.end = context.WithCancelCause(session)
	for range min(packs/2, mostUploads) {
		w.goroutines.Go(w.uploadPacks)
	}
	w.goroutines.Go(w.writeIndexFiles)
	return w, nil
}

// Add adds a blob unless the repository has the blob. Add does not keep plain. added says that this call stored the
// blob. The blob is durable after the next Flush. An error ends the Writer, except that of a blob of a wrong size.
func (w *Writer) Add(ctx context.Context, kind blob.Kind, plain []byte) (id blob.ID, added bool, err error) {
	id = blob.Sum(plain)
	added, err = w.AddKnown(ctx, kind, id, plain)
	return id, added, err
}

// AddKnown is Add for a caller that has the blob's id and has compared the bytes with a checksum of equal age: a wrong
// id makes a damaged blob.
func (w *Writer) AddKnown(ctx context.Context, kind blob.Kind, id blob.ID, plain []byte) (added bool, err error) {
	if len(plain) == 0 || len(plain) > w.blobLimit() {
		return false, api.Errorf(api.Invalid, "%v blob %.8s: %d bytes; 1 to %d are allowed", kind, id, len(plain),
			w.blobLimit())
	}
	known, err := w.claim(ctx, blobHandle{id, kind})
	if err != nil || known {
		return false, err
	}
	scratch := scratchPool.Get().(*[]byte)
	defer scratchPool.Put(scratch)
	stored, plainLength := compressBlob(kind, plain, scratch)
	if err := w.store(ctx, kind, id, stored, plainLength, int64(len(plain))); err != nil {
		// Other callers may already rely on this call, so the Writer cannot continue without the blob.
		return false, w.fail(err)
	}
	return true, nil
}

// AddTree adds the tree blob of a folder's nodes, sorted by name.
func (w *Writer) AddTree(ctx context.Context, nodes []tree.Node) (blob.ID, error) {
	plain, err := tree.Encode(nodes)
	if err != nil {
		return blob.ID{}, err
	}
	id, _, err := w.Add(ctx, blob.Tree, plain)
	return id, err
}

// Has reports whether the repository has a blob, or a call of Add is storing the blob: then no caller needs to read the
// plain bytes.
func (w *Writer) Has(ctx context.Context, id blob.ID, kind blob.Kind) (bool, error) {
	if err := w.failure(); err != nil {
		return false, err
	}
	w.mu.Lock()
	_, known := w.pending[blobHandle{id, kind}]
	w.mu.Unlock()
	if !known {
		// After pending, as in claim.
		var err error
		if known, err = w.blobs.Has(ctx, id, kind); err != nil {
			return false, w.fail(err)
		}
	}
	if known {
		w.mu.Lock()
		w.stats.KnownBlobs++
		w.mu.Unlock()
	}
	return known, nil
}

// claim reports whether the blob is known; otherwise the caller must store the blob, and no other caller will.
func (w *Writer) claim(ctx context.Context, h blobHandle) (known bool, err error) {
	if err := w.failure(); err != nil {
		return false, err
	}
	w.mu.Lock()
	if _, known = w.pending[h]; !known {
		w.pending[h] = struct{}{}
	} else {
		w.stats.KnownBlobs++
	}
	w.mu.Unlock()
	if known {
		return true, nil
	}
	// After pending, because a durable pack's blobs enter the index before they leave pending.
	known, err = w.blobs.Has(ctx, h.id, h.kind)
	if err != nil {
		return false, w.fail(err)
	}
	if known {
		w.mu.Lock()
		delete(w.pending, h)
		w.stats.KnownBlobs++
		w.mu.Unlock()
	}
	return known, nil
}

// blobLimit is the longest blob that a pack of the Writer has room for, in bytes.
func (w *Writer) blobLimit() int { return w.packSize - packHeader }

// nextPackSize is the size of a new pack whose first blob has n stored bytes.
func (w *Writer) nextPackSize(n int) int {
	if w.r.options.LargestPack == nil {
		return w.packSize
	}
	largest := w.r.options.LargestPack()
	if largest <= 0 || largest >= int64(w.packSize) {
		return w.packSize
	}
	return min(max(int(largest), n+packHeader), w.packSize)
}

// store seals a blob of at most blobLimit stored bytes into a pack.
func (w *Writer) store(ctx context.Context, kind blob.Kind, id blob.ID, stored []byte, plainLength int,
	size int64) error {
	p, memory, err := w.reserve(ctx, kind, id, len(stored), plainLength)
	if err != nil {
		return err
	}
	w.r.key.Seal(memory, stored)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stats.NewBlobs++
	w.stats.PlainBytes += size
	p.sealing--
	w.dispatchFull(p)
	return nil
}

// reserve finds memory for a blob in the open pack, or in a new one, for which reserve waits for a buffer.
func (w *Writer) reserve(ctx context.Context, kind blob.Kind, id blob.ID, n, plainLength int) (
	p *openPack, memory []byte, err error) {
	var buffer []byte
	defer func() {
		if buffer != nil {
			w.buffers <- buffer
		}
	}()
	for {
		if p, memory = w.reserveNow(&buffer, kind, id, n, plainLength); p != nil {
			return p, memory, nil
		}
		if buffer, err = w.takeBuffer(ctx); err != nil {
			return nil, nil, err
		}
	}
}

// takeBuffer prefers memory that was used before.
func (w *Writer) takeBuffer(ctx context.Context) ([]byte, error) {
	select {
	case buffer := <-w.buffers:
		return buffer, nil
	default:
	}
	select {
	case buffer := <-w.buffers:
		return buffer, nil
	case <-w.allowed:
		return block.AlignedBuffer(w.packSize), nil
	case <-w.ctx.Done():
		return nil, context.Cause(w.ctx)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// reserveNow returns nil if the open pack has no room and buffer has no memory for a new one.
func (w *Writer) reserveNow(buffer *[]byte, kind blob.Kind, id blob.ID, n, plainLength int) (*openPack, []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		p := w.open[kind]
		if p == nil {
			if *buffer == nil {
				return nil, nil
			}
			size := w.nextPackSize(n)
			p = &openPack{builder: pack.NewBuilder(w.r.key, (*buffer)[:size:size]), buffer: *buffer,
				done: make(chan struct{})}
			*buffer, w.open[kind] = nil, p
			w.unfinished[p] = struct{}{}
		}
		if memory, ok := p.builder.Reserve(id, kind, n, plainLength); ok {
			p.sealing++
			return p, memory
		}
		w.closeOpen(kind)
	}
}

// closeOpen declares the open pack of a kind full.
func (w *Writer) closeOpen(kind blob.Kind) {
	if p := w.open[kind]; p != nil {
		w.open[kind], p.full = nil, true
		w.dispatchFull(p)
	}
}

func (w *Writer) dispatchFull(p *openPack) {
	if p.full && p.sealing == 0 {
		w.uploads <- p
	}
}

// uploadPacks is an uploader.
func (w *Writer) uploadPacks() {
	for {
		select {
		case <-w.ctx.Done():
			return
		case p := <-w.uploads:
			if err := w.upload(p); err != nil {
				_ = w.fail(err) // Add and Flush return the error
				return
			}
		}
	}
}

func (w *Writer) upload(p *openPack) error {
	id, body, entries := p.builder.Finish()
	// After an error the buffer belongs to the store, and no pack uses the buffer again.
	if err := w.putPack(packName(id), body); err != nil {
		return api.Errorf(api.KindOf(err), "repository %.8s: pack %.8s cannot be written: %w", w.r.ID(), id, err)
	}
	if err := w.blobs.addPack(w.ctx, id, entries); err != nil {
		return err
	}
	w.mu.Lock()
	full := w.unindexed.Full(len(entries))
	w.mu.Unlock()
	if full {
		if err := w.writeIndex(); err != nil {
			return err
		}
	}
	w.mu.Lock()
	for _, e := range entries {
		delete(w.pending, blobHandle{e.ID, e.Kind})
	}
	w.unindexed.Add(index.Pack{ID: id, Entries: entries})
	full = w.unindexed.Packs() >= indexPacks
	w.stats.Packs++
	w.stats.StoredBytes += int64(len(body))
	delete(w.unfinished, p)
	w.mu.Unlock()
	w.buffers <- p.buffer
	close(p.done)
	if full {
		return w.writeIndex()
	}
	return nil
}

func (w *Writer) putPack(name string, body []byte) error {
	leave, err := w.pacer.Enter(w.ctx)
	if err != nil {
		return err
	}
	defer leave()
	return w.r.store.Put(w.ctx, name, body)
}

// writeIndexFiles writes index files by the clock.
func (w *Writer) writeIndexFiles() {
	ticker := time.NewTicker(indexStep)
	defer ticker.Stop()
	for {
		select {
		case <-w.ctx.Done():
			return
		case <-ticker.C:
			if err := w.writeIndex(); err != nil {
				_ = w.fail(err) // Add and Flush return the error
				return
			}
		}
	}
}

// writeIndex writes an index file of the packs that no index file names yet.
func (w *Writer) writeIndex() error {
	w.indexing.Lock()
	defer w.indexing.Unlock()
	if err := w.failure(); err != nil {
		return err
	}
	w.mu.Lock()
	file := w.unindexed
	w.unindexed = index.FileBuilder{}
	w.mu.Unlock()
	if file.Packs() == 0 {
		return nil
	}
	if err := w.saveIndex(&file); err != nil {
		return w.fail(api.Errorf(api.KindOf(err), "repository %.8s: an index file cannot be written: %w", w.r.ID(), err))
	}
	return nil
}

// saveIndex writes an index file. After an error the file may exist, or appear later, and a sweep may have deleted some
// of its packs: the session takes the deleted packs out of the index.
func (w *Writer) saveIndex(file *index.FileBuilder) error {
	if w.lock != nil {
		file.Session = w.lock.ID()
		if err := w.lock.Confirm(w.ctx); err != nil {
			return err
		}
	}
	plain := file.Bytes()
	id, sealed := w.r.sealFile(plain)
	put := target.WithUndo(w.ctx, func(ctx context.Context, store target.Store) error {
		return w.r.correctIndex(ctx, store, id, plain)
	})
	err := w.r.store.Put(put, indexFolder+id.String(), sealed)
	if err == nil {
		w.blobs.addFiles(id)
		if w.lock == nil {
			return nil
		}
		err = w.lock.Confirm(w.ctx)
	}
	if err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.ctx), closeLockTimeout)
	defer cancel()
	return errors.Join(err, w.r.correctIndex(ctx, w.r.store, id, plain))
}

// Flush waits until all blobs whose Add has returned are durable and an index file names them. If only ctx ends, the
// Writer continues.
func (w *Writer) Flush(ctx context.Context) error {
	w.mu.Lock()
	for kind := range blob.Kinds {
		w.closeOpen(kind)
	}
	packs := make([]*openPack, 0, len(w.unfinished))
	for p := range w.unfinished {
		packs = append(packs, p)
	}
	w.mu.Unlock()
	for _, p := range packs {
		select {
		case <-p.done:
		case <-w.ctx.Done():
			return w.failure()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return w.writeIndex()
}

// Close ends the Writer and waits for its goroutines. Blobs that were not flushed are lost. The result is the first
// error, if any.
func (w *Writer) Close() error {
	w.end(errWriterClosed)
	w.goroutines.Wait()
	w.release()
	if err := w.failure(); err != errWriterClosed { //nolint:errorlint // identity: the error of this Close alone
		return err
	}
	return nil
}

var errWriterClosed = api.Errorf(api.Unavailable, "writer of a repository: closed")

// Stats returns the counts so far.
func (w *Writer) Stats() WriterStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stats
}

// fail ends the Writer with err, unless the Writer ended before, and returns the error that ended the Writer.
func (w *Writer) fail(err error) error {
	w.end(err)
	return w.failure()
}

// failure returns the error that ended the Writer, or nil.
func (w *Writer) failure() error { return context.Cause(w.ctx) }
