package stack

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"drover.io/drover/api"
)

// Touched tells whether somebody changed the files of a finished layer since it was sealed, as far as the file system
// tells without the content being read. An empty mark: nobody did. Any other mark stays the same until the next change;
// whether the content is still the same, Verify says. Files that are gone or of another size are an error of kind
// corrupt.
func (d *Disk) Touched(uid string) (mark string, err error) {
	l, err := d.openLayer(uid, 0)
	if err != nil {
		if rec, e := d.layerRecord(uid); e == nil {
			err = api.Errorf(api.Corrupt, "files of layer %s, sealed %s, are missing or damaged: %w", uid,
				rec.Created.Format(time.RFC3339), err)
		}
		return "", err
	}
	defer func() { _ = l.close() }()
	st, err := l.data.Stat()
	if err != nil {
		return "", fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
	}
	if st.Size() != l.rec.Size {
		return "", api.Errorf(api.Corrupt, "layer %s on disk %s has %d bytes instead of %d", uid, d.root, st.Size(),
			l.rec.Size)
	}
	h, err := d.fs.Open(d.path(layersDir, uid, layerFile), os.O_RDONLY, 0)
	if err != nil {
		return "", fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
	}
	defer h.Close()
	rec, err := h.Stat()
	if err != nil {
		return "", fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
	}
	// The record is written last, and by the same clock.
	if at := changed(st); at.After(rec.ModTime()) {
		return at.UTC().Format(time.RFC3339Nano), nil
	}
	return "", nil
}

// changed is when the content or the inode of a file was last changed; the zero time where that is not known.
func changed(st fs.FileInfo) time.Time {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return time.Unix(s.Ctim.Unix())
	}
	return time.Time{}
}
