package stack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

var (
	fixBaseBlocks     = []int64{1, 2, 4, 600, 1500}
	fixTopBlocks      = []int64{4, 601}
	fixMapLowBlocks   = []int64{1, 600, 20000, 40000, 40001, 66000}
	fixMapHighBlocks  = []int64{5, 600, 700, 20001, 40001, 40002, 66001}
	fixMoveLowBlocks  = []int64{10, 600, 603, 604, 1400}
	fixMoveHighBlocks = []int64{11, 12, 601, 602, 1001, 1500}
	fixFarBlocks      = []int64{3, 1200}
	fixNearLowBlocks  = []int64{2, 700}
)

// fixNearHighBlock is the block of the frozen layer on the other disk.
const fixNearHighBlock = int64(4)

// Digests of layers: the same content has the same digest for ever.
const (
	fixBaseRoot   = "5a635385ca99259fb938de17cb81bc49bb8fc7f5e4b6afb39f583bd7ba87b5a3"
	fixTopRoot    = "39cf56b33173f6a654c366b0b84bdb894d85c3f123e111be9fa8426d9805f1c9"
	fixFrozenRoot = "fe2ea1b22026f008be249b74ea4659747bfa392a88535801771745c69a7cce62"
	fixKeptRoot   = "a07b2aea04d833bb28ceddf56f7d14e63823c4c9de8b5c2f007c4cf2167c7e1d"
)

// TestDiskIsWrittenAsBefore repeats the steps of the fixture's writer and compares the disk byte for byte, except for
// random names, times, and the space which the file system takes.
func TestDiskIsWrittenAsBefore(t *testing.T) {
	suite.Slow(t)
	dir := t.TempDir()
	got := writeFixture(t, dir)
	if version := os.Getenv("DROVER_WRITE_FIXTURES"); version != "" {
		to := filepath.Join("testdata", version)
		if err := os.Mkdir(to, 0o755); err != nil {
			t.Fatalf("a fixture of a released version is never written again: %v", err)
		}
		for name, b := range got {
			name = filepath.Join(to, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, b, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	from, want := filepath.Join("testdata", fixtureNow), map[string][]byte{}
	unpacked := t.TempDir()
	unpackDisk(t, from, unpacked)
	for name, b := range packDisk(t, unpacked) {
		want[alike(name)] = b
	}
	for name, b := range got {
		was, is := alike(string(want[alike(name)])), alike(string(b))
		if _, there := want[alike(name)]; !there {
			t.Errorf("%s is written, and was not in %s", name, from)
		} else if was != is {
			t.Errorf("%s differs: the format changed. It has\n%s\nand in %s it had\n%s", name, is, from, was)
		}
		delete(want, alike(name))
	}
	if len(want) > 0 {
		t.Errorf("not written any more: %v", slices.Sorted(maps.Keys(want)))
	}
}

var (
	randomUID  = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	fromClock  = regexp.MustCompile(`"(created|at)": "[^"]*Z"`)
	ofMachine  = regexp.MustCompile(`"allocated": [0-9]+`)
	sumOfThose = regexp.MustCompile(`"sha256": "[0-9a-f]{64}"`)
)

// alike removes the parts of a text in which any two runs differ. The readers of records verify the checksums.
func alike(s string) string {
	s = randomUID.ReplaceAllStringFunc(s, func(uid string) string {
		if strings.HasPrefix(uid, fixedUID) || strings.HasPrefix(uid, volumeOf(fixedUID)) {
			return uid
		}
		return "RANDOM"
	})
	s = fromClock.ReplaceAllString(s, `"$1": "TIME"`)
	s = ofMachine.ReplaceAllString(s, `"allocated": 1`)
	return sumOfThose.ReplaceAllString(s, `"sha256": "SUM"`)
}

// fixtureWriter makes the disk of a fixture.
type fixtureWriter struct {
	t    *testing.T
	d    *Disk
	loop ring
}

func (w *fixtureWriter) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// layer makes a finished layer.
func (w *fixtureWriter) layer(d *Disk, uid string, size int64, blocks []int64, v uint64, zeros ...int64) {
	w.t.Helper()
	to, err := d.Create(context.Background(), uid, size)
	w.must(err)
	buf := block.AlignedBuffer(int(blockSize))
	for _, b := range blocks {
		fill(buf, v+uint64(b))
		_, err := to.WriteAt(buf, b<<blockBits)
		w.must(err)
	}
	for _, b := range zeros {
		w.must(to.ZeroAt(b<<blockBits, blockSize))
	}
	_, _, err = to.Seal(context.Background())
	w.must(err)
}

func (w *fixtureWriter) replica(uid, volume string, size int64, layers ...string) {
	w.t.Helper()
	w.must(w.d.CreateReplica(context.Background(), Spec{UID: uid, Volume: volume, VolumeUID: volumeOf(uid), Size: size,
		Layers: layers}))
}

// writeFixture makes the disk and returns the packed files. The replicas are in use then, as if the process was killed.
func writeFixture(t *testing.T, dir string) map[string][]byte {
	ctx := context.Background()
	d, err := Add(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	w := &fixtureWriter{t, d, startLoop(t)}
	w.must(format.WriteMeta(d.FS, d.Join(diskFile), formatDisk, diskRecord{fixDisk}))
	w.must(d.Close())
	if w.d, err = Open(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.d.Close() })
	w.d.lifetime = func() (diskfs.Lifetime, error) { return diskfs.Lifetime{Boot: fixBoot, Mount: fixMount}, nil }
	w.image()
	member := w.member()
	w.reverted()
	mapping := w.merging(fixMapping, "mapping", fixMapSize, func(g *Merge) bool { return g.Mapped == 2 },
		fixMapLow, fixMapLowBlocks, fixMapHigh, fixMapHighBlocks)
	moving := w.merging(fixMoving, "moving", awaySize, func(g *Merge) bool { return g.Done >= 3<<20 },
		fixMoveLow, fixMoveLowBlocks, fixMoveHigh, fixMoveHighBlocks)
	w.pins()
	w.kept()
	w.near()
	w.far()
	w.layer(w.d, fixDamaged, 8<<20, []int64{0, 1600}, 6<<32)
	w.must(w.d.PutDamage(fixDamaged, 8<<20, []Damage{{Off: 0, Len: chunkSize}, {Off: 3 * chunkSize, Len: 4096}}))
	packed := packDisk(t, dir)
	for _, r := range []*Replica{member, mapping, moving} {
		if err := r.Close(); err != nil && !errors.Is(err, unix.EIO) {
			t.Error(err)
		}
	}
	return packed
}

func (w *fixtureWriter) image() {
	w.layer(w.d, fixBase, 8<<20, fixBaseBlocks, 1<<32, 3)
	w.layer(w.d, fixTop, 8<<20, fixTopBlocks, 2<<32)
	root, _, err := w.d.Digest(fixTop)
	w.must(err)
	w.must(w.d.PutImage(block.Image{UID: fixImage, Name: "debian", Layers: []string{fixBase, fixTop}, Format: "qcow2.xz",
		VirtualSize: 8<<20 - 512, Checksum: strings.Repeat("5e", 64), Digest: root, Object: json.RawMessage(fixObject)}))
}

// member is a replica of two, cut once, with zero records before and after the cut.
func (w *fixtureWriter) member() *Replica {
	ctx := context.Background()
	w.replica(fixMember, "member", fixSize, fixBase, fixTop)
	r, err := w.d.openReplica(ctx, fixMember, w.loop)
	w.must(err)
	w.must(r.Note([]byte(fixObject)))
	both := []string{fixMember, fixOther}
	w.must(r.AdoptFor(ctx, fixEngine, 2, 1, both))
	w.must(r.Unnoted(ctx, 2))
	w.must(r.AdoptFor(ctx, fixEngine, 3, 2, both))
	buf := block.AlignedBuffer(int(blockSize))
	write := func(b int64, v uint64) {
		fill(buf, v+uint64(b))
		mustIssue(w.t, w.loop, r, block.OpWrite, b<<blockBits, blockSize, buf)
	}
	write(1, 3<<32)
	write(20, 3<<32)
	mustIssue(w.t, w.loop, r, block.OpDiscard, 2<<blockBits, blockSize, nil)
	w.must(r.Cut(ctx, Snapshot{UID: fixSnapshot, Name: "before", Layer: fixFrozen, Created: fixTime}))
	write(21, 4<<32)
	write(2*format.IntentsRegion>>blockBits, 4<<32)
	mustIssue(w.t, w.loop, r, block.OpZero, 600<<blockBits, blockSize, nil)
	mustIssue(w.t, w.loop, r, block.OpFlush, 0, 0, nil)
	w.d.Hurry(fixFrozen)
	return r
}

// reverted is a replica which went back to a snapshot. The record has all fields which the other replicas lack.
func (w *fixtureWriter) reverted() {
	ctx := context.Background()
	w.must(w.d.CreateReplica(ctx, Spec{UID: fixReverted, Volume: "reverted", VolumeUID: volumeOf(fixReverted),
		Size: fixSize, Layers: []string{fixBase}, Branches: []Branch{{Layer: fixTop, Below: fixBase}},
		Snapshots: []Snapshot{{UID: fixOlder, Name: "older", Layer: fixTop, Created: fixTime}}}))
	m, err := w.d.Stack(fixReverted)
	w.must(err)
	m.Epoch, m.Incarnation, m.Members, m.Dirty = 9, 4, []string{fixReverted, fixOther}, true
	m.Joined, m.Reverted, m.BootID, m.MountID = 7, 8, fixBoot, fixMount
	w.must(w.d.writeStack(w.d.Join(replicaDir, fixReverted), m))
}

// merging is a replica in the middle of a merge, which ends early as soon as enough returns true.
func (w *fixtureWriter) merging(uid, volume string, size int64, enough func(g *Merge) bool, lower string, low []int64,
	upper string, high []int64) *Replica {
	ctx := context.Background()
	w.layer(w.d, lower, size, low, 1<<32)
	w.layer(w.d, upper, size, high, 2<<32)
	w.replica(uid, volume, size, lower, upper)
	d, f := tap(w.t, w.d)
	d.piece, d.window, d.lifetime = 1, 1<<20, w.d.lifetime
	r, err := d.openReplica(ctx, uid, w.loop)
	w.must(err)
	w.must(r.Adopt(ctx, 1, 1, []string{uid}))
	f.set(func(op, name string) (func(), error) {
		if op != opRename && !(op == opSync && strings.Contains(name, layer.Dir)) {
			return nil, nil
		}
		if g := r.Meta().Merge; g != nil && enough(g) {
			return nil, unix.EIO
		}
		return nil, nil
	})
	if _, err := r.Merge(ctx, MergeOptions{}); !errors.Is(err, unix.EIO) {
		w.t.Fatalf("the merge was to end before: %v", err)
	}
	f.set(nil)
	if g := r.Meta().Merge; g == nil || !enough(g) {
		w.t.Fatalf("the merge is at %+v", g)
	}
	return r
}

func (w *fixtureWriter) pins() {
	ctx := context.Background()
	_, err := w.d.Pin(ctx, Pin{UID: fixPin, For: "borrower", Disk: fixDisk}, fixMember, "")
	w.must(err)
	w.must(w.d.PinLayers(ctx, Pin{UID: fixPinImage, For: "golden", Disk: fixDisk, Layers: []string{fixBase}, Image: true}))
}

// writeKept writes the chunks of the half-written layer, beginning with chunk from.
func writeKept(t *testing.T, w block.LayerWriter, from int64) {
	t.Helper()
	whole := bytes.Repeat([]byte("01234567"), int(chunkSize/8))
	for c, b := range [][]byte{whole, whole[:3*blockSize], nil, whole[:blockSize]} {
		if int64(c) < from {
			continue
		}
		if _, err := w.WriteAt(b, int64(c)*chunkSize); err != nil {
			t.Fatal(err)
		}
	}
}

func (w *fixtureWriter) kept() {
	to, err := w.d.Create(context.Background(), fixKept, 4*chunkSize)
	w.must(err)
	k := to.(block.CheckpointWriter)
	writeKept(w.t, to, 0)
	scratch, err := k.Beside("spool")
	w.must(err)
	_, err = scratch.WriteAt([]byte("scratch"), 0)
	w.must(errors.Join(err, scratch.Close()))
	w.must(k.Checkpoint(2*chunkSize, []byte(`{"root":"abc"}`)))
	w.must(k.Leave())
}

// near is a replica of two layers on another disk of the node. The replica's disk has fetched the first chunks. The
// upper layer is frozen and has no digests.
func (w *fixtureWriter) near() {
	ctx := context.Background()
	other, err := Add(ctx, w.t.TempDir())
	w.must(err)
	w.must(format.WriteMeta(other.FS, other.Join(diskFile), formatDisk, diskRecord{fixNear}))
	w.must(other.Close())
	other, err = Open(other.Path())
	w.must(err)
	w.layer(other, fixNearLow, fixFarSize, fixNearLowBlocks, 7<<32)
	w.must(other.CreateReplica(ctx, Spec{UID: fixOther, Volume: "origin", VolumeUID: volumeOf(fixOther), Size: fixFarSize,
		Layers: []string{fixNearLow}}))
	r, err := other.openReplica(ctx, fixOther, w.loop)
	w.must(err)
	w.must(r.Adopt(ctx, 1, 1, []string{fixOther}))
	buf := block.AlignedBuffer(int(blockSize))
	fill(buf, 8<<32+uint64(fixNearHighBlock))
	mustIssue(w.t, w.loop, r, block.OpWrite, fixNearHighBlock<<blockBits, blockSize, buf)
	w.must(r.Cut(ctx, Snapshot{UID: fixSnapshot, Name: "before", Layer: fixNearHigh, Created: fixTime}))
	fromDisk(w.d, other)
	w.replica(fixBorrower, "borrower", fixFarSize, fixNearLow, fixNearHigh)
	reader, err := w.d.openReplica(ctx, fixBorrower, w.loop)
	w.must(err)
	for _, b := range []int64{fixNearHighBlock, fixNearLowBlocks[0]} {
		mustIssue(w.t, w.loop, reader, block.OpRead, b<<blockBits, blockSize, buf)
	}
	w.must(errors.Join(reader.Close(), r.Close(), other.Close()))
	for _, uid := range []string{fixNearLow, fixNearHigh} {
		w.fixedPath(w.d.Join(layer.HydratingDir, uid, "hydrating.json"), other.Path())
	}
}

// fixedPath rewrites a record of a hydration, with a path common to all runs.
func (w *fixtureWriter) fixedPath(name, path string) {
	var body json.RawMessage
	w.must(format.ReadMeta(w.d.FS, name, "drover-hydrating", &body))
	body = bytes.ReplaceAll(body, []byte(path), []byte(fixPath))
	w.must(format.WriteMeta(w.d.FS, name, "drover-hydrating", body))
}

// far is a replica of a layer on another node. The replica's disk has fetched the first chunk.
func (w *fixtureWriter) far() {
	ctx := context.Background()
	other := newDisk(w.t)
	w.layer(other, fixFar, fixFarSize, fixFarBlocks, 5<<32)
	f := &farther{disk: other}
	w.d.Sources(nil, f.fetch)
	w.must(f.hydrate(w.d, fixFar))
	w.replica(fixReader, "reader", fixFarSize, fixFar)
	r, err := w.d.openReplica(ctx, fixReader, w.loop)
	w.must(err)
	mustIssue(w.t, w.loop, r, block.OpRead, 3<<blockBits, blockSize, block.AlignedBuffer(int(blockSize)))
	w.must(errors.Join(r.Close(), w.d.Close())) // the close records the fetched chunks
}
