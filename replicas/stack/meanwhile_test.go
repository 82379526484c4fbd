package stack

import (
	"context"
	"errors"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// TestCollectDuringACut: garbage collection keeps the layer of a cut committed meanwhile, at whichever step the
// collection is.
func TestCollectDuringACut(t *testing.T) {
	for _, at := range []struct{ name, op, file string }{
		{"when the names are known", opOpen, layer.LayerFile},
		{"when it is about to look who has the layer", opOpen, layer.DataFile},
	} {
		t.Run(at.name, func(t *testing.T) {
			ctx := context.Background()
			const size = 8 << 20
			d, loop := newDisk(t), startLoop(t)
			spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
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
			mustIssue(t, loop, r, block.OpWrite, 3<<blockBits, blockSize, numbered(33))
			snap := Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())}
			c, err := r.PrepareCut(ctx, snap)
			if err != nil {
				t.Fatal(err)
			}
			collector, f := tap(t, d)
			cut := false
			f.set(func(op, name string) (func(), error) {
				if op == at.op && name == d.Join(layer.Dir, snap.Layer, at.file) && !cut {
					cut = true
					if err := c.Do(ctx); err != nil {
						t.Error(err)
					}
				}
				return nil, nil
			})
			if err := collector.Collect(ctx, 0); err != nil {
				t.Fatal(err)
			}
			if !cut {
				t.Fatal("the collection does not look at the layer that is being cut off")
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			e := make(expect)
			e.put(3, 33)
			e.check(t, d, loop, spec.UID)
		})
	}
}

// TestCollectDuringASeal: garbage collection keeps a layer sealed meanwhile.
func TestCollectDuringASeal(t *testing.T) {
	ctx := context.Background()
	d := newDisk(t)
	uid := string(api.NewUID())
	w, err := d.Create(ctx, uid, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	collector, f := tap(t, d)
	done := false
	f.set(func(op, name string) (func(), error) {
		if op == opOpen && name == d.Join(layer.Dir, uid, layer.DataFile) && !done {
			done = true
			if _, _, err := w.Seal(ctx); err != nil {
				t.Error(err)
			}
		}
		return nil, nil
	})
	if err := collector.Collect(ctx, time.Hour); err != nil {
		t.Fatal(err)
	}
	if !done {
		t.Fatal("the collection does not look at the layer that is being made")
	}
	if err := d.Verify(ctx, uid); err != nil {
		t.Fatal(err)
	}
}

// TestCollectLeavesWhatItCannotRead: garbage collection keeps layers with unreadable records and reports the error.
// Other orphans are removed.
func TestCollectLeavesWhatItCannotRead(t *testing.T) {
	ctx := context.Background()
	d := newDisk(t)
	sick, orphan := filledLayer(t, d, 1<<20, []int64{1}, 1, make(expect)), filledLayer(t, d, 1<<20, []int64{1}, 1, make(expect))
	half := string(api.NewUID())
	w, err := d.Create(ctx, half, 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	writer := w.(block.CheckpointWriter)
	if err := writer.Checkpoint(2<<20, []byte(`{}`)); err != nil {
		t.Fatal(err)
	}
	if err := writer.Leave(); err != nil {
		t.Fatal(err)
	}
	collector, f := tap(t, d)
	f.set(func(op, name string) (func(), error) {
		if op == opOpen && (name == d.Join(layer.Dir, sick, layer.LayerFile) || name == d.Join(layer.Dir, half, layer.CheckpointFile)) {
			return nil, unix.EIO
		}
		return nil, nil
	})
	if err := collector.Collect(ctx, 0); !api.Is(err, api.Unavailable) {
		t.Fatalf("collect where records cannot be read: %v", err)
	}
	if err := d.Verify(ctx, sick); err != nil {
		t.Errorf("a layer whose record could not be read for a moment: %v", err)
	}
	if k, _, _, err := d.Resume(ctx, half); err != nil {
		t.Errorf("a half-made layer whose record could not be read for a moment: %v", err)
	} else if err := k.Leave(); err != nil {
		t.Error(err)
	}
	if _, _, err := d.Digest(orphan); !api.Is(err, api.NotFound) {
		t.Errorf("an orphan beside them: %v", err)
	}
}

// TestCollectEndsWhereARecordIsDamagedMeanwhile: a record which becomes unreadable ends a garbage collection in
// progress, and the referenced layers stay.
func TestCollectEndsWhereARecordIsDamagedMeanwhile(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	e := make(expect)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 8 << 20,
		Layers: []string{filledLayer(t, d, 8<<20, []int64{0, 1, 2, 3}, 1<<32, e)}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	half := string(api.NewUID())
	if err := os.Mkdir(d.Join(layer.Dir, half), 0o700); err != nil {
		t.Fatal(err)
	}
	record := d.Join(replicaDir, spec.UID, stackFile)
	good, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	collector, f := tap(t, d)
	f.set(func(op, name string) (func(), error) {
		if op == opOpen && name == d.Join(layer.Dir, half, layer.DataFile) {
			return nil, os.WriteFile(record, good[:len(good)/2], 0o600)
		}
		return nil, nil
	})
	if err := collector.Collect(ctx, 0); !api.Is(err, api.Corrupt) {
		t.Fatalf("collect: %v", err)
	}
	if err := os.WriteFile(record, good, 0o600); err != nil {
		t.Fatal(err)
	}
	e.check(t, d, loop, spec.UID)
}

// finishedOnce has finish complete a layer while a second process is about to do again. The moment is before or after
// the second process opens the file.
func finishedOnce(t *testing.T, d *Disk, file string, before bool, finish, again func(ctx context.Context, d *Disk) error, uid string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	second, f := tap(t, d)
	done := false
	once := func() {
		if done {
			return
		}
		done = true
		if err := finish(context.Background(), d); err != nil {
			t.Error(err)
		}
		cancel() // the second process cannot restore destroyed files
	}
	f.set(func(op, name string) (func(), error) {
		switch {
		case op != opOpen || name != d.Join(layer.Dir, uid, file):
			return nil, nil
		case before:
			once()
			return nil, nil
		}
		return once, nil
	})
	// Busy: a starting process may hold the lock, too.
	if err := again(ctx, second); err != nil && !api.Is(err, api.Exists) && !api.Is(err, api.Busy) {
		t.Errorf("the second one: %v", err)
	}
	if !done {
		t.Fatal("the second one came first")
	}
	if err := d.Verify(context.Background(), uid); err != nil {
		t.Errorf("the layer that was finished: %v", err)
	}
}

// TestFinishedByAnother: a layer is finished once, also if another process was about to finish, make or continue the
// same layer.
func TestFinishedByAnother(t *testing.T) {
	ctx := context.Background()
	made := func(t *testing.T, d *Disk) (string, block.CheckpointWriter) {
		t.Helper()
		uid := string(api.NewUID())
		w, err := d.Create(ctx, uid, 8<<20)
		if err != nil {
			t.Fatal(err)
		}
		buf := block.AlignedBuffer(8 << 20)
		fill(buf, 7)
		if _, err := w.WriteAt(buf, 0); err != nil {
			t.Fatal(err)
		}
		k := w.(block.CheckpointWriter)
		if err := k.Checkpoint(4<<20, []byte(`{}`)); err != nil {
			t.Fatal(err)
		}
		return uid, k
	}
	seal := func(w block.LayerWriter) func(context.Context, *Disk) error {
		return func(ctx context.Context, _ *Disk) error {
			_, _, err := w.Seal(ctx)
			return err
		}
	}
	t.Run("digests", func(t *testing.T) {
		d, loop := newDisk(t), startLoop(t)
		spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 8 << 20}
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
		mustIssue(t, loop, r, block.OpWrite, 3<<blockBits, blockSize, numbered(33))
		uid := string(api.NewUID())
		if err := r.Cut(ctx, Snapshot{Layer: uid}); err != nil {
			t.Fatal(err)
		}
		finish := func(ctx context.Context, d *Disk) error { return d.Finish(ctx, uid) }
		finishedOnce(t, d, layer.FrozenFile, false, finish, finish, uid)
	})
	t.Run("made anew", func(t *testing.T) {
		d := newDisk(t)
		uid, w := made(t, d)
		finishedOnce(t, d, layer.DataFile, true, seal(w), func(ctx context.Context, d *Disk) error {
			w, err := d.Create(context.Background(), uid, 8<<20)
			if err != nil {
				return err
			}
			return w.Abort()
		}, uid)
	})
	t.Run("continued", func(t *testing.T) {
		d := newDisk(t)
		uid, w := made(t, d)
		finishedOnce(t, d, layer.DataFile, true, seal(w), func(ctx context.Context, d *Disk) error {
			w, _, _, err := d.Resume(context.Background(), uid)
			if err != nil {
				return err
			}
			return w.Leave()
		}, uid)
	})
}

// TestCollectDeletesWithoutTheLock: garbage collection deletes trash, which may take long, without the disk's lock.
// Snapshots need not wait.
func TestCollectDeletesWithoutTheLock(t *testing.T) {
	ctx := context.Background()
	d := newDisk(t)
	gone := d.Join(trashDir, "gone.layers."+string(api.NewUID())+".1")
	if err := os.Mkdir(gone, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(gone+"/data", numbered(1), 0o600); err != nil {
		t.Fatal(err)
	}
	collector, f := tap(t, d)
	held := true
	f.set(func(op, name string) (func(), error) {
		if op == opRemove && name == gone+"/data" {
			var err error
			for end := time.Now().Add(30 * time.Second); held && err == nil && time.Now().Before(end); {
				held, err = d.Locked(d.Join(layer.LockFile)) // a starting process may hold the lock, too
			}
			if err != nil {
				t.Error(err)
			}
		}
		return nil, nil
	})
	if err := collector.Collect(ctx, time.Hour); err != nil {
		t.Fatal(err)
	}
	if held {
		t.Error("the disk's lock is held while trash is deleted")
	}
}

// TestCollectWithoutDurableNames: garbage collection removes no layer while the records may not be durable, and still
// deletes the trash.
func TestCollectWithoutDurableNames(t *testing.T) {
	ctx := context.Background()
	d := newDisk(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 8 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	layerUID := d.Join(layer.Dir, string(api.NewUID())) // a folder without a writer
	gone := d.Join(trashDir, "gone.layers."+string(api.NewUID())+".1")
	for _, dir := range []string{layerUID, gone} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	there := func(dir string) bool {
		_, err := os.Stat(dir)
		return err == nil
	}
	collector, f := tap(t, d)
	f.set(func(op, name string) (func(), error) {
		if op == opSync && name == d.Join(replicaDir, spec.UID) {
			return nil, unix.EIO
		}
		return nil, nil
	})
	if err := collector.Collect(ctx, 0); !errors.Is(err, unix.EIO) || !there(layerUID) || there(gone) {
		t.Errorf("%v; the layer is there: %t, the trash: %t", err, there(layerUID), there(gone))
	}
	f.set(nil)
	if err := collector.Collect(ctx, 0); err != nil || there(layerUID) {
		t.Errorf("%v; the layer is there: %t", err, there(layerUID))
	}
}

// TestCollectBesideAChange: garbage collection keeps a layer which had a reference at the start of the collection,
// because the new record without the reference may not be durable.
func TestCollectBesideAChange(t *testing.T) {
	ctx, d := context.Background(), newDisk(t)
	r, layer, _ := ofTwo(t, d, startLoop(t), make(expect))
	uid := r.meta.UID
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	m, err := d.readStack(uid)
	if err != nil {
		t.Fatal(err)
	}
	collector, f := tap(t, d)
	changed := false
	f.set(func(op, name string) (func(), error) {
		if op != opSync || name != d.Join(replicaDir, uid) || changed {
			return nil, nil
		}
		changed = true
		return func() { // another process, killed before the record was durable
			m.Layers, m.Snapshots = nil, nil
			if err := d.writeStack(d.Join(replicaDir, uid), m); err != nil {
				t.Error(err)
			}
		}, nil
	})
	there := func() bool {
		_, err := d.Record(layer)
		return err == nil
	}
	if err := collector.Collect(ctx, 0); err != nil || !changed || !there() {
		t.Errorf("%v; changed: %t, the layer is there: %t", err, changed, there())
	}
	f.set(nil)
	if err := collector.Collect(ctx, 0); err != nil || there() {
		t.Errorf("%v; the layer is there: %t", err, there())
	}
}

// TestSlowCollectWithoutGrace: garbage collection without a grace deletes a layer without a reference at once, also on a
// disk whose operations take a second each.
func TestSlowCollectWithoutGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, d, uid := context.Background(), newDisk(t), string(api.NewUID())
		w, err := d.Create(ctx, uid, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.Seal(ctx); err != nil {
			t.Fatal(err)
		}
		if err := w.Abort(); err != nil {
			t.Fatal(err)
		}
		collector, f := tap(t, d)
		f.set(func(string, string) (func(), error) { time.Sleep(time.Second); return nil, nil })
		if err := collector.Collect(ctx, 0); err != nil {
			t.Fatal(err)
		}
		f.set(nil)
		for _, dir := range []string{layer.Dir, trashDir} {
			if left, err := os.ReadDir(d.Join(dir)); err != nil || len(left) > 0 {
				t.Errorf("%s has %v, %v", dir, left, err)
			}
		}
	})
}
