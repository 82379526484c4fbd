package targets

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/longhorn/longhorntest"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/driver/kubeapi/apitest"
)

// fullBlock is a block of 2 MiB.
func fullBlock(seed byte) []byte { return bytes.Repeat([]byte{seed, 2, 3, 4}, 512<<10) }

// addBlocks writes a backup of a volume with a block for each seed.
func addBlocks(t *testing.T, dir, volume, name string, seeds ...byte) {
	t.Helper()
	addLonghorn(t, dir, name, func(b *longhorntest.Backup) {
		b.Volume, b.Image, b.Blocks = volume, "", map[int64][]byte{}
		for i, seed := range seeds {
			b.Blocks[int64(i)<<21] = fullBlock(seed)
		}
	})
}

// countBlocks counts the blocks that are read from now on. Each write is an error.
func (w *world) countBlocks() *atomic.Int64 {
	reads := &atomic.Int64{}
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation == "get" && strings.HasSuffix(name, ".blk") {
			reads.Add(1)
		}
		if operation == "put" || operation == "delete" {
			w.T.Errorf("Drover calls %s for %s in Longhorn's store", operation, name)
		}
		return nil
	})
	return reads
}

// isKnown reports whether a Backup says that node-1 knows a part of its digests.
func isKnown(b *api.Backup, percent int32) bool {
	return b.Status.Digests != nil && *b.Status.Digests == api.DigestsFact{Node: "node-1", Percent: percent}
}

// TestVerificationOfLonghornsStore: a verification reads each block of a volume once, also of several backups, and an
// image; then the node knows all digests, and the Backups say so, though the target is read-only. A damaged block marks
// the backups that need it, alone, and the next verification after its return clears all.
func TestVerificationOfLonghornsStore(t *testing.T) {
	w := newWorld(t, "node-1")
	reads := w.countBlocks()
	dir := t.TempDir()
	addBlocks(t, dir, "pvc-1", "one", 1, 2, 3)
	addBlocks(t, dir, "pvc-1", "two", 1, 2, 4)
	addBlocks(t, dir, "pvc-2", "other", 1)
	longhorntest.AddImage(t, openFolder(t, dir), longhorntest.Image{Name: "golden", Content: fullBlock(9), Method: "lz4"})
	w.addTarget("old", "file://"+dir, "")
	target := w.awaitReason("old", api.ReasonAvailable, "")
	target.Spec.ReadOnly = true
	must(t, w.Server.Client.Update(t.Context(), target))
	v := w.verify("old").Status.Verification
	if v.EndedAt == nil || v.Packs != 6 || v.Bytes != 12<<20 || v.DamagedBlobs != 0 || reads.Load() != 6 {
		t.Errorf("verification %+v with %d reads", v, reads.Load())
	}
	for _, name := range []string{"one", "two", "other"} {
		w.awaitBackup(name, "known", func(b *api.Backup) bool { return isKnown(b, 100) && !b.Status.Damaged })
	}
	if node := api.ReadableOn([]api.Backup{*w.backups()["one"]}, w.backups()["one"].Status.URL); node != "node-1" {
		t.Errorf("the backup can be read on demand on node %q", node)
	}
	id := blob.ID(longhorn.Name{Volume: "pvc-1", Backup: "one"}.ID())
	o, err := w.nodes["node-1"].OpenLonghorn(t.Context(), "old", "pvc-1", id)
	must(t, err)
	if known, total, err := o.Known(); err != nil || known != 3 || total != 3 {
		t.Errorf("%d of %d chunks are known, %v", known, total, err)
	}
	must(t, o.Close())

	lost := filepath.Join(dir, longhorntest.BlockName(longhorntest.VolumeFolder("pvc-1")+"blocks/", fullBlock(3)))
	body, err := os.ReadFile(lost)
	must(t, err)
	must(t, os.Remove(lost))
	target = w.verify("old")
	v = target.Status.Verification
	if !meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionDamaged) || v.DamagedBlobs != 1 ||
		len(v.BlobNames) != 1 || v.BlobNames[0] != longhorntest.Sum(fullBlock(3)) || v.DamagedBackups != 1 ||
		len(v.BackupNames) != 1 || v.BackupNames[0] != "one" || v.DamageFoundAt != nil {
		t.Errorf("verification of a damaged store: %+v", target.Status)
	}
	w.awaitEvent("BackupsDamaged")
	w.awaitBackup("one", "damaged", func(b *api.Backup) bool { return b.Status.Damaged })
	if w.backups()["two"].Status.Damaged || w.backups()["other"].Status.Damaged {
		t.Error("a whole backup counts as damaged")
	}
	must(t, os.WriteFile(lost, body, 0o600))
	target = w.verify("old")
	if meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionDamaged) || target.Status.SweepRequested != nil ||
		target.Status.Verification.DamagedBlobs != 0 {
		t.Errorf("after the return of the block: %+v", target.Status)
	}
	w.awaitBackup("one", "whole", func(b *api.Backup) bool { return !b.Status.Damaged })
}

// TestLonghornsStoreIsVerifiedInParts: without a request, a verification reads a part of the backups each day, and all of
// them in the end.
func TestLonghornsStoreIsVerifiedInParts(t *testing.T) {
	w := newWorld(t, "node-1")
	dir := t.TempDir()
	addBlocks(t, dir, "pvc-1", "one", 1, 2, 3)
	w.addTarget("old", "file://"+dir, "")
	w.awaitReason("old", api.ReasonAvailable, "")
	reads := w.countBlocks()
	for part := range int32(api.VerificationParts) {
		w.verifyPart("old")
		if known := w.backups()["one"].Status.Digests != nil; known != (reads.Load() > 0) {
			t.Errorf("after part %d the digests are known: %v", part, known)
		}
	}
	v := w.awaitTarget("old", "verified", func(t *api.BackupTarget) bool {
		return t.Status.Verification.EndedAt != nil
	}).Status.Verification
	if reads.Load() != 3 || v.Packs != 3 || v.Position != "" || v.StartedAt != nil {
		t.Errorf("after the last part: %+v, %d reads", v, reads.Load())
	}
}

// TestCutVerificationOfLonghornContinues: after an error in the middle, a verification reads the blocks that are left.
func TestCutVerificationOfLonghornContinues(t *testing.T) {
	w := newWorld(t, "node-1")
	dir := t.TempDir()
	addBlocks(t, dir, "pvc-1", "one", 1, 2, 3, 4, 5, 6)
	w.addTarget("old", "file://"+dir, "")
	w.awaitReason("old", api.ReasonAvailable, "")
	var reads, failed atomic.Int64
	w.hooks.set(func(_ context.Context, operation, name string) error {
		if operation != "get" || !strings.HasSuffix(name, ".blk") {
			return nil
		}
		if reads.Add(1) > 2 && failed.Load() < 4 {
			failed.Add(1)
			return api.Errorf(api.Unavailable, "the store is away")
		}
		return nil
	})
	at := metav1.NewTime(w.clock.now())
	apitest.Edit(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named("old")}, func(t *api.BackupTarget) {
		t.Spec.VerifyRequestedAt = &at
	})
	ended := make(chan struct{})
	var clock sync.WaitGroup
	clock.Go(func() { // time passes: each failure ends a step, and the next step begins two minutes later
		for tick := time.NewTicker(50 * time.Millisecond); ; {
			select {
			case <-tick.C:
				w.clock.advance(2 * time.Minute)
				w.wake("old")
			case <-ended:
				tick.Stop()
				return
			}
		}
	})
	stop := sync.OnceFunc(func() { close(ended); clock.Wait() })
	t.Cleanup(stop)
	v := w.awaitTarget("old", "verified", func(t *api.BackupTarget) bool {
		return t.Status.Verification != nil && t.Status.Verification.EndedAt != nil
	}).Status.Verification
	stop()
	if v.DamagedBlobs != 0 || v.Message != "" {
		t.Errorf("verification %+v", v)
	}
	w.awaitBackup("one", "known", func(b *api.Backup) bool { return isKnown(b, 100) })
	if n := reads.Load() - failed.Load(); n < 6 || n >= 12 { // reads of a step that failed meanwhile are repeated
		t.Errorf("%d blocks were read, and the backup has 6", n)
	}
}

// TestTableOfDigestsGoesWithTheLastStore: the table of digests is removed when the manager starts and no target is a
// store of Longhorn.
func TestTableOfDigestsGoesWithTheLastStore(t *testing.T) {
	w := newWorld(t, "node-1")
	dir := t.TempDir()
	addBlocks(t, dir, "pvc-1", "one", 1)
	w.addTarget("old", "file://"+dir, "")
	target := w.awaitReason("old", api.ReasonAvailable, "")
	w.verify("old")
	path := filepath.Join(w.nodes["node-1"].cache, digestsFile)
	must(t, w.nodes["node-1"].removeCaches(t.Context()))
	if _, err := os.Stat(path); err != nil {
		t.Error("the table of a store of Longhorn was removed")
	}
	w.Delete(target)
	w.AwaitDeleted(target, &api.BackupTargetList{})
	must(t, w.nodes["node-1"].removeCaches(t.Context()))
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the table of a deleted target: %v", err)
	}
}
