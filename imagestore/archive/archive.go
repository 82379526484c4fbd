// Package archive unpacks streams that are compressed with gzip, xz or zstd: it recognises the format by content and
// gives the plain bytes as an io.ReadCloser. It knows nothing of images.
//
// The input is hostile. Whatever its headers claim, a reader holds at most Limits.Memory and gives at most
// Limits.Output bytes; every checksum in the format is verified; what follows the end of the archive is an error of its
// own. There is no limit on the ratio: a disk image may well be one zero after another, packed 7000 to 1, so the size
// of the output is what is limited. A checksum comes after the bytes that it is over, so bytes that were read count
// only once Read has said io.EOF.
//
// An archive can be gone on with in the middle, by another process: a reader remembers places (Point) at which its
// decoder knows little, and Continue begins at one. What the decoder must have of the plain bytes before it is read
// from where the caller put them.
//
// A reader works ahead on goroutines of its own: one reads the source, one decodes (two, where the blocks of an xz file
// say their sizes), while the caller's goroutine verifies and consumes. Close ends them and waits for them; it waits,
// too, for a read of the source that is under way, so a caller that gives up interrupts its source first.
package archive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"drover.io/drover/api"
)

// Format is how a stream is packed.
type Format uint8

// The formats. None is everything that is not packed in one of the others.
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

// HeadSize is how many bytes Detect wants to see; a shorter stream is whole in its head.
const HeadSize = 6

const xzMagic = "\xfd7zXZ\x00"

// Detect tells how a stream that starts with head is packed.
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

// Limits of one reader. A zero is the default.
type Limits struct {
	// Output is the most bytes that the archive may unpack to; by default the largest volume.
	Output int64
	// Memory is the most memory of the reader; by default, and at least, DefaultMemory.
	Memory int64
	// Scratch is the folder for what a zstd window holds beyond that; by default that for temporary files.
	Scratch string
}

// DefaultMemory is enough for the 64 MiB dictionary of xz -9, and what is beside it.
const DefaultMemory = 80 << 20

// The errors that callers tell apart. Each is wrapped in one with a kind of package api and the place in the archive.
var (
	ErrTruncated = errors.New("the archive ends too early")
	ErrTrailing  = errors.New("something that is not part of it follows its end")
	ErrChecksum  = errors.New("the checksum does not match the content")
	ErrTooLarge  = errors.New("the archive unpacks to more than is allowed")
)

func corrupt(format string, args ...any) error {
	return api.Errorf(api.Corrupt, format, args...)
}

func truncated(what string) error {
	return corrupt("%s: %w", what, ErrTruncated)
}

// NewReader gives the plain bytes of the archive that r holds. Nothing is read before the first Read. The reader must
// be closed; r stays the caller's.
func NewReader(r io.Reader, f Format, lim Limits) (*Reader, error) {
	if lim.Output <= 0 {
		lim.Output = api.MaxVolumeSize
	}
	lim.Memory = max(lim.Memory, DefaultMemory)
	switch f {
	case Gzip:
		return newReader(r, f, lim, gunzip), nil
	case Xz:
		return newReader(r, f, lim, unxz), nil
	case Zstd:
		return newReader(r, f, lim, unzstd), nil
	}
	return nil, api.Errorf(api.Unsupported, "no archive: %v is not gzip, xz or zstd", f)
}
