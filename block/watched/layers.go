package watched

import "drover.io/drover/block"

// layers are the layers of a disk that may hang.
type layers struct {
	watch Disk
	on    block.LayerReader
}

// Layers watches the calls of a disk that read its layers.
func Layers(d Disk, on block.LayerReader) block.LayerReader { return layers{d, on} }

// LayerNames implements block.LayerReader.
func (l layers) LayerNames() ([]string, error) { return Call(l.watch, l.on.LayerNames, nil) }

// ChunkDigests implements block.LayerReader.
func (l layers) ChunkDigests(uid string, first, n int64) ([]byte, error) {
	return Call(l.watch, func() ([]byte, error) { return l.on.ChunkDigests(uid, first, n) }, nil)
}

// Open implements block.LayerReader.
func (l layers) Open(uid string) (block.Source, error) {
	src, err := Open(l.watch, func() (block.Source, error) { return l.on.Open(uid) })
	if err != nil {
		return nil, err
	}
	return src, nil
}
