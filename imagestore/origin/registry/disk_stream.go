package registry

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"io"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/archive"
)

// diskStream is the bytes of the disk file. Opening reads the layers from the topmost layer to the file; after the last
// byte of the file, Read reads all other layers. The goroutine that reads owns the stream.
type diskStream struct {
	ctx    context.Context
	c      *client
	all    []v1.Descriptor // the lowest first
	layers []v1.Descriptor // not opened yet
	search diskSearch

	at        *layer       // the open layer
	resumable *resumePoint // nil: another process cannot continue
	err       error        // final; io.EOF: every layer matched its digest
}

// layer is an open layer.
type layer struct {
	blob  *blob
	stop  context.CancelFunc // ends the requests of blob
	buf   *bufio.Reader      // over blob
	plain *archive.Reader    // over buf; nil: the blob is plain
	files *countingReader    // the archive, unpacked
	tar   *tar.Reader        // over files

	left, fill int64 // bytes of the file and padding that tar does not count, after a resume
}

const (
	bufferSize = 256 << 10
	tarBlock   = 512
)

// findDisk advances to the disk file and returns its size.
func (d *diskStream) findDisk() (int64, error) {
	d.search.image = d.c.name
	h, err := d.nextDisk()
	if errors.Is(err, io.EOF) {
		err = d.search.errNoDisk()
	}
	if err == nil {
		err = d.search.checkSize(h, d.at.blob.want.Size, d.at.plain != nil)
	}
	if err != nil {
		d.err = err
		return 0, err
	}
	d.setResumePoint(h.Size)
	return h.Size, nil
}

// nextDisk returns the next disk file, or io.EOF once every layer matched its digest.
func (d *diskStream) nextDisk() (*tar.Header, error) {
	for {
		if d.at == nil {
			if len(d.layers) == 0 || d.search.closed {
				return nil, io.EOF
			}
			if err := d.openLayer(); err != nil {
				return nil, err
			}
		}
		h, err := d.search.nextDisk(d.at.tar)
		if errors.Is(err, io.EOF) {
			err = d.finishLayer()
			if err == nil {
				continue
			}
		}
		if err != nil {
			return nil, d.explainDamage(err)
		}
		return h, nil
	}
}

// openLayer opens the topmost unopened layer.
func (d *diskStream) openLayer() error {
	b, stop, err := d.openBlob(d.layers[len(d.layers)-1], 0, nil)
	if err != nil {
		return err
	}
	d.layers = d.layers[:len(d.layers)-1]
	d.at = &layer{blob: b, stop: stop, buf: bufio.NewReaderSize(b, bufferSize)}
	files := io.Reader(d.at.buf)
	if d.at.plain, err = unpackLayer(d.at.buf); err != nil {
		return d.explainDamage(err)
	}
	if d.at.plain != nil {
		files = d.at.plain
	}
	d.at.files = &countingReader{r: files}
	d.at.tar = tar.NewReader(d.at.files)
	return nil
}

// openBlob opens a blob; stop ends the requests of the blob.
func (d *diskStream) openBlob(want v1.Descriptor, off int64, sum []byte) (b *blob, stop context.CancelFunc, err error) {
	ctx, stop := context.WithCancel(d.ctx)
	if b, err = d.c.openBlob(ctx, want, off, sum); err != nil {
		stop()
		return nil, nil, err
	}
	return b, stop, nil
}

// finishLayer reads the rest of the blob, so that the digest is compared, and closes the layer.
func (d *diskStream) finishLayer() error {
	left := maxBeside - d.search.beside
	n, err := io.Copy(io.Discard, io.LimitReader(d.at.files, left+1))
	if err != nil {
		return err
	}
	if n > left {
		return api.Errorf(api.OutOfRange, "%s: the image holds more than %d GiB beside the disk", d.c.name, maxBeside>>30)
	}
	d.search.beside += n
	if _, err := io.Copy(io.Discard, d.at.buf); err != nil {
		return err
	}
	d.search.nextLayer()
	d.closeLayer()
	return nil
}

// explainDamage prefers the failure of the blob, because a cut damages the archive as well.
func (d *diskStream) explainDamage(err error) error {
	if failed := d.at.blob.finalError(); failed != nil && !errors.Is(failed, io.EOF) {
		return failed
	}
	kind := api.KindOf(err)
	ours := kind == api.Corrupt && strings.Contains(err.Error(), d.c.name)
	if kind != api.Other && kind != api.Corrupt || ours || d.ctx.Err() != nil {
		return err
	}
	return api.Errorf(api.Corrupt, "%s: layer %s is damaged, or no archive that can be read: %s", d.c.name,
		d.at.blob.want.Digest, clipText(err.Error()))
}

// closeLayer closes the open layer.
func (d *diskStream) closeLayer() {
	if d.at != nil {
		d.at.stop() // ends a read for which Close waits
		if d.at.plain != nil {
			_ = d.at.plain.Close()
		}
		d.at.blob.Close()
		d.at = nil
	}
}

// Read returns the next bytes of the disk file. io.EOF comes after every layer matched its digest.
func (d *diskStream) Read(p []byte) (int, error) {
	if d.err != nil || len(p) == 0 {
		return 0, d.err
	}
	n, err := d.at.readDisk(p)
	switch {
	case n > 0 || err == nil:
		return n, nil // the next Read returns the error again
	case !errors.Is(err, io.EOF):
		d.err = d.explainDamage(err)
		return 0, d.err
	}
	_, d.err = d.nextDisk() // fails for a second disk
	if d.err == nil {
		d.err = api.Errorf(api.Corrupt, "%s: the image holds more than one disk", d.c.name)
	}
	return 0, d.err
}

// readDisk returns the next bytes of the disk file in the layer.
func (l *layer) readDisk(p []byte) (int, error) {
	if l.left == 0 && l.fill == 0 {
		return l.tar.Read(p) // also after the file, until the next header
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
		err = nil // the next Read returns the error
	}
	return n, err
}

// checkEnd reports, after the last byte, whether all bytes are the image's.
func (d *diskStream) checkEnd() error {
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
func (d *diskStream) Close() error {
	if d.err == nil {
		d.err = api.Errorf(api.Unavailable, "%s: closed", d.c.name)
	}
	d.closeLayer()
	d.c.close()
	return nil
}
