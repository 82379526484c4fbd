package stack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"math/rand/v2"
	"slices"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// kindsOfLayer is the model of a layer: the kinds of its blocks, holes beyond its end.
type kindsOfLayer struct {
	size  int64
	kinds []block.Kind
}

// randomLayer makes a finished layer of a stack of size bytes. A chunk is a hole, or has a few writes of data, also of
// zeros, and of zeros.
func randomLayer(t *testing.T, d *Disk, rng *rand.Rand, size int64) (string, kindsOfLayer) {
	t.Helper()
	m := kindsOfLayer{size, make([]block.Kind, size>>blockBits)}
	if rng.IntN(2) == 0 {
		m.size = (1 + rng.Int64N(size>>blockBits)) << blockBits
	}
	uid := string(api.NewUID())
	w, err := d.Create(context.Background(), uid, m.size)
	if err != nil {
		t.Fatal(err)
	}
	exact := rng.IntN(4) == 0
	if exact {
		w.(block.Exact).Exact("")
	}
	for first := int64(0); first < m.size>>blockBits; first += chunkBlks {
		blocks := min(chunkBlks, m.size>>blockBits-first)
		for range rng.IntN(3) {
			b, n := first, blocks
			if rng.IntN(2) == 0 {
				b = first + rng.Int64N(blocks)
				n = 1 + rng.Int64N(first+blocks-b)
			}
			if rng.IntN(3) == 0 {
				if err := w.ZeroAt(b<<blockBits, n<<blockBits); err != nil {
					t.Fatal(err)
				}
				setKinds(m.kinds[b:b+n], block.Zero)
				continue
			}
			buf := make([]byte, n<<blockBits)
			randomBytes(rng, buf)
			setKinds(m.kinds[b:b+n], block.Data)
			if rng.IntN(3) == 0 {
				clear(buf[:blockSize])
				if !exact {
					m.kinds[b] = block.Zero
				}
			}
			if _, err := w.WriteAt(buf, b<<blockBits); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, _, err := w.Seal(context.Background()); err != nil {
		t.Fatal(err)
	}
	return uid, m
}

func setKinds(list []block.Kind, k block.Kind) {
	for i := range list {
		list[i] = k
	}
}

// onlySupplier returns the layer that supplies all data of a chunk and holds no other data there; -1: the chunk is
// zeros. known: such a layer exists, and its chunk is as long as the chunk of a stack of size bytes.
func onlySupplier(layers []kindsOfLayer, c, size int64) (only int, known bool) {
	first, end := c*chunkBlks, min((c+1)*chunkBlks, size>>blockBits)
	supplier := func(b int64) int {
		for k := len(layers) - 1; k >= 0; k-- {
			if b < int64(len(layers[k].kinds)) && layers[k].kinds[b] != block.Hole {
				if layers[k].kinds[b] == block.Data {
					return k
				}
				return -1
			}
		}
		return -1
	}
	only = -1
	for b := first; b < end; b++ {
		k := supplier(b)
		if k >= 0 && only >= 0 && k != only {
			return 0, false
		}
		only = max(only, k)
	}
	if only < 0 {
		return only, true
	}
	for b := first; b < min(end, layers[only].size>>blockBits); b++ {
		if layers[only].kinds[b] == block.Data && supplier(b) != only {
			return only, false
		}
	}
	return only, layers[only].size >= end<<blockBits
}

// readChunk reads a chunk of a source.
func readChunk(t *testing.T, src block.Source, c int64) []byte {
	t.Helper()
	b := block.AlignedBuffer(int(min(chunkSize, src.Size()-c*chunkSize)))
	if _, err := src.ReadAt(b, c*chunkSize); err != nil {
		t.Fatal(err)
	}
	return b
}

// openDigests opens layers as a source that knows digests.
func openDigests(t *testing.T, d *Disk, layers []string, size int64) block.DigestSource {
	t.Helper()
	src, err := d.OpenStack(layers, size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := src.Close(); err != nil {
			t.Error(err)
		}
	})
	return src.(block.DigestSource)
}

// TestKnownDigestsAreOfTheContent: in random stacks, each known digest is the SHA-256 of the bytes that a reader gets,
// also of a short last chunk. The digests of zeros, and of chunks with the data of one layer alone, are known, and no
// others.
func TestKnownDigestsAreOfTheContent(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	rng := rand.New(rand.NewPCG(suite.Seed(t), 0))
	zeros, ofLayers, unknown := 0, 0, 0
	for range suite.Count(t, "DROVER_ROUNDS", 30, 300) {
		d := newDisk(t)
		size := (1 + rng.Int64N(9<<20>>blockBits)) << blockBits
		var layers []string
		var models []kindsOfLayer
		for range 1 + rng.IntN(4) {
			uid, m := randomLayer(t, d, rng, size)
			layers, models = append(layers, uid), append(models, m)
		}
		src := openDigests(t, d, layers, size)
		if rng.IntN(2) == 0 {
			src.(block.CacheBypasser).BypassCache()
		}
		for c := range (size + chunkSize - 1) / chunkSize {
			only, want := onlySupplier(models, c, size)
			sum, known := src.Digest(c)
			if known != want {
				t.Errorf("chunk %d of %d bytes: known %v, want %v", c, size, known, want)
			}
			switch {
			case !known:
				unknown++
				continue
			case only < 0:
				zeros++
			default:
				ofLayers++
			}
			if sum != sha256.Sum256(readChunk(t, src, c)) {
				t.Errorf("chunk %d of %d bytes, of layer %d: the digest is of other bytes", c, size, only)
			}
		}
		for _, c := range []int64{-1, (size + chunkSize - 1) / chunkSize, 1 << 60} {
			if _, known := src.Digest(c); known {
				t.Errorf("the digest of chunk %d of %d bytes is known", c, size)
			}
		}
	}
	if zeros == 0 || ofLayers == 0 || unknown == 0 {
		t.Errorf("%d chunks of zeros, %d of layers, %d unknown: the test proves too little", zeros, ofLayers, unknown)
	}
}

// TestDigestsOfSnapshots: a frozen layer has no digests until MakeDigests makes them. The digests of merged layers are
// those of the content, too, and of one finished layer all are known.
func TestDigestsOfSnapshots(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	c := newChained(t)
	size := int64(len(c.model))
	snaps := c.scribble(4)
	known := func(snapshot string, open bool) (n int) {
		m, err := c.d.Stack(c.uid)
		if err != nil {
			t.Fatal(err)
		}
		k := slices.IndexFunc(m.Snapshots, func(s Snapshot) bool { return s.UID == snapshot })
		layers, err := m.Chain(m.Snapshots[k].Layer)
		if err != nil {
			t.Fatal(err)
		}
		if open {
			if err := c.d.MakeDigests(t.Context(), layers); err != nil {
				t.Fatal(err)
			}
		}
		src, err := c.d.OpenStack(layers, size)
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		for i := range size / chunkSize {
			b := readChunk(t, src, i)
			if !bytes.Equal(b, c.snaps[snapshot][i*chunkSize:][:len(b)]) {
				t.Fatalf("chunk %d differs from the snapshot", i)
			}
			sum, is := src.(block.DigestSource).Digest(i)
			if is && sum != sha256.Sum256(b) {
				t.Errorf("chunk %d: the digest is of other bytes", i)
			}
			if is && !bytes.Equal(b, make([]byte, len(b))) {
				n++
			}
		}
		return n
	}
	if n := known(snaps[0], false); n > 0 {
		t.Errorf("%d digests of a frozen layer are known", n)
	}
	if n := known(snaps[0], true); n < int(size/chunkSize)-1 {
		t.Errorf("%d digests of one layer are known", n)
	}
	known(snaps[3], true)
	for _, uid := range snaps[:3] {
		if err := c.d.DropSnapshot(c.uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	c.mergeAll()
	if n := known(snaps[3], false); n < int(size/chunkSize)-1 {
		t.Errorf("%d digests of the merged layer are known", n)
	}
}

// TestViewKnowsNoDigestOfAHead: a chunk with data in a head has no digest, whatever the layers below hold, and a chunk
// of a layer alone keeps its digest.
func TestViewKnowsNoDigestOfAHead(t *testing.T) {
	t.Parallel()
	ctx, d, loop := t.Context(), newDisk(t), startLoop(t)
	const size = 16 << 20
	lower := filledLayer(t, d, size, []int64{0, 512, 1024}, 1<<32, make(expect))
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size,
		Layers: []string{lower}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(int(blockSize))
	fill(buf, 7)
	mustIssue(t, loop, r, block.OpWrite, 0, blockSize, buf)                        // hides the data of the layer
	mustIssue(t, loop, r, block.OpDiscard, 1024<<blockBits, blockSize, nil)        // the same with zeros
	mustIssue(t, loop, r, block.OpWrite, (3*chunkBlks)<<blockBits, blockSize, buf) // of the head alone
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	src, err := d.OpenView(spec.UID)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	for c, want := range []bool{false, true, true, false, true} {
		sum, known := src.(block.DigestSource).Digest(int64(c))
		if known != want || known && sum != sha256.Sum256(readChunk(t, src, int64(c))) {
			t.Errorf("chunk %d: known %v, want %v", c, known, want)
		}
	}
}
