package registry

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"io"
	"strings"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/archive"
)

// disk is the bytes of the disk file. It goes through the layers, the topmost first: up to the file when it is opened,
// and through all that follows after its last byte. Owner: the goroutine that reads.
type disk struct {
	ctx    context.Context
	c      *client
	all    []descriptor // the topmost last
	layers []descriptor // of them, what was not looked at yet
	walk   walk

	at     *layer       // the open one
	origin *resumePoint // of the disk file; nil: its transfer cannot be gone on with
	err    error        // final; io.EOF: all is read, and right
}

// layer is an open one.
type layer struct {
	blob  *blob
	stop  context.CancelFunc // ends its requests
	buf   *bufio.Reader      // over blob
	plain *archive.Reader    // over buf; nil: it is not packed
	files *counted           // the archive, unpacked
	tar   *tar.Reader        // over files

	left, fill int64 // of the disk file, and behind it, where tar does not know of it
}

const (
	bufferSize = 256 << 10
	tarBlock   = 512
)

// find goes to the disk file and returns its size.
func (d *disk) find() (int64, error) {
	d.walk.image = d.c.name
	h, err := d.next()
	if errors.Is(err, io.EOF) {
		err = d.walk.none()
	}
	if err == nil {
		err = d.walk.fits(h, d.at.blob.want.Size, d.at.plain != nil)
	}
	if err != nil {
		d.err = err
		return 0, err
	}
	d.remember(h.Size)
	return h.Size, nil
}

// next is the next disk file in what was not looked at yet; io.EOF: there is none, and all layers were right.
func (d *disk) next() (*tar.Header, error) {
	for {
		if d.at == nil {
			if len(d.layers) == 0 || d.walk.closed {
				return nil, io.EOF
			}
			if err := d.open(); err != nil {
				return nil, err
			}
		}
		h, err := d.walk.disk(d.at.tar)
		if errors.Is(err, io.EOF) {
			err = d.finish()
			if err == nil {
				continue
			}
		}
		if err != nil {
			return nil, d.explain(err)
		}
		return h, nil
	}
}

// open begins with the topmost layer that was not looked at yet.
func (d *disk) open() error {
	b, stop, err := d.blob(d.layers[len(d.layers)-1], 0, nil)
	if err != nil {
		return err
	}
	d.layers = d.layers[:len(d.layers)-1]
	d.at = &layer{blob: b, stop: stop, buf: bufio.NewReaderSize(b, bufferSize)}
	files := io.Reader(d.at.buf)
	if d.at.plain, err = unpack(d.at.buf); err != nil {
		return d.explain(err)
	}
	if d.at.plain != nil {
		files = d.at.plain
	}
	d.at.files = &counted{r: files}
	d.at.tar = tar.NewReader(d.at.files)
	return nil
}

// blob opens one, whose requests end with stop.
func (d *disk) blob(want descriptor, off int64, sum []byte) (b *blob, stop context.CancelFunc, err error) {
	ctx, stop := context.WithCancel(d.ctx)
	if b, err = d.c.openBlob(ctx, want, off, sum); err != nil {
		stop()
		return nil, nil, err
	}
	return b, stop, nil
}

// finish reads what stands behind the archive's end, so that the digest is known, and leaves the layer.
func (d *disk) finish() error {
	left := maxBeside - d.walk.beside
	n, err := io.Copy(io.Discard, io.LimitReader(d.at.files, left+1))
	if err != nil {
		return err
	}
	if n > left {
		return api.Errorf(api.OutOfRange, "%s: the image holds more than %d GiB beside the disk", d.c.name, maxBeside>>30)
	}
	d.walk.beside += n
	if _, err := io.Copy(io.Discard, d.at.buf); err != nil {
		return err
	}
	d.walk.below()
	d.leave()
	return nil
}

// explain tells what was wrong: the way here comes first, for a cut leaves the archive damaged, too.
func (d *disk) explain(err error) error {
	if failed := d.at.blob.failure(); failed != nil && !errors.Is(failed, io.EOF) {
		return failed
	}
	kind := api.KindOf(err)
	ours := kind == api.Corrupt && strings.Contains(err.Error(), d.c.name)
	if kind != api.Other && kind != api.Corrupt || ours || d.ctx.Err() != nil {
		return err
	}
	return api.Errorf(api.Corrupt, "%s: layer %s is damaged, or no archive that can be read: %s", d.c.name,
		d.at.blob.want.Digest, clip(err.Error()))
}

// leave closes the open layer.
func (d *disk) leave() {
	if d.at != nil {
		d.at.stop() // ends a read that Close waits for
		if d.at.plain != nil {
			_ = d.at.plain.Close()
		}
		d.at.blob.Close()
		d.at = nil
	}
}

// Read gives the next bytes of the disk file. io.EOF comes after all layers were read and compared.
func (d *disk) Read(p []byte) (int, error) {
	if d.err != nil || len(p) == 0 {
		return 0, d.err
	}
	n, err := d.at.read(p)
	switch {
	case n > 0 || err == nil:
		return n, nil // an error that came with bytes comes again with the next Read
	case !errors.Is(err, io.EOF):
		d.err = d.explain(err)
		return 0, d.err
	}
	_, d.err = d.next() // a second disk is an error of it
	if d.err == nil {
		d.err = api.Errorf(api.Corrupt, "%s: the image holds more than one disk", d.c.name)
	}
	return 0, d.err
}

// read gives the next bytes of the disk file in the layer.
func (l *layer) read(p []byte) (int, error) {
	if l.left == 0 && l.fill == 0 {
		return l.tar.Read(p) // where another one read the file, there is none before the next header
	}
	if l.left == 0 {
		_, err := io.CopyN(io.Discard, l.files, l.fill)
		l.fill = 0
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		} else if err == nil {
			err = io.EOF
		}
		return 0, err
	}
	n, err := l.files.Read(p[:min(int64(len(p)), l.left)])
	l.left -= int64(n)
	if errors.Is(err, io.EOF) && n == 0 {
		err = io.ErrUnexpectedEOF
	} else if n > 0 {
		err = nil // it comes again
	}
	return n, err
}

// settled says, after the last byte, whether all of them were the image's.
func (d *disk) settled() error {
	var one [1]byte
	for d.err == nil {
		if n, _ := d.Read(one[:]); n > 0 {
			return api.Errorf(api.Corrupt, "%s: the disk is longer than the archive says", d.c.name)
		}
	}
	if errors.Is(d.err, io.EOF) {
		return nil
	}
	return d.err
}

// Close ends the transfer.
func (d *disk) Close() error {
	if d.err == nil {
		d.err = api.Errorf(api.Unavailable, "%s: closed", d.c.name)
	}
	d.leave()
	d.c.close()
	return nil
}
