package stack

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// layerWriter fills a new layer. The flock on its data file tells other processes that it is being made.
type layerWriter struct {
	d      *Disk
	uid    string
	dir    string
	size   int64
	data   file.Handle // buffered
	direct file.Handle // for what is aligned
	sums   file.Handle
	crcs   file.Handle

	mu    sync.Mutex
	kinds format.Index   // values are block.Kind
	known map[int64]bool // chunks whose digest is in sums and true
	dirty map[int64]int  // WriteAt calls under way per chunk, so that a digest is not noted over a newer write
	state writerState
	want  string // the root digest that it must come to have; empty: any
	exact bool   // zeros that are written stay data

	allocated map[int64]bool // windows of chunks that have room

	unsynced int64         // bytes of data that were written since a sync of them was begun
	syncing  chan struct{} // closed when the sync under way ends; nil: there is none
	lost     error         // of a sync that failed
}

// Exact implements block.Exact. Before anything is written.
func (w *layerWriter) Exact(root string) { w.want, w.exact = root, true }

type writerState uint8

const (
	writing writerState = iota
	sealed
	aborted
)

// Create implements block.Layers.
func (d *Disk) Create(ctx context.Context, uid string, size int64) (_ block.LayerWriter, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("create layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return nil, err
	}
	if size <= 0 || size > api.MaxVolumeSize {
		return nil, api.Errorf(api.OutOfRange, "%d is not a size that a layer can have", size)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	size = (size + blockSize - 1) &^ (blockSize - 1)
	unlock, err := d.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := d.unmade(uid); err != nil {
		return nil, err
	}
	w := &layerWriter{d: d, uid: uid, dir: d.path(layersDir, uid), size: size, kinds: format.NewIndex(size>>blockBits, 0),
		known: make(map[int64]bool), dirty: make(map[int64]int)}
	if busy, err := d.held(d.path(layersDir, uid, dataFile)); err != nil {
		return nil, err
	} else if busy {
		return nil, api.Errorf(api.Busy, "somebody else is making it")
	}
	if err := d.unmade(uid); err != nil { // by who had the lock before
		return nil, err
	}
	if err := d.unowned(uid); err != nil {
		return nil, err
	}
	if err := file.RemoveAll(d.fs, w.dir); err != nil {
		return nil, err
	}
	if err := w.open(); err != nil {
		return nil, errors.Join(err, w.closeFiles(), file.RemoveAll(d.fs, w.dir))
	}
	return w, nil
}

// unowned is no error where what is in the folder of a layer that has no record may be removed: nobody needs it, and a
// loss of power does not bring a record back that names it. It may look half made and be data of a volume: what was cut
// off and has no digests yet, and what a merge was over with a moment ago.
func (d *Disk) unowned(uid string) error {
	frozen, err := d.exists(d.path(layersDir, uid, frozenFile))
	if err != nil {
		return err
	}
	merged, err := d.exists(d.path(layersDir, uid, movingFile))
	if err != nil {
		return err
	}
	if !frozen && !merged {
		return nil
	}
	if names, err := d.named(); frozen && (err != nil || names[uid]) {
		return errors.Join(api.Errorf(api.Busy, "a snapshot here has it, and makes its digests"), err)
	}
	return d.settleNames(context.Background())
}

func (w *layerWriter) open() (err error) {
	if err := w.d.fs.Mkdir(w.dir, 0o700); err != nil {
		return err
	}
	name := w.dir + "/" + dataFile
	if w.data, err = w.d.fs.Open(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	if err := flock(w.data, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}
	if err := w.data.Truncate(w.size); err != nil {
		return err
	}
	if w.direct, err = w.d.fs.Open(name, os.O_RDWR|w.d.direct, 0); err != nil {
		return err
	}
	if w.sums, err = w.d.fs.Open(w.dir+"/"+sumsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	w.crcs, err = w.d.fs.Open(w.dir+"/"+crcsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	return err
}

func (w *layerWriter) closeFiles() error {
	w.synced()
	var errs []error
	for _, h := range []file.Handle{w.data, w.direct, w.sums, w.crcs} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	return errors.Join(errs...)
}

func (w *layerWriter) name(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("layer %s on disk %s: %w", w.uid, w.d.root, classify(err))
}

// check allows an access, and tells the layer's size.
func (w *layerWriter) check(off, n int64) (size int64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if off < 0 || n < 0 || off > w.size-n {
		return 0, api.Errorf(api.OutOfRange, "range [%d, %d) is outside of %d bytes", off, off+n, w.size)
	}
	if w.state != writing {
		return 0, api.Errorf(api.Invalid, "it is sealed or aborted")
	}
	return w.size, w.lost
}

// syncEvery is how many bytes of data are written before they begin to be synced: so that Seal has little to wait for.
const syncEvery = 128 << 20

// wrote is told of data that was written.
func (w *layerWriter) wrote(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unsynced += n; w.unsynced < w.d.early || w.syncing != nil || w.state != writing {
		return
	}
	ended := make(chan struct{})
	w.unsynced, w.syncing = 0, ended
	go func() { // closeFiles waits for it
		defer close(ended)
		err := w.data.Datasync()
		w.mu.Lock()
		defer w.mu.Unlock()
		w.syncing = nil
		w.lose(err)
	}()
}

// lose notes that a sync failed. It counts for good: of what it lost, the kernel tells no later one. The caller has mu.
func (w *layerWriter) lose(err error) {
	if err != nil && w.lost == nil {
		w.lost = fmt.Errorf("not all that was written is on the disk: %w", err)
	}
}

// synced waits for the sync under way.
func (w *layerWriter) synced() {
	w.mu.Lock()
	under := w.syncing
	w.mu.Unlock()
	if under != nil {
		<-under
	}
}

// sync makes what was written durable, together with what goes with it.
func (w *layerWriter) sync(more ...func() error) error {
	err := atOnce(append(more, w.data.Datasync)...)
	w.synced()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lose(err)
	return w.lost
}

// Resize implements block.LayerWriter.
func (w *layerWriter) Resize(size int64) error {
	if size <= 0 || size > api.MaxVolumeSize {
		return w.name(api.Errorf(api.OutOfRange, "%d is not a size that a layer can have", size))
	}
	if _, err := w.check(0, 0); err != nil {
		return w.name(err)
	}
	size = (size + blockSize - 1) &^ (blockSize - 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	// The end of the last chunk moves: what was its digest is that of something else.
	delete(w.known, min(size, w.size)/chunkSize)
	if size >= w.size {
		w.kinds.Grow(size>>blockBits, uint16(block.Hole))
		w.size = size
		return nil // the file gets its length when it is sealed
	}
	if len(w.dirty) > 0 {
		return w.name(api.Errorf(api.Invalid, "it cannot shrink while it is written to"))
	}
	if err := errors.Join(w.data.Truncate(size), w.crcs.Truncate(size>>blockBits*crcSize)); err != nil {
		return w.name(err)
	}
	kinds := format.NewIndex(size>>blockBits, uint16(block.Hole))
	for b := int64(0); b < kinds.Blocks; {
		v, n := w.kinds.Run(b, kinds.Blocks)
		kinds.Set(b, b+n, v)
		b += n
	}
	w.kinds, w.size = kinds, size
	for c := range w.known {
		if c >= (size+chunkSize-1)/chunkSize {
			delete(w.known, c)
		}
	}
	return nil
}

// begin counts a writer into the chunks of a range, whose digests are unknown from now on.
func (w *layerWriter) begin(off, n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := off / chunkSize; c <= (off+n-1)/chunkSize; c++ {
		w.dirty[c]++
		delete(w.known, c)
	}
}

// end takes a writer out again. Summed says that it wrote chunk's digest; that counts only if it was there alone, and
// if the chunk still ends where it did when the layer was of size.
func (w *layerWriter) end(off, n, size int64, summed []int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range summed {
		if w.dirty[c] == 1 && (size == w.size || (c+1)*chunkSize <= size) {
			w.known[c] = true
		}
	}
	for c := off / chunkSize; c <= (off+n-1)/chunkSize; c++ {
		if w.dirty[c]--; w.dirty[c] == 0 {
			delete(w.dirty, c)
		}
	}
}

// WriteAt implements io.WriterAt. Whole blocks of zeros are recorded and not written.
func (w *layerWriter) WriteAt(p []byte, off int64) (int, error) {
	n := int64(len(p))
	size, err := w.check(off, n)
	if err != nil || n == 0 {
		return 0, w.name(err)
	}
	w.begin(off, n)
	var summed []int64
	defer func() { w.end(off, n, size, summed) }()
	for at := int64(0); at < n; {
		end := at + blockSize - (off+at)%blockSize
		zero := !w.exact && end <= n && end-at == blockSize && format.IsZero(p[at:end])
		for end < n {
			next := min(end+blockSize, n)
			if (!w.exact && next-end == blockSize && format.IsZero(p[end:next])) != zero {
				break
			}
			end = next
		}
		end = min(end, n)
		var err error
		if zero {
			err = w.mark(off+at, end-at, block.Zero)
		} else {
			err = w.put(p[at:end], off+at)
		}
		if err != nil {
			return int(at), w.name(err)
		}
		at = end
	}
	// A chunk that came whole is digested while it is in the cache.
	for c := (off + chunkSize - 1) / chunkSize; c*chunkSize < off+n; c++ {
		end := min((c+1)*chunkSize, size)
		if end > off+n {
			break
		}
		part := p[c*chunkSize-off : end-off]
		if err := w.putSums(c, format.ChunkSums{Digest: sha256.Sum256(part), CRCs: format.ChunkCRCs(part)}); err != nil {
			return int(n), w.name(err)
		}
		summed = append(summed, c)
	}
	return int(n), nil
}

// putSums writes what there is to compare chunk c with.
func (w *layerWriter) putSums(c int64, sums format.ChunkSums) error {
	if _, err := w.sums.WriteAt(sums.Digest[:], sumsHeader+c*sumSize); err != nil {
		return err
	}
	_, err := w.crcs.WriteAt(sums.CRCs, c*int64(format.ChunkCRCsSize))
	return err
}

func (w *layerWriter) put(p []byte, off int64) error {
	h := w.data
	if aligned(p, off) {
		h = w.direct
	}
	if _, err := h.WriteAt(p, off); err != nil {
		return err
	}
	end := off + int64(len(p))
	w.mu.Lock()
	w.kinds.Set(off>>blockBits, (end+blockSize-1)>>blockBits, uint16(block.Data))
	w.mu.Unlock()
	w.wrote(int64(len(p)))
	return nil
}

// mark makes whole blocks zero; where they held data, that goes.
func (w *layerWriter) mark(off, n int64, k block.Kind) error {
	b, end := off>>blockBits, (off+n)>>blockBits
	w.mu.Lock()
	had := false
	for i := b; i < end && !had; {
		v, m := w.kinds.Run(i, end)
		had = v == uint16(block.Data)
		i += m
	}
	w.mu.Unlock()
	if had {
		if err := w.data.Punch(off, n); err != nil {
			return err
		}
	}
	w.mu.Lock()
	w.kinds.Set(b, end, uint16(k))
	w.mu.Unlock()
	return nil
}

// ZeroAt implements block.Sink. Parts of blocks at the ends are written as zeros.
func (w *layerWriter) ZeroAt(off, n int64) error {
	if _, err := w.check(off, n); err != nil || n == 0 {
		return w.name(err)
	}
	w.begin(off, n)
	defer w.end(off, n, 0, nil)
	end := off + n
	from, to := (off+blockSize-1)&^(blockSize-1), end&^(blockSize-1)
	if from > to {
		return w.name(w.put(make([]byte, n), off))
	}
	if off < from {
		if err := w.put(make([]byte, from-off), off); err != nil {
			return w.name(err)
		}
	}
	if to < end {
		if err := w.put(make([]byte, end-to), to); err != nil {
			return w.name(err)
		}
	}
	if from == to {
		return nil
	}
	return w.name(w.mark(from, to-from, block.Zero))
}

// Sync implements block.Sink.
func (w *layerWriter) Sync(context.Context) error {
	if _, err := w.check(0, 0); err != nil {
		return w.name(err)
	}
	return w.name(w.sync())
}

// Seal implements block.LayerWriter. The rename of layer.json commits it.
func (w *layerWriter) Seal(ctx context.Context) (root string, allocated int64, err error) {
	if _, err := w.check(0, 0); err != nil {
		return "", 0, w.name(err)
	}
	rec, err := w.seal(ctx)
	if err != nil {
		return "", 0, w.name(err)
	}
	w.mu.Lock()
	w.state = sealed
	w.mu.Unlock()
	w.unkeep()
	return rec.Root, rec.Allocated, w.name(w.closeFiles())
}

func (w *layerWriter) seal(ctx context.Context) (layerRecord, error) {
	rec := layerRecord{UID: w.uid, Size: w.size, Durable: true, Created: time.Now().UTC().Truncate(time.Second)}
	if err := w.data.Truncate(w.size); err != nil {
		return rec, err
	}
	err := eachChunk(ctx, &w.kinds, func(c int64, buf []byte) error {
		w.mu.Lock()
		known := w.known[c]
		w.mu.Unlock()
		if known {
			return nil
		}
		k := w.kinds.Chunk(c)
		sum, err := format.ChunkSum(w.direct, k, c, w.size, buf)
		if err != nil {
			return err
		}
		var crcs []byte // nobody asks for them where nothing is data, and they take room
		if k.Data {
			crcs = format.ChunkCRCs(buf[:min(chunkSize, w.size-c*chunkSize)])
		}
		return w.putSums(c, format.ChunkSums{Digest: sum, CRCs: crcs})
	})
	if err != nil {
		return rec, err
	}
	if _, err := w.sums.WriteAt(format.SumsHeaderOf(w.size), 0); err != nil {
		return rec, err
	}
	if err := w.sums.Truncate(sumsHeader + (w.size+chunkSize-1)/chunkSize*sumSize); err != nil {
		return rec, err
	}
	if rec.Root, err = format.RootDigest(w.sums, w.size, &w.kinds); err != nil {
		return rec, err
	}
	if w.want != "" && rec.Root != w.want {
		return rec, api.Errorf(api.Corrupt, "its digest is %s, and should be %s", rec.Root, w.want)
	}
	for b := int64(0); b < w.kinds.Blocks; {
		v, n := w.kinds.Run(b, w.kinds.Blocks)
		switch block.Kind(v) {
		case block.Data:
			rec.Data += n << blockBits
		case block.Zero:
			rec.Zero += n << blockBits
		}
		b += n
	}
	seal := func() error { return format.SealCRCs(w.crcs, w.size) }
	if err := atOnce(func() error { return w.sync(w.sums.Datasync, seal) },
		func() error { return format.WriteMap(w.d.fs, w.dir+"/"+mapFile, &w.kinds) }); err != nil {
		return rec, err
	}
	if err := errors.Join(w.data.Chmod(0o444), w.sums.Chmod(0o444)); err != nil {
		return rec, err
	}
	st, err := w.data.Stat()
	if err != nil {
		return rec, err
	}
	rec.Allocated = allocated(st)
	if err := w.d.syncDirs(w.dir, w.d.path(layersDir)); err != nil {
		return rec, err
	}
	if err := ctx.Err(); err != nil {
		return rec, context.Cause(ctx)
	}
	return rec, format.WriteMeta(w.d.fs, w.dir+"/"+layerFile, formatLayer, rec)
}

// Abort implements block.LayerWriter.
func (w *layerWriter) Abort() error {
	w.mu.Lock()
	was := w.state
	if was == writing {
		w.state = aborted
	}
	w.mu.Unlock()
	if was != writing {
		return nil
	}
	w.synced() // nobody should wait for it, too
	unlock, err := w.d.lock()
	if err != nil {
		return w.name(errors.Join(err, w.closeFiles()))
	}
	defer unlock()
	return w.name(errors.Join(file.RemoveAll(w.d.fs, w.dir), w.closeFiles()))
}
