package backups_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups"
	"drover.io/drover/block"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/replicas/stack"
)

// healable makes a volume with a backup whose first chunk the store damages. The chunk is on the disk of node-1 alone.
func (w *world) healable() (*volume, *api.Backup) {
	w.T.Helper()
	v := w.newVolume("vol", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk), 4 * chunk: randomBytes(2, 4096)})
	replica := &api.Replica{ObjectMeta: apitest.Named("vol-r1"), Spec: api.ReplicaSpec{UID: v.replica, Volume: v.name,
		VolumeUID: v.uid, Node: nodeName, Disk: api.UID(w.disk.UID()), Size: v.size}}
	w.Create(replica)
	s := &api.Snapshot{ObjectMeta: apitest.Named(v.snapshot(0))}
	apitest.EditStatus(w.Server, s, func(s *api.Snapshot) { s.Status.CreationTime = cutTime })
	w.start(nil)
	b := w.newBackup("b1", v, 0)
	w.awaitState(b, api.BackupCompleted)
	w.spoilFirstBlob()
	return v, b
}

// verify asks for the first verification, and waits for its end.
func (w *world) verify() *api.VerificationFact {
	w.T.Helper()
	apitest.Edit(w.Server, w.target, func(t *api.BackupTarget) {
		now := metav1.Now()
		t.Spec.VerifyRequestedAt = &now
	})
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "verified", func(t *api.BackupTarget) bool {
		return t.Status.Verification != nil && t.Status.Verification.EndedAt != nil
	})
	return w.target.Status.Verification
}

// compareRestored demands that a restore of the backup has the content of the snapshot.
func (w *world) compareRestored(b *api.Backup, v *volume, snapshot int) {
	w.T.Helper()
	open := w.openBackup(b.Status.URL)
	sink := &memorySink{got: make([]byte, v.size)}
	must(w.T, open.Restore(w.Ctx, sink))
	if !bytes.Equal(sink.got, v.contents[snapshot]) {
		w.T.Error("the restore has other bytes than the snapshot")
	}
	must(w.T, open.Close())
}

// TestVerificationHealsFromDisks: the store damages a chunk of a backup. A verification that a user asks for finds the
// damage, and writes the chunk again, which a snapshot on the node's disk still has. The backup is whole afterwards,
// the target has no damage, and the disk holds no snapshot any more.
func TestVerificationHealsFromDisks(t *testing.T) {
	w := newWorld(t)
	v, b := w.healable()
	if f := w.verify(); f.HealedBlobs != 1 || f.DamagedBlobs != 0 || f.DamagedBackups != 0 {
		t.Errorf("verification %+v", f)
	}
	w.compareRestored(b, v, 0)
	w.awaitReleased()
}

// TestOtherNodesHeal: the node that looks after the target has no disk with the damaged chunk; another node has, and
// writes the chunk again. The owner looks again without a request: the backup is whole, and the target has no damage.
func TestOtherNodesHeal(t *testing.T) {
	w := newWorld(t)
	node := &api.Node{ObjectMeta: apitest.Named(nodeName)}
	apitest.EditStatus(w.Server, node, func(n *api.Node) { n.Status.Heartbeat = metav1.Time{} }) // owns no target
	owner := &api.Node{ObjectMeta: apitest.Named("node-2")}
	w.Create(owner)
	apitest.EditStatus(w.Server, owner, func(n *api.Node) {
		n.Status.Heartbeat = metav1.NewTime(time.Now().Add(time.Hour)) // outlives the test
	})
	w.opts.Targets.RecheckDelay, w.opts.Targets.SweepDelay = time.Millisecond, time.Millisecond
	mgr := w.Manager(nil)
	o := w.opts
	o.Targets.Cache = t.TempDir()
	_, err := backups.SetupNode(mgr, "node-2", func(uid api.UID) (block.SnapshotDisk, error) {
		return nil, api.Errorf(api.Unavailable, "disk %s: is not on this node", uid)
	}, o)
	must(t, err)
	w.Run(mgr)
	v, b := w.healable()
	if f := w.verify(); w.target.Status.OwnerID != "node-2" || f.DamagedBlobs > 1 {
		t.Errorf("node %s verified: %+v", w.target.Status.OwnerID, f)
	}
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "healed", func(t *api.BackupTarget) bool {
		f := t.Status.Verification
		return f.HealedBlobs == 1 && f.UncheckedBlobs == 0 && f.DamagedBlobs == 0 && f.DamageFoundAt == nil
	})
	w.await(b, "whole", func(b *api.Backup) bool { return !b.Status.Damaged })
	w.compareRestored(b, v, 0)
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "swept", func(t *api.BackupTarget) bool {
		return t.Status.SweepRequested == nil && t.Status.LastSweep != nil
	})
	w.check(1) // without the damaged pack
	w.awaitReleased()
}

// addReplica records a replica of a volume, without a snapshot, with the content in one layer, as a restore makes it.
func (w *world) addReplica(volume string, content []byte) {
	w.T.Helper()
	layer, size := string(api.NewUID()), int64(len(content))
	l, err := w.disk.Create(w.Ctx, layer, size)
	must(w.T, err)
	_, err = l.WriteAt(content, 0)
	must(w.T, err)
	_, _, err = l.Seal(w.Ctx)
	must(w.T, err)
	must(w.T, w.disk.CreateReplica(w.Ctx, stack.Spec{UID: string(api.NewUID()), Volume: volume,
		VolumeUID: string(api.NewUID()), Size: size, Layers: []string{layer}}))
}

// TestRestoredVolumeHealsTheBackupOfItsOriginal: a volume is lost and restored under another name, and the store
// damages a chunk of the backup afterwards. The layer of the restored volume, of which no snapshot exists, has the
// chunk. The same holds for the backup of an image whose content a volume of another size has. The last chunks are
// short.
func TestRestoredVolumeHealsTheBackupOfItsOriginal(t *testing.T) {
	t.Run("volume", func(t *testing.T) {
		w := newWorld(t)
		v, b := w.healable()
		w.Delete(&api.Replica{ObjectMeta: apitest.Named("vol-r1")})
		w.Delete(&api.Snapshot{ObjectMeta: apitest.Named(v.snapshot(0))})
		must(t, w.disk.RemoveReplica(string(v.replica)))
		w.addReplica("vol-new", v.contents[0])
		if f := w.verify(); f.HealedBlobs != 1 || f.DamagedBlobs != 0 || f.DamagedBackups != 0 {
			t.Errorf("verification %+v", f)
		}
		w.compareRestored(b, v, 0)
	})
	t.Run("image", func(t *testing.T) {
		w := newWorld(t)
		i := w.newImage("golden", 3*chunk-512, nil, nil, map[int64][]byte{chunk: randomBytes(1, chunk)})
		w.start(nil)
		b := w.backUp("b", i)
		w.awaitStored(b)
		w.spoilFirstBlob()
		w.Delete(&api.BackingImage{ObjectMeta: apitest.Named("golden")})
		must(t, w.disk.RemoveImage(string(i.uuid)))
		w.addReplica("vol", append(bytes.Clone(i.content), make([]byte, 3*chunk+512)...))
		if f := w.verify(); f.HealedBlobs != 1 || f.DamagedBlobs != 0 || f.DamagedBackups != 0 {
			t.Errorf("verification %+v", f)
		}
		if !bytes.Equal(w.dumpImage(b), i.content) {
			t.Error("restic reads other bytes than the image has")
		}
	})
}

// TestVerificationHealsImages: the store damages the last chunk of the backup of an image, which a copy on the node's
// disk has. The chunk is shorter than that of the image's layer.
func TestVerificationHealsImages(t *testing.T) {
	w := newWorld(t)
	i := w.newImage("golden", 3*chunk-512, nil, nil, map[int64][]byte{2 * chunk: randomBytes(1, chunk-512)})
	w.Create(&api.ImageCopy{ObjectMeta: apitest.Named("golden-1"), Spec: api.ImageCopySpec{Image: i.name, UUID: i.uuid,
		Layers: i.layers, Node: nodeName, Disk: api.UID(w.disk.UID())}})
	w.start(nil)
	b := w.backUp("b", i)
	w.awaitStored(b)
	w.spoilFirstBlob()
	if f := w.verify(); f.HealedBlobs != 1 || f.DamagedBlobs != 0 || f.DamagedBackups != 0 {
		t.Errorf("verification %+v", f)
	}
	if !bytes.Equal(w.dumpImage(b), i.content) {
		t.Error("restic reads other bytes than the image has")
	}
	w.awaitReleased()
}

// TestDamagedBackupIsNoBase: a verification finds a damaged chunk while the disk with the chunk is not ready. The next
// backup of the volume does not take the chunk over from the damaged backup, and is whole.
func TestDamagedBackupIsNoBase(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("vol", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)},
		map[int64][]byte{4 * chunk: randomBytes(2, 4096)})
	apitest.EditStatus(w.Server, &api.Node{ObjectMeta: apitest.Named(nodeName)}, func(n *api.Node) {
		n.Status.Disks[0].Ready = false
	})
	w.start(nil)
	first := w.newBackup("b1", v, 0)
	w.awaitState(first, api.BackupCompleted)
	w.spoilFirstBlob()
	w.verify()
	w.await(first, "damaged", func(b *api.Backup) bool { return b.Status.Damaged })
	second := w.newBackup("b2", v, 1)
	w.awaitState(second, api.BackupCompleted)
	w.compareRestored(second, v, 1)
}

// TestStoreThatIsGoneIsNoDamage: a restore that may leave damaged chunks out meets an empty folder, as below a share that
// was unmounted. The restore fails for the moment, and names no chunk.
func TestStoreThatIsGoneIsNoDamage(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("vol", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	w.start(nil)
	b := w.newBackup("b1", v, 0)
	w.awaitState(b, api.BackupCompleted)
	open := w.openBackup(b.Status.URL)
	must(t, os.Rename(w.folder, w.folder+"-gone"))
	must(t, os.Mkdir(w.folder, 0o700))
	restore := func() ([]int64, error) {
		return open.(block.ChunkedBackup).RestoreIntact(t.Context(), &memorySink{got: make([]byte, v.size)},
			func(int64) bool { return false })
	}
	if damaged, err := restore(); !api.Is(err, api.Unavailable) {
		t.Errorf("the empty folder: chunks %v, %v", damaged, err)
	}
	buf := make([]byte, chunk)
	if err := open.(block.ChunkedBackup).ReadChunk(t.Context(), 0, buf); !api.Is(err, api.Unavailable) {
		t.Errorf("a read from the empty folder: %v", err)
	}
	must(t, os.RemoveAll(w.folder))
	must(t, os.Rename(w.folder+"-gone", w.folder))
	if damaged, err := restore(); err != nil || len(damaged) > 0 {
		t.Errorf("the folder is back: chunks %v, %v", damaged, err)
	}
	must(t, open.Close())
}

// spoilFirstBlob changes bytes of one chunk in the pack with data. The position is within a chunk of full size even when
// a smaller blob of 4 KiB comes first.
func (w *world) spoilFirstBlob() {
	w.T.Helper()
	must(w.T, filepath.WalkDir(filepath.Join(w.folder, "data"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		body, err := os.ReadFile(path)
		if err != nil || len(body) < chunk/2+4096 {
			return err
		}
		copy(body[chunk/2:], make([]byte, 4096))
		must(w.T, os.Chmod(path, 0o600))
		return os.WriteFile(path, body, 0o600)
	}))
}
