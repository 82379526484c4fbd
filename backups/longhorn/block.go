package longhorn

import (
	"bytes"
	"context"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/pierrec/lz4/v4"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
)

// Methods of compression. A cfg without a method is of a Longhorn that knew gzip alone.
const (
	none  = "none"
	gzip1 = "gzip"
	lz4f  = "lz4"
)

// storedLimit bounds the object of a block of n bytes: compression adds little to bytes that it cannot compress.
func storedLimit(n int64) int64 { return n + n/16 + 64<<10 }

// readBlock reads a block of len(into) bytes from a pool of blocks. It tries the method first, then the others, and
// compares the bytes with the checksum. A missing or damaged block is an error of kind Corrupt.
func readBlock(ctx context.Context, store target.Store, pool, sum, method string, into []byte) error {
	name := pool + sum[:2] + "/" + sum[2:4] + "/" + sum + ".blk"
	o, err := store.Stat(ctx, name)
	var body []byte
	switch limit := storedLimit(int64(len(into))); {
	case err != nil:
	case o.Size < 0 || o.Size > limit:
		err = api.Errorf(api.Corrupt, "object %s: has %d bytes, at most %d are allowed", name, o.Size, limit)
	default:
		body, err = store.Get(ctx, name, 0, o.Size)
	}
	switch {
	case api.Is(err, api.NotFound), api.Is(err, api.Invalid):
		return api.Errorf(api.Corrupt, "the store lost the block: %w", err)
	case err != nil:
		return err
	}
	if method == "" {
		method = gzip1
	}
	var first error
	for _, m := range []string{method, lz4f, gzip1, none} {
		if m == method && first != nil {
			continue
		}
		if err = decompress(m, body, into); err == nil && checksum(into) != sum {
			err = errors.New("the bytes do not match the checksum")
		}
		if err == nil {
			return nil
		}
		if first == nil {
			first = err
		}
	}
	return api.Errorf(api.Corrupt, "object %s: %w", name, first)
}

// decompress fills into.
func decompress(method string, body, into []byte) error {
	var from io.Reader
	switch method {
	case none:
		if len(body) != len(into) {
			return errors.New("the block has another length")
		}
		copy(into, body)
		return nil
	case lz4f:
		from = lz4.NewReader(bytes.NewReader(body))
	case gzip1:
		z, err := gzip.NewReader(bytes.NewReader(body))
		if err != nil {
			return err
		}
		defer z.Close() //nolint:errcheck // the reader of memory
		from = z
	default:
		return api.Errorf(api.Unsupported, "the compression %.16q is not supported", method)
	}
	if _, err := io.ReadFull(from, into); err != nil {
		return err
	}
	// The end has the checksum of the compression, and must be the end.
	if n, err := io.ReadFull(from, make([]byte, 1)); n > 0 || err != io.EOF {
		return errors.Join(errors.New("the block is longer than the backup's blocks, or damaged at its end"), err)
	}
	return nil
}
