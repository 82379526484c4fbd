package stack

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// newMirror makes a replica of three regions on a disk.
func newMirror(t *testing.T, d *Disk) string {
	t.Helper()
	uid := string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: 3 * format.IntentsRegion}
	if err := d.CreateReplica(context.Background(), spec); err != nil {
		t.Fatal(err)
	}
	return uid
}

func adopt(t *testing.T, r *Replica, epoch, incarnation int64, members ...string) {
	t.Helper()
	if err := r.Adopt(context.Background(), epoch, incarnation, members); err != nil {
		t.Fatal(err)
	}
}

func notes(t *testing.T, r *Replica, regions ...int64) {
	t.Helper()
	got, err := r.Intents(context.Background())
	if err != nil || !slices.Equal(got.Regions, regions) {
		t.Errorf("intents of regions %v, %v; %v are expected", got.Regions, err, regions)
	}
}

// TestReopenedNotes: after a replica was opened again, the engine need not turn write intents on again. The replica's
// record and intents show the other members, present or former.
func TestReopenedNotes(t *testing.T) {
	const other = "e1a3f4a4-6a7e-4c3e-8a2f-0d5b3a8f9c11"
	for name, clean := range map[string]bool{"killed": false, "closed": true} {
		for what, again := range map[string]func(t *testing.T, r *Replica, uid string){
			"the same session":      func(t *testing.T, r *Replica, uid string) { adopt(t, r, 1, 7, uid, other) },
			"the others left":       func(t *testing.T, r *Replica, uid string) { adopt(t, r, 2, 7, uid) },
			"they had left already": nil,
		} {
			t.Run(name+", "+what, func(t *testing.T) {
				d, l := newDisk(t), startLoop(t)
				uid := newMirror(t, d)
				r, err := d.OpenReplica(context.Background(), uid, l)
				if err != nil {
					t.Fatal(err)
				}
				buf := block.AlignedBuffer(int(blockSize))
				adopt(t, r, 1, 7, uid, other)
				mustIssue(t, l, r, block.OpWrite, 0, blockSize, buf)
				if again == nil {
					adopt(t, r, 2, 7, uid)
				}
				if !clean { // the record does not show the end
					if err := r.onLoop(func() { r.failWrites(errors.New("the test says so")) }); err != nil {
						t.Fatal(err)
					}
				}
				if err := r.Close(); err != nil {
					t.Fatal(err)
				}
				if r, err = d.OpenReplica(context.Background(), uid, l); err != nil {
					t.Fatal(err)
				}
				defer r.Close()
				if again == nil {
					adopt(t, r, 2, 7, uid)
				} else {
					again(t, r, uid)
				}
				mustIssue(t, l, r, block.OpWrite, 2*format.IntentsRegion, blockSize, buf)
				notes(t, r, 0, 2)
			})
		}
	}
}

// TestSingleNotesNothing: a volume which always had a single replica notes no intents.
func TestSingleNotesNothing(t *testing.T) {
	d, l := newDisk(t), startLoop(t)
	uid := newMirror(t, d)
	for range 2 {
		r, err := d.OpenReplica(context.Background(), uid, l)
		if err != nil {
			t.Fatal(err)
		}
		adopt(t, r, 1, 7, uid)
		mustIssue(t, l, r, block.OpWrite, 0, blockSize, block.AlignedBuffer(int(blockSize)))
		notes(t, r)
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// marksOf is the file of the intents. Writes at from and beyond, and syncs, can fail.
type marksOf struct {
	file.Handle
	write, sync error
	from        int64
}

func (m *marksOf) WriteAt(b []byte, off int64) (int, error) {
	if m.write != nil && off >= m.from {
		return 0, m.write
	}
	return m.Handle.WriteAt(b, off)
}

func (m *marksOf) Datasync() error { return errors.Join(m.sync, m.Handle.Datasync()) }

// TestIntentsNotSynced: a replica which fails to sync an intent takes no more writes. A replica without room for an
// intent fails the write and continues.
func TestIntentsNotSynced(t *testing.T) {
	d, l := newDisk(t), startLoop(t)
	uid := newMirror(t, d)
	r, err := d.OpenReplica(context.Background(), uid, l)
	if err != nil {
		t.Fatal(err)
	}
	marks := &marksOf{Handle: r.intentTracker.file}
	r.work.do(func() { r.intentTracker.file = marks })
	adopt(t, r, 1, 7, uid, "e1a3f4a4-6a7e-4c3e-8a2f-0d5b3a8f9c11")
	write := func(region int64) error {
		return issue(l, r, block.OpWrite, region*format.IntentsRegion, blockSize, block.AlignedBuffer(int(blockSize)), false)
	}
	r.work.do(func() { marks.write = unix.ENOSPC })
	if err := write(0); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a write without room for its intent: %v", err)
	}
	r.work.do(func() { marks.write = nil })
	if err := write(0); err != nil {
		t.Errorf("a write, when there is room again: %v", err)
	}
	r.work.do(func() { marks.sync = unix.EIO })
	if err := write(1); err == nil {
		t.Error("a write whose intent is not durable was done")
	}
	r.work.do(func() { marks.sync = nil }) // the kernel forgets the failure
	if err := write(1); err == nil {
		t.Error("after a sync that failed a write was done")
	}
	if err := r.Failed(); !errors.Is(err, ErrFailed) {
		t.Errorf("the replica: %v", err)
	}
	_ = r.Close()
}

// TestIntentsReplaced: the removal of intents in a new epoch replaces the intents file. If the replacement did not
// begin, the intents stay. If the outcome is unknown, the replica takes no write, since the intents file may have no
// name any more.
func TestIntentsReplaced(t *testing.T) {
	for name, unsure := range map[string]bool{"it did not begin": false, "its outcome is not known": true} {
		t.Run(name, func(t *testing.T) {
			ctx, plain, l := context.Background(), newDisk(t), startLoop(t)
			uid := newMirror(t, plain)
			d, f := tap(t, plain)
			r, err := d.OpenReplica(ctx, uid, l)
			if err != nil {
				t.Fatal(err)
			}
			adopt(t, r, 1, 7, uid, "e1a3f4a4-6a7e-4c3e-8a2f-0d5b3a8f9c11")
			write := func(region int64) error {
				return issue(l, r, block.OpWrite, region*format.IntentsRegion, blockSize, block.AlignedBuffer(int(blockSize)), false)
			}
			if err := errors.Join(write(0), r.Mark(ctx, 5)); err != nil {
				t.Fatal(err)
			}
			replaced := false
			f.set(func(op, name string) (func(), error) {
				switch {
				case !unsure && op == opOpen && name == r.dir+"/"+intentsFile+".tmp":
					return nil, unix.ENOSPC
				case op == opRename && name == r.dir+"/"+intentsFile:
					replaced = true
				case op == opSync && name == r.dir && replaced:
					return nil, unix.EIO
				}
				return nil, nil
			})
			if err := r.Clean(ctx, 5, 1, []int64{0}); err != nil {
				t.Fatal(err)
			}
			if err := write(1); (err != nil) != unsure { // after the replacement which Clean began
				t.Errorf("a write: %v", err)
			}
			if !unsure {
				notes(t, r, 0, 1)
				if got, err := r.Intents(ctx); err != nil || got.Base != 0 {
					t.Errorf("they are of epoch %d, %v", got.Base, err)
				}
			}
			f.set(nil)
			_ = r.Close()
			if r, err = plain.OpenReplica(ctx, uid, l); err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			if !unsure {
				notes(t, r, 0, 1)
			}
		})
	}
}

// TestIntentsClearedInPart: the replica has written some pages of the cleared intents, and failed to write others. The
// next write notes the intent again, since the pages in the file are unknown.
func TestIntentsClearedInPart(t *testing.T) {
	ctx, d, l := context.Background(), newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 1 << 40}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, l)
	if err != nil {
		t.Fatal(err)
	}
	adopt(t, r, 1, 7, spec.UID, string(api.NewUID()))
	const far = format.RegionsPerPage + 7 // on another page
	first := []int64{1, far}
	if err := errors.Join(r.Intend(ctx, first), r.Mark(ctx, 5), r.Clean(ctx, 5, 1, nil)); err != nil {
		t.Fatal(err)
	}
	marks := &marksOf{from: 2 * format.IntentsPageSize, write: unix.EIO}
	r.work.do(func() { marks.Handle, r.intentTracker.file = r.intentTracker.file, marks })
	if err := r.Clean(ctx, 5, 1, first); err != nil {
		t.Fatal(err)
	}
	r.work.do(func() { marks.write = nil })
	mustIssue(t, l, r, block.OpWrite, format.IntentsRegion, blockSize, block.AlignedBuffer(int(blockSize)))
	b, err := os.ReadFile(d.Join(replicaDir, spec.UID, intentsFile))
	if err != nil {
		t.Fatal(err)
	}
	if on, err := format.DecodeIntents(b); err != nil || !on.Dirty(1) || !on.Dirty(far) {
		t.Errorf("the file of the intents does not tell of an acknowledged write: %v", err)
	}
	_ = r.Close()
}

// TestIntentsGrow: intents cleared during an expansion stay, in memory and in the file.
func TestIntentsGrow(t *testing.T) {
	ctx, plain, l := context.Background(), newDisk(t), startLoop(t)
	uid := newMirror(t, plain)
	d, f := tap(t, plain)
	r, err := d.OpenReplica(ctx, uid, l)
	if err != nil {
		t.Fatal(err)
	}
	adopt(t, r, 1, 7, uid, "e1a3f4a4-6a7e-4c3e-8a2f-0d5b3a8f9c11")
	write := func(region int64) error {
		return issue(l, r, block.OpWrite, region*format.IntentsRegion, blockSize, block.AlignedBuffer(int(blockSize)), false)
	}
	if err := errors.Join(write(0), r.Mark(ctx, 5)); err != nil {
		t.Fatal(err)
	}
	cleaned := errors.New("nobody cleaned")
	f.set(func(op, name string) (func(), error) {
		if op == opOpen && name == r.dir+"/"+intentsFile+".tmp" && cleaned != nil {
			cleaned = r.Clean(ctx, 5, 1, []int64{0})
		}
		return nil, nil
	})
	if err := r.Expand(ctx, 5*format.IntentsRegion); err != nil {
		t.Fatal(err)
	}
	r.work.do(func() { f.set(nil) })
	if cleaned != nil {
		t.Fatal(cleaned)
	}
	if err := errors.Join(write(0), write(4)); err != nil {
		t.Fatal(err)
	}
	notes(t, r, 0, 4)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err = plain.OpenReplica(ctx, uid, l); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	notes(t, r, 0, 4)
	if err := r.Mark(ctx, 6); err != nil { // the replica can clean again
		t.Fatal(err)
	}
	if err := r.Clean(ctx, 6, 1, []int64{0, 4}); err != nil {
		t.Fatal(err)
	}
	notes(t, r)
}
