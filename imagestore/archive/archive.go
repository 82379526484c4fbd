// Package archive unpacks streams that are compressed with gzip, xz or zstd. It detects the format by content and
// returns the plain bytes as an io.ReadCloser. It knows nothing of images. The decoders are libraries
// (klauspost/compress, ulikunitz/xz); the package owns their limits.
//
// The input is hostile. A reader checks the window or dictionary that a header asks for before the decoder allocates
// it, and returns at most Limits.Output bytes. The decoders verify every checksum of the format; data behind the end of
// the archive is an error. There is no limit on the ratio: a disk image may well be one zero after another, packed 7000
// to 1, so the limit is the size of the output. A checksum follows the bytes that it covers, so a caller may rely on
// the bytes only after Read has returned io.EOF.
//
// A reader owns one goroutine, which reads the source ahead of the decoder; the zstd decoder adds its own. Close ends
// them and waits for them. Close also waits for a running read of the source, so a caller that gives up interrupts its
// source first.
package archive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"drover.io/drover/api"
)

// Format is the compression format of a stream.
type Format uint8

// The formats. None stands for a stream in no other format.
const (
	None Format = iota
	Gzip
	Xz
	Zstd
)

var formatNames = [...]string{"none", "gzip", "xz", "zstd"}

func (f Format) String() string {
	if int(f) < len(formatNames) {
		return formatNames[f]
	}
	return fmt.Sprintf("format %d", uint8(f))
}

// HeadSize is the number of bytes that Detect needs. A shorter stream fits into its head.
const HeadSize = 6

// Detect returns the format of a stream that starts with head.
func Detect(head []byte) Format {
	switch {
	case len(head) >= 3 && head[0] == 0x1f && head[1] == 0x8b && head[2] == 8:
		return Gzip
	case len(head) >= len(xzMagic) && string(head[:len(xzMagic)]) == xzMagic:
		return Xz
	case len(head) >= 4:
		magic := binary.LittleEndian.Uint32(head)
		if magic == zstdMagic || magic&skipMask == skipMagic {
			return Zstd
		}
	}
	return None
}

// Limits of one reader. Zero values mean the defaults.
type Limits struct {
	// Output is the largest number of plain bytes; by default the size of the largest volume.
	Output int64
}

// The errors that callers distinguish. Each is wrapped in an error with a kind of package api.
var (
	ErrTruncated = errors.New("the archive ends too early")
	ErrTrailing  = errors.New("data that does not belong to the archive follows its end")
	ErrChecksum  = errors.New("the checksum does not match the content")
	ErrTooLarge  = errors.New("the archive unpacks to more than is allowed")
)

// decoder is a library's decoder with the rules of this package.
type decoder interface {
	Read(p []byte) (int, error)
	Close()
}

var decoders = [...]func(io.Reader) (decoder, error){Gzip: newGunzip, Xz: newUnxz, Zstd: newUnzstd}

// NewReader returns a reader for the plain bytes of the archive in r. It reads nothing before the first Read. The
// caller closes the reader, and keeps r.
func NewReader(r io.Reader, f Format, lim Limits) (*Reader, error) {
	if f == None || int(f) >= len(decoders) {
		return nil, api.Errorf(api.Unsupported, "no archive: %v is not gzip, xz or zstd", f)
	}
	if lim.Output <= 0 {
		lim.Output = api.MaxVolumeSize
	}
	return &Reader{format: f, source: r, limit: lim.Output, left: lim.Output}, nil
}
