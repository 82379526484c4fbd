package stack

import (
	"errors"
	"fmt"
	"io/fs"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
)

// Image is the record of one image, without a look at those of the others. Not there: an error of kind not found.
func (d *Disk) Image(uid string) (block.Image, error) {
	if err := api.UID(uid).Validate(); err != nil {
		return block.Image{}, err
	}
	img, err := d.image(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return img, api.Errorf(api.NotFound, "image %s is not on disk %s", uid, d.Root)
	}
	if err != nil {
		err = fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	return img, err
}
