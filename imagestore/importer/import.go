// Package importer makes true that a backing image is, or is not, on a disk: it imports an image from a source into a
// layer, copies layers from another disk, finds what is there already, and removes. It sees a disk as block.Layers.
//
// The bytes of the source go through once: read, hashed (SHA-512, over the source's bytes, holes included) and written
// in parallel; chunks of zeros stay holes. What comes packed (gzip, xz, zstd) is unpacked on the way. A raw image
// streams straight into the layer, and so does a fixed VHD disk, which shows by its end. The other formats need random
// access: from a file of this node they are converted in place, while the file is hashed; from a stream they go through
// a nameless scratch file on the same disk, and are converted while they arrive. What was converted is taken out of
// that file, and the source waits when it is too far ahead, so that it stays small where the image is in order.
//
// The commit point of an import is the record of the image (Layers.PutImage): before it nothing is there, and every
// failure leaves nothing. The checksum is compared before the layer is sealed. All goroutines end before a function
// returns.
package importer

import (
	"context"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/archive"
	"drover.io/drover/imagestore/origin"
)

// Spec is the image that is to be on the disk. What is known of it from an earlier copy must come out the same.
type Spec struct {
	UID             api.UID
	Name            string
	Layers          []api.UID
	Checksum        string          // expected SHA-512, or empty
	Digest          string          // known root digest of the top layer, or empty
	Format          string          // known, or empty
	Object          json.RawMessage // what the API knows of the image, to be kept with it; or nil
	VirtualSize     int64           // known, or 0
	Export          bool            // the layers are those of a snapshot, and may be volumes' too
	Checkpoint      *Checkpoint     // what FindCheckpoint found, to be used or dropped by Import; or nil
	CheckpointEvery time.Duration   // how often a download is kept, at the most; 10 s when zero
}

// Result is the image that is on the disk.
type Result struct {
	block.Image
	Allocated int64 // bytes that it takes there
}

// Progress of one import or copy. Written by its goroutines, read by anybody.
type Progress struct {
	read, readTotal atomic.Int64 // bytes of the source
	made, makeTotal atomic.Int64 // bytes of the content, where it is made in a second step
	sealing         atomic.Bool
	scratch         atomic.Int64 // the most bytes that a scratch file took
	early           atomic.Int64 // bytes that were read before they came
}

// Notice is what a user may want to know of it, or empty.
func (p *Progress) Notice() string {
	n := p.scratch.Load()
	if n == 0 {
		return ""
	}
	said := "converted while it arrived, by way of a scratch file that took up to " + api.SizeText(n) + " of the disk"
	if n := p.early.Load(); n > 0 {
		said += "; " + api.SizeText(n) + " of its tables were read before they came"
	}
	return said
}

// Snapshot is how far it is; percent reaches 100 only when the image is ready, and is then not asked for here.
func (p *Progress) Snapshot() (state api.ImageState, percent int32, done, total int64) {
	state, done, total = api.ImageInProgress, p.read.Load(), max(p.readTotal.Load(), 0)
	share := 0.0
	if total > 0 {
		share = float64(done) / float64(total)
	}
	if t := p.makeTotal.Load(); t > 0 {
		share = (share + float64(p.made.Load())/float64(t)) / 2
	}
	if p.sealing.Load() {
		state = api.ImageTransfer
	}
	return state, int32(min(max(share, 0)*100, 99)), done, total
}

// writers is how many goroutines write one import.
const writers = 4

// Import brings an image from its source to the disk. open gets a context that ends when the import does.
func Import(ctx context.Context, on block.Layers, want Spec, p *Progress,
	open func(context.Context) (*origin.Stream, error)) (Result, error) {
	if len(want.Layers) != 1 {
		return Result{}, api.Errorf(api.Invalid, "image %s: one layer is imported, not %d", want.Name, len(want.Layers))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s, err := open(ctx)
	if err != nil {
		if want.Checkpoint != nil {
			err = errors.Join(err, want.Checkpoint.w.Leave())
		}
		return Result{}, err
	}
	defer s.Close()
	im := &importRun{ctx: ctx, cancel: cancel, on: on, want: want, p: p, s: s, sum: sha512.New(), space: newSpaceGuard(on)}
	p.readTotal.Store(s.Size)
	got, err := im.run()
	if err != nil {
		if im.w != nil {
			if aerr := im.endFailed(err); aerr != nil {
				err = errors.Join(err, api.Errorf(api.Other, "what was written could not be removed: %w", aerr))
			}
		}
		return Result{}, explainDiskError(on, err)
	}
	return got, nil
}

// explainDiskError gives errors of the kernel a kind and a message.
func explainDiskError(on block.Layers, err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return api.Errorf(api.Full, "disk %s is full: free some room, or let the image go to a larger disk (%w)", on.UID(),
			err)
	case api.KindOf(err) != api.Other:
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return api.Errorf(api.Corrupt, "the source is shorter than it says: %w", err)
	}
	return err
}

type importRun struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	on     block.Layers
	want   Spec
	p      *Progress
	s      *origin.Stream
	sum    hash.Hash
	w      block.LayerWriter
	space  *spaceGuard

	format  format
	packed  string       // how the image is packed, as its name would end, or empty
	virtual int64        // bytes of the disk
	cut     atomic.Int64 // where the disk ends in a raw source

	from         int64  // the first byte of the image that comes; those before were kept,
	at           int64  // and so is the layer up to here
	crc          uint32 // CRC-32C of the source's bytes, where it wants that
	checkpointed bool   // something is kept

	mu   sync.Mutex
	size int64 // of the layer, while it grows
}

// imageStream is an image as it comes: head, then what r gives.
type imageStream struct {
	head []byte
	r    io.Reader
	size int64     // -1: it shows at the end
	file *os.File  // where it is one
	sum  hash.Hash // takes the bytes, where they are those of the source
	tell func(int64)
}

func (im *importRun) run() (Result, error) {
	adopted, err := im.adoptCheckpoint(im.want.Checkpoint)
	if err != nil {
		return Result{}, im.nameError(err)
	}
	if adopted {
		n, err := im.continueImport(im.want.Checkpoint)
		if err != nil {
			return Result{}, im.nameError(err)
		}
		return im.commit(n)
	}
	b := imageStream{r: im.s, size: im.s.Size, file: im.s.File, sum: im.originHash(), tell: im.readSome}
	if err := b.readHead(); err != nil {
		return Result{}, err
	}
	packing := archive.Detect(b.head)
	if packing == archive.None {
		n, err := im.importImage(b)
		if err != nil {
			return Result{}, im.nameError(err)
		}
		return im.commit(n)
	}
	n, err := im.importArchive(b.head, packing)
	if err != nil {
		return Result{}, im.nameError(err)
	}
	return im.commit(n)
}

// readHead reads the head.
func (b *imageStream) readHead() error {
	head := make([]byte, headSize)
	n, err := io.ReadFull(b.r, head)
	if err != nil && !errors.Is(err, io.EOF) && err != io.ErrUnexpectedEOF {
		return err
	}
	b.head = head[:n]
	return nil
}

// nameError is an error about the image with the name of its source, where it does not say that itself.
func (im *importRun) nameError(err error) error {
	if api.KindOf(err) == api.Other || strings.Contains(err.Error(), im.s.Name) {
		return err
	}
	return api.Errorf(api.KindOf(err), "%s: %w", im.s.Name, err)
}

// record makes the layer from an image. It returns how many bytes the image had.
func (im *importRun) importImage(b imageStream) (n int64, err error) {
	if im.format, err = detect(b.head); err != nil {
		return 0, err
	}
	switch {
	case im.format == formatRaw:
		return im.importRaw(b)
	case b.file != nil:
		return im.convertFile(b)
	}
	return im.convertStream(b, nil)
}

func (im *importRun) tooLarge(size int64) error {
	return api.Errorf(api.OutOfRange, "%d bytes are more than a volume can have (%d)", size, api.MaxVolumeSize)
}

// createLayer starts the layer of size bytes, or gives one that was begun this size.
func (im *importRun) createLayer(size int64) (err error) {
	if size > api.MaxVolumeSize {
		return im.tooLarge(size)
	}
	if size <= 0 {
		return api.Errorf(api.Invalid, "the disk in it has no bytes")
	}
	im.virtual, im.size = size, size
	if im.w != nil {
		return im.w.Resize(size)
	}
	im.w, err = createLayer(im.ctx, im.on, im.want.Layers[0], size)
	return err
}

// importRaw carries a raw source into the layer, whose size may show at the end only.
func (im *importRun) importRaw(b imageStream) (int64, error) {
	size := b.size
	if size < 0 {
		size = 32 * chunkSize
	}
	if err := im.createLayer(size); err != nil {
		return 0, err
	}
	return im.writeRaw(&b)
}

// writeRaw carries the bytes of a raw source into the layer that was begun.
func (im *importRun) writeRaw(b *imageStream) (int64, error) {
	im.cut.Store(1 << 62)
	var f feed
	if b.file != nil {
		tail, err := fileTail(b.file, b.size)
		if err == nil {
			err = im.checkEnd(tail, b.size)
		}
		if err != nil {
			return 0, err
		}
		f = &fileFeed{f: b.file, size: b.size}
	} else {
		f = &holdbackFeed{feed: &streamFeed{head: b.head, r: b.r}, off: im.from, end: im.checkEnd}
	}
	if w, ok := im.checkpointWriter(); ok {
		f = &checkpointFeed{feed: f, im: im, w: w, next: time.Now().Add(im.checkpointEvery()), last: im.from}
	}
	put := im.clipWrites(im.growWrites(im.space.guard(chunkWriter(im.w))))
	n, err := runPipeline(im.ctx, pipelineStages{feed: f, hash: b.sum, writers: writers, progress: b.tell,
		put: func(p []byte, off int64) error { return put(p, im.from+off) }, cancel: im.cancel})
	if n += im.from; err != nil {
		return n, err
	}
	im.virtual = min(n, im.cut.Load())
	if im.virtual == 0 {
		return n, api.Errorf(api.Invalid, "the disk in it has no bytes")
	}
	return n, im.w.Resize(im.virtual)
}

func (im *importRun) readSome(n int64) { im.p.read.Add(n) }

// complete compares what came with what was announced.
func (im *importRun) complete(n int64) error {
	if im.s.Size >= 0 && n != im.s.Size {
		return api.Errorf(api.Corrupt, "%d bytes came instead of %d", n, im.s.Size)
	}
	return nil
}

// convertFile makes the layer from an image in a file of this node, while the file is hashed.
func (im *importRun) convertFile(b imageStream) (n int64, err error) {
	var wg sync.WaitGroup
	var hashed error
	sum := newThrottle()
	wg.Go(func() {
		n, hashed = runPipeline(im.ctx, pipelineStages{feed: &fileFeed{f: b.file, size: b.size}, hash: b.sum,
			progress: func(n int64) {
				sum.advance(n)
				b.tell(n)
			}, cancel: im.cancel})
		sum.end()
	})
	g := newCheckpointGate(0)
	g.wait = sum.wait
	if err = im.convert(b.file, b.size, false, g); err != nil {
		im.cancel(err)
	}
	wg.Wait()
	if err == nil {
		err = hashed
	}
	return n, err
}

// convertStream takes a stream to a scratch file, and makes the layer from there while it comes; kept is what an
// earlier process left of that, or nil.
func (im *importRun) convertStream(b imageStream, kept *scratchState) (n int64, err error) {
	sp, feed, g, err := im.openScratch(b, kept)
	if err != nil {
		return 0, err
	}
	defer func() { _ = sp.Close() }()
	var wg sync.WaitGroup
	var arrived error
	put := im.space.guard(sp.put)
	wg.Go(func() {
		n, arrived = runPipeline(im.ctx, pipelineStages{feed: feed, hash: b.sum, writers: 1, progress: b.tell,
			put: func(p []byte, off int64) error { return put(p, im.from+off) }, cancel: im.cancel})
		n += im.from
		g.release() // nobody is left who would open it again
		sp.finish(arrived)
	})
	end := context.AfterFunc(im.ctx, func() {
		g.release()
		sp.finish(context.Cause(im.ctx))
	})
	defer end()
	size := b.size
	if size < 0 && im.format.needsEnd() {
		size, err = sp.whole()
	}
	if err == nil {
		g.wait = sp.wait
		err = im.convert(sp, size, true, g)
	}
	// What was found to be damaged before it came may be the server's doing: what comes tells.
	if err != nil && !(api.Is(err, api.Corrupt) && sp.lookahead.pending()) {
		im.cancel(err)
	}
	sp.discard()
	wg.Wait()
	if arrived != nil && !errors.Is(arrived, context.Canceled) {
		return n, arrived // the cause; what the conversion says follows from it
	}
	return n, err
}

// scratchFile makes the scratch file, and what carries the stream to it. Where the import can be continued by another
// process, the file lies beside the layer, which is begun for that.
func (im *importRun) openScratch(b imageStream, kept *scratchState) (
	sp *scratchFile, f feed, g *checkpointGate, err error,
) {
	g = newCheckpointGate(im.at)
	f = &streamFeed{head: b.head, r: b.r}
	_, resumes := im.on.(block.Resumer)
	if resumes && im.w == nil && im.resumable() {
		if err := im.createLayer(chunkSize); err != nil {
			return nil, nil, nil, err
		}
	}
	w, ok := im.checkpointWriter()
	if !ok {
		file, err := createScratch(im.on)
		sp = newScratchFile(file, &im.p.scratch)
		sp.lookahead = im.newLookahead()
		return sp, f, g, err
	}
	file, err := w.Beside(scratchName)
	if err != nil {
		return nil, nil, nil, err
	}
	sp = newScratchFile(file, &im.p.scratch)
	sp.lookahead = im.newLookahead()
	if kept != nil {
		if err := sp.resume(kept); err != nil {
			return nil, nil, nil, errors.Join(err, sp.Close())
		}
	}
	return sp, &scratchFeed{feed: f, im: im, sp: sp, gate: g, w: w, next: time.Now().Add(im.checkpointEvery()), shut: -1,
		off: im.from, at: im.at}, g, nil
}

// convert makes the layer from an image that is not raw. With stream, it is still on its way.
func (im *importRun) convert(r io.ReaderAt, size int64, stream bool, g *checkpointGate) error {
	img, err := im.format.open(r, size, stream)
	if err != nil {
		return err
	}
	defer img.Close()
	if err := im.createLayer(img.Size()); err != nil {
		return err
	}
	im.p.makeTotal.Store(img.Size())
	g.setImage(img)
	err = block.Copy(im.ctx, g.sink(chunkSink{im.w, im.space.guard(chunkWriter(im.w))}), g, block.CopyOptions{
		Progress: func(done, _ int64) { im.p.made.Store(done) }})
	if s, ok := img.(interface{ Settled() error }); ok && err == nil {
		err = s.Settled()
	}
	return err
}

// commit compares sizes and checksums, makes the layer durable and records the image. n is how many bytes came.
func (im *importRun) commit(n int64) (Result, error) {
	if err := im.complete(n); err != nil {
		return Result{}, im.nameError(err)
	}
	if im.s.Size < 0 {
		im.p.readTotal.Store(n)
	}
	if im.s.Settled != nil {
		if err := im.s.Settled(); err != nil {
			return Result{}, err
		}
	}
	sum := hex.EncodeToString(im.sum.Sum(nil))
	if want := im.want.Checksum; want != "" && !strings.EqualFold(want, sum) {
		return Result{}, api.Errorf(api.Corrupt, "%s: wrong checksum: SHA-512 is %s, expected %s", im.s.Name, sum, want)
	}
	im.p.sealing.Store(true)
	root, allocated, err := im.w.Seal(im.ctx)
	if err != nil {
		return Result{}, err
	}
	if im.want.Digest != "" && im.want.Digest != root {
		err := api.Errorf(api.Corrupt, "%s holds something else than the image's other copies: its content changed",
			im.s.Name)
		return Result{}, errors.Join(err, Remove(im.ctx, im.on, im.want))
	}
	img := block.Image{UID: string(im.want.UID), Name: im.want.Name, Layers: layerNames(im.want.Layers),
		Format: string(im.format) + im.packed, VirtualSize: im.virtual, Checksum: sum, Digest: root,
		Object: im.want.Object}
	if err := im.on.PutImage(img); err != nil {
		return Result{}, err
	}
	return Result{img, allocated}, nil
}

func layerNames(uids []api.UID) []string {
	out := make([]string, len(uids))
	for i, u := range uids {
		out[i] = string(u)
	}
	return out
}
