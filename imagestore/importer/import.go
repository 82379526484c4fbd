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

// Spec is an image that a disk shall have. Facts from an earlier copy must come out the same.
type Spec struct {
	UID             api.UID
	Name            string
	Layers          []api.UID
	Checksum        string          // expected SHA-512, or empty
	Digest          string          // known root digest of the top layer, or empty
	Format          string          // known, or empty
	Object          json.RawMessage // the image in the API, for the record on the disk; or nil
	VirtualSize     int64           // known, or 0
	Export          bool            // the layers belong to a snapshot, and perhaps to volumes
	Left            bool            // the image leaves its layers to the replicas on the disk
	Checkpoint      *Checkpoint     // from FindCheckpoint, for Import to use or drop; or nil
	CheckpointEvery time.Duration   // interval between checkpoints; 10 s when zero
}

// Result is the image on the disk.
type Result struct {
	block.Image
	Allocated int64 // bytes on the disk
}

// Progress of one import or copy. The goroutines of the import write the fields; any goroutine may read them.
type Progress struct {
	read, readTotal atomic.Int64 // bytes of the origin
	made, makeTotal atomic.Int64 // bytes of the content, if a conversion follows
	sealing         atomic.Bool
	scratch         atomic.Int64 // peak bytes of the scratch file
	early           atomic.Int64 // bytes of the lookahead

	restored atomic.Pointer[func() (done, total int64)] // of a restore; nil: the fields above count
	notice   atomic.Pointer[string]
}

// SetNotice sets the remark for the user.
func (p *Progress) SetNotice(text string) { p.notice.Store(&text) }

// Notice returns a remark for the user, or "".
func (p *Progress) Notice() string {
	if text := p.notice.Load(); text != nil {
		return *text
	}
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

// Snapshot returns the progress. percent stays below 100 until the image is ready.
func (p *Progress) Snapshot() (state api.ImageState, percent int32, done, total int64) {
	state, done, total = api.ImageInProgress, p.read.Load(), max(p.readTotal.Load(), 0)
	if restored := p.restored.Load(); restored != nil {
		done, total = (*restored)()
	}
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

// writers is the number of goroutines that write one import.
const writers = 4

// Import imports an image from its origin to the disk. The context of open ends with the import.
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
	got, err := im.runImport()
	if err != nil {
		if im.w != nil {
			if aerr := im.endFailed(err); aerr != nil {
				err = errors.Join(err, api.Errorf(api.Other, "the incomplete layer could not be removed: %w", aerr))
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
	packed  string       // ending of the archive: ".gz", ".xz", ".zst" or empty
	virtual int64        // bytes of the disk in the image
	cut     atomic.Int64 // end of the disk in a raw origin

	from         int64  // first byte of the origin after the checkpoint
	at           int64  // end of the layer in the checkpoint
	crc          uint32 // CRC-32C of the bytes, if the origin asks for it
	checkpointed bool   // a checkpoint exists

	mu   sync.Mutex
	size int64 // of the growing layer
}

// imageStream is an image in transfer: head, then the bytes of r.
type imageStream struct {
	head   []byte
	r      io.Reader
	size   int64     // -1: only the end shows the size
	file   *os.File  // of a file of this node
	sum    hash.Hash // of the bytes, unless an archive is around them
	report func(int64)
}

func (im *importRun) runImport() (Result, error) {
	adopted, err := im.adoptCheckpoint(im.want.Checkpoint)
	if err != nil {
		return Result{}, im.nameError(err)
	}
	if adopted {
		n, err := im.continueImport(im.want.Checkpoint)
		if err != nil {
			return Result{}, im.nameError(err)
		}
		return im.commitImage(n)
	}
	b := imageStream{r: im.s, size: im.s.Size, file: im.s.File, sum: im.originHash(), report: im.readSome}
	if err := b.readHead(); err != nil {
		return Result{}, err
	}
	packing := archive.Detect(b.head)
	if packing == archive.None {
		n, err := im.importImage(b)
		if err != nil {
			return Result{}, im.nameError(err)
		}
		return im.commitImage(n)
	}
	n, err := im.importArchive(b.head, packing)
	if err != nil {
		return Result{}, im.nameError(err)
	}
	return im.commitImage(n)
}

// readHead reads the first bytes.
func (b *imageStream) readHead() error {
	head := make([]byte, headSize)
	n, err := io.ReadFull(b.r, head)
	if err != nil && !errors.Is(err, io.EOF) && err != io.ErrUnexpectedEOF {
		return err
	}
	b.head = head[:n]
	return nil
}

// nameError adds the name of the origin to an error about the image.
func (im *importRun) nameError(err error) error {
	if api.KindOf(err) == api.Other || strings.Contains(err.Error(), im.s.Name) {
		return err
	}
	return api.Errorf(api.KindOf(err), "%s: %w", im.s.Name, err)
}

// importImage makes the layer from an image and returns the number of bytes of the image.
func (im *importRun) importImage(b imageStream) (n int64, err error) {
	if im.format, err = detectFormat(b.head); err != nil {
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

// createLayer starts the layer with size bytes, or resizes a started layer.
func (im *importRun) createLayer(size int64) (err error) {
	if size > api.MaxVolumeSize {
		return im.tooLarge(size)
	}
	if size <= 0 {
		return api.Errorf(api.Invalid, "the disk in the image has no bytes")
	}
	im.virtual, im.size = size, size
	if im.w != nil {
		return im.w.Resize(size)
	}
	im.w, err = createLayer(im.ctx, im.on, im.want.Layers[0], size)
	return err
}

// importRaw writes a raw image into the layer; the size may show only at the end.
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

// writeRaw writes the bytes of a raw image into the started layer.
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
	put := im.clipWrites(im.growWrites(im.space.guardPut(chunkWriter(im.w))))
	n, err := runPipeline(im.ctx, pipelineStages{feed: f, hash: b.sum, writers: writers, progress: b.report,
		put: func(p []byte, off int64) error { return put(p, im.from+off) }, cancel: im.cancel})
	if n += im.from; err != nil {
		return n, err
	}
	im.virtual = min(n, im.cut.Load())
	if im.virtual == 0 {
		return n, api.Errorf(api.Invalid, "the disk in the image has no bytes")
	}
	return n, im.w.Resize(im.virtual)
}

func (im *importRun) readSome(n int64) { im.p.read.Add(n) }

// checkLength compares the received with the announced number of bytes.
func (im *importRun) checkLength(n int64) error {
	if im.s.Size >= 0 && n != im.s.Size {
		return api.Errorf(api.Corrupt, "%d bytes came instead of %d", n, im.s.Size)
	}
	return nil
}

// convertFile converts a file of this node while the file is hashed.
func (im *importRun) convertFile(b imageStream) (n int64, err error) {
	var wg sync.WaitGroup
	var hashed error
	sum := newThrottle()
	wg.Go(func() {
		n, hashed = runPipeline(im.ctx, pipelineStages{feed: &fileFeed{f: b.file, size: b.size}, hash: b.sum,
			progress: func(n int64) {
				sum.addHashed(n)
				b.report(n)
			}, cancel: im.cancel})
		sum.endWaits()
	})
	g := newCheckpointGate(0)
	g.wait = sum.awaitHash
	if err = im.convertImage(b.file, b.size, false, g); err != nil {
		im.cancel(err)
	}
	wg.Wait()
	if err == nil {
		err = hashed
	}
	return n, err
}

// convertStream converts a stream by way of a scratch file, during the transfer. kept is the scratch file of a
// checkpoint, or nil.
func (im *importRun) convertStream(b imageStream, kept *scratchState) (n int64, err error) {
	sp, feed, g, err := im.openScratch(b, kept)
	if err != nil {
		return 0, err
	}
	defer func() { _ = sp.Close() }()
	var wg sync.WaitGroup
	var arrived error
	put := im.space.guardPut(sp.storeBytes)
	wg.Go(func() {
		n, arrived = runPipeline(im.ctx, pipelineStages{feed: feed, hash: b.sum, writers: 1, progress: b.report,
			put: func(p []byte, off int64) error { return put(p, im.from+off) }, cancel: im.cancel})
		n += im.from
		g.disableGate() // the feed that opens the gate has ended
		sp.finishStream(arrived)
	})
	end := context.AfterFunc(im.ctx, func() {
		g.disableGate()
		sp.finishStream(context.Cause(im.ctx))
	})
	defer end()
	size := b.size
	if size < 0 && im.format.needsEnd() {
		size, err = sp.awaitAll()
	}
	if err == nil {
		g.wait = sp.awaitBytes
		err = im.convertImage(sp, size, true, g)
	}
	// Damage in the lookahead may be a fault of the server: the stream decides.
	if err != nil && !(api.Is(err, api.Corrupt) && sp.lookahead.hasPending()) {
		im.cancel(err)
	}
	sp.discardRest()
	wg.Wait()
	if arrived != nil && !errors.Is(arrived, context.Canceled) {
		return n, arrived // the cause of the failed conversion
	}
	return n, err
}

// openScratch creates the scratch file and its feed. For an import that can continue, the file lies beside the layer,
// which starts now.
func (im *importRun) openScratch(b imageStream, kept *scratchState) (
	sp *scratchFile, f feed, g *checkpointGate, err error,
) {
	g = newCheckpointGate(im.at)
	f = &streamFeed{head: b.head, r: b.r}
	_, resumes := im.on.(block.Resumer)
	if resumes && im.w == nil && im.isResumable() {
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
		if err := sp.restoreState(kept); err != nil {
			return nil, nil, nil, errors.Join(err, sp.Close())
		}
	}
	return sp, &scratchFeed{feed: f, im: im, sp: sp, gate: g, w: w, next: time.Now().Add(im.checkpointEvery()), shut: -1,
		off: im.from, at: im.at}, g, nil
}

// convertImage makes the layer from an image that is not raw. stream: the image is still in transfer.
func (im *importRun) convertImage(r io.ReaderAt, size int64, stream bool, g *checkpointGate) error {
	img, err := im.format.openImage(r, size, stream)
	if err != nil {
		return err
	}
	defer img.Close()
	if err := im.createLayer(img.Size()); err != nil {
		return err
	}
	im.p.makeTotal.Store(img.Size())
	g.setImage(img)
	err = block.Copy(im.ctx, g.gateSink(chunkSink{im.w, im.space.guardPut(chunkWriter(im.w))}), g, block.CopyOptions{
		Progress: func(done, _ int64) { im.p.made.Store(done) }})
	if s, ok := img.(interface{ Settled() error }); ok && err == nil {
		err = s.Settled()
	}
	return err
}

// commitImage compares sizes and checksums, makes the layer durable and records the image. n is the number of received
// bytes.
func (im *importRun) commitImage(n int64) (Result, error) {
	if err := im.checkLength(n); err != nil {
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
		err := api.Errorf(api.Corrupt, "the content of %s differs from the image's other copies: the origin changed",
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
