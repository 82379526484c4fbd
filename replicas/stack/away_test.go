package stack

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

const awaySize = 8 << 20

// ofTwo creates and opens a replica on two layers, lower and upper, ready for a merge. The upper layer's file is the
// target.
func ofTwo(t *testing.T, d *Disk, l ring, e expect) (r *Replica, lower, upper string) {
	t.Helper()
	ctx := context.Background()
	d.window = 1 << 20
	lower = filledLayer(t, d, awaySize, []int64{10, 600, 603, 604}, 1<<32, e)
	upper = filledLayer(t, d, awaySize, []int64{11, 12, 601, 602, 1001, 1500}, 2<<32, e)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: awaySize,
		Layers: []string{lower, upper}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.openReplica(ctx, spec.UID, l)
	if err != nil {
		t.Fatal(err)
	}
	adopt(t, r, 1, 1, spec.UID)
	return r, lower, upper
}

// patient repeats do while do fails because of a lock. A starting process may hold a lock, too.
func patient(t *testing.T, do func() error) {
	t.Helper()
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Millisecond) {
		err := do()
		if err == nil {
			return
		}
		locked := errors.Is(err, errRead) || errors.Is(err, unix.EWOULDBLOCK) || api.Is(err, api.Busy)
		if !locked || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// begun begins a merge and carries out no step.
func begun(t *testing.T, r *Replica) (w *merger) {
	t.Helper()
	patient(t, func() (err error) { w, err = r.beginMerge(); return err })
	if w == nil || !w.seen.Up {
		t.Fatal("no merge that goes up", w)
	}
	return w
}

// closed closes a replica and waits until the owner file is unlocked.
func closed(t *testing.T, d *Disk, r *Replica) {
	t.Helper()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	patient(t, func() error {
		open, err := d.Locked(d.Join(replicaDir, r.meta.UID, ownerFile))
		if open {
			err = unix.EWOULDBLOCK
		}
		return err
	})
}

// mergeAndLeave merges both layers. Renames into the trash fail, so the folders of the merged layers stay.
func mergeAndLeave(t *testing.T, d *Disk, f *tapped, r *Replica) {
	t.Helper()
	f.set(func(op, name string) (func(), error) {
		if op == opRename && strings.HasPrefix(name, d.Join(trashDir)) {
			return nil, unix.EIO
		}
		return nil, nil
	})
	defer f.set(nil)
	patient(t, func() error {
		did, err := r.Merge(context.Background(), MergeOptions{})
		switch {
		case errors.Is(err, unix.EIO) && len(r.Meta().Layers) == 1:
			return nil
		case err == nil && !did:
			return errRead
		}
		return err
	})
	if len(r.Meta().Layers) != 1 {
		t.Fatalf("not merged: %+v", r.Meta())
	}
}

// TestMergedLayerIsNotContinued: no writer continues the checkpoint of a layer after a merge, since the result of the
// merge has the layer's files.
func TestMergedLayerIsNotContinued(t *testing.T) {
	t.Parallel()
	ctx, l := context.Background(), startLoop(t)
	plain := newDisk(t)
	d, f := tap(t, plain)
	e := make(expect)
	r, _, upper := ofTwo(t, d, l, e)
	half := string(api.NewUID())
	w, err := d.Create(ctx, half, awaySize)
	if err != nil {
		t.Fatal(err)
	}
	writer := w.(block.CheckpointWriter)
	if err := errors.Join(writer.Checkpoint(2<<20, []byte(`{}`)), writer.Leave()); err != nil {
		t.Fatal(err)
	}
	keep := func() { // leaves a checkpoint, as a crash right after the seal does
		t.Helper()
		var rec layer.CheckpointRecord
		err := format.ReadMeta(d.FS, d.Join(layer.Dir, half, layer.CheckpointFile), layer.FormatCheckpoint, &rec)
		if err != nil {
			t.Fatal(err)
		}
		m, err := os.ReadFile(d.Join(layer.Dir, half, layer.CheckpointMapFile))
		if err != nil {
			t.Fatal(err)
		}
		rec.UID = upper
		if err := errors.Join(format.ReplaceFile(d.FS, d.Join(layer.Dir, upper, layer.CheckpointMapFile), m),
			format.WriteMeta(d.FS, d.Join(layer.Dir, upper, layer.CheckpointFile), layer.FormatCheckpoint, rec)); err != nil {
			t.Fatal(err)
		}
	}
	keep()
	mergeAndLeave(t, d, f, r)
	if there, err := d.Exists(d.Join(layer.Dir, upper, layer.CheckpointFile)); there || err != nil {
		t.Errorf("the merge left the record of what was kept: %v", err)
	}
	keep()
	k, _, _, err := plain.Resume(ctx, upper)
	if !api.Is(err, api.NotFound) {
		t.Errorf("gone on with: %v", err)
	}
	if err == nil {
		err = k.Leave()
	} else {
		patient(t, func() error { w, err = plain.Create(ctx, upper, awaySize); return err })
		_, _, err = w.Seal(ctx)
	}
	if err != nil {
		t.Error(err)
	}
	closed(t, plain, r)
	e.check(t, plain, l, r.meta.UID)
}

// TestRepairOfAMergedLayer: the disk repairs no layer in place during or after a merge of the layer, because the
// layer's files belong to the merge's result.
func TestRepairOfAMergedLayer(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx, l := context.Background(), startLoop(t)
	for name, during := range map[string]func(t *testing.T, d *Disk, f *tapped, r *Replica, data string,
		repair func() error) error{
		"in a merge": func(t *testing.T, _ *Disk, _ *tapped, r *Replica, _ string, repair func() error) error {
			w := begun(t, r)
			defer w.close()
			for range 4 {
				if err := errors.Join(w.copyNextWindow(ctx), w.whenQuiet(ctx, w.switchReads)); err != nil {
					t.Fatal(err)
				}
			}
			err := repair()
			patient(t, func() error { return w.mergeRest(ctx, MergeOptions{}) })
			return err
		},
		"at the end of a merge": func(t *testing.T, d *Disk, f *tapped, r *Replica, data string, repair func() error) error {
			w := begun(t, r)
			end := func() {
				patient(t, func() error { return w.mergeRest(ctx, MergeOptions{}) })
				w.close()
			}
			ended := false
			f.set(func(op, name string) (func(), error) {
				if op != opOpen || name != data || ended {
					return nil, nil
				}
				return func() { // the merge ends right after the repair opened the file, unless the layer lock is held
					if locked, err := d.LockedNow(d.Join(layer.LockFile)); err != nil {
						t.Error(err)
					} else if !locked {
						ended = true
						end()
					}
				}, nil
			})
			err := repair()
			f.set(nil)
			if !ended {
				end()
			}
			return err
		},
		"after a merge": func(t *testing.T, d *Disk, f *tapped, r *Replica, _ string, repair func() error) error {
			mergeAndLeave(t, d, f, r)
			return repair()
		},
	} {
		t.Run(name, func(t *testing.T) {
			plain, other := newDisk(t), newDisk(t)
			d, f := tap(t, plain)
			e := make(expect)
			r, _, upper := ofTwo(t, d, l, e)
			bring(t, d, other, upper)
			root, _, err := other.Digest(upper)
			if err != nil {
				t.Fatal(err)
			}
			src, err := other.Open(upper)
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			err = during(t, d, f, r, d.Join(layer.Dir, upper, layer.DataFile), func() error {
				return d.RepairLayer(ctx, upper, root, src)
			})
			if !api.Is(err, api.Busy) {
				t.Errorf("repaired: %v", err)
			}
			closed(t, plain, r)
			e.check(t, plain, l, r.meta.UID)
		})
	}
}

// TestOneMergerAtATime: a merge still copies after its replica was closed. The replica's next opener cannot merge until
// the first merge has ended.
func TestOneMergerAtATime(t *testing.T) {
	t.Parallel()
	ctx, l := context.Background(), startLoop(t)
	d := newDisk(t)
	e := make(expect)
	r, _, _ := ofTwo(t, d, l, e)
	w := begun(t, r)
	closed(t, d, r)
	again, err := openOn(d.FS, d.Root) // as another process does, or another Disk of the same process
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if r, err = again.OpenReplica(ctx, r.meta.UID, startLoop(t)); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	adopt(t, r, 2, 1, r.meta.UID)
	if _, err := r.Merge(ctx, MergeOptions{}); !api.Is(err, api.Busy) {
		t.Errorf("two at once: %v", err)
	}
	if _, _, err := w.copyWindow(0, awaySize); err != nil {
		t.Fatal(err)
	}
	w.close()
	if r.Meta().Merge != nil {
		patient(t, func() error { _, err := r.Merge(ctx, MergeOptions{}); return err })
		if len(r.Meta().Layers) != 1 {
			t.Fatalf("not merged afterwards: %+v", r.Meta())
		}
	}
	closed(t, d, r)
	e.check(t, d, l, r.meta.UID)
}
