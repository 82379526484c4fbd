package stack

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file/lossy"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// A step is an operation on metadata, with the check after the operation, whether the operation happened or not.
type step struct {
	name   string
	window int64 // of merges; 0: the window of power
	// third is 0 if the power is cut after every change. A merge makes hundreds of changes. Unless the run wants all, a
	// step with a merge cuts the power after every third change, beginning with change 1, 2 or 3.
	third int
	setup func(t *testing.T, d *Disk, ids *ids)
	do    func(d *Disk, p *power, ids *ids) error
	// check is called after the power came back; done means success of do.
	check func(t *testing.T, d *Disk, p *power, ids *ids, done bool)
}

// seeds is the number of outcomes to test for each power loss: DROVER_OUTCOMES, or 4 in a run of everything, or 1. The
// power losses of a step have different outcomes.
func seeds(t *testing.T) uint64 {
	t.Helper()
	return uint64(suite.Count(t, "DROVER_OUTCOMES", 1, 4))
}

type ids struct {
	replica, image, layer, other string
	e                            expect // of the replica
	side                         expect // of the layers beside the head
	from                         *Disk  // the node's other disk; nil: none
}

func (i *ids) spec(layers ...string) Spec {
	return Spec{UID: i.replica, Volume: "v", VolumeUID: i.other, Size: 8 << 20, Layers: layers}
}

func (i *ids) record() block.Image {
	return block.Image{UID: i.image, Name: "i", Layers: []string{i.layer}, VirtualSize: 4 << 20}
}

func (i *ids) makeLayer(t *testing.T, d *Disk) {
	i.layer = filledLayer(t, d, 4<<20, []int64{0, 5, 700}, 7<<32, i.e)
}

func (i *ids) makeImage(t *testing.T, d *Disk) {
	i.makeLayer(t, d)
	if err := d.PutImage(i.record()); err != nil {
		t.Fatal(err)
	}
}

func (i *ids) makeReplica(t *testing.T, d *Disk) {
	i.makeImage(t, d)
	if err := d.CreateReplica(context.Background(), i.spec(i.layer)); err != nil {
		t.Fatal(err)
	}
}

func withReplica(do func(r *Replica) error) func(d *Disk, p *power, i *ids) error {
	return func(d *Disk, p *power, i *ids) error {
		r, err := d.openReplica(context.Background(), i.replica, p)
		if err != nil {
			return err
		}
		err = do(r)
		return errors.Join(err, r.Close())
	}
}

func mergeAll(r *Replica) error {
	for {
		if did, err := r.Merge(context.Background(), MergeOptions{}); !did || err != nil {
			return err
		}
	}
}

// servedAsSealed fails unless every layer which can be opened matches its digest, with or without a reference.
func servedAsSealed(t *testing.T, d *Disk) {
	t.Helper()
	entries, err := d.FS.ReadDir(d.Join(layer.Dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		_, _, merged := d.Digest(e.Name())
		src, err := d.Open(e.Name())
		if err != nil {
			continue
		}
		if err := errors.Join(merged, src.Close(), d.Verify(context.Background(), e.Name())); err != nil {
			t.Fatalf("a layer is served that is not what it was: %v", err)
		}
	}
}

func replicaIs(ok func(m Meta, done bool) bool) func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
	return func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
		list, err := d.Replicas()
		if err != nil || len(list) != 1 || !ok(list[0], done) {
			t.Fatalf("done=%v: %+v, %v", done, list, err)
		}
		i.e.check(t, d, p, i.replica)
	}
}

var steps = []step{
	{name: "create replica", setup: func(t *testing.T, d *Disk, i *ids) { i.makeImage(t, d) },
		do: func(d *Disk, p *power, i *ids) error { return d.CreateReplica(context.Background(), i.spec(i.layer)) },
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			list, err := d.Replicas()
			if err != nil || done && len(list) != 1 {
				t.Fatalf("%+v, %v", list, err)
			}
			if err := d.CreateReplica(context.Background(), i.spec(i.layer)); err != nil {
				t.Fatal(err)
			}
			i.e.check(t, d, p, i.replica)
		}},
	{name: "adopt", setup: func(t *testing.T, d *Disk, i *ids) { i.makeReplica(t, d) },
		do: withReplica(func(r *Replica) error { return r.Adopt(context.Background(), 5, 6, []string{r.meta.UID}) }),
		check: replicaIs(func(m Meta, done bool) bool {
			if done { // and closed
				return m.Epoch == 5 && m.Incarnation == 6 && len(m.Members) == 1 && !m.Dirty
			}
			return m.Epoch == 5 && m.Incarnation == 6 || m.Epoch == 0 && !m.Dirty
		})},
	{name: "expand", setup: func(t *testing.T, d *Disk, i *ids) { i.makeReplica(t, d) },
		do:    withReplica(func(r *Replica) error { return r.Expand(context.Background(), 80<<20) }),
		check: replicaIs(func(m Meta, done bool) bool { return m.Size == 80<<20 || !done && m.Size == 8<<20 })},
	{name: "remove replica", setup: func(t *testing.T, d *Disk, i *ids) { i.makeReplica(t, d) },
		do: func(d *Disk, p *power, i *ids) error {
			defer d.Close()
			return d.RemoveReplica(i.replica)
		},
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			list, err := d.Replicas()
			if err != nil || done && len(list) > 0 {
				t.Fatalf("%+v, %v", list, err)
			}
			if len(list) == 1 {
				i.e.check(t, d, p, i.replica)
			}
			if err := d.RemoveReplica(i.replica); err != nil {
				t.Fatal(err)
			}
			if err := d.Verify(context.Background(), i.layer); err != nil {
				t.Fatalf("the image's layer: %v", err)
			}
		}},
	{name: "remove replica with its layers", setup: func(t *testing.T, d *Disk, i *ids) {
		i.makeLayer(t, d)
		if err := d.CreateReplica(context.Background(), i.spec(i.layer)); err != nil {
			t.Fatal(err)
		}
	},
		do: func(d *Disk, p *power, i *ids) error {
			defer d.Close()
			return d.RemoveReplica(i.replica)
		},
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			list, err := d.Replicas()
			if err != nil {
				t.Fatal(err)
			}
			if len(list) == 1 { // then the replica is whole
				i.e.check(t, d, p, i.replica)
			}
			if err := errors.Join(d.RemoveReplica(i.replica), d.Close(), d.Collect(context.Background(), 0)); err != nil {
				t.Fatal(err)
			}
			for _, dir := range []string{layer.Dir, replicaDir, trashDir} {
				if left, err := d.FS.ReadDir(d.Join(dir)); err != nil || len(left) > 0 {
					t.Fatalf("%s holds %v, %v", dir, left, err)
				}
			}
		}},
	{name: "make layer", setup: func(t *testing.T, d *Disk, i *ids) { i.layer = string(api.NewUID()) },
		do: func(d *Disk, p *power, i *ids) error {
			w, err := d.Create(context.Background(), i.layer, 4<<20)
			if err != nil {
				return err
			}
			buf := block.AlignedBuffer(2 << 20)
			fill(buf, 99)
			if _, err := w.WriteAt(buf, 0); err == nil {
				_, err = w.WriteAt(buf[:blockSize], 3<<20)
				if err == nil {
					err = w.ZeroAt(3<<20+blockSize, blockSize)
				}
				if err == nil {
					_, _, err = w.Seal(context.Background())
				}
				if err == nil {
					return nil
				}
			}
			return errors.Join(lossy.ErrKilled, w.Abort())
		},
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			_, _, err := d.Digest(i.layer)
			if err != nil && (done || !api.Is(err, api.NotFound)) {
				t.Fatal(err)
			}
			if err == nil {
				if err := d.Verify(context.Background(), i.layer); err != nil {
					t.Fatal(err)
				}
			} else if w, err := d.Create(context.Background(), i.layer, 4<<20); err != nil {
				t.Fatal(err)
			} else if err := w.Abort(); err != nil {
				t.Fatal(err)
			}
		}},
	{name: "put image", setup: func(t *testing.T, d *Disk, i *ids) { i.makeLayer(t, d) },
		do: func(d *Disk, p *power, i *ids) error { return d.PutImage(i.record()) },
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			list, err := d.Images()
			if err != nil || done && len(list) != 1 {
				t.Fatalf("%+v, %v", list, err)
			}
			if err := d.PutImage(i.record()); err != nil {
				t.Fatal(err)
			}
		}},
	{name: "remove image", setup: func(t *testing.T, d *Disk, i *ids) { i.makeImage(t, d) },
		do: func(d *Disk, p *power, i *ids) error {
			defer d.Close()
			return d.RemoveImage(i.image)
		},
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			list, err := d.Images()
			if err != nil || done && len(list) > 0 {
				t.Fatalf("%+v, %v", list, err)
			}
			if len(list) == 1 {
				if err := d.Verify(context.Background(), i.layer); err != nil {
					t.Fatalf("an image without its layer: %v", err)
				}
			}
		}},
	{name: "collect", setup: func(t *testing.T, d *Disk, i *ids) {
		filledLayer(t, d, 1<<20, []int64{1}, 1, make(expect)) // an orphan
		i.makeReplica(t, d)
	},
		do: func(d *Disk, p *power, i *ids) error { return d.Collect(context.Background(), 0) },
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			if list, err := d.Replicas(); err != nil || len(list) != 1 {
				t.Fatalf("%+v, %v", list, err)
			}
			i.e.check(t, d, p, i.replica)
			for range 2 {
				if err := d.Collect(context.Background(), 0); err != nil {
					t.Fatal(err)
				}
			}
			for dir, want := range map[string]int{layer.Dir: 1, trashDir: 0} {
				if left, err := d.FS.ReadDir(d.Join(dir)); err != nil || len(left) != want {
					t.Fatalf("%s holds %v, %v", dir, left, err)
				}
			}
		}},
	{name: "cut", setup: func(t *testing.T, d *Disk, i *ids) {
		i.makeReplica(t, d)
		i.e.add(3, 1, 33)
		i.e.add(5, 1, 0)
	},
		do: func(d *Disk, p *power, i *ids) error {
			return withReplica(func(r *Replica) error {
				buf := block.AlignedBuffer(int(blockSize))
				fill(buf, 33)
				err := r.Adopt(context.Background(), 1, 1, []string{i.replica})
				if err == nil {
					err = issue(p, r, block.OpWrite, 3<<blockBits, blockSize, buf, false)
				}
				if err == nil {
					err = issue(p, r, block.OpDiscard, 5<<blockBits, blockSize, nil, false)
				}
				if err == nil {
					err = r.Cut(context.Background(), Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())})
				}
				if err == nil {
					i.e.durable()
				}
				return err
			})(d, p, i)
		},
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			if err := d.Collect(context.Background(), 0); err != nil {
				t.Fatal(err)
			}
			replicaIs(func(m Meta, done bool) bool {
				return len(m.Layers) == 2 && len(m.Snapshots) == 1 || !done && len(m.Layers) == 1 && len(m.Snapshots) == 0
			})(t, d, p, i, done)
			list, err := d.Replicas()
			if err != nil {
				t.Fatal(err)
			}
			for dir, want := range map[string]int{layer.Dir: len(list[0].Layers), trashDir: 0} {
				if left, err := d.FS.ReadDir(d.Join(dir)); err != nil || dir == layer.Dir && len(left) != want {
					t.Fatalf("%s holds %v, %v", dir, left, err)
				}
			}
			// No file of another head is left. Otherwise the space of that head's layer would never be freed.
			files, err := d.FS.ReadDir(d.Join(replicaDir, i.replica))
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				if name := f.Name(); name == stackFile+".cut" || strings.HasPrefix(name, firstHead) &&
					name != list[0].Head+dataSuffix && name != list[0].Head+zeroSuffix {
					t.Fatalf("%s is left beside head %s", name, list[0].Head)
				}
			}
		}},
	{name: "finish", setup: func(t *testing.T, d *Disk, i *ids) { i.makeReplica(t, d) },
		do: func(d *Disk, p *power, i *ids) error {
			uids, err := d.Unfinished()
			if err == nil && len(uids) == 0 { // the first part of the step
				err = withReplica(func(r *Replica) error {
					buf := block.AlignedBuffer(int(blockSize))
					fill(buf, 34)
					i.e.add(3, 1, 34)
					err := r.Adopt(context.Background(), 1, 1, []string{i.replica})
					if err == nil {
						err = issue(p, r, block.OpWrite, 3<<blockBits, blockSize, buf, false)
					}
					if err == nil {
						err = r.Cut(context.Background(), Snapshot{Layer: string(api.NewUID())})
					}
					if err == nil {
						i.e.durable()
					}
					return err
				})(d, p, i)
				if err == nil {
					uids, err = d.Unfinished()
				}
			}
			for _, uid := range uids {
				err = errors.Join(err, d.Finish(context.Background(), uid))
			}
			return err
		},
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			uids, err := d.Unfinished()
			if err != nil || done && len(uids) > 0 {
				t.Fatalf("unfinished %v, %v", uids, err)
			}
			for _, uid := range uids {
				if err := d.Finish(context.Background(), uid); err != nil {
					t.Fatal(err)
				}
			}
			list, err := d.Replicas()
			if err != nil || len(list) != 1 {
				t.Fatal(list, err)
			}
			for _, uid := range list[0].Layers {
				if err := d.Verify(context.Background(), uid); err != nil {
					t.Fatal(err)
				}
			}
			i.e.check(t, d, p, i.replica)
		}},
	mergeThree,
	mergePieces,
	mergeBefore,
	mergeBeside,
	{name: "compact the record of zeros of an open replica", setup: func(t *testing.T, d *Disk, i *ids) {
		i.makeReplica(t, d)
		fillZeroLog(t, d, i.replica, format.CompactAt-1)
		i.e.put(5, 0)
	},
		do: func(d *Disk, p *power, i *ids) error {
			return withReplica(func(r *Replica) error {
				buf := block.AlignedBuffer(int(blockSize))
				fill(buf, 44)
				i.e.add(700, 1, 44)
				err := issue(p, r, block.OpWrite, 700<<blockBits, blockSize, buf, true)
				for _, b := range []int64{0, 700, 5} {
					if err == nil {
						i.e.add(b, 1, 0)
						err = issue(p, r, block.OpDiscard, b<<blockBits, blockSize, nil, false)
					}
				}
				if err == nil {
					i.e.durable()
				}
				return err
			})(d, p, i)
		},
		check: func(t *testing.T, d *Disk, p *power, i *ids, done bool) {
			if st, err := os.Stat(d.Join(replicaDir, i.replica, "head.zero")); err != nil || done && st.Size() > 64<<10 {
				t.Fatalf("%d bytes, %v", st.Size(), err)
			}
			replicaIs(func(m Meta, done bool) bool { return true })(t, d, p, i, done)
			if left, err := filepath.Glob(d.Join(replicaDir, i.replica, "*.tmp")); err != nil || len(left) > 0 {
				t.Fatalf("left behind: %v, %v", left, err)
			}
		}},
	{name: "compact the record of zeros", setup: func(t *testing.T, d *Disk, i *ids) {
		i.makeReplica(t, d)
		fillZeroLog(t, d, i.replica, format.CompactAt)
		i.e.put(5, 0)
	},
		do:    withReplica(func(r *Replica) error { return nil }),
		check: replicaIs(func(m Meta, done bool) bool { return true })},
}

// fillZeroLog adds n zero records for block 5.
func fillZeroLog(t *testing.T, d *Disk, replica string, n int) {
	t.Helper()
	l, err := format.OpenZeroLog(d.FS, d.Join(replicaDir, replica, "head.zero"), 2048)
	if err != nil {
		t.Fatal(err)
	}
	spans := make([]block.Span, n)
	for k := range spans {
		spans[k] = block.Span{Off: 5 << blockBits, Len: blockSize}
	}
	if err := errors.Join(l.Add(spans), l.Sync(), l.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestPowerLossInSteps cuts the power after every single change of an operation, except for merges in a short run.
func TestPowerLossInSteps(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	for _, s := range append(steps, hydrateStep) {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			loop := startLoop(t)
			first, apart := 0, 1
			if s.third > 0 && !suite.All() {
				first, apart = s.third-1, 3
			}
			for kill, done := first, false; !done; kill += apart {
				for seed := range seeds(t) {
					rng := rand.New(rand.NewPCG(seed, uint64(kill)))
					i := &ids{replica: string(api.NewUID()), image: string(api.NewUID()), other: string(api.NewUID()),
						e: make(expect), side: make(expect)}
					p := freshPower(t, loop)
					if s.window > 0 {
						p.window = s.window
					}
					s.setup(t, p.disk(t), i)
					p.fs.KillAfter(kill)
					err := s.do(p.disk(t), p, i)
					if err != nil && !p.fs.Killed() {
						t.Fatalf("not killed: %v", err)
					}
					done = !p.fs.Killed()
					p.disk(t).Close()
					after := p.crash(t, rng)
					d := after.disk(t)
					s.check(t, d, after, &ids{i.replica, i.image, i.layer, i.other, maps.Clone(i.e), i.side, i.from}, err == nil)
					d.Close()
					after.fs.Close() // otherwise many files stay open until the end
					p.fs.Close()
					if err := errors.Join(os.RemoveAll(after.root), os.RemoveAll(p.root)); err != nil {
						t.Fatal(err)
					}
				}
				if kill > 400 {
					t.Fatal("the operation never ends")
				}
			}
		})
	}
}

// TestRecoveryIsRepeatable kills the recovery after every change.
func TestRecoveryIsRepeatable(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	loop := startLoop(t)
	for kill, done := 0, false; !done; kill++ {
		rng := rand.New(rand.NewPCG(7, uint64(kill)))
		i := &ids{replica: string(api.NewUID()), image: string(api.NewUID()), other: string(api.NewUID()), e: make(expect)}
		p := freshPower(t, loop)
		i.makeReplica(t, p.disk(t))
		// A torn tail: a record, then half a record, then bytes like a later record.
		h, err := os.OpenFile(filepath.Join(p.root, replicaDir, i.replica, "head.zero"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		var rec [3 * format.ZeroRecordSize]byte
		format.PutZeroRecord(rec[:], 0, 5<<blockBits, blockSize)
		format.PutZeroRecord(rec[format.ZeroRecordSize:], 1, 0, blockSize)
		format.PutZeroRecord(rec[2*format.ZeroRecordSize:], 2, 700<<blockBits, blockSize)
		rec[format.ZeroRecordSize+20] ^= 1
		if _, err := h.WriteAt(rec[:], format.ZeroRecordSize); err != nil {
			t.Fatal(err)
		}
		h.Close()
		i.e.put(5, 0)
		p = newPower(t, loop, p.root) // all records are durable
		p.fs.KillAfter(kill)
		r, err := p.disk(t).openReplica(context.Background(), i.replica, p)
		if err == nil {
			r.Close()
		}
		done = !p.fs.Killed()
		after := p.crash(t, rng)
		i.e.check(t, after.disk(t), after, i.replica)
		name := filepath.Join(after.root, replicaDir, i.replica, "head.zero")
		if b, err := os.ReadFile(name); err != nil || len(b) != 2*format.ZeroRecordSize {
			t.Fatalf("the torn tail is still there: %d bytes, %v", len(b), err)
		}
	}
}

// TestDamagedRecords: while a record is damaged, the disk collects nothing, removes nothing by mistake, and opens no
// replica with that record.
func TestDamagedRecords(t *testing.T) {
	t.Parallel()
	loop := startLoop(t)
	for _, damage := range []string{"stack", "image"} {
		t.Run(damage, func(t *testing.T) {
			i := &ids{replica: string(api.NewUID()), image: string(api.NewUID()), other: string(api.NewUID()), e: make(expect)}
			p := freshPower(t, loop)
			d := p.disk(t)
			i.makeReplica(t, d)
			orphan := filledLayer(t, d, 1<<20, []int64{1}, 1, make(expect))
			name := d.Join(replicaDir, i.replica, stackFile)
			if damage == "image" {
				name = d.Join(imagesDir, i.image, imageFile)
			}
			good, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			bad := bytes.Replace(good, []byte(`"layers"`), []byte(`"leyers"`), 1)
			if err := os.WriteFile(name, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := d.Collect(context.Background(), 0); !api.Is(err, api.Corrupt) {
				t.Fatalf("collect: %v", err)
			}
			if _, _, err := d.Digest(orphan); err != nil {
				t.Fatalf("a layer was collected while a record is damaged: %v", err)
			}
			if damage == "stack" {
				if _, err := d.openReplica(context.Background(), i.replica, p); !api.Is(err, api.Corrupt) {
					t.Fatalf("open: %v", err)
				}
				if err := d.CreateReplica(context.Background(), i.spec(i.layer)); !api.Is(err, api.Corrupt) {
					t.Fatalf("create over it: %v", err)
				}
				if err := d.RemoveImage(i.image); err == nil {
					t.Fatal("an image was removed while its users cannot be told")
				}
			}
			if err := os.WriteFile(name, good, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := d.RemoveImage(i.image); !api.Is(err, api.InUse) {
				t.Fatalf("remove image in use: %v", err)
			}
			i.e.check(t, d, p, i.replica)
		})
	}
}
