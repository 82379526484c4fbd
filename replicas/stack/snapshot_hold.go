package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"drover.io/drover/replicas/stack/diskfs"
)

// MakeDigests makes the missing digests of layers.
func (d *Disk) MakeDigests(ctx context.Context, layers []string) error {
	for _, uid := range layers {
		err := d.FinishNow(ctx, uid)
		if _, derr := d.Record(uid); derr != nil {
			if errors.Is(err, fs.ErrNotExist) || err == nil {
				err = derr
			}
			return fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}
	return nil
}
