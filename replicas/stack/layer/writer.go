package layer

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
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Writer fills a new layer. The flock on the data file shows other processes that the layer is being made.
type Writer struct {
	d      *Store
	UID    string
	dir    string
	Size   int64
	data   file.Handle // buffered
	direct file.Handle // for aligned writes
	sums   file.Handle
	crcs   file.Handle

	Mu    sync.Mutex
	kinds format.Index   // values are block.Kind
	known map[int64]bool // chunks with their true digest in sums
	dirty map[int64]int  // WriteAt calls in progress per chunk, so that no digest hides a newer write
	State writerState
	Want  string // the root digest that Seal demands; empty: any
	exact bool   // written zeros stay data

	allocated map[int64]bool // windows of chunks that have room

	unsynced int64         // bytes of data that were written since the last sync began
	syncing  chan struct{} // closed when the sync in progress ends; nil: no sync is in progress
	lost     error         // of a sync that failed
}

// Exact implements block.Exact. Before anything is written.
func (w *Writer) Exact(root string) { w.Want, w.exact = root, true }

type writerState uint8

// States of a Writer.
const (
	writing writerState = iota
	sealed
	Aborted
)

// Create implements block.Layers.
func (d *Store) Create(ctx context.Context, uid string, size int64) (_ block.LayerWriter, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("create layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
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
	unlock, err := d.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := d.refuseFinished(uid); err != nil {
		return nil, err
	}
	w := &Writer{d: d, UID: uid, dir: d.Join(Dir, uid), Size: size, kinds: format.NewIndex(size>>blockBits, 0),
		known: make(map[int64]bool), dirty: make(map[int64]int)}
	if busy, err := d.Locked(d.Join(Dir, uid, DataFile)); err != nil {
		return nil, err
	} else if busy {
		return nil, api.Errorf(api.Busy, "another process makes the layer")
	}
	if err := d.refuseFinished(uid); err != nil { // finished by the former holder of the lock
		return nil, err
	}
	if err := d.refuseReferenced(uid); err != nil {
		return nil, err
	}
	if err := file.RemoveAll(d.FS, w.dir); err != nil {
		return nil, err
	}
	if err := w.createFiles(); err != nil {
		return nil, errors.Join(err, w.closeFiles(), file.RemoveAll(d.FS, w.dir))
	}
	return w, nil
}

// refuseReferenced returns nil if the folder of a layer without layer.json may be removed: no record names the layer,
// and no loss of power can bring back such a record. A folder that looks half made may hold data of a volume: a frozen
// layer, or the target of a merge that ended a moment ago.
func (d *Store) refuseReferenced(uid string) error {
	frozen, err := d.Exists(d.Join(Dir, uid, FrozenFile))
	if err != nil {
		return err
	}
	merged, err := d.Exists(d.Join(Dir, uid, MovingFile))
	if err != nil {
		return err
	}
	if !frozen && !merged {
		return nil
	}
	if names, err := d.records.Named(); frozen && (err != nil || names[uid]) {
		return errors.Join(api.Errorf(api.Busy, "a snapshot here has it, and makes its digests"), err)
	}
	return d.records.SyncRecords(context.Background())
}

func (w *Writer) createFiles() (err error) {
	if err := w.d.FS.Mkdir(w.dir, 0o700); err != nil {
		return err
	}
	name := w.dir + "/" + DataFile
	if w.data, err = w.d.FS.Open(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	if err := diskfs.Flock(w.data, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}
	if err := w.data.Truncate(w.Size); err != nil {
		return err
	}
	if w.direct, err = w.d.FS.Open(name, os.O_RDWR|w.d.Direct, 0); err != nil {
		return err
	}
	if w.sums, err = w.d.FS.Open(w.dir+"/"+SumsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	w.crcs, err = w.d.FS.Open(w.dir+"/"+CRCsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	return err
}

func (w *Writer) closeFiles() error {
	w.awaitSync()
	var errs []error
	for _, h := range []file.Handle{w.data, w.direct, w.sums, w.crcs} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	return errors.Join(errs...)
}

func (w *Writer) nameError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("layer %s on disk %s: %w", w.UID, w.d.Root, diskfs.Classify(err))
}

// checkAccess allows an access, and returns the layer's size.
func (w *Writer) checkAccess(off, n int64) (size int64, err error) {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	if off < 0 || n < 0 || off > w.Size-n {
		return 0, api.Errorf(api.OutOfRange, "range [%d, %d) is outside of %d bytes", off, off+n, w.Size)
	}
	if w.State != writing {
		return 0, api.Errorf(api.Invalid, "the layer is sealed or aborted")
	}
	return w.Size, w.lost
}

// syncEvery is the number of written bytes that start a sync, so that Seal has little to wait for.
const syncEvery = 128 << 20

// countWritten counts written data, and starts a sync now and then.
func (w *Writer) countWritten(n int64) {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	if w.unsynced += n; w.unsynced < w.d.Early || w.syncing != nil || w.State != writing {
		return
	}
	ended := make(chan struct{})
	w.unsynced, w.syncing = 0, ended
	go func() { // closeFiles waits for it
		defer close(ended)
		err := w.data.Datasync()
		w.Mu.Lock()
		defer w.Mu.Unlock()
		w.syncing = nil
		w.recordFailedSync(err)
	}()
}

// recordFailedSync records a failed sync for good, because the kernel reports lost data only once. The caller has mu.
func (w *Writer) recordFailedSync(err error) {
	if err != nil && w.lost == nil {
		w.lost = fmt.Errorf("a sync failed, written data may be missing on the disk: %w", err)
	}
}

// awaitSync waits for the sync in progress.
func (w *Writer) awaitSync() {
	w.Mu.Lock()
	under := w.syncing
	w.Mu.Unlock()
	if under != nil {
		<-under
	}
}

// syncData makes written data durable, at once with more.
func (w *Writer) syncData(more ...func() error) error {
	err := diskfs.AtOnce(append(more, w.data.Datasync)...)
	w.awaitSync()
	w.Mu.Lock()
	defer w.Mu.Unlock()
	w.recordFailedSync(err)
	return w.lost
}

// Resize implements block.LayerWriter.
func (w *Writer) Resize(size int64) error {
	if size <= 0 || size > api.MaxVolumeSize {
		return w.nameError(api.Errorf(api.OutOfRange, "%d is not a size that a layer can have", size))
	}
	if _, err := w.checkAccess(0, 0); err != nil {
		return w.nameError(err)
	}
	size = (size + blockSize - 1) &^ (blockSize - 1)
	w.Mu.Lock()
	defer w.Mu.Unlock()
	// The end of the last chunk moves: its digest is not true any more.
	delete(w.known, min(size, w.Size)/chunkSize)
	if size >= w.Size {
		w.kinds.Grow(size>>blockBits, uint16(block.Hole))
		w.Size = size
		return nil // Seal gives the file its length
	}
	if len(w.dirty) > 0 {
		return w.nameError(api.Errorf(api.Invalid, "the layer cannot shrink during a write"))
	}
	if err := errors.Join(w.data.Truncate(size), w.crcs.Truncate(size>>blockBits*crcSize)); err != nil {
		return w.nameError(err)
	}
	kinds := format.NewIndex(size>>blockBits, uint16(block.Hole))
	for b := int64(0); b < kinds.Blocks; {
		v, n := w.kinds.Run(b, kinds.Blocks)
		kinds.Set(b, b+n, v)
		b += n
	}
	w.kinds, w.Size = kinds, size
	for c := range w.known {
		if c >= (size+chunkSize-1)/chunkSize {
			delete(w.known, c)
		}
	}
	return nil
}

// beginWrite counts a writer in the chunks of a range; the digests of the chunks are unknown from now on.
func (w *Writer) beginWrite(off, n int64) {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	for c := off / chunkSize; c <= (off+n-1)/chunkSize; c++ {
		w.dirty[c]++
		delete(w.known, c)
	}
}

// endWrite ends the count of a writer. summed lists the chunks with a new digest; a digest counts only if no other
// writer was in the chunk, and if the end of the chunk has not moved since the layer had the given size.
func (w *Writer) endWrite(off, n, size int64, summed []int64) {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	for _, c := range summed {
		if w.dirty[c] == 1 && (size == w.Size || (c+1)*chunkSize <= size) {
			w.known[c] = true
		}
	}
	for c := off / chunkSize; c <= (off+n-1)/chunkSize; c++ {
		if w.dirty[c]--; w.dirty[c] == 0 {
			delete(w.dirty, c)
		}
	}
}

// WriteAt implements io.WriterAt. Whole blocks of zeros take no room: they become zero blocks, or with Exact data in a
// hole of the file.
func (w *Writer) WriteAt(p []byte, off int64) (int, error) {
	return w.write(p, off, func(chunk []byte) [sumSize]byte { return sha256.Sum256(chunk) })
}

// write is WriteAt; digest returns the digest of a whole chunk.
func (w *Writer) write(p []byte, off int64, digest func(chunk []byte) [sumSize]byte) (int, error) {
	n := int64(len(p))
	size, err := w.checkAccess(off, n)
	if err != nil || n == 0 {
		return 0, w.nameError(err)
	}
	w.beginWrite(off, n)
	var summed []int64
	defer func() { w.endWrite(off, n, size, summed) }()
	zeros := block.Zero
	if w.exact {
		zeros = block.Data
	}
	for at := int64(0); at < n; {
		end := at + blockSize - (off+at)%blockSize
		zero := end <= n && end-at == blockSize && format.IsZero(p[at:end])
		for end < n {
			next := min(end+blockSize, n)
			if (next-end == blockSize && format.IsZero(p[end:next])) != zero {
				break
			}
			end = next
		}
		end = min(end, n)
		var err error
		if zero {
			err = w.zeroBlocks(off+at, end-at, zeros)
		} else {
			err = w.writeData(p[at:end], off+at)
		}
		if err != nil {
			return int(at), w.nameError(err)
		}
		at = end
	}
	// A whole chunk gets its digest while the bytes are in the processor's cache.
	for c := (off + chunkSize - 1) / chunkSize; c*chunkSize < off+n; c++ {
		end := min((c+1)*chunkSize, size)
		if end > off+n {
			break
		}
		part := p[c*chunkSize-off : end-off]
		if err := w.putSums(c, format.ChunkSums{Digest: digest(part), CRCs: format.ChunkCRCs(part)}); err != nil {
			return int(n), w.nameError(err)
		}
		summed = append(summed, c)
	}
	return int(n), nil
}

// putSums writes the digest and the checksums of chunk c.
func (w *Writer) putSums(c int64, sums format.ChunkSums) error {
	if _, err := w.sums.WriteAt(sums.Digest[:], sumsHeader+c*sumSize); err != nil {
		return err
	}
	_, err := w.crcs.WriteAt(sums.CRCs, c*int64(format.ChunkCRCsSize))
	return err
}

func (w *Writer) writeData(p []byte, off int64) error {
	h := w.data
	if block.Aligned(p, off) {
		h = w.direct
	}
	if _, err := h.WriteAt(p, off); err != nil {
		return err
	}
	end := off + int64(len(p))
	w.Mu.Lock()
	w.kinds.Set(off>>blockBits, (end+blockSize-1)>>blockBits, uint16(block.Data))
	w.Mu.Unlock()
	w.countWritten(int64(len(p)))
	return nil
}

// zeroBlocks makes whole blocks zero, and frees their data.
func (w *Writer) zeroBlocks(off, n int64, k block.Kind) error {
	b, end := off>>blockBits, (off+n)>>blockBits
	w.Mu.Lock()
	had := false
	for i := b; i < end && !had; {
		v, m := w.kinds.Run(i, end)
		had = v == uint16(block.Data)
		i += m
	}
	w.Mu.Unlock()
	if had {
		if err := w.data.Punch(off, n); err != nil {
			return err
		}
	}
	w.Mu.Lock()
	w.kinds.Set(b, end, uint16(k))
	w.Mu.Unlock()
	return nil
}

// ZeroAt implements block.Sink. ZeroAt writes partial blocks at the ends as zeros.
func (w *Writer) ZeroAt(off, n int64) error {
	if _, err := w.checkAccess(off, n); err != nil || n == 0 {
		return w.nameError(err)
	}
	w.beginWrite(off, n)
	defer w.endWrite(off, n, 0, nil)
	end := off + n
	from, to := (off+blockSize-1)&^(blockSize-1), end&^(blockSize-1)
	if from > to {
		return w.nameError(w.writeData(make([]byte, n), off))
	}
	if off < from {
		if err := w.writeData(make([]byte, from-off), off); err != nil {
			return w.nameError(err)
		}
	}
	if to < end {
		if err := w.writeData(make([]byte, end-to), to); err != nil {
			return w.nameError(err)
		}
	}
	if from == to {
		return nil
	}
	return w.nameError(w.zeroBlocks(from, to-from, block.Zero))
}

// Sync implements block.Sink.
func (w *Writer) Sync(context.Context) error {
	if _, err := w.checkAccess(0, 0); err != nil {
		return w.nameError(err)
	}
	return w.nameError(w.syncData())
}

// Seal implements block.LayerWriter. The rename of layer.json commits the layer.
func (w *Writer) Seal(ctx context.Context) (root string, allocated int64, err error) {
	if _, err := w.checkAccess(0, 0); err != nil {
		return "", 0, w.nameError(err)
	}
	rec, err := w.sealLayer(ctx)
	if err != nil {
		return "", 0, w.nameError(err)
	}
	w.Mu.Lock()
	w.State = sealed
	w.Mu.Unlock()
	w.removeCheckpoint()
	return rec.Root, rec.Allocated, w.nameError(w.closeFiles())
}

func (w *Writer) sealLayer(ctx context.Context) (Record, error) {
	rec := Record{UID: w.UID, Size: w.Size, Durable: true, Created: time.Now().UTC().Truncate(time.Second)}
	if err := w.data.Truncate(w.Size); err != nil {
		return rec, err
	}
	err := EachChunk(ctx, &w.kinds, func(c int64, buf []byte) error {
		w.Mu.Lock()
		known := w.known[c]
		w.Mu.Unlock()
		if known {
			return nil
		}
		k := w.kinds.Chunk(c)
		sum, err := format.ChunkSum(w.direct, k, c, w.Size, buf)
		if err != nil {
			return err
		}
		var crcs []byte // only data needs checksums
		if k.Data {
			crcs = format.ChunkCRCs(buf[:min(chunkSize, w.Size-c*chunkSize)])
		}
		return w.putSums(c, format.ChunkSums{Digest: sum, CRCs: crcs})
	})
	if err != nil {
		return rec, err
	}
	if _, err := w.sums.WriteAt(format.SumsHeaderOf(w.Size), 0); err != nil {
		return rec, err
	}
	if err := w.sums.Truncate(sumsHeader + (w.Size+chunkSize-1)/chunkSize*sumSize); err != nil {
		return rec, err
	}
	if rec.Root, err = format.RootDigest(w.sums, w.Size, &w.kinds); err != nil {
		return rec, err
	}
	if w.Want != "" && rec.Root != w.Want {
		return rec, api.Errorf(api.Corrupt, "the root digest is %s, not %s", rec.Root, w.Want)
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
	seal := func() error { return format.SealCRCs(w.crcs, w.Size) }
	if err := diskfs.AtOnce(func() error { return w.syncData(w.sums.Datasync, seal) },
		func() error { return format.WriteMap(w.d.FS, w.dir+"/"+MapFile, &w.kinds) }); err != nil {
		return rec, err
	}
	if err := errors.Join(w.data.Chmod(0o444), w.sums.Chmod(0o444)); err != nil {
		return rec, err
	}
	st, err := w.data.Stat()
	if err != nil {
		return rec, err
	}
	rec.Allocated = diskfs.Allocated(st)
	if err := w.d.SyncDirs(w.dir, w.d.Join(Dir)); err != nil {
		return rec, err
	}
	if err := ctx.Err(); err != nil {
		return rec, context.Cause(ctx)
	}
	return rec, format.WriteMeta(w.d.FS, w.dir+"/"+LayerFile, FormatLayer, rec)
}

// Abort implements block.LayerWriter.
func (w *Writer) Abort() error {
	w.Mu.Lock()
	was := w.State
	if was == writing {
		w.State = Aborted
	}
	w.Mu.Unlock()
	if was != writing {
		return nil
	}
	w.awaitSync() // before the disk's lock
	unlock, err := w.d.Lock()
	if err != nil {
		return w.nameError(errors.Join(err, w.closeFiles()))
	}
	defer unlock()
	return w.nameError(errors.Join(file.RemoveAll(w.d.FS, w.dir), w.closeFiles()))
}
