package archive

import (
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"drover.io/drover/api"
)

// Reader returns the plain bytes of an archive. It is for one goroutine.
type Reader struct {
	format Format
	source io.Reader
	ahead  *readahead // nil before the first Read
	dec    decoder
	limit  int64
	left   int64 // of limit
	err    error // final
}

// Read returns the plain bytes. The bytes before an error may be wrong.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if r.ahead == nil && r.err == nil {
		r.ahead = newReadahead(r.source)
		var err error
		if r.dec, err = decoders[r.format](r.ahead); err != nil {
			r.err = r.explain(err)
		}
	}
	for r.err == nil {
		n, err := r.dec.Read(p[:min(int64(len(p)), r.left+1)])
		if int64(n) > r.left {
			n, err = int(r.left), api.Errorf(api.OutOfRange, "%v: %w: more than %d bytes", r.format, ErrTooLarge, r.limit)
		}
		r.left -= int64(n)
		if err != nil {
			r.err = r.explain(err)
		}
		if n > 0 {
			return n, nil // an error follows with the next Read
		}
	}
	return 0, r.err
}

// explain returns the error of a decoder with a kind and a place. An error of the source comes first, and unchanged:
// the decoder's error follows from it.
func (r *Reader) explain(err error) error {
	read, failed := r.ahead.decoderState()
	var known *api.Error
	switch {
	case failed != nil && !errors.Is(failed, io.EOF):
		return failed
	case err == io.EOF && read > 0, errors.As(err, &known): //nolint:errorlint // a decoder that wraps io.EOF failed
		return err
	case failed != nil && (errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF)):
		return api.Errorf(api.Corrupt, "%v: %w", r.format, ErrTruncated)
	case errors.Is(err, gzip.ErrChecksum), errors.Is(err, zstd.ErrCRCMismatch), isXzChecksum(err):
		return api.Errorf(api.Corrupt, "%v: before byte %d: %w", r.format, read, ErrChecksum)
	}
	return api.Errorf(api.Corrupt, "%v: the archive is damaged before byte %d: %w", r.format, read, err)
}

// Close ends the goroutines, waits for them and frees the memory.
func (r *Reader) Close() error {
	if r.ahead != nil {
		r.ahead.stop()
		if r.dec != nil {
			r.dec.Close()
		}
		r.ahead.wait()
	}
	r.ahead, r.dec, r.err = nil, nil, errClosed
	return nil
}

// trailingError is the error for data behind the end of the archive.
func trailingError(f Format) error {
	return api.Errorf(api.Corrupt, "%v: the archive is complete, but %w", f, ErrTrailing)
}
