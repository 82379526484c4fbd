package stack

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"
)

// TestMergedBeforeAKill: a process records a merge and is killed before the record is durable. The next process removes
// the merged layers only when a power loss cannot bring the old record back.
func TestMergedBeforeAKill(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for name, next := range map[string]func(d *Disk, lower, upper string) error{
		"collect": func(d *Disk, _, _ string) error { return d.Collect(ctx, 0) },
		"make anew": func(d *Disk, lower, upper string) error { // as a new copy of an image does
			for _, uid := range []string{lower, upper} {
				w, err := d.Create(ctx, uid, awaySize)
				if err != nil {
					return err
				}
				if _, _, err := w.Seal(ctx); err != nil {
					return err
				}
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			loop := startLoop(t)
			for seed := range uint64(4) {
				p := freshPower(t, loop)
				f := &tapped{FS: p.fs}
				d, err := openOn(f, p.root)
				if err != nil {
					t.Fatal(err)
				}
				e := make(expect)
				r, lower, upper := ofTwo(t, d, p, e)
				uid, hit := r.meta.UID, false
				f.set(func(op, name string) (func(), error) {
					if op == opSync && name == d.Join(replicaDir, uid) && !hit {
						if m, err := d.readStack(uid); err != nil || len(m.Layers) == 1 {
							hit = true
							return nil, unix.EIO
						}
					}
					return nil, nil
				})
				patient(t, func() error {
					if _, err := r.Merge(ctx, MergeOptions{}); !hit {
						return errors.Join(err, errRead)
					}
					return nil
				})
				_ = r.Close() // closes the killed process's replica
				again := p.disk(t)
				patient(t, func() error { return next(again, lower, upper) })
				p = p.crash(t, rand.New(rand.NewPCG(seed, 2)))
				d = p.disk(t)
				m, err := d.readStack(uid)
				if err != nil {
					t.Fatal(err)
				}
				for _, l := range m.Layers {
					if _, err := d.Record(l); api.Is(err, api.NotFound) {
						t.Fatalf("seed %d: layer %s is gone, and named: %+v", seed, l, m)
					}
				}
				e.check(t, d, p, uid)
			}
		})
	}
}

// TestDropAfterAKill: a process removes a reference to a layer and is killed before the removal is durable. The removal
// of the last other reference deletes the layer only when a power loss cannot bring the first reference back.
func TestDropAfterAKill(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	uid := func() string { return string(api.NewUID()) }
	type name struct {
		put, drop func(d *Disk) error
		folder    string // a sync of the folder makes the removal durable
	}
	record := func(layer string) name { // of a replica which stays
		spec := Spec{UID: uid(), Volume: "v", VolumeUID: uid(), Size: 1 << 20, Layers: []string{layer}}
		return name{func(d *Disk) error { return d.CreateReplica(ctx, spec) }, func(d *Disk) error {
			m, err := d.readStack(spec.UID)
			if err == nil {
				m.Layers = nil
				err = d.writeStack(d.Join(replicaDir, spec.UID), m)
			}
			return err
		}, replicaDir + "/" + spec.UID}
	}
	replica := func(layer string) name {
		spec := Spec{UID: uid(), Volume: "v", VolumeUID: uid(), Size: 1 << 20, Layers: []string{layer}}
		return name{func(d *Disk) error { return d.CreateReplica(ctx, spec) },
			func(d *Disk) error { return d.RemoveReplica(spec.UID) }, ""}
	}
	image := func(layer string) name {
		img := block.Image{UID: uid(), Name: "i", Layers: []string{layer}}
		return name{func(d *Disk) error { return d.PutImage(img) },
			func(d *Disk) error { return d.RemoveImage(img.UID) }, ""}
	}
	pin := func(layer string) name {
		p := Pin{UID: uid(), For: "v", Disk: uid(), Layers: []string{layer}}
		return name{func(d *Disk) error { return d.PinLayers(ctx, p) },
			func(d *Disk) error { return d.Unpin(p.UID) }, pinsDir + "/" + p.UID}
	}
	for _, c := range []struct {
		name        string
		first, last func(layer string) name
	}{
		{"pin,replica", pin, replica}, {"record,replica", record, replica}, {"record,image", record, image},
		{"record,pin", record, pin},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			loop := startLoop(t)
			for seed := range uint64(8) {
				p := freshPower(t, loop)
				f := &tapped{FS: p.fs}
				d, err := openOn(f, p.root)
				if err != nil {
					t.Fatal(err)
				}
				layer := filledLayer(t, d, 1<<20, []int64{1}, 1<<32, make(expect))
				mate := replica(layer) // a pin needs an existing reference
				first, last := c.first(layer), c.last(layer)
				if err := errors.Join(mate.put(d), first.put(d), last.put(d), mate.drop(d)); err != nil {
					t.Fatal(err)
				}
				f.set(func(op, name string) (func(), error) {
					if op == opSync && name == d.Join(first.folder) {
						return nil, unix.EIO
					}
					return nil, nil
				})
				if err := first.drop(d); !errors.Is(err, unix.EIO) {
					t.Fatal(err)
				}
				again := p.disk(t)
				if err := errors.Join(last.drop(again), again.Close(), d.Close()); err != nil {
					t.Fatal(err)
				}
				d = p.crash(t, rand.New(rand.NewPCG(seed, 3))).disk(t)
				names, err := d.referencedLayers()
				if err != nil {
					t.Fatal(err)
				}
				if _, err := d.Record(layer); names[layer] && api.Is(err, api.NotFound) {
					t.Fatalf("seed %d: the layer is gone, and named", seed)
				}
			}
		})
	}
}

// TestDurableRecordsAreNotSyncedAgain: recovery syncs only records changed since their last sync, because a disk may
// have thousands of records.
func TestDurableRecordsAreNotSyncedAgain(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	d, f := tap(t, newDisk(t))
	var uids []string
	for range 3 {
		uids = append(uids, string(api.NewUID()))
		spec := Spec{UID: uids[len(uids)-1], Volume: "v", VolumeUID: string(api.NewUID()), Size: 1 << 20}
		if err := d.CreateReplica(ctx, spec); err != nil {
			t.Fatal(err)
		}
	}
	var synced []string
	f.set(func(op, name string) (func(), error) {
		if op == opSync {
			synced = append(synced, name)
		}
		return nil, nil
	})
	sync := func() []string {
		synced = nil
		if err := d.syncReferences(ctx); err != nil {
			t.Fatal(err)
		}
		return synced
	}
	if len(sync()) < len(uids) {
		t.Fatal("not all was synced", synced)
	}
	for len(sync()) > 0 { // as long as file times cannot show a change
		time.Sleep(layer.SteadyAge / 10)
	}
	m, err := d.readStack(uids[1])
	if err == nil {
		err = d.writeStack(d.Join(replicaDir, m.UID), m)
	}
	if err != nil {
		t.Fatal(err)
	}
	if s := sync(); !slices.Equal(s, []string{d.Join(replicaDir, m.UID)}) {
		t.Fatal("one record was written, synced was", s)
	}
}
