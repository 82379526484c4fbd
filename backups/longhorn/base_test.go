package longhorn

import (
	"bytes"
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/longhorntest"
	"drover.io/drover/backups/target"
	"drover.io/drover/block"
)

// rawImages finds raw images.
func rawImages() *Images {
	return &Images{Disk: func(file block.Source) (block.Source, error) { return file, nil }}
}

// local is an image outside of the store.
type local struct {
	*bytes.Reader
	closed *atomic.Bool
}

func (l local) Next(off int64) (block.Extent, error) {
	return block.Extent{Off: off, Len: l.Size() - off, Kind: block.Data}, nil
}

func (l local) Close() error {
	l.closed.Store(true)
	return nil
}

// aboveImage is a volume above an image that ends within a block and has a hole. The volume has blocks of data, and a
// block of zeros that hides the image. want is the content of the volume.
func aboveImage(t *testing.T, s target.Store, blockSize int64, sum string) (image, want []byte) {
	t.Helper()
	image = content(1, 19*mib+512)
	clear(image[8*mib : 10*mib])
	size := int64(48 * mib)
	want = make([]byte, size)
	copy(want, image)
	blocks := map[int64][]byte{32 * mib: content(2, int(blockSize))}
	if blockSize == 2*mib {
		blocks[0], blocks[16*mib] = content(3, int(blockSize)), make([]byte, blockSize)
	}
	for off, b := range blocks {
		copy(want[off:], b)
	}
	if sum == "" {
		sum = longhorntest.ImageSum(image)
	}
	longhorntest.AddBackup(t, s, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: size, BlockSize: blockSize,
		Method: "lz4", Image: "golden", ImageSum: sum, Blocks: blocks})
	return image, want
}

// compare compares a restore, and reads of chunks, with the content of the volume.
func compare(t *testing.T, o *Opened, want []byte) {
	t.Helper()
	sink := &memory{bytes: make([]byte, o.Size())}
	must(t, o.Restore(t.Context(), sink))
	if !bytes.Equal(sink.bytes, want) || !sink.synced {
		t.Error("the restore has other bytes")
	}
	if done, total := o.Restored(); done != total || total == 0 || total > o.Size() {
		t.Errorf("%d of %d bytes are reported", done, total)
	}
	testSource(t, o, want)
}

// TestBytesWithoutABlockAreThoseOfTheImage: of an image that is smaller than the volume and ends within a block, with
// blocks of zeros above the image, and holes in the image.
func TestBytesWithoutABlockAreThoseOfTheImage(t *testing.T) {
	for name, blockSize := range map[string]int64{"2 MiB": 2 * mib, "16 MiB": 16 * mib} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			image, want := aboveImage(t, s, blockSize, "")
			longhorntest.AddImage(t, s, longhorntest.Image{Name: "golden", Content: image, Method: "lz4", Sparse: true})
			l := New(s, Options{Cache: t.TempDir()})
			images := rawImages()
			for range 2 {
				o, err := l.OpenBackup(t.Context(), Name{"pvc-1", "backup-1"}, images)
				must(t, err)
				compare(t, o, want)
				must(t, o.Close())
			}
			if len(images.verified) != 1 {
				t.Errorf("%d images are verified", len(images.verified))
			}
		})
	}
}

// TestImageIsLarger: bytes of an image behind the end of the volume are no part of the volume.
func TestImageIsLarger(t *testing.T) {
	s := newStore(t)
	image := content(1, 15*mib)
	longhorntest.AddBackup(t, s, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: 12 * mib,
		BlockSize: 16 * mib, Method: "none", Image: "golden", ImageSum: longhorntest.ImageSum(image)})
	longhorntest.AddImage(t, s, longhorntest.Image{Name: "golden", Content: image, Method: "gzip"})
	o, err := New(s, Options{Cache: t.TempDir()}).OpenBackup(t.Context(), Name{"pvc-1", "backup-1"}, rawImages())
	must(t, err)
	defer o.Close()
	compare(t, o, image[:12*mib])
}

// TestWrongImagesAreNotTaken: without the image of the volume's checksum, in the store or outside, the backup is
// refused, and the error names the image. An image outside has the same bytes.
func TestWrongImagesAreNotTaken(t *testing.T) {
	add := func(change func(*longhorntest.Image)) func(*testing.T, target.Store, []byte) {
		return func(t *testing.T, s target.Store, image []byte) {
			i := longhorntest.Image{Name: "golden", Content: image, Method: "lz4"}
			change(&i)
			longhorntest.AddImage(t, s, i)
		}
	}
	for name, c := range map[string]struct {
		store func(t *testing.T, s target.Store, image []byte)
		part  string
	}{
		"none":          {func(*testing.T, target.Store, []byte) {}, "golden"},
		"in progress":   {add(func(i *longhorntest.Image) { i.InProgress = true }), "in progress"},
		"other name":    {add(func(i *longhorntest.Image) { i.Name = "silver" }), "golden"},
		"other content": {add(func(i *longhorntest.Image) { i.Content = i.Content[512:] }), "another image of this name"},
		"content unlike its checksum": {func(t *testing.T, s target.Store, image []byte) {
			other := bytes.Clone(image)
			other[100]++
			longhorntest.AddImage(t, s, longhorntest.Image{Name: "golden", Content: other, Method: "lz4"})
			const cfg = "backupstore/backing-images/backing-images/golden/backing-image.cfg"
			b, err := s.Get(t.Context(), cfg, 0, -1)
			must(t, err)
			b = bytes.Replace(b, []byte(longhorntest.ImageSum(other)), []byte(longhorntest.ImageSum(image)), 1)
			must(t, s.Put(t.Context(), cfg, b))
		}, "another image of this name"},
		"lost block": {func(t *testing.T, s target.Store, image []byte) {
			longhorntest.AddImage(t, s, longhorntest.Image{Name: "golden", Content: image, Method: "lz4"})
			must(t, s.Delete(t.Context(), longhorntest.BlockName(imageBlocks, image[2*mib:4*mib])))
		}, "lost the block"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			image, want := aboveImage(t, s, 2*mib, "")
			c.store(t, s, image)
			l, n := New(s, Options{Cache: t.TempDir()}), Name{"pvc-1", "backup-1"}
			if _, err := l.OpenBackup(t.Context(), n, rawImages()); !api.Is(err, api.NotFound) ||
				!strings.Contains(err.Error(), `"golden"`) || !strings.Contains(err.Error(), c.part) ||
				!strings.Contains(err.Error(), longhorntest.ImageSum(image)) {
				t.Errorf("the open without the image: %v", err)
			}
			closed := &atomic.Bool{}
			images := rawImages()
			images.Local = func(_ context.Context, sum string) (block.Source, error) {
				if sum != longhorntest.ImageSum(image) {
					return nil, api.Errorf(api.NotFound, "image %s is not here", sum)
				}
				return local{bytes.NewReader(image), closed}, nil
			}
			o, err := l.OpenBackup(t.Context(), n, images)
			must(t, err)
			compare(t, o, want)
			must(t, o.Close())
			if !closed.Load() {
				t.Error("the image stays open")
			}
		})
	}
}

// TestImageWithoutAChecksumIsRefused: nothing proves that an image is the volume's.
func TestImageWithoutAChecksumIsRefused(t *testing.T) {
	for _, sum := range []string{"none", strings.Repeat("g", 128), strings.Repeat("a", 127)} {
		s := newStore(t)
		image, _ := aboveImage(t, s, 2*mib, sum)
		longhorntest.AddImage(t, s, longhorntest.Image{Name: "golden", Content: image, Method: "lz4"})
		_, err := New(s, Options{Cache: t.TempDir()}).OpenBackup(t.Context(), Name{"pvc-1", "backup-1"}, rawImages())
		if !api.Is(err, api.Unsupported) || !strings.Contains(err.Error(), "golden") {
			t.Errorf("checksum %.10s: %v", sum, err)
		}
	}
}
