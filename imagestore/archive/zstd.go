package archive

import (
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"

	"drover.io/drover/api"
)

const (
	zstdMagic = 0xfd2fb528
	skipMagic = 0x184d2a50
	skipMask  = 0xfffffff0
)

// Read lets the library read the input.
func (in *input) Read(p []byte) (int, error) {
	if !in.need(1) {
		return 0, in.err
	}
	n := copy(p, in.buf[in.pos:in.end])
	in.skip(n)
	return n, nil
}

func unzstd(u *unpacker) error {
	z, err := zstd.NewReader(u.in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
	if err != nil {
		return err
	}
	defer z.Close()
	g, err := u.ring(0)
	if err != nil {
		return err
	}
	defer close(g.out)
	for {
		if err := g.reserve(); err != nil {
			return err
		}
		n, err := z.Read(g.b[g.pos : g.pos+pieceSize])
		g.pos += n
		if cerr := g.commit(); cerr != nil {
			return cerr
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, io.ErrUnexpectedEOF):
			return truncated("zstd")
		case errors.Is(err, zstd.ErrMagicMismatch):
			return u.in.trailing()
		case errors.Is(err, zstd.ErrCRCMismatch):
			return corrupt("zstd: %w", ErrChecksum)
		case errors.Is(err, zstd.ErrWindowSizeExceeded), errors.Is(err, zstd.ErrDecoderSizeExceeded):
			return api.Errorf(api.Unsupported, "zstd: the window is larger than 64 MiB")
		default:
			return u.in.damaged("%w", err)
		}
	}
}
