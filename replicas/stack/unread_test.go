package stack

import (
	"context"
	"os"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// TestCutsBesideADamagedRecord: an unreadable record does not stop the snapshots of other replicas. New layers are cut,
// finished and cloned. Nothing is removed meanwhile.
func TestCutsBesideADamagedRecord(t *testing.T) {
	t.Parallel()
	ctx, loop := context.Background(), startLoop(t)
	for _, damaged := range []string{replicaDir, imagesDir, pinsDir} {
		d := newDisk(t)
		const size = 8 << 20
		create := func(layers ...string) Spec {
			t.Helper()
			spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: layers}
			if err := d.CreateReplica(ctx, spec); err != nil {
				t.Fatalf("%s: %v", damaged, err)
			}
			return spec
		}
		base := filledLayer(t, d, size, []int64{0, 5}, 7<<32, make(expect))
		other, spec := create(base), create(base)
		if err := d.PutImage(block.Image{UID: other.UID, Name: "i", Layers: []string{base}, VirtualSize: size}); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Pin(ctx, Pin{UID: other.UID, For: "v"}, other.UID, ""); err != nil {
			t.Fatal(err)
		}
		record := map[string]string{replicaDir: stackFile, imagesDir: imageFile, pinsDir: pinFile}[damaged]
		record = d.Join(damaged, other.UID, record)
		good, err := os.ReadFile(record)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(record, good[:len(good)/2], 0o600); err != nil {
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
		if err := r.Cut(ctx, snap); err != nil {
			t.Fatalf("%s: cut: %v", damaged, err)
		}
		clone := create(base, snap.Layer)
		if todo, err := d.ToFinish(); err != nil || len(todo) != 1 || todo[0] != snap.Layer {
			t.Fatalf("%s: to finish: %v, %v", damaged, todo, err)
		}
		if err := d.Finish(ctx, snap.Layer); err != nil {
			t.Fatalf("%s: finish: %v", damaged, err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		// If a layer exists already, its owner is unknown, and the cut fails.
		if r, err = d.OpenReplica(ctx, spec.UID, loop); err != nil {
			t.Fatal(err)
		}
		if err := r.Adopt(ctx, 2, 1, []string{spec.UID}); err != nil {
			t.Fatal(err)
		}
		there := filledLayer(t, d, size, []int64{9}, 9<<32, make(expect))
		if err := r.Cut(ctx, Snapshot{Layer: there}); !api.Is(err, api.Corrupt) {
			t.Fatalf("%s: a cut over a layer that is there: %v", damaged, err)
		}
		if err := d.Verify(ctx, there); err != nil {
			t.Fatalf("%s: %v", damaged, err)
		}
		if err := r.Cut(ctx, Snapshot{Layer: base}); !api.Is(err, api.Exists) {
			t.Fatalf("%s: a cut over a layer that is named: %v", damaged, err)
		}
		if err := d.Verify(ctx, base); err != nil {
			t.Fatalf("%s: %v", damaged, err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if err := d.RemoveReplica(clone.UID); err != nil {
			t.Fatal(err)
		}
		if err := d.Collect(ctx, 0); !api.Is(err, api.Corrupt) {
			t.Fatalf("%s: collect: %v", damaged, err)
		}
		if err := os.WriteFile(record, good, 0o600); err != nil {
			t.Fatal(err)
		}
		e := make(expect)
		e.put(0, 7<<32)
		e.put(5, 7<<32+5)
		e.check(t, d, loop, other.UID)
		e.put(3, 33)
		e.check(t, d, loop, spec.UID)
	}
}
