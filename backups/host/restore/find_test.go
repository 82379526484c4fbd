package restore

import (
	"context"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// objects are the backups of an API.
type objects struct {
	client.Reader
	backups []api.Backup
	images  []api.BackupBackingImage
}

func (o objects) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	switch l := list.(type) {
	case *api.BackupList:
		l.Items = o.backups
	case *api.BackupBackingImageList:
		l.Items = o.images
	}
	return nil
}

// TestDeletionLeavesTheRestore: a restore, which a restart of its node interrupted, finds its backup again while the
// deletion of the backup waits for the restore, be it the backup of a volume or of an image. A backup that never was in
// the store is not found.
func TestDeletionLeavesTheRestore(t *testing.T) {
	t.Parallel()
	const url = "file:///store?backup=one&volume=data"
	var volume api.Backup
	var image api.BackupBackingImage
	for _, o := range []api.StoredBackup{&volume, &image} {
		st := o.Common()
		st.URL, st.State, st.SnapshotID = url, api.BackupDeleting, "1f3a9c2b"
		b := Backups{Reader: objects{backups: []api.Backup{volume}, images: []api.BackupBackingImage{image}}}
		if _, err := b.find(t.Context(), url); err != nil {
			t.Errorf("%T: %v", o, err)
		}
		st.SnapshotID = ""
		b.Reader = objects{backups: []api.Backup{volume}, images: []api.BackupBackingImage{image}}
		if _, err := b.find(t.Context(), url); !api.Is(err, api.NotFound) {
			t.Errorf("%T without a snapshot in the store: %v", o, err)
		}
	}
}

// TestURLOfAnImageChoosesNoBackup: the URL of an image opens no backup, not even the only one: the controller chooses the
// backup, or later restores of the image would read another one.
func TestURLOfAnImageChoosesNoBackup(t *testing.T) {
	t.Parallel()
	var image api.BackupBackingImage
	image.Name, image.Status.State = "golden", api.BackupCompleted
	image.Status.URL = api.ImageBackupURL("nfs://host:/store", "golden", "golden")
	b := Backups{Reader: objects{images: []api.BackupBackingImage{image}}}
	if o, err := b.find(t.Context(), "nfs://host:/store?backingImage=golden"); !api.Is(err, api.Unavailable) {
		t.Errorf("found %+v, %v", o, err)
	}
	if o, err := b.find(t.Context(), image.Status.URL); err != nil || o.GetName() != image.Name {
		t.Errorf("by the URL of the backup: %+v, %v", o, err)
	}
}
