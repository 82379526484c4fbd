package importer

import (
	"errors"
	"io"
	"os"

	"drover.io/drover/api"
)

// holdbackFeed reads a stream two pieces ahead, so that the end of the stream has been seen before its last two pieces
// are given out: a fixed VHD disk shows by its last bytes only. end hears of them.
type holdbackFeed struct {
	feed
	ahead [][]byte
	spare [][]byte
	off   int64 // of what was read
	end   func(tail []byte, size int64) error
	done  bool
}

// heldChunks is how many pieces are read ahead: so the last one that is full, and what follows it.
const heldChunks = 2

func (t *holdbackFeed) fill(buf []byte) ([]byte, int64, error) {
	t.spare = append(t.spare, buf)
	for !t.done && len(t.ahead) <= heldChunks {
		var next []byte
		if n := len(t.spare); n > 0 {
			next, t.spare = t.spare[n-1][:chunkSize], t.spare[:n-1]
		} else {
			next = make([]byte, chunkSize)
		}
		b, _, err := t.feed.fill(next)
		if errors.Is(err, io.EOF) {
			t.done = true
			if err := t.end(t.tail(), t.off); err != nil {
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

// tail is the last bytes, from two pieces at most.
func (t *holdbackFeed) tail() []byte {
	var b []byte
	for _, a := range t.ahead[max(len(t.ahead)-2, 0):] {
		b = append(b, a[max(len(a)-tailSize, 0):]...)
	}
	return b[max(len(b)-tailSize, 0):]
}

// fileTail is the end of a file.
func fileTail(f *os.File, size int64) ([]byte, error) {
	b := make([]byte, min(size, tailSize))
	_, err := f.ReadAt(b, size-int64(len(b)))
	return b, err
}

// checkEnd looks at the end of what began like a raw disk.
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

// clipWrites is put for the bytes of the disk alone, where its end is known to be before that of the source.
func (im *importRun) clipWrites(put func([]byte, int64) error) func([]byte, int64) error {
	return func(p []byte, off int64) error {
		cut := im.cut.Load()
		switch {
		case off >= cut:
			return nil
		case off+int64(len(p)) > cut:
			// Padding may not overwrite what is still being hashed.
			p = append(make([]byte, 0, chunkSize), p[:cut-off]...)
		}
		return put(p, off)
	}
}

// growWrites is put into a layer that grows with what comes.
func (im *importRun) growWrites(put func([]byte, int64) error) func([]byte, int64) error {
	return func(p []byte, off int64) error {
		if err := im.growLayer(off + int64(len(p))); err != nil {
			return err
		}
		return put(p, off)
	}
}

// growLayer makes the layer at least so large.
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
