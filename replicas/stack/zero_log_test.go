package stack

import (
	"context"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/format"
)

// zeroed opens a replica on a layer with blocks 0 to 9. The zero log has room for a single record before a compaction.
func zeroed(t *testing.T, d *Disk, on ring, e expect) (*Replica, Spec) {
	t.Helper()
	ctx := context.Background()
	const size = 8 << 20
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size,
		Layers: []string{filledLayer(t, d, size, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 7<<32, e)}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	fillZeroLog(t, d, spec.UID, format.CompactAt-1)
	e.put(5, 0)
	r, err := d.openReplica(ctx, spec.UID, on)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	return r, spec
}

// TestZerosAreCompactedButUnderACut: the zero log of a volume which stays attached does not grow without bound. The
// replica does not compact the log while a cut has a second name of the file, because the layer would lack later
// records.
func TestZerosAreCompactedButUnderACut(t *testing.T) {
	t.Parallel()
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	e := make(expect)
	r, spec := zeroed(t, d, loop, e)
	discard := func(b int64) {
		t.Helper()
		mustIssue(t, loop, r, block.OpDiscard, b<<blockBits, blockSize, nil)
		e.put(b, 0)
	}
	records := func() (n int64) {
		t.Helper()
		r.work.do(func() { n = r.log.Records })
		st, err := os.Stat(d.Join(replicaDir, spec.UID, r.Meta().Head+zeroSuffix))
		if err != nil || st.Size() != (n+1)*format.ZeroRecordSize {
			t.Fatalf("%d records in %d bytes, %v", n, st.Size(), err)
		}
		return n
	}
	cut := func() *Cut {
		t.Helper()
		c, err := r.PrepareCut(ctx, Snapshot{Layer: string(api.NewUID())})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := cut()
	discard(0)
	discard(1)
	if n := records(); n != format.CompactAt+1 {
		t.Fatalf("%d records while a cut is prepared", n)
	}
	if err := c.Abort(); err != nil {
		t.Fatal(err)
	}
	discard(2)
	if n := records(); n > 3 {
		t.Fatalf("%d records", n)
	}
	discard(8)
	discard(9)
	if n := records(); n > 5 {
		t.Fatalf("%d records", n)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	fillZeroLog(t, d, spec.UID, format.CompactAt-5)
	var err error
	if r, err = d.OpenReplica(ctx, spec.UID, loop); err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 2, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	c = cut()
	discard(3)
	discard(4)
	if err := c.Do(ctx); err != nil {
		t.Fatal(err)
	}
	discard(6)
	if n := records(); n != 1 {
		t.Fatalf("%d records of the new head", n)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	e.check(t, d, loop, spec.UID)
}

// TestZerosThatCannotBeCompacted: if the zero log cannot be rewritten, the old log stays in use. If the outcome is
// unknown, the replica takes no more writes.
func TestZerosThatCannotBeCompacted(t *testing.T) {
	t.Parallel()
	loop := startLoop(t)
	for _, at := range []string{opOpen, opRename, opSync} {
		plain := newDisk(t)
		d, f := tap(t, plain)
		e := make(expect)
		r, spec := zeroed(t, d, loop, e)
		hit := false
		f.set(func(op, name string) (func(), error) {
			dir := d.Join(replicaDir, spec.UID)
			if op == at && (op == opOpen && name == dir+"/head.zero.tmp" || op == opRename || op == opSync && name == dir) {
				hit = true
				return nil, unix.EIO
			}
			return nil, nil
		})
		err := issue(loop, r, block.OpDiscard, 0, blockSize, nil, true)
		if !hit || (err != nil) != (at == opSync) {
			t.Fatalf("%s fails: %v, %v", at, hit, err)
		}
		f.set(nil)
		if err == nil {
			e.put(0, 0)
		} else {
			e.add(0, 1, 0)
		}
		if err := issue(loop, r, block.OpDiscard, 1<<blockBits, blockSize, nil, true); (err != nil) != (at == opSync) {
			t.Fatalf("after a failure of %s: %v", at, err)
		} else if err == nil {
			e.put(1, 0)
		}
		_ = r.Close() // returns the failure
		e.check(t, plain, loop, spec.UID)
	}
}
