package backups_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/block/budget"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestAllKindsShareOneMemory: a node has memory for a single request, backup, copy, and heal or sweep. Backups, copies,
// restores, a verification, a heal and a sweep begin together, and all end. Their reservations never exceed the memory.
func TestAllKindsShareOneMemory(t *testing.T) {
	w, offsite := newPair(t)
	const size = 132 << 20
	b := budget.New(size)
	w.opts.Targets.Memory = &targets.Memory{Budget: b, Readers: b.NewPart(4 << 20), Reads: b.NewPart(12 << 20),
		Moves: b.NewPart(12 << 20), Copies: b.NewPart(24 << 20), Maintenance: b.NewPart(16 << 20),
		Heals: b.NewPart(16 << 20), Backups: b.NewPart(48 << 20)}
	w.opts.Targets.SweepDelay = time.Millisecond
	damaged, spoilt := w.healable()
	w.awaitAvailable("offsite")
	v := w.newVolume("many", 12*chunk, map[int64][]byte{0: randomBytes(3, 10*chunk)},
		map[int64][]byte{0: randomBytes(4, 10*chunk)})
	first := w.newBackup("first", v, 0)
	w.awaitState(first, api.BackupCompleted)

	var backups, copies []*api.Backup
	for i := range 3 {
		backups = append(backups, w.newBackup(fmt.Sprintf("more-%d", i), v, i%2))
		copies = append(copies, w.newCopy(fmt.Sprintf("copy-%d", i), "first", v.name, "offsite"))
	}
	var restores errgroup.Group
	for range 3 {
		restores.Go(func() error {
			open, err := w.open(w.Ctx, first.Status.URL)
			if err != nil {
				return err
			}
			sink := &memorySink{got: make([]byte, v.size)}
			if err := open.Restore(w.Ctx, sink); err != nil {
				return err
			}
			if !bytes.Equal(sink.got, v.contents[0]) {
				return api.Errorf(api.Corrupt, "the restore has other bytes than the snapshot")
			}
			return open.Close()
		})
	}
	if f := w.verify(); f.HealedBlobs < 1 || f.DamagedBlobs > 0 {
		t.Errorf("verification %+v", f)
	}
	for _, x := range append(backups, copies...) {
		w.awaitState(x, api.BackupCompleted)
	}
	must(t, restores.Wait())
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "swept", func(t *api.BackupTarget) bool {
		return t.Status.SweepRequested == nil && t.Status.LastSweep != nil
	})
	w.compareRestored(spoilt, damaged, 0)
	offsite.check(3)
	w.stop()
	if now, most := b.Reserved(); now != 0 || most < 24<<20 || most > size {
		t.Errorf("%d bytes are reserved, and at most %d of %d", now, most, size)
	}
}
