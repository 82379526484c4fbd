package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"
)

// TestCuts compares a replica with cuts at random moments, and each snapshot, with arrays of bytes.
func TestCuts(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	size := int64(pageSize) + 24<<20
	model := make([]byte, size)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	spec.Layers = []string{makeLayer(t, d, rng, size-8<<20, model)}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	type taken struct {
		layer string
		model []byte
	}
	var snaps []taken
	buf := block.AlignedBuffer(1 << 20)
	for session := range 4 {
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.PrepareCut(ctx, Snapshot{Layer: string(api.NewUID())}); !api.Is(err, api.Denied) {
			t.Fatalf("a cut without a session: %v", err)
		}
		if err := r.Adopt(ctx, int64(session+1), 1, []string{spec.UID}); err != nil {
			t.Fatal(err)
		}
		for range 120 {
			off := rng.Int64N(size>>blockBits) << blockBits
			n := min((1+rng.Int64N(64))<<blockBits, size-off)
			switch rng.IntN(8) {
			case 0:
				mustIssue(t, loop, r, block.OpDiscard, off, n, nil)
				clear(model[off : off+n])
			case 1:
				mustIssue(t, loop, r, block.OpZero, off, n, nil)
				clear(model[off : off+n])
			case 2:
				mustIssue(t, loop, r, block.OpFlush, 0, 0, nil)
			case 3:
				if rng.IntN(4) > 0 {
					continue
				}
				s := Snapshot{UID: string(api.NewUID()), Name: fmt.Sprint("s", len(snaps)), Layer: string(api.NewUID()),
					Created: time.Now()}
				if err := r.Cut(ctx, s); err != nil {
					t.Fatal(err)
				}
				snaps = append(snaps, taken{s.Layer, slices.Clone(model)})
			case 4:
				if rng.IntN(4) > 0 {
					continue
				}
				uids, err := d.Unfinished()
				if err != nil {
					t.Fatal(err)
				}
				for _, uid := range uids {
					if err := d.Finish(ctx, uid); err != nil {
						t.Fatal(err)
					}
				}
			default:
				b := buf[:n]
				randomBytes(rng, b)
				if rng.IntN(5) == 0 {
					clear(b[:blockSize])
				}
				mustIssue(t, loop, r, block.OpWrite, off, n, b)
				copy(model[off:], b)
			}
		}
		compareAll(t, loop, r, model)
		if err := d.Collect(ctx, 0); err != nil {
			t.Fatal(err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		compareView(t, d, spec.UID, model)
		list, err := d.Replicas()
		if err != nil || len(list) != 1 || len(list[0].Snapshots) != len(snaps) {
			t.Fatalf("%d snapshots; %+v, %v", len(snaps), list, err)
		}
		for k, s := range snaps {
			src, err := d.OpenStack(list[0].Layers[:k+2], size)
			if err != nil {
				t.Fatal(err)
			}
			got := make([]byte, size)
			if err := block.Copy(ctx, arraySink(got), src, block.CopyOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := src.Close(); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, s.model) {
				t.Fatalf("session %d: snapshot %d differs", session, k)
			}
		}
	}
	if len(snaps) == 0 {
		t.Skip("no snapshot was taken: a matter of luck")
	}
	if err := d.RemoveReplica(spec.UID); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{layer.Dir, trashDir, replicaDir} {
		if left, err := d.FS.ReadDir(d.Join(dir)); err != nil || len(left) > 0 {
			t.Fatalf("%s holds %v, %v", dir, left, err)
		}
	}
}

// TestCutIsOneInstant: a cut under load holds every write acknowledged before the cut began, and no write issued after
// the cut ended.
func TestCutIsOneInstant(t *testing.T) {
	t.Parallel()
	const size, workers = 64 << 20, 8
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	issued, acked := [workers]uint64{}, [workers]uint64{}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var worst time.Duration
	for w := range workers {
		wg.Go(func() {
			buf := block.AlignedBuffer(int(blockSize))
			for seq := uint64(1); ; seq++ {
				select {
				case <-stop:
					return
				default:
				}
				fill(buf, seq)
				mu.Lock()
				issued[w] = seq
				mu.Unlock()
				began := time.Now()
				// Each worker writes a single block again and again, so a snapshot shows a moment of the worker.
				if err := issue(loop, r, block.OpWrite, int64(w)<<blockBits, blockSize, buf, seq%50 == 0); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				acked[w] = seq
				worst = max(worst, time.Since(began))
				mu.Unlock()
			}
		})
	}
	for k := range 20 {
		mu.Lock()
		before := acked
		mu.Unlock()
		if err := r.Cut(ctx, Snapshot{UID: string(api.NewUID()), Name: fmt.Sprint("s", k), Layer: string(api.NewUID())}); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		after := issued
		mu.Unlock()
		src, err := d.OpenStack(r.Meta().Layers, size)
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, blockSize)
		for w := range workers {
			if _, err := src.ReadAt(buf, int64(w)<<blockBits); err != nil {
				t.Fatal(err)
			}
			v := uint64(0)
			for i := 7; i >= 0; i-- {
				v = v<<8 | uint64(buf[i])
			}
			if v < before[w] || v > after[w] {
				t.Errorf("cut %d, worker %d: %d, acknowledged before %d, issued after %d", k, w, v, before[w], after[w])
			}
		}
		if err := src.Close(); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("20 cuts; the longest write took %v", worst)
}

// TestPrepareCutRunsOutOfTime: a cut without time left after its preparation leaves nothing behind.
func TestPrepareCutRunsOutOfTime(t *testing.T) {
	t.Parallel()
	ctx, loop := context.Background(), startLoop(t)
	d, f := tap(t, newDisk(t))
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 8 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	adopt(t, r, 1, 1, spec.UID)
	mustIssue(t, loop, r, block.OpWrite, 3<<blockBits, blockSize, numbered(33))
	short, end := context.WithCancel(ctx)
	f.set(func(op, name string) (func(), error) {
		if op != opSync || name != r.dir {
			return nil, nil
		}
		return end, nil
	})
	layerUID := string(api.NewUID())
	if c, err := r.PrepareCut(short, Snapshot{Layer: layerUID}); !errors.Is(err, context.Canceled) || c != nil {
		t.Fatalf("%v, %v", c, err)
	}
	f.set(nil)
	for _, name := range []string{d.Join(layer.Dir, layerUID), r.dir + "/" + stackFile + ".cut",
		r.dir + "/" + nextHead(r.Meta().Head) + dataSuffix} {
		if there, err := d.Exists(name); err != nil || there {
			t.Errorf("%s is there: %v, %v", name, there, err)
		}
	}
	r.work.do(func() {
		if r.log.Linked {
			t.Error("the record of zeros is written as if a cut were under way")
		}
	})
	if err := r.Cut(ctx, Snapshot{Layer: string(api.NewUID())}); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
