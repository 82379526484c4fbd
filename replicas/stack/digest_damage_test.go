package stack

import (
	"crypto/sha256"
	"os"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// openFile opens a file of a layer for changes.
func openFile(t *testing.T, d *Disk, uid, name string) file.Handle {
	t.Helper()
	h, err := file.OS.Open(d.Join(layer.Dir, uid, name), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	return h
}

// TestDamageBelowAKnownDigest: a chunk with a known digest is read as it was, or not at all, whatever happened to the
// data and to the checksums.
func TestDamageBelowAKnownDigest(t *testing.T) {
	t.Parallel()
	const size, at = 6 << 20, int64(513) << blockBits
	for name, damage := range map[string]func(t *testing.T, d *Disk, uid string){
		"a bit has flipped": func(t *testing.T, d *Disk, uid string) {
			flipBit(t, d.Join(layer.Dir, uid, layer.DataFile), at+99)
		},
		"a block is lost": func(t *testing.T, d *Disk, uid string) {
			if err := openFile(t, d, uid, layer.DataFile).Punch(at, blockSize); err != nil {
				t.Fatal(err)
			}
		},
		"a block and its checksum are lost": func(t *testing.T, d *Disk, uid string) {
			if err := openFile(t, d, uid, layer.DataFile).Punch(at, blockSize); err != nil {
				t.Fatal(err)
			}
			if _, err := openFile(t, d, uid, layer.CRCsFile).WriteAt(make([]byte, crcSize), at>>blockBits*crcSize); err != nil {
				t.Fatal(err)
			}
		},
		"the file is cut off": func(t *testing.T, d *Disk, uid string) {
			if err := openFile(t, d, uid, layer.DataFile).Truncate(at); err != nil {
				t.Fatal(err)
			}
		},
		"the file is empty": func(t *testing.T, d *Disk, uid string) {
			if err := openFile(t, d, uid, layer.DataFile).Truncate(0); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for kind, open := range map[string]func(block.DigestSource){
			"through the page cache": func(block.DigestSource) {},
			"past the page cache":    func(src block.DigestSource) { src.(block.CacheBypasser).BypassCache() },
		} {
			t.Run(name+" "+kind, func(t *testing.T) {
				d := newDisk(t)
				blocks := []int64{0}
				for b := range int64(40) { // long enough for direct I/O
					blocks = append(blocks, 512+b)
				}
				uid := filledLayer(t, d, size, blocks, 1<<32, make(expect))
				src := openDigests(t, d, []string{uid}, size)
				open(src)
				want := sha256.Sum256(readChunk(t, src, 1))
				damage(t, d, uid)
				if sum, known := src.Digest(1); !known || sum != want {
					t.Errorf("the digest is known: %v", known)
				}
				b := block.AlignedBuffer(int(chunkSize))
				if n, err := src.ReadAt(b, chunkSize); !api.Is(err, api.Corrupt) {
					t.Errorf("%d bytes are read: %v, want an error of kind corrupt", n, err)
				}
				if _, err := src.ReadAt(b[:blockSize], 2*chunkSize); err != nil { // a hole
					t.Error(err)
				}
				if err := d.Close(); err != nil { // records the damage
					t.Fatal(err)
				}
			})
		}
	}
}

// TestDamagedDigestsAreNotKnown: a digest that has changed, before or after the first use of a layer's digests, is not
// known, and the content is readable all the same.
func TestDamagedDigestsAreNotKnown(t *testing.T) {
	t.Parallel()
	const far = int64(33) // a chunk of the next page of the map
	const size = (far + 1) * chunkSize
	for name, later := range map[string]bool{"before the first use": false, "after the first use": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDisk(t)
			uid := filledLayer(t, d, size, []int64{0, far * chunkBlks}, 1<<32, make(expect))
			src := openDigests(t, d, []string{uid}, size)
			if later {
				if sum, known := src.Digest(0); !known || sum != sha256.Sum256(readChunk(t, src, 0)) {
					t.Fatal("the digest is not known before the damage")
				}
			}
			flipBit(t, d.Join(layer.Dir, uid, layer.SumsFile), sumsHeader+far*sumSize)
			for _, c := range []int64{far, 0} {
				if _, known := src.Digest(c); known {
					t.Errorf("the digest of chunk %d is known", c)
				}
				readChunk(t, src, c)
			}
			if sum, known := src.Digest(1); !known || sum != format.ZeroSum(chunkSize) {
				t.Error("the digest of zeros is not known")
			}
		})
	}
}

// TestNoDigestWithoutChecksums: a layer without checksums has no known digests, because no read would compare the
// content. MakeDigests makes the checksums.
func TestNoDigestWithoutChecksums(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	uid := filledLayer(t, d, chunkSize, []int64{3}, 1<<32, make(expect))
	if err := os.Remove(d.Join(layer.Dir, uid, layer.CRCsFile)); err != nil {
		t.Fatal(err)
	}
	if _, known := openDigests(t, d, []string{uid}, chunkSize).Digest(0); known {
		t.Error("the digest is known")
	}
	if err := d.MakeDigests(t.Context(), []string{uid}); err != nil {
		t.Fatal(err)
	}
	if _, known := openDigests(t, d, []string{uid}, chunkSize).Digest(0); !known {
		t.Error("the digest is not known, although the layer has checksums now")
	}
}

// TestNoDigestOfMergedDamage: the digest that a merge gives to a damaged chunk is not known.
func TestNoDigestOfMergedDamage(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	uid := filledLayer(t, d, 2*chunkSize, []int64{3, chunkBlks}, 1<<32, make(expect))
	sums := openFile(t, d, uid, layer.SumsFile)
	if _, err := sums.WriteAt(format.NoSum[:], sumsHeader); err != nil {
		t.Fatal(err)
	}
	l, err := d.OpenLayer(uid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	kinds, err := format.IndexOf(l.Map)
	if err != nil {
		t.Fatal(err)
	}
	rec := l.Rec
	if rec.Root, err = format.RootDigest(sums, rec.Size, kinds); err != nil {
		t.Fatal(err)
	}
	if err := format.WriteMeta(file.OS, d.Join(layer.Dir, uid, layer.LayerFile), layer.FormatLayer, rec); err != nil {
		t.Fatal(err)
	}
	src := openDigests(t, d, []string{uid}, 2*chunkSize)
	for c, want := range []bool{false, true} {
		if _, known := src.Digest(int64(c)); known != want {
			t.Errorf("chunk %d: known %v, want %v", c, known, want)
		}
	}
}

// TestDigestReadsNoData: digests of a layer whose data cannot be read are known.
func TestDigestReadsNoData(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	uid := filledLayer(t, d, chunkSize, []int64{3}, 1<<32, make(expect))
	v := openDigests(t, d, []string{uid}, chunkSize)
	if err := openFile(t, d, uid, layer.DataFile).Truncate(0); err != nil {
		t.Fatal(err)
	}
	if _, known := v.Digest(0); !known {
		t.Error("the digest is not known")
	}
}
