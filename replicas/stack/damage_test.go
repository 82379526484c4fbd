package stack

import (
	"bytes"
	"context"
	"os"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// TestMissingRecordsCollectNothing: garbage collection removes nothing while the record of a replica with data, or of a
// referenced layer, is missing. With the record back, all data exists.
func TestMissingRecordsCollectNothing(t *testing.T) {
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	e := make(expect)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20,
		Layers: []string{filledLayer(t, d, 8<<20, []int64{0, 1, 2, 3, 100, 2000}, 1<<32, e)}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(int(blockSize))
	fill(buf, 99)
	mustIssue(t, loop, r, block.OpWrite, 7<<blockBits, blockSize, buf)
	e.put(7, 99)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	for _, record := range []string{d.Join(replicaDir, spec.UID, stackFile), d.Join(layer.Dir, spec.Layers[0], layer.LayerFile)} {
		good, err := os.ReadFile(record)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(record); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			_ = d.Collect(ctx, 0) // the error may report the missing record
		}
		if err := d.CreateReplica(ctx, spec); err == nil && bytes.Contains(good, []byte(formatStack)) {
			t.Error("a replica was made over another's data")
		}
		if err := os.WriteFile(record, good, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Collect(ctx, 0); err != nil {
		t.Fatal(err)
	}
	e.check(t, d, loop, spec.UID)
	if err := d.Verify(ctx, spec.Layers[0]); err != nil {
		t.Fatal(err)
	}
}
