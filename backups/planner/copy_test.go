package planner

import (
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// addCopy creates a copy of a backup into target t.
func (w *world) addCopy(name, of, volume string) *api.Backup {
	w.T.Helper()
	b := &api.Backup{ObjectMeta: apitest.Named(name),
		Spec: api.BackupSpec{Volume: volume, BackupTargetName: "t", CopyOf: of}}
	w.Create(b)
	return b
}

// TestCopiesAreLeftToTheirTargetsOwner: a copy gets a finalizer and labels, and no source, also if its volume exists. A
// copy without a target waits. The finalizer of a deleted copy stays for the owner, unless the target does not exist.
func TestCopiesAreLeftToTheirTargetsOwner(t *testing.T) {
	w := newWorld(t)
	w.addNodes("node-1")
	w.addVolume("v", "node-1")
	early := w.addCopy("early", "b", "v")
	w.awaitState("early", api.BackupPending, "backup target t does not exist")
	w.Delete(early)
	w.AwaitDeleted(early, &api.BackupList{})
	w.addTarget("t")
	c := w.addCopy("c", "b", "v")
	w.awaitBackup("c", "has its labels", func(b *api.Backup) bool {
		return len(b.Finalizers) == 1 && b.Labels[api.LabelVolume] == "v" && b.Labels[api.LabelBackupTarget] == "t"
	})
	w.stays("c", "a copy")
	w.Delete(c)
	w.awaitBackup("c", "is being deleted", func(b *api.Backup) bool { return b.DeletionTimestamp != nil })
	w.stays("c", "a deleted copy")
	var snapshots api.SnapshotList
	if err := w.Client.List(w.Ctx, &snapshots); err != nil || len(snapshots.Items) > 0 {
		t.Errorf("%d snapshots were taken for copies: %v", len(snapshots.Items), err)
	}
	if err := w.Client.Get(w.Ctx, client.ObjectKeyFromObject(c), c); err != nil || c.Spec.Source != nil {
		t.Errorf("%+v, %v", c.Spec, err)
	}
}

// TestCopiesOfImagesAreLeftToTheirTargetsOwner: as those of volumes, and without a target they wait.
func TestCopiesOfImagesAreLeftToTheirTargetsOwner(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addImage("golden", "a", "n1")
	c := &api.BackupBackingImage{ObjectMeta: apitest.Named("c"), Spec: api.BackupBackingImageSpec{BackupTargetName: "t",
		BackingImageName: "golden", CopyOf: "b"}}
	w.Create(c)
	list := &api.BackupBackingImageList{}
	apitest.Await(w.Server, c, list, "waits for the target", func(b *api.BackupBackingImage) bool {
		return strings.Contains(b.Status.Message, "backup target t does not exist")
	})
	w.addTarget("t")
	for range 2 { // the second change shows that the first reconcile ended
		apitest.Edit(w.Server, c, func(b *api.BackupBackingImage) { b.Labels[api.LabelImage] = "other" })
		apitest.Await(w.Server, c, list, "has its labels", func(b *api.BackupBackingImage) bool {
			return b.Labels[api.LabelImage] == "golden"
		})
	}
	if c.Spec.Source != nil || len(c.Finalizers) != 1 {
		t.Errorf("%+v", c)
	}
	w.Delete(c)
	awaitLeaving(w, c, list) // for the owner of the target
}

// TestNoBackupIsMadeInAStoreOfLonghorn: the backup has an Error at once.
func TestNoBackupIsMadeInAStoreOfLonghorn(t *testing.T) {
	w := newWorld(t)
	w.addNodes("node-1")
	w.addVolume("v", "node-1")
	target := w.addTarget("t")
	apitest.EditStatus(w.Server, target, func(t *api.BackupTarget) { t.Status.Format = api.FormatLonghorn })
	w.addBackup("b", "v", "")
	w.awaitState("b", api.BackupError, "is a store of Longhorn")
}
