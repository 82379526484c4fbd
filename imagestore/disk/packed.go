package disk

import (
	"errors"
	"hash"
	"io"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/archive"
)

// packedNote is the place in an archive that a packed import is to go on from. The Mark beside it is a bit before that,
// where the state of the checksum is known.
type packedNote struct {
	Point archive.Point `json:"point"`
	Off   int64         `json:"off"` // unpacked bytes that are there: the point is at or before that
}

// tally hashes what is read of a source that is packed, and remembers the states of that.
type tally struct {
	r    io.Reader
	sum  hash.Hash
	tell func(int64)
	n    int64
	note func(n int64) // or nil
}

// tally is r as one, from a byte of the source on.
func (im *importer) tally(r io.Reader, from int64) *tally {
	t := &tally{r: r, sum: im.hashed(), tell: im.readSome, n: from}
	if im.s.Mark != nil && im.s.At == nil {
		t.note = func(n int64) { im.trail.Note(n, im.sum, im.crc) }
		t.note(from)
	}
	return t
}

func (t *tally) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	_, _ = t.sum.Write(p[:n])
	t.n += int64(n)
	if t.note != nil {
		t.note(t.n)
	}
	t.tell(int64(n))
	return n, err
}

// unpack has an image made from what a reader unpacks, and closes it.
func (im *importer) unpack(plain *archive.Reader, packing archive.Format, do func(bytesOf) error) error {
	im.packed, im.plain = packedNames[packing], plain
	if im.continuable() {
		plain.KeepPoints(pieceSize)
	}
	err := do(bytesOf{r: plain, size: -1})
	if err != nil {
		im.cancel(err) // ends a read of the source that Close would wait for
	}
	return errors.Join(err, plain.Close())
}

// packedPlace is place for what is unpacked on its way.
func (im *importer) packedPlace(off int64, note *keptNote) bool {
	p, ok := im.plain.Point(off)
	if !ok {
		return false
	}
	m, ok := im.trail.Before(p.Packed)
	if !ok {
		return false
	}
	note.Mark.Off, note.Mark.CRC, note.Sum = m.Off, m.CRC, m.Sum
	note.Packed = &packedNote{Point: p, Off: off}
	note.From = p.Plain - p.Window
	return true
}

// errAnew is in the errors of what cannot be continued, but may be had from the beginning.
var errAnew = errors.New("it begins anew")

// goOn makes the rest of an image whose begin was adopted. It returns how many bytes of the source came in all.
func (im *importer) goOn(k *Kept) (n int64, err error) {
	rest := func(b bytesOf) (int64, error) {
		if k.note.Spool != nil {
			return im.spooled(b, k.note.Spool)
		}
		return im.stream(&b)
	}
	defer func() {
		if (k.note.Packed != nil || k.note.State != nil) && api.Is(err, api.Corrupt) {
			// It may be what was kept that is damaged.
			err = api.Errorf(api.Unavailable, "it could not be continued (%w): %w", err, errAnew)
		}
	}()
	packed := k.note.Packed
	if packed == nil {
		return rest(bytesOf{r: im.s, size: im.s.Size, sum: im.hashed(), tell: im.readSome})
	}
	all := im.tally(im.s, k.Mark.Off)
	if err := pass(all, packed.Point.Packed-k.Mark.Off); err != nil {
		return 0, err
	}
	plain, err := archive.Continue(all, packed.Point, unpacking(im.on), k.Before())
	if err != nil {
		return 0, err
	}
	err = im.unpack(plain, packed.Point.Format, func(b bytesOf) error {
		if err := pass(plain, packed.Off-packed.Point.Plain); err != nil {
			return err
		}
		_, err := rest(b)
		return err
	})
	return all.n, err
}

// unpacking are the limits of an archive. What of its window does not fit into memory goes to the image's disk.
func unpacking(on block.Layers) (lim archive.Limits) {
	if at, ok := on.(interface{ Path() string }); ok {
		lim.Scratch = at.Path()
	}
	return lim
}

// pass reads n bytes that are known.
func pass(r io.Reader, n int64) error {
	_, err := io.CopyN(io.Discard, r, n)
	if errors.Is(err, io.EOF) {
		return api.Errorf(api.Corrupt, "it ends before the place where it was to be continued")
	}
	return err
}

// Before gives the bytes of the image before the Mark, in so far as they are at hand.
func (k *Kept) Before() io.ReaderAt { return before{k.w, k.note.Spool != nil} }

type before struct {
	w     block.Keeper
	spool bool
}

func (b before) ReadAt(p []byte, off int64) (n int, err error) {
	if !b.spool {
		return b.w.ReadAt(p, off)
	}
	f, err := b.w.Beside(spoolName)
	if err != nil {
		return 0, err
	}
	n, err = f.ReadAt(p, off)
	if errors.Is(err, io.EOF) { // zeros at the end were not written
		clear(p[n:])
		n, err = len(p), nil
	}
	return n, errors.Join(err, f.Close())
}
