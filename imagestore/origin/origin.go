package origin

import (
	"encoding/json"
	"errors"
	"hash/crc32"
	"io"
	"os"
)

// Stream is the bytes of one image. Read gives the bytes in order; an error of Read other than io.EOF describes a
// failure of the origin. Read fails once the context that opened the Stream ends.
type Stream struct {
	io.ReadCloser
	// Size in bytes, or -1 when only the end shows the size.
	Size int64
	// Name for messages and events, without credentials.
	Name string
	// File is set for a file of this node: an import reads the file in any order and finds its holes.
	File *os.File
	// Mark is set for an origin that can continue after a restart: the place of the first byte of Read.
	Mark *Mark
	// At is set for an origin that needs more than a Mark to continue. At returns the state to record with a Mark at
	// off, a place that Read has passed. Any goroutine may call At.
	At func(off int64) (state json.RawMessage, ok bool)
	// CRC asks for Marks with the CRC-32C of the bytes before them.
	CRC bool
	// Ahead is set for an origin that serves bytes before Read reaches them: all of p, from off on. Ahead is meant for
	// small tables; the bytes of Read count. Any goroutine may call Ahead.
	Ahead func(p []byte, off int64) error
	// Settled is called after the last byte and reports whether the origin stayed the same during the import. May be nil.
	Settled func() error
}

// Mark is a place from which an origin can continue. Validator names the content around the place: a download
// continues as long as the server has the same content; the validator of an upload is the token of its address.
type Mark struct {
	Off       int64  `json:"off"`
	Size      int64  `json:"size"`
	Validator string `json:"validator"`
	CRC       uint32 `json:"crc32c,omitempty"` // of the bytes before Off, if Stream.CRC is set
}

var (
	// ErrChanged is in the errors of an origin that no longer has the bytes before a Mark.
	ErrChanged = errors.New("changed")
	// ErrRange is in the errors of a server without the requested range.
	ErrRange = errors.New("no such range")
)

// Changed reports whether a server has other bytes than at a Mark, or lacks the bytes behind the Mark.
func Changed(err error) bool { return errors.Is(err, ErrChanged) || errors.Is(err, ErrRange) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC32C continues the checksum of a Mark.
func CRC32C(sum uint32, p []byte) uint32 { return crc32.Update(sum, castagnoli, p) }
