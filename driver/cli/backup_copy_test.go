package cli_test

import (
	"context"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestBackupCopyCreatesACopy: the flags become the spec, and wrong ones are refused at once.
func TestBackupCopyCreatesACopy(t *testing.T) {
	closed := newTarget("copy-closed")
	closed.Spec.ReadOnly = true
	old := newTarget("copy-old")
	place(t, newTarget("copy-from"), newTarget("copy-to"), closed, old, newBackup("copy-b", "v", "copy-from"))
	if err := status(t.Context(), "copy-old", func(t *api.BackupTarget) {
		t.Status.Format = api.FormatLonghorn
	}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		code int
		argv string
		want string
	}{
		{2, "copy-b", "--to"},
		{2, "copy-b --to copy-from", "already"},
		{2, "copy-b --to copy-to --name Not_A_Name", "lower-case"},
		{3, "copy-b --to nosuch", "drover target list"},
		{3, "nosuch --to copy-to", "drover backup list"},
		{5, "copy-b --to copy-closed", "read-only"},
		{5, "copy-b --to copy-old", "Longhorn"},
	} {
		argv := kubeconfig(append([]string{"backup", "copy"}, strings.Fields(c.argv)...)...)
		drover(t, argv...).mustSay(t, c.code, c.want)
	}
	for _, name := range []string{"copy-b-copy-to", "named"} {
		argv := kubeconfig("backup", "copy", "copy-b", "--to", "copy-to", "--wait=false", "-o", "name")
		if name == "named" {
			argv = append(argv, "--name", name)
		}
		remove(t, newBackup(name, "", ""))
		drover(t, argv...).mustSay(t, 0, "backup.storage.drover.io/"+name)
		var b api.Backup
		if err := store.Get(t.Context(), client.ObjectKey{Name: name}, &b); err != nil {
			t.Fatal(err)
		}
		if b.Spec.CopyOf != "copy-b" || b.Spec.Volume != "v" || b.Target() != "copy-to" {
			t.Errorf("spec %+v", b.Spec)
		}
		b.Spec.CopyOf = "other"
		if err := store.Update(context.Background(), &b); err == nil || !strings.Contains(err.Error(), "copyOf cannot change") {
			t.Errorf("another origin: %v", err)
		}
	}
}

func newImageBackupOf(name, image, target, digest string) *api.BackupBackingImage {
	b := &api.BackupBackingImage{Spec: api.BackupBackingImageSpec{BackupTargetName: target, BackingImageName: image,
		Digest: digest}}
	b.Name, b.Finalizers = name, []string{api.Finalizer}
	return b
}

// TestBackupCopyCopiesImages: the copy of an image's backup has the name that names its content in the other target, and
// exists there once.
func TestBackupCopyCopiesImages(t *testing.T) {
	digest := strings.Repeat("ab", 32)
	place(t, newTarget("img-from"), newTarget("img-to"), newImageBackupOf("of-image", "golden", "img-from", digest))
	name := api.ImageBackupName("golden", digest, "img-to")
	remove(t, newImageBackupOf(name, "", "", ""))
	argv := kubeconfig("backup", "copy", "of-image", "--to", "img-to", "--wait=false")
	drover(t, argv...).mustSay(t, 0, "drover backup images "+name)
	var b api.BackupBackingImage
	if err := store.Get(t.Context(), client.ObjectKey{Name: name}, &b); err != nil {
		t.Fatal(err)
	}
	if b.Spec.CopyOf != "of-image" || b.Spec.BackingImageName != "golden" || b.Target() != "img-to" ||
		b.Spec.Digest != digest || !b.Spec.UserCreated {
		t.Errorf("spec %+v", b.Spec)
	}
	drover(t, argv...).mustSay(t, 5, "exists already", "drover backup images "+name)
	b.Spec.CopyOf = "other"
	if err := store.Update(t.Context(), &b); err == nil || !strings.Contains(err.Error(), "copyOf cannot change") {
		t.Errorf("another origin: %v", err)
	}
}

// TestImageRestoreTakesTheRecordOver: a restored image has the labels, copies and selectors of the original; flags
// replace one of them, and --defaults all.
func TestImageRestoreTakesTheRecordOver(t *testing.T) {
	place(t, newImageBackupOf("recorded", "golden", "default", strings.Repeat("cd", 32)))
	if err := status(t.Context(), "recorded", func(b *api.BackupBackingImage) {
		b.Status.State, b.Status.URL = api.BackupCompleted, "file:///store?backingImage=golden&backup=recorded"
		b.Status.RecordedImage = &api.RecordedImage{Labels: map[string]string{"team": "os"}, MinNumberOfCopies: 3,
			NodeSelector: []string{"ssd"}, DiskSelector: []string{"fast"}}
	}); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("backup", "images", "recorded")...).mustSay(t, 0, "team=os", "ssd", "fast")
	for _, c := range []struct {
		name  string
		flags []string
		want  *api.RecordedImage
	}{
		{"rec-all", nil, &api.RecordedImage{Labels: map[string]string{"team": "os"}, MinNumberOfCopies: 3,
			NodeSelector: []string{"ssd"}, DiskSelector: []string{"fast"}}},
		{"rec-flags", []string{"--min-copies", "2", "--disk-selector", ""}, &api.RecordedImage{
			Labels: map[string]string{"team": "os"}, MinNumberOfCopies: 2, NodeSelector: []string{"ssd"}}},
		{"rec-none", []string{"--defaults"}, &api.RecordedImage{MinNumberOfCopies: 1}},
	} {
		img := &api.BackingImage{}
		img.Name = c.name
		remove(t, img)
		argv := append(kubeconfig("image", "restore", "recorded", "--name", c.name, "--background"), c.flags...)
		drover(t, argv...).mustSay(t, 0, c.name)
		if err := store.Get(t.Context(), client.ObjectKey{Name: c.name}, img); err != nil {
			t.Fatal(err)
		}
		if got := api.RecordImage(img); !equality.Semantic.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

// TestBackupOfLonghornIsNotDeleted: the object would come back.
func TestBackupOfLonghornIsNotDeleted(t *testing.T) {
	place(t, newTarget("longhorn"), newBackup("of-longhorn", "v", "longhorn"))
	if err := status(t.Context(), "longhorn", func(t *api.BackupTarget) {
		t.Status.Format = api.FormatLonghorn
	}); err != nil {
		t.Fatal(err)
	}
	if err := status(t.Context(), "of-longhorn", func(b *api.Backup) {
		b.Status.State, b.Status.SnapshotID = api.BackupCompleted, strings.Repeat("ab", 32)
	}); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("backup", "delete", "of-longhorn")...).mustSay(t, 5, "with Longhorn", "--force longhorn")
	drover(t, kubeconfig("target", "show", "longhorn")...).mustSay(t, 0, "longhorn", "Longhorn does not encrypt")
}
