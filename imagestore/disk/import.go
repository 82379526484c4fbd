// Package disk makes true that a backing image is, or is not, on a disk: it imports an image from a source into a
// layer, copies layers from another disk, finds what is there already, and removes. It sees a disk as block.Layers.
//
// The bytes of the source go through once: read, hashed (SHA-512, over the source's bytes, holes included) and written
// in parallel; chunks of zeros stay holes. A raw image streams straight into the layer. A qcow2 image needs random access:
// from a file of this node it is converted in place, while the file is hashed; from a stream it goes to a nameless
// scratch file on the same disk, and is converted while it arrives.
//
// The commit point of an import is the record of the image (Layers.PutImage): before it nothing is there, and every
// failure leaves nothing. The checksum is compared before the layer is sealed. All goroutines end before a function
// returns.
package disk

import (
	"context"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/qcow2"
	"drover.io/drover/imagestore/source"
)

// Want is the image that is to be on the disk. What is known of it from an earlier copy must come out the same.
type Want struct {
	UID         api.UID
	Name        string
	Layers      []api.UID
	Checksum    string          // expected SHA-512, or empty
	Digest      string          // known root digest of the top layer, or empty
	Format      string          // known, or empty
	Object      json.RawMessage // what the API knows of the image, to be kept with it; or nil
	VirtualSize int64           // known, or 0
}

// Got is the image that is on the disk.
type Got struct {
	block.Image
	Allocated int64 // bytes that it takes there
}

// Progress of one import or copy. Written by its goroutines, read by anybody.
type Progress struct {
	read, readTotal atomic.Int64 // bytes of the source
	made, makeTotal atomic.Int64 // bytes of the content, where it is made in a second step
	sealing         atomic.Bool
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
func Import(ctx context.Context, on block.Layers, want Want, p *Progress,
	open func(context.Context) (*source.Stream, error)) (Got, error) {
	if len(want.Layers) != 1 {
		return Got{}, api.Errorf(api.Invalid, "image %s: one layer is imported, not %d", want.Name, len(want.Layers))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s, err := open(ctx)
	if err != nil {
		return Got{}, err
	}
	defer s.Close()
	im := &importer{ctx: ctx, cancel: cancel, on: on, want: want, p: p, s: s, sum: sha512.New(), room: newRoom(on)}
	p.readTotal.Store(s.Size)
	got, err := im.run()
	if err != nil {
		if im.w != nil {
			if aerr := im.w.Abort(); aerr != nil {
				err = errors.Join(err, api.Errorf(api.Other, "what was written could not be removed: %w", aerr))
			}
		}
		return Got{}, explain(on, err)
	}
	return got, nil
}

// explain gives errors of the kernel a kind and a message.
func explain(on block.Layers, err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return api.Errorf(api.Full, "disk %s is full: free some room, or let the image go to a larger disk (%w)", on.UID(), err)
	case api.KindOf(err) != api.Other:
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return api.Errorf(api.Corrupt, "the source is shorter than it says: %w", err)
	}
	return err
}

type importer struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	on     block.Layers
	want   Want
	p      *Progress
	s      *source.Stream
	sum    hash.Hash
	w      block.LayerWriter
	room   *room

	format  source.Format
	virtual int64
}

func (im *importer) run() (Got, error) {
	head := make([]byte, source.HeadSize)
	n, err := io.ReadFull(im.s, head)
	if err != nil && !errors.Is(err, io.EOF) && err != io.ErrUnexpectedEOF {
		return Got{}, err
	}
	head = head[:n]
	if im.format, err = source.Detect(head); err != nil {
		return Got{}, api.Errorf(api.KindOf(err), "%s: %w", im.s.Name, err)
	}
	switch {
	case im.format == source.Raw && im.s.File != nil:
		err = im.raw(&fileFeed{f: im.s.File, size: im.s.Size})
	case im.format == source.Raw && im.s.Size >= 0:
		err = im.raw(&streamFeed{head: head, r: im.s})
	case im.s.File != nil:
		err = im.convertFile()
	default:
		err = im.spooled(&streamFeed{head: head, r: im.s})
	}
	if err != nil {
		return Got{}, err
	}
	return im.commit()
}

// create starts the layer of size bytes.
func (im *importer) create(size int64) (err error) {
	if size > api.MaxVolumeSize {
		return api.Errorf(api.OutOfRange, "%s: %d bytes are more than a volume can have (%d)", im.s.Name, size,
			api.MaxVolumeSize)
	}
	im.virtual = size
	im.w, err = create(im.ctx, im.on, im.want.Layers[0], size)
	return err
}

// raw streams a source of known size into the layer.
func (im *importer) raw(f feed) error {
	if err := im.create(im.s.Size); err != nil {
		return err
	}
	n, err := pump(im.ctx, f, im.sum, im.room.within(whole(im.w)), writers, im.readSome, im.cancel)
	if err != nil {
		return err
	}
	return im.complete(n)
}

func (im *importer) readSome(n int64) { im.p.read.Add(n) }

// complete compares what came with what was announced.
func (im *importer) complete(n int64) error {
	if im.s.Size >= 0 && n != im.s.Size {
		return api.Errorf(api.Corrupt, "%s: %d bytes came instead of %d", im.s.Name, n, im.s.Size)
	}
	return nil
}

// convertFile makes the layer from a qcow2 file of this node, while the file is hashed.
func (im *importer) convertFile() error {
	var wg sync.WaitGroup
	var hashed error
	var n int64
	wg.Go(func() {
		n, hashed = pump(im.ctx, &fileFeed{f: im.s.File, size: im.s.Size}, im.sum, nil, 0, im.readSome, im.cancel)
	})
	err := im.convert(im.s.File, im.s.Size)
	if err != nil {
		im.cancel(err)
	}
	wg.Wait()
	if err == nil {
		err = hashed
	}
	if err != nil {
		return err
	}
	return im.complete(n)
}

// spooled takes a stream to a scratch file, and makes the layer from there while it comes.
func (im *importer) spooled(f feed) error {
	sp, err := newSpool(im.on)
	if err != nil {
		return err
	}
	defer sp.Close()
	var wg sync.WaitGroup
	var arrived error
	var n int64
	wg.Go(func() {
		n, arrived = pump(im.ctx, f, im.sum, im.room.within(sp.put), 1, im.readSome, im.cancel)
		if arrived == nil {
			arrived = im.complete(n)
		}
		sp.finish(arrived)
	})
	size := im.s.Size
	if size < 0 {
		if err = sp.wait(1 << 62); err == nil {
			size = sp.have
			im.p.readTotal.Store(size)
		}
	}
	if err == nil {
		if im.format == source.QCOW2 {
			err = im.convert(sp, size)
		} else if err = im.create(size); err == nil {
			_, err = pump(im.ctx, &fileFeed{f: sp.f, size: size}, nil, im.room.within(whole(im.w)), writers, nil, im.cancel)
		}
	}
	if err != nil {
		im.cancel(err)
	}
	wg.Wait()
	if arrived != nil && !errors.Is(arrived, context.Canceled) {
		return arrived // the cause; what the conversion says follows from it
	}
	return err
}

// convert makes the layer from a qcow2 image.
func (im *importer) convert(r io.ReaderAt, size int64) error {
	img, err := qcow2.Open(r, size, qcow2.Limits{})
	if err != nil {
		return api.Errorf(api.KindOf(err), "%s: %w", im.s.Name, err)
	}
	defer img.Close()
	if err := im.create(img.Size()); err != nil {
		return err
	}
	im.p.makeTotal.Store(img.Size())
	err = block.Copy(im.ctx, wholeSink{im.w, im.room.within(whole(im.w))}, wholeSource{img}, block.CopyOptions{
		Progress: func(done, _ int64) { im.p.made.Store(done) }})
	if err != nil && api.KindOf(err) != api.Other {
		return api.Errorf(api.KindOf(err), "%s: %w", im.s.Name, err)
	}
	return err
}

// commit compares checksums, makes the layer durable and records the image.
func (im *importer) commit() (Got, error) {
	if im.s.Settled != nil {
		if err := im.s.Settled(); err != nil {
			return Got{}, err
		}
	}
	sum := hex.EncodeToString(im.sum.Sum(nil))
	if want := im.want.Checksum; want != "" && !strings.EqualFold(want, sum) {
		return Got{}, api.Errorf(api.Corrupt, "%s: wrong checksum: SHA-512 is %s, expected %s", im.s.Name, sum, want)
	}
	im.p.sealing.Store(true)
	root, allocated, err := im.w.Seal(im.ctx)
	if err != nil {
		return Got{}, err
	}
	if im.want.Digest != "" && im.want.Digest != root {
		err := api.Errorf(api.Corrupt, "%s holds something else than the image's other copies: its content changed",
			im.s.Name)
		return Got{}, errors.Join(err, Remove(im.ctx, im.on, im.want))
	}
	img := block.Image{UID: string(im.want.UID), Name: im.want.Name, Layers: names(im.want.Layers),
		Format: string(im.format), VirtualSize: im.virtual, Checksum: sum, Digest: root,
		Object: im.want.Object}
	if err := im.on.PutImage(img); err != nil {
		return Got{}, err
	}
	return Got{img, allocated}, nil
}

func names(uids []api.UID) []string {
	out := make([]string, len(uids))
	for i, u := range uids {
		out[i] = string(u)
	}
	return out
}
