package importer

import (
	"bytes"
	"errors"
	"hash"
	"io"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/archive"
)

// The importer unpacks an archive during the transfer. No decoder can begin in the middle of an archive, so an import
// of an archive has no checkpoint and starts again after a restart of the process.

// hashingReader hashes and counts the bytes of an archive.
type hashingReader struct {
	r      io.Reader
	sum    hash.Hash
	report func(int64)
	n      int64
}

func (t *hashingReader) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	_, _ = t.sum.Write(p[:n])
	t.n += int64(n)
	t.report(int64(n))
	return n, err
}

// importArchive makes the layer from an image in an archive with the first bytes head, and returns the size of the
// archive.
func (im *importRun) importArchive(head []byte, packing archive.Format) (int64, error) {
	all := &hashingReader{r: io.MultiReader(bytes.NewReader(head), im.s), sum: im.originHash(), report: im.readSome}
	plain, err := archive.NewReader(all, packing, archive.Limits{})
	if err != nil {
		return 0, err
	}
	im.packed = packedNames[packing]
	if err = im.importUnpacked(imageStream{r: plain, size: -1}, packing); err != nil {
		im.cancel(err) // ends a read of the origin for which Close would wait
	}
	err = errors.Join(err, plain.Close()) // makes all.n final
	return all.n, err
}

func (im *importRun) importUnpacked(b imageStream, packing archive.Format) error {
	if err := b.readHead(); err != nil {
		return err
	}
	if inner := archive.Detect(b.head); inner != archive.None {
		return api.Errorf(api.Unsupported, "the source is an archive (%s) in an archive (%s): unpack the outer one "+
			"first", inner, packing)
	}
	_, err := im.importImage(b)
	return err
}
