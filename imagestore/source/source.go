// Package source opens the places that a backing image's bytes come from: a download over http or https, an upload
// that a user sends to this node, a file of this node. Each becomes a Stream: bytes from the first to the last, with
// their number where it is known beforehand. What the bytes mean is found in them, by who imports them, and never from
// a name or a header.
//
// Everything that arrives here is hostile input: lengths are checked, messages carry no credentials, and only http and
// https are spoken. A Stream belongs to one goroutine; the package starts none but those of the upload server, which
// ends in Uploads.Start.
package source

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"drover.io/drover/api"
)

// Stream is one run of bytes from outside. Read gives them in order; an error of Read other than io.EOF says what
// happened to the source. Reading stops with an error when the context that opened the Stream ends.
type Stream struct {
	io.ReadCloser
	// Size in bytes, or -1 when it shows only at the end.
	Size int64
	// Name for messages and events: no credentials in it.
	Name string
	// File is set for a file of this node: its bytes can be read in any order and its holes be found.
	File *os.File
	// Mark is set where the source can be continued after a restart: it is the place of the first byte of Read.
	Mark *Mark
	// At is set where a Mark alone is not enough to continue: it returns what else is to be recorded with one at off,
	// which was read. Any goroutine may call it.
	At func(off int64) (state json.RawMessage, ok bool)
	// CRC says that a Mark is to have the CRC-32C of the bytes before it.
	CRC bool
	// Ahead is set where bytes can be had that Read has not come to: all of p, from off on. It is meant for the little
	// that is to be known beforehand; what comes with Read counts. It may be called by any goroutine.
	Ahead func(p []byte, off int64) error
	// Settled is called after the last byte, and says whether the source stayed the same meanwhile. May be nil.
	Settled func() error
}

// OpenFile opens a regular file or a block device of this node.
func OpenFile(path string) (*Stream, error) {
	if !filepath.IsAbs(path) {
		return nil, api.Errorf(api.Invalid, "file %q: the path must be absolute", path)
	}
	f, err := os.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, api.Errorf(api.NotFound, "file %s is not on this node", path)
	case errors.Is(err, fs.ErrPermission):
		return nil, api.Errorf(api.Denied, "file %s may not be read: %w", path, err)
	case err != nil:
		return nil, api.Errorf(api.Unavailable, "file %s cannot be opened: %w", path, err)
	}
	before, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, api.Errorf(api.Unavailable, "file %s: %w", path, err)
	}
	mode := before.Mode()
	if !mode.IsRegular() && (mode&fs.ModeDevice == 0 || mode&fs.ModeCharDevice != 0) {
		_ = f.Close()
		return nil, api.Errorf(api.Invalid, "%s is neither a file nor a block device", path)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		_ = f.Close()
		return nil, api.Errorf(api.Unavailable, "file %s: its size: %w", path, err)
	}
	s := &Stream{ReadCloser: f, Size: size, Name: "file " + path, File: f}
	s.Settled = func() error {
		after, err := f.Stat()
		if err != nil {
			return api.Errorf(api.Unavailable, "file %s: %w", path, err)
		}
		if mode.IsRegular() && (after.Size() != before.Size() || !after.ModTime().Equal(before.ModTime())) {
			return api.Errorf(api.Unavailable, "file %s changed while it was read (%s): import it when nobody writes to it",
				path, after.ModTime().Format(time.RFC3339))
		}
		return nil
	}
	return s, nil
}
