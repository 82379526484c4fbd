package layer

import (
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"os"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// pageChunks is the number of chunks in a page of a map.
const pageChunks = pageBlocks / chunkBlks

// ChunkDigests returns digests of single chunks of an open layer, with small reads of the digests and the map. Because
// a damaged digest names other content, the first call compares all digests and the map with the root digest, and later
// calls compare each page of digests with its checksum from then. Methods are safe for concurrent use, except Close.
type ChunkDigests struct {
	l *Layer

	mu       sync.Mutex
	compared bool
	sums     file.Handle // nil: no digest is known
	crcs     []uint32    // by page of the map: the checksum of the digests of its chunks
	page     digestPage  // the page of the last call
	kinds    *[pageBlocks]block.Kind
}

// digestPage has the digests and kinds of the chunks in a page of the map.
type digestPage struct {
	number int
	sums   []byte
	kinds  []format.ChunkKinds
}

// NewChunkDigests prepares the digests of an open layer; the caller closes the digests before the layer.
func NewChunkDigests(l *Layer) *ChunkDigests {
	return &ChunkDigests{l: l, page: digestPage{number: -1}}
}

// DigestOf returns the digest of chunk c, of n bytes, for a reader that sees dataBlocks blocks of the layer's data in
// the chunk, and zeros elsewhere. The digest is known only of a finished layer with checksums, if the layer holds no
// other data in the chunk and the layer's chunk has n bytes.
func (d *ChunkDigests) DigestOf(c, n, dataBlocks int64) (sum [sumSize]byte, known bool) {
	if n != min(chunkSize, d.l.Rec.Size-c*chunkSize) {
		return sum, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.compared {
		d.compared = true
		d.compareWithRoot()
	}
	if d.sums == nil {
		return sum, false
	}
	if p := int(c / pageChunks); d.page.number != p {
		page, err := d.readPage(p)
		if err == nil && format.BlockCRC(page.sums) != d.crcs[p] {
			err = api.Errorf(api.Corrupt, "page %d of the digests has changed", p)
		}
		if err != nil {
			d.giveUp(err)
			return sum, false
		}
		d.page = page
	}
	i := c % pageChunks
	sum = [sumSize]byte(d.page.sums[i*sumSize:])
	return sum, d.page.kinds[i].DataBlocks() == dataBlocks && sum != [sumSize]byte{} && sum != format.NoSum
}

// compareWithRoot opens the digests, if they match the root digest. The caller has mu.
func (d *ChunkDigests) compareWithRoot() {
	l := d.l
	if _, own := l.Map.(*format.Map); !own || l.Rec.Root == "" || l.Hydration != nil || l.CRCs == nil {
		return // frozen, hydrated, being merged, or without checksums that reads are compared with
	}
	var err error
	if d.sums, err = l.Store.FS.Open(l.Store.Join(Dir, l.Rec.UID, SumsFile), os.O_RDONLY, 0); err == nil {
		d.kinds = new([pageBlocks]block.Kind)
		err = d.readAll()
	}
	if err != nil {
		d.giveUp(err)
	}
}

// giveUp ends the use of the digests after an error.
func (d *ChunkDigests) giveUp(err error) {
	slog.Error("the digests of a layer cannot be used: readers compute digests", "layer", d.l.Rec.UID, "disk",
		d.l.Store.Root, "error", err)
	_ = d.Close() // read only
}

// readAll compares all digests and the map with the root digest, and notes the checksums of the digests.
func (d *ChunkDigests) readAll() error {
	root := format.NewRoot(d.l.Rec.Size)
	for p := range int((d.l.Rec.Size + format.PageSize - 1) / format.PageSize) {
		page, err := d.readPage(p)
		if err != nil {
			return err
		}
		d.crcs = append(d.crcs, format.BlockCRC(page.sums))
		for i, k := range page.kinds {
			if k != (format.ChunkKinds{}) {
				format.AddRoot(root, int64(p)*pageChunks+int64(i), [sumSize]byte(page.sums[i*sumSize:]), k)
			}
		}
	}
	if have := hex.EncodeToString(root.Sum(nil)); have != d.l.Rec.Root {
		return api.Errorf(api.Corrupt, "the root digest is %s, not %s", have, d.l.Rec.Root)
	}
	return nil
}

// readPage reads the digests and the kinds of the chunks in a page of the map.
func (d *ChunkDigests) readPage(p int) (digestPage, error) {
	first, size := int64(p)*pageChunks, d.l.Rec.Size
	chunks := min(pageChunks, (size+chunkSize-1)/chunkSize-first)
	page := digestPage{p, make([]byte, chunks*sumSize), make([]format.ChunkKinds, chunks)}
	n, err := d.sums.ReadAt(page.sums, sumsHeader+first*sumSize)
	if n < len(page.sums) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return page, err
	}
	if err := d.l.Map.Load(p, d.kinds); err != nil {
		return page, err
	}
	for i := range page.kinds {
		page.kinds[i] = format.KindsOf(d.kinds[int64(i)*chunkBlks:][:chunkBlks]) // holes beyond the end of the layer
	}
	return page, nil
}

// Close closes the file of the digests.
func (d *ChunkDigests) Close() error {
	if d.sums == nil {
		return nil
	}
	h := d.sums
	d.sums = nil
	return h.Close()
}
