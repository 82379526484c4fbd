package origin

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"drover.io/drover/api"
)

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
			return api.Errorf(api.Unavailable, "file %s changed while it was read (%s): import the file after the last "+
				"write", path, after.ModTime().Format(time.RFC3339))
		}
		return nil
	}
	return s, nil
}
