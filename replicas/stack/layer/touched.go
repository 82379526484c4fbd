package layer

import (
	"fmt"
	"os"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
)

// Touched reports, without a read of the content, whether the file system shows a change of a finished layer since the
// seal. An empty mark: no change. Another mark stays the same until the next change; Verify tells whether the content
// is still the same. Missing files, or files of another size, are an error of kind corrupt.
func (d *Store) Touched(uid string) (mark string, err error) {
	l, err := d.OpenLayer(uid, 0)
	if err != nil {
		if rec, e := d.Record(uid); e == nil {
			err = api.Errorf(api.Corrupt, "files of layer %s, sealed %s, are missing or damaged: %w", uid,
				rec.Created.Format(time.RFC3339), err)
		}
		return "", err
	}
	defer func() { _ = l.Close() }()
	st, err := l.Data.Stat()
	if err != nil {
		return "", fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
	}
	if st.Size() != l.Rec.Size {
		return "", api.Errorf(api.Corrupt, "layer %s on disk %s has %d bytes instead of %d", uid, d.Root, st.Size(),
			l.Rec.Size)
	}
	h, err := d.FS.Open(d.Join(Dir, uid, LayerFile), os.O_RDONLY, 0)
	if err != nil {
		return "", fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
	}
	defer h.Close()
	rec, err := h.Stat()
	if err != nil {
		return "", fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
	}
	// The record comes last, and the clock is the same.
	if at := diskfs.ChangeTime(st); at.After(rec.ModTime()) {
		return at.UTC().Format(time.RFC3339Nano), nil
	}
	return "", nil
}
