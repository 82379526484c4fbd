package stack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// The folders testdata/v1, v2, ... hold a disk each, as a released version left the disk: every kind of file, and every
// state which a killed process can leave. A version of the program reads the disks of all earlier versions, so a folder
// stays for ever. A change of a format adds a folder, here v3, written by
//
//	DROVER_WRITE_FIXTURES=v3 go test -run TestDiskIsWrittenAsBefore ./replicas/stack
//
// then fixtureNow becomes v3, and fixtureTimes gets the time. The older folders and their tests stay unchanged.
// fixtures_pack_test.go has the form of files in a folder, fixtures_write_test.go the writer.
//
// Beyond v1, v2 has the file holes, the mount and the engine's node of an adoption, the checksums of a hydration, and
// layers on another disk of the node, a frozen layer among them.
const fixtureNow = "v2"

// fixtureTimes are the times at which the folders were written.
var fixtureTimes = map[string]time.Time{
	"v1": time.Date(2026, 11, 25, 16, 26, 0, 0, time.UTC),
	"v2": time.Date(2026, 11, 26, 16, 0, 0, 0, time.UTC),
}

// eachRelease runs a test with the disk of each version.
func eachRelease(t *testing.T, test func(t *testing.T, version string, d *Disk)) {
	for _, version := range slices.Sorted(maps.Keys(fixtureTimes)) {
		t.Run(version, func(t *testing.T) { test(t, version, released(t, version)) })
	}
}

// The UIDs of the fixtures begin alike, unlike random UIDs.
const (
	fixedUID = "00000000-0000-4000-8000-0000000000"

	fixDisk = fixedUID + "01"
	fixBoot = fixedUID + "02" // of the node which wrote the fixtures
	fixNear = fixedUID + "03" // another disk of the node

	fixBase     = fixedUID + "10" // the two layers of an image
	fixTop      = fixedUID + "11"
	fixFrozen   = fixedUID + "12" // cut, not finished
	fixKept     = fixedUID + "13" // half-written, with a checkpoint
	fixFar      = fixedUID + "14" // hydrates from another node
	fixDamaged  = fixedUID + "15"
	fixMapLow   = fixedUID + "16" // a merge which makes the map
	fixMapHigh  = fixedUID + "17"
	fixMoveLow  = fixedUID + "18" // a merge which moves data
	fixMoveHigh = fixedUID + "19"
	fixNearLow  = fixedUID + "1a" // on the other disk of the node
	fixNearHigh = fixedUID + "1b" // on the other disk, and frozen

	fixImage    = fixedUID + "20"
	fixSnapshot = fixedUID + "21"
	fixOlder    = fixedUID + "22"

	fixMember   = fixedUID + "30" // a member of two, cut, in use
	fixReverted = fixedUID + "31" // a replica with branches and a winner
	fixMapping  = fixedUID + "32"
	fixMoving   = fixedUID + "33"
	fixReader   = fixedUID + "34" // a replica on the layer of another node
	fixBorrower = fixedUID + "35" // a replica on the layers of the other disk
	fixOther    = fixedUID + "3f" // a replica on another node

	fixPin      = fixedUID + "40"
	fixPinImage = fixedUID + "41"
)

const (
	fixSize    = int64(3) * format.IntentsRegion
	fixMapSize = int64(260) << 20 // five pages of the map, the last page short
	fixFarSize = int64(6) << 20
	fixObject  = `{"spec":{"size":"48Mi"}}`
	fixMount   = "ext4/sda1/4711"
	fixEngine  = "one" // the node of an engine
	fixPath    = "/var/lib/drover/near"
)

var fixTime = time.Date(2026, 11, 25, 12, 30, 15, 0, time.UTC)

// volumeOf is the UID of the volume of a replica in the fixtures.
func volumeOf(replica string) string { return strings.Replace(replica, "-8000-", "-9000-", 1) }

// fixtureContent returns the contents of the fixtures, by volume.
func fixtureContent() (base, member, mapping, moving, far expect) {
	base, mapping, moving, far = expect{}, expect{}, expect{}, expect{}
	put := func(e expect, from uint64, blocks []int64) {
		for _, b := range blocks {
			e.put(b, from+uint64(b))
		}
	}
	put(base, 1<<32, fixBaseBlocks)
	base.put(3, 0)
	put(base, 2<<32, fixTopBlocks)
	member = expect{}
	for s, v := range base {
		member[s] = slices.Clone(v)
	}
	put(member, 3<<32, []int64{1, 20})
	member.put(2, 0) // discarded before the cut
	put(member, 4<<32, []int64{21, 2 * (format.IntentsRegion >> blockBits)})
	member.put(600, 0) // discarded after the cut
	put(mapping, 1<<32, fixMapLowBlocks)
	put(mapping, 2<<32, fixMapHighBlocks)
	put(moving, 1<<32, fixMoveLowBlocks)
	put(moving, 2<<32, fixMoveHighBlocks)
	put(far, 5<<32, fixFarBlocks)
	return base, member, mapping, moving, far
}

// nearContent is the content of the replica on the other disk's layers.
func nearContent() expect {
	e := expect{}
	for _, b := range fixNearLowBlocks {
		e.put(b, 7<<32+uint64(b))
	}
	e.put(fixNearHighBlock, 8<<32+uint64(fixNearHighBlock))
	return e
}

// released unpacks the fixture of a version.
func released(t *testing.T, version string) *Disk {
	t.Helper()
	dir := t.TempDir()
	unpackDisk(t, "testdata/"+version, dir)
	d, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// writtenThen compares a time from the writer's clock with the time of the fixture, and clears the time.
func writtenThen(t *testing.T, version string, at *time.Time) {
	t.Helper()
	then := fixtureTimes[version]
	if age := at.Sub(then); age < -6*time.Hour || age > 6*time.Hour || at.Location() != time.UTC {
		t.Errorf("written at %v, not at %v or so", at, then)
	}
	*at = time.Time{}
}

// releasedReplicas are the records of the replicas on the disk of a version.
func releasedReplicas(version string) []Meta {
	list := []Meta{
		{UID: fixMember, Volume: "member", VolumeUID: volumeOf(fixMember), Size: fixSize, Epoch: 3, Incarnation: 2,
			Members: []string{fixMember, fixOther}, Dirty: true, Layers: []string{fixBase, fixTop, fixFrozen},
			Head: "head-1", Joined: 3, BootID: fixBoot, Object: json.RawMessage(fixObject),
			Snapshots: []Snapshot{{UID: fixSnapshot, Name: "before", Layer: fixFrozen, Created: fixTime}}},
		{UID: fixReverted, Volume: "reverted", VolumeUID: volumeOf(fixReverted), Size: fixSize, Epoch: 9, Incarnation: 4,
			Members: []string{fixReverted, fixOther}, Dirty: true, Layers: []string{fixBase}, Head: "head",
			Joined: 7, Reverted: 8, BootID: fixBoot,
			Branches:  []Branch{{Layer: fixTop, Below: fixBase}},
			Snapshots: []Snapshot{{UID: fixOlder, Name: "older", Layer: fixTop, Created: fixTime}}},
		{UID: fixMapping, Volume: "mapping", VolumeUID: volumeOf(fixMapping), Size: fixMapSize, Epoch: 1, Incarnation: 1,
			Members: []string{fixMapping}, Dirty: true, Layers: []string{fixMapLow, fixMapHigh}, Head: "head", Joined: 1,
			BootID: fixBoot,
			Merge: &Merge{Lower: fixMapLow, Upper: fixMapHigh, Up: true, Done: fixMapSize, Crcs: true, Mapped: 2,
				MapSum: 1095424741}},
		{UID: fixMoving, Volume: "moving", VolumeUID: volumeOf(fixMoving), Size: awaySize, Epoch: 1, Incarnation: 1,
			Members: []string{fixMoving}, Dirty: true, Layers: []string{fixMoveLow, fixMoveHigh}, Head: "head", Joined: 1,
			BootID: fixBoot,
			Merge:  &Merge{Lower: fixMoveLow, Upper: fixMoveHigh, Up: true, Done: 3 << 20, Crcs: true}},
		{UID: fixReader, Volume: "reader", VolumeUID: volumeOf(fixReader), Size: fixFarSize, Layers: []string{fixFar},
			Head: "head"},
	}
	if version == "v1" {
		return list
	}
	for i := range list {
		if list[i].BootID != "" {
			list[i].MountID = fixMount
		}
	}
	list[0].EngineNode = fixEngine
	return append(list, Meta{UID: fixBorrower, Volume: "borrower", VolumeUID: volumeOf(fixBorrower), Size: fixFarSize,
		Layers: []string{fixNearLow, fixNearHigh}, Head: "head"})
}

// TestReleasedDiskSaysWhatItSaid reads every record of the disk of each version.
func TestReleasedDiskSaysWhatItSaid(t *testing.T) {
	eachRelease(t, func(t *testing.T, version string, d *Disk) {
		if d.UID() != fixDisk {
			t.Errorf("the disk is %s", d.UID())
		}
		replicasSayWhatTheySaid(t, version, d)
		layersSayWhatTheySaid(t, version, d)
	})
}

func replicasSayWhatTheySaid(t *testing.T, version string, d *Disk) {
	want := releasedReplicas(version)
	got, err := d.Replicas()
	if err != nil || len(got) != len(want) {
		t.Fatalf("%d replicas, %v", len(got), err)
	}
	slices.SortFunc(got, func(a, b Meta) int { return strings.Compare(a.UID, b.UID) })
	for i := range want {
		m := &got[i]
		writtenThen(t, version, &m.Created)
		if m.Merge != nil {
			if err := api.UID(m.Merge.Result).Validate(); err != nil {
				t.Errorf("result of the merge of %s: %v", m.UID, err)
			}
			m.Merge.Result = ""
		}
		for _, list := range []*[]string{&m.Members, &m.Layers} {
			*list = append([]string(nil), *list...)
		}
		m.Snapshots, m.Branches = append([]Snapshot(nil), m.Snapshots...), append([]Branch(nil), m.Branches...)
		a, b := jsonOf(t, m), jsonOf(t, want[i])
		if a != b || !reflect.DeepEqual(*m, want[i]) {
			t.Errorf("replica %s:\n%s, it said\n%s", m.UID, a, b)
		}
	}
}

func layersSayWhatTheySaid(t *testing.T, version string, d *Disk) {
	img, err := d.Image(fixImage)
	wantImage := block.Image{UID: fixImage, Name: "debian", Layers: []string{fixBase, fixTop}, Format: "qcow2.xz",
		VirtualSize: 8<<20 - 512, Checksum: strings.Repeat("5e", 64), Digest: fixTopRoot, Object: json.RawMessage(fixObject)}
	if err != nil || !reflect.DeepEqual(img, wantImage) {
		t.Errorf("image: %s, %v; it said\n%s", jsonOf(t, img), err, jsonOf(t, wantImage))
	}
	pins, err := d.Pins()
	wantPins := []Pin{{UID: fixPin, For: "borrower", Disk: fixDisk, Layers: []string{fixBase, fixTop, fixFrozen}},
		{UID: fixPinImage, For: "golden", Disk: fixDisk, Layers: []string{fixBase}, Image: true}}
	for i := range pins {
		writtenThen(t, version, &pins[i].Created)
	}
	if err != nil || !reflect.DeepEqual(pins, wantPins) {
		t.Errorf("pins: %s, %v", jsonOf(t, pins), err)
	}
	damage := []Damage{{Off: 0, Len: chunkSize}, {Off: 3 * chunkSize, Len: 4096}}
	if got := d.Damaged(fixDamaged); !slices.Equal(got, damage) {
		t.Errorf("damage of a layer: %v", got)
	}
	frozen, err := d.Frozen(fixFrozen)
	if writtenThen(t, version, &frozen.Created); err != nil ||
		frozen != (layer.FrozenRecord{UID: fixFrozen, Size: fixSize}) {
		t.Errorf("the frozen layer: %+v, %v", frozen, err)
	}
	if lacks, err := d.LackingOf([]string{fixBase, fixFrozen, fixKept, fixFar}); err != nil ||
		!slices.Equal(lacks, []string{fixKept, fixFar}) {
		t.Errorf("not finished are %v, %v", lacks, err)
	}
	if rest, err := d.Unfinished(); err != nil || !slices.Contains(rest, fixFrozen) || slices.Contains(rest, fixOther) {
		t.Errorf("to be finished are %v, %v", rest, err)
	}
}

func jsonOf(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestReleasedLayersAreWhole compares the finished layers with the digests: map, sums, checksums and root.
func TestReleasedLayersAreWhole(t *testing.T) {
	eachRelease(t, func(t *testing.T, version string, d *Disk) {
		ctx := context.Background()
		for uid, want := range map[string]layer.Record{
			fixBase: {Size: 8 << 20, Root: fixBaseRoot, Data: 5 * blockSize, Zero: blockSize, Durable: true},
			fixTop:  {Size: 8 << 20, Root: fixTopRoot, Data: 2 * blockSize, Durable: true},
		} {
			rec, err := d.Record(uid)
			if err != nil {
				t.Fatal(err)
			}
			if rec.Allocated <= 0 {
				t.Errorf("layer %s takes %d bytes on the disk", uid, rec.Allocated)
			}
			writtenThen(t, version, &rec.Created)
			rec.Allocated, want.UID = 0, uid
			if rec != want {
				t.Errorf("%+v, it said\n%+v", rec, want)
			}
			if err := d.Verify(ctx, uid); err != nil {
				t.Error(err)
			}
			checksummed(t, d, uid)
		}
		base, _, _, _, _ := fixtureContent()
		base.checkLayers(t, d, []string{fixBase, fixTop}, 8<<20)
	})
}

// TestReleasedReplicaGoesOn: the replica of a killed process, with a layer cut from the head, serves its data and its
// intents.
func TestReleasedReplicaGoesOn(t *testing.T) {
	eachRelease(t, func(t *testing.T, version string, d *Disk) {
		ctx, loop := context.Background(), startLoop(t)
		_, member, _, _, _ := fixtureContent()
		member.check(t, d, loop, fixMember)
		r, err := d.OpenReplica(ctx, fixMember, loop)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Close() }()
		got, err := r.Intents(ctx)
		if err != nil || !slices.Equal(got.Regions, []int64{0, 2}) || got.Base != 2 {
			t.Errorf("intents %+v, %v", got, err)
		}
		other, err := d.OpenReplica(ctx, fixReverted, loop)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = other.Close() }()
		if got, err := other.Intents(ctx); err != nil || len(got.Regions) > 0 || got.Base != 0 {
			t.Errorf("intents of the other one %+v, %v", got, err)
		}
		buf := block.AlignedBuffer(int(blockSize))
		mustIssue(t, loop, other, block.OpRead, 600<<blockBits, blockSize, buf)
		expect{600 * perBlock: {1<<32 + 600}}.holds(t, 600<<blockBits, buf)
		if restarted, err := r.Restarted(); err != nil || !restarted {
			t.Errorf("that the machine restarted since then is %v, %v", restarted, err)
		}
		if version != "v1" {
			knowsItsSession(t, d, r)
		}
		if err := d.Finish(ctx, fixFrozen); err != nil {
			t.Fatal(err)
		}
		if err := d.Verify(ctx, fixFrozen); err != nil {
			t.Error(err)
		}
		if root := d.LayerRoot(fixFrozen); root != fixFrozenRoot {
			t.Errorf("the frozen layer has the digest %s", root)
		}
	})
}

// knowsItsSession checks the mount and the engine's node which a replica recorded at the adoption.
func knowsItsSession(t *testing.T, d *Disk, r *Replica) {
	t.Helper()
	for _, c := range []struct {
		now   diskfs.Lifetime
		ended bool
	}{
		{diskfs.Lifetime{Boot: fixBoot, Mount: fixMount}, false},
		{diskfs.Lifetime{Boot: fixBoot, Mount: "ext4/sda1/4712"}, true},
	} {
		d.lifetime = func() (diskfs.Lifetime, error) { return c.now, nil }
		if ended, err := r.Restarted(); err != nil || ended != c.ended {
			t.Errorf("in boot and mount %v the session ended: %v, %v", c.now, ended, err)
		}
	}
	err := r.AdoptFor(context.Background(), "two", 3, 3, []string{fixMember, fixOther})
	if !api.Is(err, api.Denied) {
		t.Errorf("the engine of another node in the same epoch: %v", err)
	}
}

// TestReleasedMergesGoOn: replicas are readable in the middle of a merge, and the merges end.
func TestReleasedMergesGoOn(t *testing.T) {
	eachRelease(t, func(t *testing.T, _ string, d *Disk) {
		ctx, loop := context.Background(), startLoop(t)
		_, _, mapping, moving, _ := fixtureContent()
		for uid, e := range map[string]expect{fixMapping: mapping, fixMoving: moving} {
			e.check(t, d, loop, uid)
			r, err := d.OpenReplica(ctx, uid, loop)
			if err != nil {
				t.Fatal(err)
			}
			if err := mergeAll(r); err != nil {
				t.Fatal(err)
			}
			layers := r.Meta().Layers
			if err := r.Close(); err != nil || len(layers) != 1 {
				t.Fatal(layers, err)
			}
			if err := d.Verify(ctx, layers[0]); err != nil {
				t.Error(err)
			}
			checksummed(t, d, layers[0])
			e.check(t, d, loop, uid)
		}
	})
}

// TestReleasedHydrationGoesOn: a disk with the first of three chunks continues to hydrate a layer of another node.
func TestReleasedHydrationGoesOn(t *testing.T) {
	eachRelease(t, func(t *testing.T, _ string, d *Disk) {
		loop := startLoop(t)
		_, _, _, _, far := fixtureContent()
		var fetched []int64
		d.Sources(nil, func(_ context.Context, l RemoteLayer, off int64, buf []byte, _ func([]byte) error) error {
			if l != (RemoteLayer{UID: fixFar}) {
				return errors.New("no such layer")
			}
			fetched = append(fetched, off/chunkSize)
			for i := int64(0); i < int64(len(buf)); i += blockSize {
				if v := far[(off+i)/512]; len(v) > 0 {
					fill(buf[i:i+blockSize], v[0])
				} else {
					clear(buf[i : i+blockSize])
				}
			}
			return nil
		})
		if !d.Hydrating(fixFar) {
			t.Fatal("the layer is not known")
		}
		far.check(t, d, loop, fixReader)
		d.Close()
		if !slices.Equal(fetched, []int64{2}) { // the disk has the first chunk, the second chunk holds nothing
			t.Errorf("chunks %v were fetched", fetched)
		}
	})
}

// TestReleasedHalfMadeLayerIsContinued: a writer continues a layer from a checkpoint and seals the layer.
func TestReleasedHalfMadeLayerIsContinued(t *testing.T) {
	eachRelease(t, func(t *testing.T, version string, d *Disk) {
		ctx := context.Background()
		var rec layer.CheckpointRecord
		name := d.Join(layer.Dir, fixKept, layer.CheckpointFile)
		if err := format.ReadMeta(d.FS, name, layer.FormatCheckpoint, &rec); err != nil {
			t.Fatal(err)
		}
		if writtenThen(t, version, &rec.At); !slices.Equal(rec.Open, []int64{1}) {
			t.Errorf("open are %v", rec.Open)
		}
		w, upTo, note, err := d.Resume(ctx, fixKept)
		if err != nil {
			t.Fatal(err)
		}
		var compact bytes.Buffer
		if err := json.Compact(&compact, note); err != nil || upTo != 2*chunkSize || compact.String() != `{"root":"abc"}` {
			t.Errorf("kept up to %d with %s, %v", upTo, note, err)
		}
		scratch, err := w.Beside("spool")
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, len("scratch"))
		if _, err := scratch.ReadAt(buf, 0); err != nil || string(buf) != "scratch" {
			t.Errorf("beside it is %q, %v", buf, err)
		}
		if err := scratch.Close(); err != nil {
			t.Fatal(err)
		}
		writeKept(t, w, 2)
		root, _, err := w.Seal(ctx)
		if err != nil || root != fixKeptRoot {
			t.Errorf("the layer has the digest %s, %v", root, err)
		}
		if err := d.Verify(ctx, fixKept); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(d.Join(layer.Dir, fixKept, layer.CheckpointFile)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the record of the half-made layer stays: %v", err)
		}
	})
}

// TestReleasedBorrowerGoesOn: an older version read a replica's layers, a frozen layer among them, on another disk of
// the node and recorded no source. The replica still reads the layers there, gets copies, and then does without the
// other disk.
func TestReleasedBorrowerGoesOn(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	d, other := released(t, "v1"), newDisk(t)
	if err := os.Mkdir(other.Join(pinsDir), 0o700); err != nil {
		t.Fatal(err)
	}
	move := func(elem ...string) {
		t.Helper()
		if err := os.Rename(d.Join(elem...), other.Join(elem...)); err != nil {
			t.Fatal(err)
		}
	}
	layers := []string{fixBase, fixTop, fixFrozen}
	for _, uid := range layers {
		move(layer.Dir, uid)
	}
	move(pinsDir, fixPin) // the pin kept the layers on the other disk
	_, member, _, _, _ := fixtureContent()
	if _, err := d.OpenReplica(ctx, fixMember, loop); !api.Is(err, api.Corrupt) {
		t.Fatalf("without the other disk: %v", err)
	}
	fromDisk(d, other)
	member.check(t, d, loop, fixMember)
	r, err := d.OpenReplica(ctx, fixMember, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	want := make([]RemoteLayer, len(layers))
	for i, uid := range layers {
		want[i] = RemoteLayer{UID: uid, From: SourceDisk{UID: other.UID(), Path: other.Path()}}
	}
	if got := r.Remote(); !slices.Equal(got, want) {
		t.Errorf("it reads %v elsewhere, not %v", got, want)
	}
	for _, uid := range layers {
		if err := d.CopyLayer(ctx, other, uid, CopyOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if root := d.LayerRoot(fixFrozen); root != fixFrozenRoot {
		t.Errorf("the frozen layer has the digest %s", root)
	}
	localizeAll(t, r)
	if lacks, err := d.Lacking(fixMember); r.Hydrates() || err != nil || len(lacks) > 0 {
		t.Errorf("it still reads %v elsewhere and lacks %v, %v", r.Remote(), lacks, err)
	}
	if err := errors.Join(r.Close(), d.Close(), os.RemoveAll(other.Join(layer.Dir))); err != nil {
		t.Fatal(err)
	}
	d.Sources(nil, nil)
	member.check(t, d, loop, fixMember)
	if _, err := os.Stat(d.Join(layer.HydratingDir, fixBase)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what was read on the way stays: %v", err)
	}
}

// TestReleasedBorrowerFindsItsSource: a replica reads layers, a frozen layer among them, from another disk of the node.
// The record of each layer names the other disk. The replica's disk had fetched a chunk of each layer.
func TestReleasedBorrowerFindsItsSource(t *testing.T) {
	loop := startLoop(t)
	d := released(t, "v2")
	near := nearContent()
	var fetched []string
	d.Sources(nil, func(_ context.Context, l RemoteLayer, off int64, buf []byte, _ func([]byte) error) error {
		fetched = append(fetched, fmt.Sprint(l.UID, " ", off/chunkSize, " ", l.From))
		for i := int64(0); i < int64(len(buf)); i += blockSize {
			if v := near[(off+i)/512]; len(v) > 0 {
				fill(buf[i:i+blockSize], v[0])
			} else {
				clear(buf[i : i+blockSize])
			}
		}
		return nil
	})
	near.check(t, d, loop, fixBorrower)
	// The disk has the first chunk of each layer. A single other chunk holds data.
	want := []string{fmt.Sprint(fixNearLow, " 1 ", SourceDisk{UID: fixNear, Path: fixPath})}
	if !slices.Equal(fetched, want) {
		t.Errorf("%q were fetched, want %q", fetched, want)
	}
	root, _, err := d.Digest(fixNearLow)
	if root != "" || !api.Is(err, api.NotFound) {
		t.Errorf("the disk has layer %s with digest %s, %v", fixNearLow, root, err)
	}
}
