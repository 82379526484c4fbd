package cli_test

import (
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestBackupRestore: backup restore and volume create --from-backup make a volume of the backup's URL and size, and
// refuse before they make a volume. The hidden image of a restore is in no list without --all.
func TestBackupRestore(t *testing.T) {
	b, early := newBackup("rest-b", "rest", "offsite"), newBackup("rest-early", "rest", "offsite")
	place(t, b, early)
	url := api.BackupURL("file:///offsite", "rest-b", "rest")
	if err := status(t.Context(), "rest-b", func(b *api.Backup) {
		b.Status.State, b.Status.URL, b.Status.VolumeSize = api.BackupCompleted, url, 31<<20
	}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		say  string
		args []string
	}{
		{"not completed", []string{"backup", "restore", "rest-early"}},
		{"less than the 32 MiB of backup", []string{"backup", "restore", "rest-b", "--size", "20Mi"}},
		{`one of volume "rest"`, []string{"volume", "create", "x", "--from-backup", "bak://other/rest-b"}},
		{"no backup has this URL", []string{"volume", "create", "x", "--from-backup", url + "x"}},
		{"begins with one of them", []string{"volume", "create", "x", "--from-backup", "rest-b", "--image", "i"}},
	} {
		r := drover(t, kubeconfig(c.args...)...)
		if r.code == 0 || !strings.Contains(r.out+r.err, c.say) {
			t.Errorf("%v: code %d, %s%s", c.args, r.code, r.out, r.err)
		}
	}
	for name, args := range map[string][]string{
		"rest-1": {"backup", "restore", "rest-b", "--name", "rest-1", "--replicas", "2", "--disk-selector", "ssd"},
		"rest-2": {"volume", "create", "rest-2", "--from-backup", url, "--size", "40Mi"},
		"rest-3": {"volume", "create", "rest-3", "--from-backup", "bak://rest/rest-b"},
	} {
		v := newVolume(name)
		remove(t, v)
		pen(t, name, func(v *api.Volume) {
			v.Status.State = api.VolumeDetached
			v.Status.RestoreStatus = &api.RestoreStatus{State: api.CloneInitiated, Backup: "rest-b", Progress: 40}
		})
		drover(t, kubeconfig(args...)...).mustSay(t, 0, `from backup "rest-b"`)
		if err := store.Get(t.Context(), client.ObjectKey{Name: name}, v); err != nil {
			t.Fatal(err)
		}
		size := int64(32 << 20)
		if name == "rest-2" {
			size = 40 << 20
		}
		if s := v.Spec; s.FromBackup != url || s.Size != size || (s.NumberOfReplicas == 2) != (name == "rest-1") {
			t.Errorf("%s: %+v", name, s)
		}
	}
	drover(t, kubeconfig("volume", "show", "rest-1")...).mustSay(t, 0, "backup rest-b (initiated, 40 %)")

	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceRestore,
		SourceParameters: map[string]string{api.RestoreBackupURL: url}}}
	img.Name, img.Labels = "restore-hidden", map[string]string{api.LabelHidden: "rest-1"}
	place(t, img)
	if r := drover(t, kubeconfig("image", "list")...); strings.Contains(r.out, img.Name) {
		t.Errorf("a list of images has the hidden image: %s", r.out)
	}
	drover(t, kubeconfig("image", "list", "--all")...).mustSay(t, 0, img.Name)
}
