package stack

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// checksummed fails unless every block of a layer matches its checksum. A read does not notice a wrong checksum if the
// digest is right.
func checksummed(t *testing.T, d *Disk, uid string) {
	t.Helper()
	l, err := d.OpenLayer(uid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	kinds, err := format.IndexOf(l.Map)
	if err != nil || l.CRCs == nil {
		t.Fatalf("checksums %v, %v", l.CRCs, err)
	}
	buf := block.AlignedBuffer(int(blockSize))
	for b := int64(0); b < kinds.Blocks; b++ {
		if v, n := kinds.Run(b, kinds.Blocks); block.Kind(v) != block.Data {
			b += n - 1
			continue
		}
		if _, err := l.Data.ReadAt(buf, b<<blockBits); err != nil {
			t.Fatal(err)
		}
		if crcs, err := l.CRCsAt(b<<blockBits, blockSize); err != nil || !layer.HasCRC(crcs, 0, buf) {
			t.Fatalf("block %d does not match its checksum, %v", b, err)
		}
	}
}

// mergeStep merges layers above an image's layer. Before the merge, change alters the replica's record.
func mergeStep(name string, change func(t *testing.T, d *Disk, m *Meta), blocks ...[]int64) step {
	s := mergeOf(name, 8<<20, change, blocks...)
	s.third = 1
	return s
}

func mergeOf(name string, size int64, change func(t *testing.T, d *Disk, m *Meta), blocks ...[]int64) step {
	return step{name: name, setup: func(t *testing.T, d *Disk, i *ids) {
		i.makeImage(t, d)
		spec := i.spec(i.layer)
		spec.Size = size
		for k, b := range blocks {
			spec.Layers = append(spec.Layers, filledLayer(t, d, size, b, uint64(k+1)<<40, i.e))
		}
		if err := d.CreateReplica(context.Background(), spec); err != nil {
			t.Fatal(err)
		}
		m, err := d.readStack(i.replica)
		if err != nil {
			t.Fatal(err)
		}
		change(t, d, &m)
		if err := format.WriteMeta(d.FS, d.Join(replicaDir, i.replica, stackFile), formatStack, m.toRecord()); err != nil {
			t.Fatal(err)
		}
	},
		do: withReplica(mergeAll),
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			servedAsSealed(t, d)
			if err := d.Collect(context.Background(), time.Hour); err != nil {
				t.Fatal(err)
			}
			replicaIs(func(m Meta, done bool) bool { return !done || len(m.Layers) == 2 && m.Merge == nil })(t, d, p, i, done)
			if err := withReplica(mergeAll)(d, p, i); err != nil {
				t.Fatal(err)
			}
			replicaIs(func(m Meta, done bool) bool { return len(m.Layers) == 2 && m.Merge == nil })(t, d, p, i, done)
			list, err := d.Replicas()
			if err != nil {
				t.Fatal(err)
			}
			for _, uid := range list[0].Layers {
				if err := d.Verify(context.Background(), uid); err != nil {
					t.Fatal(err)
				}
				checksummed(t, d, uid)
			}
			if err := errors.Join(d.Collect(context.Background(), 0), d.Collect(context.Background(), 0), d.Close()); err != nil {
				t.Fatal(err)
			}
			for dir, want := range map[string]int{layer.Dir: 2, trashDir: 0} {
				if left, err := d.FS.ReadDir(d.Join(dir)); err != nil || len(left) != want {
					t.Fatalf("%s holds %v, %v", dir, left, err)
				}
			}
		}}
}

var (
	mergeThree = mergeStep("merge", func(*testing.T, *Disk, *Meta) {},
		[]int64{1, 5, 600, 601, 900}, []int64{5, 6, 601, 700, 1500, 2047}, []int64{2})
	// mergePieces has maps of three pieces, the second piece without a page, and moves all data in two windows.
	mergePieces = func() step {
		s := mergeOf("merge with a map in pieces", 130<<20, func(*testing.T, *Disk, *Meta) {},
			[]int64{1, 5, 600, 33000, 33001, 33279}, []int64{5, 6, 601, 33001, 33002})
		s.window, s.third = 128<<20, 3
		return s
	}()
	// mergeBefore was begun by a version whose merges do not carry checksums.
	mergeBefore = mergeStep("merge that an older version began", func(t *testing.T, d *Disk, m *Meta) {
		t.Helper()
		m.Merge = &Merge{Lower: m.Layers[1], Upper: m.Layers[2], Result: string(api.NewUID())}
		for _, uid := range m.Layers[1:] {
			dir := d.Join(layer.Dir, uid)
			if err := errors.Join(format.WriteFile(d.FS, dir+"/"+layer.MergingFile, []byte(m.UID)), d.FS.SyncDir(dir)); err != nil {
				t.Fatal(err)
			}
		}
	}, []int64{1, 5, 600, 601, 900}, []int64{5, 6, 601, 1500})
)

// allocatedIn is the space of the files in a folder, with links counted once.
func allocatedIn(t *testing.T, dir string) (n int64) {
	t.Helper()
	seen := map[uint64]bool{}
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		if is := st.Sys().(*syscall.Stat_t); !seen[is.Ino] {
			seen[is.Ino] = true
			n += diskfs.Allocated(st)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestMergeMovesChecksums: the checksums of scattered data take as much space as the data. While a merge moves
// checksums to places where the larger layer has no checksums, the disk has only the checksums of a window twice.
func TestMergeMovesChecksums(t *testing.T) {
	t.Parallel()
	const size, pages = int64(260) << 20, 64
	dir, _ := mounted(t, 64<<20, "", "mkfs.ext4", "-q", "-F", "-b", "4096")
	ctx, loop := context.Background(), startLoop(t)
	plain, err := Add(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	var scattered, dense []int64
	for k := range int64(pages) {
		scattered = append(scattered, k<<format.CRCPageBits+5)
	}
	for k := range int64(2 * pages) {
		dense = append(dense, pages<<format.CRCPageBits+k)
	}
	for _, up := range []bool{true, false} {
		d, f := tap(t, plain)
		d.window = 16 << 20
		e := make(expect)
		of := [][]int64{dense, scattered}
		if up {
			slices.Reverse(of)
		}
		spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
		for k, blocks := range of {
			spec.Layers = append(spec.Layers, filledLayer(t, d, size, blocks, uint64(k+1)<<32, e))
		}
		if err := d.CreateReplica(ctx, spec); err != nil {
			t.Fatal(err)
		}
		before := allocatedIn(t, d.Join(layer.Dir))
		most, commits := int64(0), 0
		f.set(func(op, name string) (func(), error) {
			if op == opRename && (strings.HasSuffix(name, stackFile) || strings.HasSuffix(name, layer.LayerFile)) {
				most, commits = max(most, allocatedIn(t, d.Join(layer.Dir))), commits+1
			}
			return nil, nil
		})
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			t.Fatal(err)
		}
		patient(t, func() error {
			err := mergeAll(r)
			if err == nil && len(r.Meta().Layers) != 1 {
				err = errRead
			}
			return err
		})
		f.set(nil)
		layers := r.Meta().Layers
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		// Twice: 4 blocks of a window, and as many pages of checksums. In addition: the map (6 pages), digests, small files.
		if room := most - before; len(layers) != 1 || room > 128<<10 || commits < 17 {
			t.Errorf("up %v: %d KiB beside the layers, %d commits, layers %v", up, room>>10, commits, layers)
		}
		if err := d.Verify(ctx, layers[0]); err != nil {
			t.Fatal(err)
		}
		checksummed(t, d, layers[0])
		if err := d.RemoveReplica(spec.UID); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMergedChecksumsInMemory: a merge changes checksums in a file. Once the data path reads the merged part, the
// checksums in memory equal the file.
func TestMergedChecksumsInMemory(t *testing.T) {
	t.Parallel()
	ctx, l := context.Background(), startLoop(t)
	d := newDisk(t)
	e := make(expect)
	r, _, upper := ofTwo(t, d, l, e)
	defer func() { _ = r.Close() }()
	w := begun(t, r)
	defer w.close()
	buf := block.AlignedBuffer(awaySize)
	for w.seen.Done < w.size {
		mustIssue(t, l, r, block.OpRead, 0, awaySize, buf)
		if err := errors.Join(w.copyNextWindow(ctx), w.whenQuiet(ctx, w.switchReads)); err != nil {
			t.Fatal(err)
		}
		var off int64
		if err := r.onLoop(func() {
			to := r.layers[1]
			for key, page := range r.crcs.at {
				if key.l != to {
					continue
				}
				n := key.n
				have := make([]byte, format.CRCPageSize)
				if _, err := w.upper.CRCs.ReadAt(have, n*format.CRCPageSize); err != nil || string(have) != string(page.crc) {
					t.Errorf("page %d is not what the file says, %v", n, err)
				}
			}
			off = r.merge.Done
		}); err != nil || off != w.seen.Done {
			t.Fatal(off, err)
		}
	}
	mustIssue(t, l, r, block.OpRead, 0, awaySize, buf)
	if err := r.onLoop(func() {
		compared := false
		for key := range r.crcs.at {
			compared = compared || key.l == r.layers[1]
		}
		if r.layers[1].Rec.UID != upper || !compared {
			t.Error("nothing of the target was compared")
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// TestMergeLosesChecksums: checksums lost in the middle of a merge are no damage.
func TestMergeLosesChecksums(t *testing.T) {
	t.Parallel()
	ctx, l := context.Background(), startLoop(t)
	for _, of := range []string{"of the target", "of the other", "of both"} {
		d := newDisk(t)
		e := make(expect)
		r, lower, upper := ofTwo(t, d, l, e)
		w := begun(t, r)
		for range 3 {
			if err := errors.Join(w.copyNextWindow(ctx), w.whenQuiet(ctx, w.switchReads)); err != nil {
				t.Fatal(err)
			}
		}
		w.close()
		closed(t, d, r)
		if of != "of the other" {
			if err := os.Remove(d.Join(layer.Dir, upper, layer.CRCsFile)); err != nil {
				t.Fatal(err)
			}
		}
		if of != "of the target" {
			if err := os.Remove(d.Join(layer.Dir, lower, layer.CRCsFile)); err != nil {
				t.Fatal(err)
			}
		}
		r, err := d.openReplica(ctx, r.meta.UID, l)
		if err != nil {
			t.Fatal(err)
		}
		patient(t, func() error {
			did, err := r.Merge(ctx, MergeOptions{})
			if err == nil && !did && r.Meta().Merge != nil {
				err = errRead
			}
			return err
		})
		layers := r.Meta().Layers
		closed(t, d, r)
		if len(layers) != 1 || d.Damaged(layers[0]) != nil {
			t.Fatalf("checksums %s: layers %v, damaged %v", of, layers, d.Damaged(layers[0]))
		}
		if err := d.Verify(ctx, layers[0]); err != nil {
			t.Fatal(err)
		}
		e.check(t, d, l, r.meta.UID)
	}
}
