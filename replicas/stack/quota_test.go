package stack

import (
	"context"
	"errors"
	"os/exec"
	"syscall"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// TestQuotaIsAFullDisk: a write beyond a quota fails like a write to a full disk. The engine holds such writes and must
// not give the guest an error.
func TestQuotaIsAFullDisk(t *testing.T) {
	t.Parallel()
	dir, _ := mounted(t, 300<<20, "", "mkfs.btrfs", "-q", "-f")
	if out, err := exec.Command("btrfs", "quota", "enable", dir).CombinedOutput(); err != nil {
		t.Skipf("no quotas here: %v: %s", err, out)
	}
	run(t, "btrfs", "qgroup", "limit", "24M", dir)
	ctx, loop := context.Background(), startLoop(t)
	d, err := Add(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 128 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	buf := block.AlignedBuffer(1 << 20)
	for off := int64(0); off < spec.Size && err == nil; off += int64(len(buf)) {
		fill(buf, uint64(off)|1)
		err = issue(loop, r, block.OpWrite, off, int64(len(buf)), buf, true)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("a write beyond the quota: %v, want ENOSPC", err)
	}
}
