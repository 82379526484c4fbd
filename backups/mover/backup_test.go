package mover

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block/suite"
)

// TestResticRestoresOurBackups: a volume is backed up, changes and grows, and is backed up again, with fragments; an
// image has an odd size. restic finds no error, lists the backups with their paths and tags, and restores the bytes of
// each.
func TestResticRestoresOurBackups(t *testing.T) {
	suite.System(t)
	w := newWorld(t)
	v := newDisk(130 * chunkSize) // more than two segments
	v.fill(1, 0, 1, 63, 64, 129)
	v.chunks[5] = bytes.Repeat([]byte("words of text. "), chunkSize/15+1)[:chunkSize]
	v.chunks[6] = make([]byte, chunkSize)
	first := w.backup(v, options("v"))
	if !first.Full || first.Read != 7*chunkSize {
		t.Errorf("the first backup: %+v", first)
	}
	v2 := v.copy(200 * chunkSize)
	v2.fill(2, 64, 180)
	_, err := v2.WriteAt(randomBytes(3, 4096), 63*chunkSize+8192)
	must(t, err)
	delete(v2.chunks, 1)
	o := options("v")
	o.Base, o.Changed, o.FragmentSize = &first.Snapshot, []int64{1, 63, 64}, 128<<10
	second := w.backup(v2, o)
	if second.Full || second.Read != 4*chunkSize {
		t.Errorf("the second backup: %+v", second)
	}
	image := newDisk(3*chunkSize + 12345)
	image.fill(4, 0, 3)
	o = options("ubuntu")
	o.Description.Kind = manifest.Image
	third := w.backup(image, o)
	backups := map[blob.ID]*disk{first.Snapshot: v, second.Snapshot: v2, third.Snapshot: image}
	for id, want := range backups {
		w.compare(id, want)
	}
	for _, restic := range w.oracles() {
		if output := w.runRestic(restic, "check", "--read-data"); !strings.Contains(output, "no errors were found") {
			t.Errorf("%s check: %.2000s", restic, output)
		}
		if restic != "restic" { // refuses trees that it would write otherwise
			w.runRestic(restic, "rewrite", "--dry-run", "--exclude", "/nothing")
		}
		for id, want := range backups {
			if got := w.resticRestore(restic, id); !got.equals(want) {
				t.Errorf("%s restores %d other bytes of backup %.8s, want %d", restic, got.size, id, want.size)
			}
		}
	}
	var list []struct {
		ID, Parent, Hostname string
		Paths, Tags          []string
	}
	must(t, json.Unmarshal([]byte(w.restic("snapshots", "--json", "--no-lock")), &list))
	for _, s := range list {
		path := "/volumes/v"
		if s.ID == third.Snapshot.String() {
			path = "/images/ubuntu"
		}
		if !slices.Equal(s.Paths, []string{path}) || !slices.Equal(s.Tags, []string{"drover"}) || s.Hostname != "cluster" ||
			(s.ID == second.Snapshot.String()) != (s.Parent == first.Snapshot.String()) {
			t.Errorf("restic lists %+v", s)
		}
	}
	if len(list) != 3 {
		t.Errorf("restic lists %d backups, want 3", len(list))
	}
}

// resticRestore restores a backup as the documents say: all files data, one after the other.
func (w *world) resticRestore(restic string, id blob.ID) *disk {
	w.Helper()
	to := w.TempDir()
	w.runRestic(restic, "restore", id.String(), "--target", to, "--no-lock")
	files, err := filepath.Glob(to + "/*/*/disk/*/*/data")
	must(w, err)
	slices.Sort(files)
	var all []byte
	for _, f := range files {
		b, err := os.ReadFile(f)
		must(w, err)
		all = append(all, b...)
	}
	must(w, os.RemoveAll(to))
	got := newDisk(int64(len(all)))
	_, err = got.WriteAt(all, 0)
	must(w, err)
	return got
}

// TestEveryBackupInAChainIsRestored: random writes, holes and growth of a volume of several groups, and backups with
// random bases, fragments, digests and changed chunks that did not change: a restore of every backup has the bytes of
// its time.
func TestEveryBackupInAChainIsRestored(t *testing.T) {
	for seed := range suite.Seeds(t, 2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			w := newWorld(t)
			groupChunks := int64(manifest.GroupSegments * manifest.SegmentChunks)
			now := newDisk(groupChunks*chunkSize + random.Int64N(groupChunks)*chunkSize)
			type done struct {
				id   blob.ID
				disk *disk
			}
			var all []done
			for range 12 {
				now = now.copy(min(now.size+random.Int64N(3)*random.Int64N(200)*chunkSize, 4*groupChunks*chunkSize))
				now.digests = random.IntN(2) == 0
				for range 1 + random.IntN(6) {
					mutate(random, now)
				}
				o := options("v")
				o.FragmentSize = []int{0, 128 << 10, 64 << 10}[random.IntN(3)]
				o.Reread = random.IntN(8) == 0
				if len(all) > 0 && random.IntN(5) > 0 {
					base := all[random.IntN(len(all))]
					o.Base, o.Changed = &base.id, changed(random, base.disk, now)
				}
				p := &Progress{}
				o.Progress = p
				all = append(all, done{w.backup(now, o).Snapshot, now})
				if done, total := p.Bytes(); done != total {
					t.Errorf("progress %d of %d bytes at the end", done, total)
				}
			}
			for _, d := range all {
				w.compare(d.id, d.disk)
			}
		})
	}
}

// mutate changes a chunk in one of several ways.
func mutate(random *rand.Rand, d *disk) {
	c := random.Int64N(manifest.Chunks(d.size))
	if random.IntN(2) == 0 {
		c = random.Int64N(3) // often the same ones
	}
	switch random.IntN(5) {
	case 0:
		delete(d.chunks, c)
	case 1:
		d.chunks[c] = make([]byte, chunkSize)
	case 2:
		d.fill(uint64(random.IntN(2)), c) // content that existed before
	default:
		_, _ = d.WriteAt(randomBytes(random.Uint64(), 4096), c*chunkSize+random.Int64N(chunkSize/4096)*4096)
	}
}

// changed lists the chunks that differ, and some that do not.
func changed(random *rand.Rand, old, now *disk) (list []int64) {
	for c := range manifest.Chunks(now.size) {
		if !bytes.Equal(old.chunks[c], now.chunks[c]) || random.IntN(500) == 0 {
			list = append(list, c)
		}
	}
	return list
}

// TestKnownChunksAreNotRead: a second volume with the same content, whose source knows the digests, stores no data and
// reads none; without digests the chunks are read, and not stored. A backup that trusts nothing reads all.
func TestKnownChunksAreNotRead(t *testing.T) {
	w := newWorld(t)
	v := newDisk(100 * chunkSize)
	v.fill(1, 0, 10, 70, 99)
	w.backup(v, options("v"))
	packs := len(w.packs())
	v.digests = true
	for _, c := range []struct {
		name    string
		digests bool
		reread  bool
		reads   int64
	}{{"a", true, false, 0}, {"b", false, false, 4}, {"c", true, true, 4}} {
		v.digests = c.digests
		v.reads.Store(0)
		o := options(c.name)
		o.Reread = c.reread
		result := w.backup(v, o)
		if v.reads.Load() != c.reads || result.Read != c.reads*chunkSize || result.PlainBytes > 20_000 {
			t.Errorf("volume %s: %d reads, want %d: %+v", c.name, v.reads.Load(), c.reads, result)
		}
		w.compare(result.Snapshot, v)
	}
	if n := len(w.packs()); n > packs+6 {
		t.Errorf("%d packs, after the first backup %d", n, packs)
	}
}

// TestSmallChangeStoresFragments: after a chunk was split, a change of 4 KiB stores a fragment and the folders above,
// in two packs.
func TestSmallChangeStoresFragments(t *testing.T) {
	w := newWorld(t)
	v := newDisk(3 * manifest.SegmentSize)
	v.fill(1, 0, 1, 2, 100)
	last := w.backup(v, options("v"))
	for i, want := range []int64{chunkSize, 128 << 10, 128 << 10} {
		_, err := v.WriteAt(randomBytes(uint64(i), 4096), chunkSize+int64(i)*8192)
		must(t, err)
		o := options("v")
		o.Base, o.Changed, o.FragmentSize = &last.Snapshot, []int64{1}, 128<<10
		last = w.backup(v, o)
		// Beside data: the sums, the description and six trees.
		if last.Read != chunkSize || last.PlainBytes < want || last.PlainBytes > want+30_000 || last.Packs != 2 {
			t.Errorf("backup %d: %+v, want %d bytes of data", i, last, want)
		}
		w.compare(last.Snapshot, v.copy(v.size))
	}
}

// TestBackupWithoutUsableBaseIsFull: a base that was deleted, belongs to another volume, is larger, or is no backup.
func TestBackupWithoutUsableBaseIsFull(t *testing.T) {
	w := newWorld(t)
	v := newDisk(10 * chunkSize)
	v.fill(1, 0, 9)
	deleted := w.backup(v, options("v")).Snapshot
	must(t, w.r.DeleteSnapshots(t.Context(), deleted))
	other := w.backup(v, options("w")).Snapshot
	larger := w.backup(newDisk(11*chunkSize), options("v")).Snapshot
	odd := w.backup(newDisk(9*chunkSize+512), options("v")).Snapshot
	blobs, m := w.load(other)
	must(t, blobs.Close())
	foreign, err := w.r.SaveSnapshot(t.Context(), repo.Snapshot{Tree: treeOf(t, w, m), Paths: []string{"/home"}})
	must(t, err)
	for name, id := range map[string]blob.ID{"deleted": deleted, "other": other, "larger": larger, "odd": odd,
		"foreign": foreign} {
		o := options("v")
		o.Base, o.Changed = &id, []int64{0}
		result := w.backup(v, o)
		if !result.Full {
			t.Errorf("%s: the backup has a base", name)
		}
		w.compare(result.Snapshot, v)
	}
	usable := w.backup(v, options("v")).Snapshot
	o := options("v")
	o.Base, o.Changed = &usable, []int64{3, 3}
	if _, err := Backup(t.Context(), w.r, v, o); !api.Is(err, api.Invalid) {
		t.Errorf("changed chunks out of order: %v, want an error of kind invalid", err)
	}
}

func treeOf(t *testing.T, w *world, m *manifest.Manifest) *blob.ID {
	f, err := w.r.FindSnapshot(t.Context(), m.Snapshot)
	must(t, err)
	s, err := w.r.LoadSnapshot(t.Context(), f)
	must(t, err)
	return s.Tree
}

// TestInterruptedBackupLeavesNoTrace: the store fails at each write of a backup in turn, as after a kill. restic finds
// no error, no backup is listed, and the next attempt completes, and finds the blobs of the index files.
func TestInterruptedBackupLeavesNoTrace(t *testing.T) {
	suite.System(t)
	v := newDisk(70 * chunkSize)
	v.fill(1, 0, 1, 2, 3, 65, 66)
	killed := errors.New("killed")
	w := newWorld(t)
	base := w.backup(v, options("v")).Snapshot
	before := v.copy(v.size)
	v.fill(2, 1, 2, 64)
	for step := 1; ; step++ {
		var puts atomic.Int64
		w.store.before = func(operation, _ string) error {
			if operation == "put" {
				puts.Add(1)
			}
			if int(puts.Load()) >= step && (operation == "put" || operation == "delete") {
				return killed
			}
			return nil
		}
		o := options("v")
		o.Base, o.Changed, o.FragmentSize = &base, []int64{1, 2, 64}, 128<<10
		o.Workers, o.Writer.Memory = 1, 1 // packs one after the other
		result, err := Backup(t.Context(), w.r, v, o)
		w.store.before = nil
		w.compare(base, before)
		files, listErr := w.r.ListSnapshots(t.Context())
		must(t, listErr)
		if err == nil {
			w.check()
			w.compare(result.Snapshot, v)
			if len(files) != 2 || step < 5 {
				t.Errorf("%d backups are listed after %d steps", len(files), step)
			}
			return
		}
		if len(files) != 1 || !errors.Is(err, killed) {
			t.Fatalf("step %d: %d backups are listed: %v", step, len(files), err)
		}
		if step%3 == 0 {
			w.check()
		}
		if step > 40 {
			t.Fatal("the backup does not end")
		}
	}
}
