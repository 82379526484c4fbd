package cli_test

import (
	"context"
	"strings"
	"testing"

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
