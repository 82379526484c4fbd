package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"drover.io/drover/block"
)

// Bounds of another node's answers and requests.
const (
	maxFacts   = 64 << 10 // bytes of an answer of a few facts
	maxList    = 1 << 20  // of a list of maxExtents extents
	maxImage   = 4 << 20  // of the record of an image
	maxMessage = 4 << 10  // of an error
	maxID      = 64
	maxLayer   = int64(64) << 40 // bytes of a layer: the largest volume
	sumSize    = 32              // bytes of the digest of a chunk
)

// errNonsense is in the error of a call whose answer cannot be true. Callers do not ask again.
var errNonsense = errors.New("the answer makes no sense")

// readAtMost reads all of r, and refuses more bytes than most.
func readAtMost(r io.Reader, most int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(b)) > most {
		err = fmt.Errorf("%w: it has more than %d bytes", errNonsense, most)
	}
	return b, err
}

// takeJSON decodes an answer of at most so many bytes.
func takeJSON(r io.Reader, most int64, into any) error {
	b, err := readAtMost(r, most)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%w: %w", errNonsense, err)
	}
	return nil
}

// checkID refuses any string that cannot be the uid of a disk, an image or a layer: nothing else reaches a file
// system.
func checkID(what, id string) error {
	ok := id != "" && len(id) <= maxID
	for _, c := range []byte(id) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-')
	}
	if !ok {
		return fmt.Errorf("%.80q is not the uid of a %s", id, what)
	}
	return nil
}

func (f layerFacts) check() error {
	if f.Size <= 0 || f.Size > maxLayer || f.Size%block.Size != 0 || f.Allocated < 0 || len(f.Root) > maxID {
		return fmt.Errorf("%w: a layer of %d bytes that takes %d", errNonsense, f.Size, f.Allocated)
	}
	return nil
}

func checkImage(img block.Image) error {
	if img.VirtualSize < 0 || img.VirtualSize > maxLayer {
		return fmt.Errorf("%w: an image of %d bytes", errNonsense, img.VirtualSize)
	}
	err := checkID("image", img.UID)
	for _, uid := range img.Layers {
		err = errors.Join(err, checkID("layer", uid))
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errNonsense, err)
	}
	return nil
}
