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

// TestLonghornsURLOfAnImage: the URL finds the only backup of an image of the name in the store, and chooses none of
// several.
func TestLonghornsURLOfAnImage(t *testing.T) {
	t.Parallel()
	const url = "nfs://host:/store?backingImage=golden"
	var images []api.BackupBackingImage
	for _, u := range []string{api.ImageBackupURL("nfs://host:/other", "golden", "golden"),
		api.ImageBackupURL("nfs://host:/store", "silver", "silver"),
		api.ImageBackupURL("nfs://host:/store/?nfsOptions=soft", "golden", "golden"),
		api.ImageBackupURL("nfs://host:/store", "golden-1f3a9c2b.default", "golden")} {
		var i api.BackupBackingImage
		i.Name, i.Status.URL, i.Status.State = u, u, api.BackupCompleted
		images = append(images, i)
	}
	b := Backups{Reader: objects{images: images[:3]}}
	if o, err := b.find(t.Context(), url); err != nil || o.GetName() != images[2].Name {
		t.Errorf("found %+v, %v", o, err)
	}
	b.Reader = objects{images: images}
	if o, err := b.find(t.Context(), url); !api.Is(err, api.Invalid) {
		t.Errorf("of two backups: %+v, %v", o, err)
	}
	if o, err := b.find(t.Context(), images[3].Status.URL); err != nil || o.GetName() != images[3].Name {
		t.Errorf("of two backups, by the URL of one: %+v, %v", o, err)
	}
}
