package stack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// TestMergeOfUnknownOutcome: the end of a merge may or may not be durable. The replica records nothing more and touches
// neither the layers nor the result, until the next open shows the outcome.
func TestMergeOfUnknownOutcome(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	plain := newDisk(t)
	d, f := tap(t, plain)
	const size = 16 << 20
	e := make(expect)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: []string{
		filledLayer(t, d, size, []int64{10, 600, 601, 2000}, 1<<32, e),
		filledLayer(t, d, size, []int64{11, 12, 601, 602, 2001, 3000}, 2<<32, e)}}
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
	result := ""
	f.set(func(op, name string) (func(), error) {
		if op == opSync && name == d.Join(replicaDir, spec.UID) && result == "" {
			if m, err := plain.Stack(spec.UID); err != nil || len(m.Layers) == 1 {
				result = m.Layers[0]
				return nil, unix.EIO
			}
		}
		if op == opRemove && result != "" && strings.HasPrefix(name, d.Join(layer.Dir, result)) {
			t.Errorf("%s is removed, which the stack names", name)
		}
		return nil, nil
	})
	if _, err := r.Merge(ctx, MergeOptions{}); !api.Is(err, api.Unavailable) || result == "" {
		t.Fatalf("a merge whose end is not known: %v", err)
	}
	for range 2 {
		if did, err := r.Merge(ctx, MergeOptions{}); err == nil || did {
			t.Errorf("it is merged again: %v, %v", did, err)
		}
	}
	if err := plain.Collect(ctx, 0); err != nil { // removes unreferenced layers
		t.Fatal(err)
	}
	if err := r.Note(json.RawMessage(`{"size":1}`)); err == nil {
		t.Error("a stack is recorded over the one that may be there")
	}
	buf := block.AlignedBuffer(size)
	mustIssue(t, loop, r, block.OpRead, 0, size, buf) // reads continue
	if err := issue(loop, r, block.OpWrite, 0, blockSize, buf[:blockSize], true); err == nil {
		t.Error("a replica whose record is not known takes writes")
	}
	_ = r.Close() // returns the failure
	if m, err := plain.Stack(spec.UID); err != nil || len(m.Layers) != 1 || m.Layers[0] != result || m.Merge != nil {
		t.Fatalf("after all: %+v, %v", m, err)
	}
	e.check(t, plain, loop, spec.UID)
	if err := plain.Verify(ctx, result); err != nil {
		t.Fatal(err)
	}
	src, err := plain.OpenStack([]string{result}, size)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	got := make([]byte, size)
	if err := block.Copy(ctx, arraySink(got), src, block.CopyOptions{}); err != nil || !bytes.Equal(got, buf) {
		t.Fatalf("what was read and what is there differ: %v", err)
	}
}

// TestCutOfUnknownOutcome: a cut may or may not be durable. No other cut freezes the head before the replica was opened
// again.
func TestCutOfUnknownOutcome(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	plain := newDisk(t)
	d, f := tap(t, plain)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 8 << 20}
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
	c, err := r.PrepareCut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())})
	if err != nil {
		t.Fatal(err)
	}
	f.set(func(op, name string) (func(), error) {
		if op == opSync && name == d.Join(replicaDir, spec.UID) {
			return nil, unix.EIO
		}
		return nil, nil
	})
	if err := c.Do(ctx); !errors.Is(err, ErrFailed) || !api.Is(err, api.Unavailable) {
		t.Fatalf("a cut that cannot be synced: %v", err)
	}
	f.set(nil)
	if again, err := r.PrepareCut(ctx, Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID())}); err == nil {
		t.Errorf("another cut: %v", again.Abort())
	} else if !errors.Is(err, ErrFailed) {
		t.Errorf("another cut: %v", err)
	}
	_ = r.Close() // returns the failure
	e := make(expect)
	e.put(3, 33)
	e.check(t, plain, loop, spec.UID)
	if m, err := plain.Stack(spec.UID); err != nil || len(m.Layers) != 1 || len(m.Snapshots) != 1 {
		t.Fatalf("%+v, %v", m, err)
	}
}
