package disks

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// TestNoDiskInAMissingFolder: Open adds no disk to a folder that nobody made.
func TestNoDiskInAMissingFolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slip")
	r := NewRegistry(RegistryOptions{Instance: "test"})
	if _, err := r.Open(t.Context(), path, "", true); !api.Is(err, api.NotFound) || !strings.Contains(err.Error(), path) {
		t.Error(err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("the folder was made")
	}
}

// TestNoDiskOnADroverVolume: Open adds no disk to a folder on a Drover volume: the volume and the disk would wait for
// each other.
func TestNoDiskOnADroverVolume(t *testing.T) {
	path := t.TempDir()
	below := ""
	r := NewRegistry(RegistryOptions{VolumeBelow: func(string) (string, error) { return below, nil }})
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	below = "/dev/drover/v"
	_, err := r.Open(t.Context(), path, "", true)
	if !api.Is(err, api.Invalid) || !strings.Contains(err.Error(), "/dev/drover/v") {
		t.Errorf("on a Drover volume: %v", err)
	}
	if left, err := os.ReadDir(path); err != nil || len(left) > 0 {
		t.Errorf("the folder has %v, %v", left, err)
	}
	below = ""
	if _, err := r.Open(t.Context(), path, "", true); err != nil {
		t.Error(err)
	}
}

// TestChangesOverALayerOfAnotherDisk: a snapshot stands on a layer that its disk does not have yet, and another disk of
// the machine has. A process that fetches no layers tells what the snapshot holds all the same, and writes nothing.
func TestChangesOverALayerOfAnotherDisk(t *testing.T) {
	const size = 4 << 20
	ctx := t.Context()
	fetch := func(context.Context, *stack.Disk, stack.RemoteLayer, int64, []byte, func([]byte) error) error {
		return errors.ErrUnsupported
	}
	data, node := NewRegistry(RegistryOptions{Fetch: fetch}), NewRegistry(RegistryOptions{})
	data.Beside = data.Except
	var own, other *stack.Disk
	for _, disk := range []**stack.Disk{&own, &other} {
		d, err := data.Open(ctx, t.TempDir(), "", true)
		if err == nil {
			_, err = node.Open(ctx, d.Path(), api.UID(d.UID()), false)
		}
		if err != nil {
			t.Fatal(err)
		}
		*disk = d
	}
	layer := func(on *stack.Disk, off int64) string {
		uid := string(api.NewUID())
		w, err := on.Create(ctx, uid, size)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.WriteAt(bytes.Repeat([]byte("x"), block.Size), off); err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.Seal(ctx); err != nil {
			t.Fatal(err)
		}
		return uid
	}
	r := &api.Replica{Spec: api.ReplicaSpec{UID: api.NewUID(), Disk: api.UID(own.UID())}}
	snap := api.NewUID()
	layers := []string{layer(other, 0), layer(own, 1<<20)}
	spec := stack.Spec{UID: string(r.Spec.UID), Volume: "v", VolumeUID: string(api.NewUID()), Size: size, Layers: layers,
		Snapshots: []stack.Snapshot{{UID: string(snap), Name: "s", Layer: layers[1]}}}
	if err := own.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	delta, err := node.Changes(ctx, r, "", snap)
	if err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{0, 1 << 20} {
		if e, err := delta.Next(off); err != nil || e.Off != off || e.Len != block.Size {
			t.Errorf("what the snapshot holds from %d on: %+v, %v", off, e, err)
		}
	}
	if _, err := os.Stat(filepath.Join(own.Path(), "hydrating")); err == nil {
		t.Error("it began to copy the layer")
	}
	if err := errors.Join(delta.Close(), node.Close(), data.Close()); err != nil {
		t.Error(err)
	}
}
