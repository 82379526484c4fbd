package heal

import (
	"context"
	"log/slog"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/holders"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/block"
)

// heldDisk is a disk with the hold of one holder at most.
type heldDisk struct {
	block.SnapshotDisk
	holder string
}

func (d *heldDisk) HoldSnapshot(_ context.Context, holder, _, _ string, _ block.SnapshotCut) ([]string, int64, error) {
	d.holder = holder
	return []string{"layer"}, block.ChunkSize, nil
}

func (d *heldDisk) OpenStack([]string, int64) (block.Source, error) { return source{}, nil }

func (d *heldDisk) ReleaseSnapshot(holder string) error {
	if d.holder == holder {
		d.holder = ""
	}
	return nil
}

type source struct{ block.DigestSource }

func (source) Close() error { return nil }

// TestCollectorKeepsTheHoldsOfAHeal: the collector, which knows no object for the hold of a heal, leaves the hold until
// the heal ends.
func TestCollectorKeepsTheHoldsOfAHeal(t *testing.T) {
	disk, h := &heldDisk{}, &holders.Set{}
	f := &chunkFinder{Disks: &Disks{Holders: h, Log: slog.New(slog.DiscardHandler)}}
	s, err := f.hold(disk, func(holder string) ([]string, int64, error) {
		return holdSnapshot(t.Context(), disk, holder, &api.ReplicaSpec{},
			&api.SnapshotStatus{CreationTime: "2026-01-02T03:04:05Z"})
	})
	if err != nil {
		t.Fatal(err)
	}
	holder := disk.holder
	if err := h.Release(holder, disk.ReleaseSnapshot); err != nil || disk.holder == "" {
		t.Errorf("the collector released the hold of a heal in progress, err %v", err)
	}
	f.held = map[subject][]*heldSource{{manifest.Volume, "v"}: {s}}
	f.close()
	if disk.holder != "" {
		t.Error("the heal has ended and left its hold")
	}
	disk.holder = holder // of a killed process
	if err := h.Release(holder, disk.ReleaseSnapshot); err != nil || disk.holder != "" {
		t.Errorf("the collector left the hold of a killed process, err %v", err)
	}
}
