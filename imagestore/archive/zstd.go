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
	// maxWindow is the window that the zstd program unpacks without an option: --long=27 and --ultra -22.
	maxWindow = 128 << 20
	// zstdBlocks is the number of blocks that the decoder has in work, for two cores.
	zstdBlocks = 2
)

// unzstd decodes one frame after the other.
type unzstd struct{ z *zstd.Decoder }

func newUnzstd(r io.Reader) (decoder, error) {
	z, err := zstd.NewReader(r, zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow),
		zstd.WithDecoderMaxMemory(maxWindow), zstd.WithDecoderConcurrency(zstdBlocks))
	if err != nil {
		return nil, err
	}
	return &unzstd{z}, nil
}

func (u *unzstd) Read(p []byte) (int, error) {
	n, err := u.z.Read(p)
	switch {
	case err == nil:
	case errors.Is(err, zstd.ErrMagicMismatch):
		err = trailingError(Zstd)
	case errors.Is(err, zstd.ErrWindowSizeExceeded), errors.Is(err, zstd.ErrDecoderSizeExceeded):
		err = api.Errorf(api.Unsupported, "zstd: a frame needs a window of more than %d MiB, or a block exceeds the "+
			"window of its frame: pack it with a smaller window (zstd --long=27 is fine)", maxWindow>>20)
	case errors.Is(err, zstd.ErrUnknownDictionary):
		err = api.Errorf(api.Unsupported, "zstd: the archive needs a dictionary, which is not supported")
	}
	return n, err
}

func (u *unzstd) Close() { u.z.Close() }
