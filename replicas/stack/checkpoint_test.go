package stack

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// chunks makes content: chunks of data, chunks with some zeros, and holes.
func chunks(rng *rand.Rand, n int) [][]byte {
	all := make([][]byte, n)
	for i := range all {
		if rng.IntN(4) == 0 {
			continue // a hole
		}
		all[i] = make([]byte, chunkSize)
		for b := int64(0); b < chunkSize; b += blockSize {
			if rng.IntN(3) > 0 {
				fill(all[i][b:b+blockSize], rng.Uint64()|1)
			}
		}
	}
	return all
}

func writeChunks(t *testing.T, w block.LayerWriter, all [][]byte, from, to int) {
	t.Helper()
	for c := from; c < to; c++ {
		if all[c] == nil {
			continue
		}
		if _, err := w.WriteAt(all[c], int64(c)*chunkSize); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCheckpointSurvivesPowerLoss: the checkpoint exists after a power loss at any moment, and the writer continues
// from there. The finished layer is the same as without the power loss.
func TestCheckpointSurvivesPowerLoss(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	for seed := range uint64(5) {
		rng := rand.New(rand.NewPCG(seed, 7))
		all := chunks(rng, 10)
		size := int64(len(all))*chunkSize - 3*blockSize
		if last := len(all) - 1; all[last] != nil {
			all[last] = all[last][:chunkSize-3*blockSize]
		}
		whole := newDisk(t)
		uid := string(api.NewUID())
		w, err := whole.Create(ctx, uid, size)
		if err != nil {
			t.Fatal(err)
		}
		writeChunks(t, w, all, 0, len(all))
		want, _, err := w.Seal(ctx)
		if err != nil {
			t.Fatal(err)
		}

		p := freshPower(t, nil)
		d := p.disk(t)
		if w, err = d.Create(ctx, uid, size); err != nil {
			t.Fatal(err)
		}
		kept := 0
		for at := 0; ; {
			next := min(at+1+rng.IntN(3), len(all))
			writeChunks(t, w, all, at, next)
			if at = next; at == len(all) || rng.IntN(4) == 0 {
				break
			}
			if err := w.(block.CheckpointWriter).Checkpoint(int64(at)*chunkSize, fmt.Appendf(nil, `"note %d"`, at)); err != nil {
				t.Fatal(err)
			}
			kept = at
		}
		_ = w.(block.CheckpointWriter).Leave() // a killed process releases the lock, too
		d = p.crash(t, rng).disk(t)
		if err := d.Collect(ctx, 0); err != nil {
			t.Fatal(err)
		}
		again, upTo, note, err := d.Resume(ctx, uid)
		if kept == 0 {
			if !api.Is(err, api.NotFound) {
				t.Errorf("seed %d: nothing was kept: %v", seed, err)
			}
			continue
		}
		if err != nil || upTo != int64(kept)*chunkSize || string(note) != fmt.Sprintf(`"note %d"`, kept) {
			t.Fatalf("seed %d: up to %d, note %s: %v; want chunk %d", seed, upTo, note, err, kept)
		}
		if _, _, _, err := d.Resume(ctx, uid); !api.Is(err, api.Busy) {
			t.Errorf("a second writer: %v", err)
		}
		writeChunks(t, again, all, kept, len(all))
		root, _, err := again.Seal(ctx)
		if err != nil || root != want {
			t.Fatalf("seed %d: root %s, want %s: %v", seed, root, want, err)
		}
		if err := d.Verify(ctx, uid); err != nil {
			t.Error(err)
		}
		if _, _, _, err := d.Resume(ctx, uid); err == nil {
			t.Error("a finished layer is continued")
		}
	}
}

// TestUselessCheckpointIsCollected: no writer continues a damaged or outdated checkpoint, and garbage collection
// removes the layer.
func TestUselessCheckpointIsCollected(t *testing.T) {
	ctx := context.Background()
	all := chunks(rand.New(rand.NewPCG(3, 3)), 4)
	all[0] = make([]byte, chunkSize)
	fill(all[0], 77)
	for name, spoil := range map[string]func(d *Disk, dir string) error{
		"record": func(_ *Disk, dir string) error {
			return os.WriteFile(dir+"/"+layer.CheckpointFile, []byte("{}"), 0o600)
		},
		"map":  func(_ *Disk, dir string) error { return os.Truncate(dir+"/"+layer.CheckpointMapFile, 100) },
		"sums": func(_ *Disk, dir string) error { return os.Remove(dir + "/" + layer.SumsFile) },
		"old": func(d *Disk, dir string) error {
			var rec layer.CheckpointRecord
			if err := format.ReadMeta(d.FS, dir+"/"+layer.CheckpointFile, layer.FormatCheckpoint, &rec); err != nil {
				return err
			}
			rec.At = time.Now().Add(-layer.CheckpointAge - time.Hour)
			if err := os.Chtimes(dir+"/"+layer.DataFile, rec.At, rec.At); err != nil {
				return err
			}
			return format.WriteMeta(d.FS, dir+"/"+layer.CheckpointFile, layer.FormatCheckpoint, rec)
		},
	} {
		d := newDisk(t)
		uid := string(api.NewUID())
		w, err := d.Create(ctx, uid, 4*chunkSize)
		if err != nil {
			t.Fatal(err)
		}
		writeChunks(t, w, all, 0, 3)
		k := w.(block.CheckpointWriter)
		if err := k.Checkpoint(chunkSize+blockSize, nil); !api.Is(err, api.OutOfRange) {
			t.Errorf("half a chunk was kept: %v", err)
		}
		if err := k.Checkpoint(2*chunkSize, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		if err := k.Leave(); err != nil {
			t.Fatal(err)
		}
		dir := d.Join(layer.Dir, uid)
		if err := spoil(d, dir); err != nil {
			t.Fatal(err)
		}
		if name == "record" || name == "old" {
			if err := d.Collect(ctx, 0); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(dir); !os.IsNotExist(err) {
				t.Errorf("%s: it was not collected: %v", name, err)
			}
		}
		if name != "old" {
			if _, _, _, err := d.Resume(ctx, uid); err == nil {
				t.Errorf("%s: it is continued", name)
			}
		}
		if w, err = d.Create(ctx, uid, 4*chunkSize); err != nil { // the layer does not hinder a new writer
			t.Fatalf("%s: %v", name, err)
		}
		if err := w.Abort(); err != nil {
			t.Error(err)
		}
	}
}

// TestProgressKeepsCheckpoint: a layer whose data is younger than its old checkpoint is continued.
func TestProgressKeepsCheckpoint(t *testing.T) {
	d := newDisk(t)
	uid := string(api.NewUID())
	w, err := d.Create(t.Context(), uid, 4*chunkSize)
	if err != nil {
		t.Fatal(err)
	}
	k := w.(block.CheckpointWriter)
	if err := errors.Join(k.Checkpoint(2*chunkSize, []byte("{}")), k.Leave()); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	last := began.Add(2 * layer.CheckpointAge)
	if err := os.Chtimes(d.Join(layer.Dir, uid, layer.DataFile), last, last); err != nil {
		t.Fatal(err)
	}
	for _, late := range []time.Duration{-time.Hour, time.Hour} {
		is, err := d.Resumable(uid, last.Add(layer.CheckpointAge+late))
		if err != nil || is != (late < 0) {
			t.Errorf("the last data is older than allowed by %v, and is continued: %v, %v", late, is, err)
		}
	}
}
