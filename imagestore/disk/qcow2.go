package disk

import (
	"io"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

func openQCOW2(r io.ReaderAt, size int64) (block.Source, error) {
	return nil, api.Errorf(api.Unsupported, "qcow2")
}
