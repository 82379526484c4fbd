package stack

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
)

// fetching lets d hydrate a layer of data from another node, and creates a replica on the layer.
func fetching(t *testing.T, d *Disk, size int64) (far *farther, layer, uid string, model []byte) {
	t.Helper()
	far = &farther{disk: newDisk(t)}
	d.Sources(nil, far.fetch)
	model = make([]byte, size)
	randomBytes(rand.New(rand.NewPCG(1, 1)), model)
	layer = wholeLayer(t, far.disk, model)
	if err := far.hydrate(d, layer); err != nil {
		t.Fatal(err)
	}
	uid = string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layer}}
	if err := d.CreateReplica(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	return far, layer, uid, model
}

// flip changes a bit in the data of a hydrating layer.
func flip(t *testing.T, d *Disk, layerUID string, at int64, was byte) {
	t.Helper()
	f, err := os.OpenFile(d.Join(layer.HydratingDir, layerUID, layer.DataFile), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{was ^ 1}, at); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

// TestDamagedChunkIsFetchedAgain: every read compares fetched chunks with their checksums. The disk fetches a damaged
// chunk again and never serves the damage.
func TestDamagedChunkIsFetchedAgain(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	far, layer, uid, model := fetching(t, d, 8<<20)
	loop := startLoop(t)
	r, err := d.OpenReplica(t.Context(), uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	compareAll(t, loop, r, model)
	all := far.fetched.Load()
	const at = 5*blockSize + 100
	flip(t, d, layer, at, model[at])
	far.fails.Store(true)
	for range 2 { // the read which finds the damage, and a read during the fetch
		if err := once(t, loop, r, block.OpRead, 5*blockSize, blockSize); !errors.Is(err, ErrNotFetched) {
			t.Errorf("a read of a damaged chunk: %v", err)
		}
	}
	far.fails.Store(false)
	compareAll(t, loop, r, model)
	if n := far.fetched.Load() - all; n != chunkSize {
		t.Errorf("%d bytes were fetched for a damaged chunk", n)
	}

	// A reader of the layer's content gets the right bytes as well.
	flip(t, d, layer, at, model[at])
	l, err := d.Find(layer, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	buf := make([]byte, chunkSize)
	if _, err := l.ReadAt(buf, 0); err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(buf, model[:chunkSize]) {
		t.Errorf("the content of a damaged chunk: %v, right: %v", err, bytes.Equal(buf, model[:chunkSize]))
	}
}

// TestChunksWithoutChecksumsAreKept: chunks which an older version fetched have no checksums. The first read compares
// the chunks with the digests, and the disk fetches nothing again.
func TestChunksWithoutChecksumsAreKept(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	far, layerUID, uid, model := fetching(t, d, 8<<20)
	loop := startLoop(t)
	r, err := d.OpenReplica(t.Context(), uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	compareAll(t, loop, r, model)
	if err := errors.Join(r.Close(), d.Close()); err != nil { // the last user ends in the background
		t.Fatal(err)
	}
	if err := os.Remove(d.Join(layer.HydratingDir, layerUID, layer.CRCsFile)); err != nil {
		t.Fatal(err)
	}
	far.fails.Store(true)
	if r, err = d.OpenReplica(t.Context(), uid, loop); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	compareAll(t, loop, r, model)
	crcs, err := os.ReadFile(d.Join(layer.HydratingDir, layerUID, layer.CRCsFile))
	if err != nil || !bytes.Equal(crcs[:format.ChunkCRCsSize], format.ChunkCRCs(model[:chunkSize])) {
		t.Errorf("a chunk that was judged gets no checksums: %v", err)
	}
}

// TestFetchedChunksOutliveALossOfPower: a power loss takes no chunk named in the record of fetched chunks. All these
// chunks are read without the source.
func TestFetchedChunksOutliveALossOfPower(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	p := freshPower(t, startLoop(t))
	d := p.disk(t)
	far, layer, uid, model := fetching(t, d, 4*chunkSize)
	r, err := d.openReplica(t.Context(), uid, p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	read := func(r *Replica, on ring, c int64) error {
		t.Helper()
		buf := block.AlignedBuffer(int(chunkSize))
		err := issue(on, r, block.OpRead, c*chunkSize, chunkSize, buf, false)
		if err == nil && !bytes.Equal(buf, model[c*chunkSize:][:chunkSize]) {
			t.Errorf("chunk %d: wrong bytes", c)
		}
		return err
	}
	for c := range int64(3) {
		if err := read(r, p, c); err != nil {
			t.Fatal(err)
		}
		r.layers[0].Hydration.SaveState()
	}
	for range 5 {
		after := p.crash(t, rng)
		d := after.disk(t)
		lost := &farther{disk: far.disk}
		lost.fails.Store(true)
		d.Sources(nil, lost.fetch)
		if !d.Hydrating(layer) {
			t.Fatal("the layer is gone")
		}
		r, err := d.openReplica(t.Context(), uid, after)
		if err != nil {
			t.Fatal(err)
		}
		for c := range int64(3) {
			if err := once(t, after, r, block.OpRead, c*chunkSize, chunkSize); err != nil {
				t.Errorf("chunk %d, which the record names: %v", c, err)
				continue
			}
			if err := read(r, after, c); err != nil {
				t.Error(err)
			}
		}
		if err := errors.Join(r.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	}
}
