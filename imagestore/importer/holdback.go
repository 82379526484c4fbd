package importer

import (
	"errors"
	"io"
	"os"

	"drover.io/drover/api"
)

// holdbackFeed reads a stream two chunks ahead, so that the end of the stream is known before the last two chunks leave
// the feed: only the last bytes show a fixed VHD disk. end receives the last bytes.
type holdbackFeed struct {
	feed
	ahead [][]byte
	spare [][]byte
	off   int64 // of the next byte to read
	end   func(tail []byte, size int64) error
	done  bool
}

// heldChunks is the number of chunks to read ahead: the last full chunk and the rest behind.
const heldChunks = 2

func (t *holdbackFeed) fillChunk(buf []byte) ([]byte, int64, error) {
	t.spare = append(t.spare, buf)
	for !t.done && len(t.ahead) <= heldChunks {
		var next []byte
		if n := len(t.spare); n > 0 {
			next, t.spare = t.spare[n-1][:chunkSize], t.spare[:n-1]
		} else {
			next = make([]byte, chunkSize)
		}
		b, _, err := t.feed.fillChunk(next)
		if errors.Is(err, io.EOF) {
			t.done = true
			if err := t.end(t.lastBytes(), t.off); err != nil {
				return nil, 0, err
			}
			break
		}
		if err != nil {
			return nil, 0, err
		}
		t.off += int64(len(b))
		t.ahead = append(t.ahead, b)
	}
	if len(t.ahead) == 0 {
		return nil, 0, io.EOF
	}
	b := t.ahead[0]
	t.ahead = t.ahead[1:]
	return b, 0, nil
}

// lastBytes returns the last bytes, from at most two chunks.
func (t *holdbackFeed) lastBytes() []byte {
	var b []byte
	for _, a := range t.ahead[max(len(t.ahead)-2, 0):] {
		b = append(b, a[max(len(a)-tailSize, 0):]...)
	}
	return b[max(len(b)-tailSize, 0):]
}

// fileTail returns the last bytes of a file.
func fileTail(f *os.File, size int64) ([]byte, error) {
	b := make([]byte, min(size, tailSize))
	_, err := f.ReadAt(b, size-int64(len(b)))
	return b, err
}

// checkEnd checks the end of an image without a known head for the footer of a fixed VHD disk.
func (im *importRun) checkEnd(tail []byte, size int64) error {
	disk, err := fixedVHD(tail, size)
	if err != nil || disk < 0 {
		return err
	}
	if size-disk > (heldChunks-1)*chunkSize {
		return api.Errorf(api.Corrupt, "vhd: %d bytes are between the end of the disk of %d bytes and its footer: "+
			"it is damaged", size-tailSize-disk, disk)
	}
	im.format, im.virtual = formatVHD, disk
	im.cut.Store(disk)
	return nil
}

// clipWrites limits put to the bytes of the disk, once the end of the disk is known.
func (im *importRun) clipWrites(put func([]byte, int64) error) func([]byte, int64) error {
	return func(p []byte, off int64) error {
		cut := im.cut.Load()
		switch {
		case off >= cut:
			return nil
		case off+int64(len(p)) > cut:
			// Padding must not overwrite bytes that are not hashed yet.
			p = append(make([]byte, 0, chunkSize), p[:cut-off]...)
		}
		return put(p, off)
	}
}

// growWrites grows the layer before each put.
func (im *importRun) growWrites(put func([]byte, int64) error) func([]byte, int64) error {
	return func(p []byte, off int64) error {
		if err := im.growLayer(off + int64(len(p))); err != nil {
			return err
		}
		return put(p, off)
	}
}

// growLayer grows the layer to at least size bytes.
func (im *importRun) growLayer(size int64) error {
	im.mu.Lock()
	defer im.mu.Unlock()
	if size <= im.size {
		return nil
	}
	if size > api.MaxVolumeSize {
		return im.tooLarge(size)
	}
	next := min(max(2*im.size, (size+chunkSize-1)/chunkSize*chunkSize), api.MaxVolumeSize)
	if err := im.w.Resize(next); err != nil {
		return err
	}
	im.size = next
	return nil
}
