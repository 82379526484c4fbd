package cli_test

import (
	"fmt"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestBackupRestore: backup restore and volume create --from-backup make a volume of the backup's URL and size, and
// refuse before they make a volume. Labels and parameters of the backup's volume come along, unless a flag replaces
// them. The hidden image of a restore is in no list without --all.
func TestBackupRestore(t *testing.T) {
	place(t, newTarget("rest-target"))
	b, early := newBackup("rest-b", "rest", "offsite"), newBackup("rest-early", "rest", "offsite")
	place(t, b, early)
	url := api.BackupURL("file:///offsite", "rest-b", "rest")
	if err := status(t.Context(), "rest-b", func(b *api.Backup) {
		b.Status.State, b.Status.URL, b.Status.VolumeSize = api.BackupCompleted, url, 31<<20
		b.Status.RecordedVolume = &api.RecordedVolume{StorageClassName: "fast", Claim: "db/data",
			Labels: map[string]string{"team": "db", "tier": "1"}, NumberOfReplicas: 3, DataLocality: "best-effort",
			SnapshotDataIntegrity: "fast-check", BackupTargetName: "rest-target",
			NodeSelector: []string{"rack"}, DiskSelector: []string{"hdd"}}
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
	place(t, newVolume("rest-exists"), newBackup("rest-of-existing", "rest-exists", "offsite"))
	drover(t, kubeconfig("backup", "restore", "rest-of-existing")...).mustSay(t, 5, `volume "rest-exists"`, "--name")
	for name, c := range map[string]struct {
		args []string
		want string // labels and parameters
	}{
		"rest": {[]string{"backup", "restore", "rest-b"},
			"map[team:db tier:1] 3 best-effort fast-check [rack] [hdd] map[backupTargetName:rest-target]"},
		"rest-1": {[]string{"backup", "restore", "rest-b", "--name", "rest-1", "--replicas", "2", "--disk-selector", "ssd",
			"--node-selector", "", "--label", "tier=2", "--label", "new=x"},
			"map[new:x team:db tier:2] 2 best-effort fast-check [] [ssd] map[backupTargetName:rest-target]"},
		"rest-2": {[]string{"volume", "create", "rest-2", "--from-backup", url, "--size", "40Mi"},
			"map[team:db tier:1] 3 best-effort fast-check [rack] [hdd] map[backupTargetName:rest-target]"},
		"rest-3": {[]string{"volume", "create", "rest-3", "--from-backup", "bak://rest/rest-b", "--defaults"},
			"map[] 1 disabled  [] [] map[]"},
	} {
		v := newVolume(name)
		remove(t, v)
		pen(t, name, func(v *api.Volume) {
			v.Status.State = api.VolumeDetached
			v.Status.RestoreStatus = &api.RestoreStatus{State: api.CloneInitiated, Backup: "rest-b", Progress: 40}
		})
		drover(t, kubeconfig(c.args...)...).mustSay(t, 0, `from backup "rest-b"`)
		if err := store.Get(t.Context(), client.ObjectKey{Name: name}, v); err != nil {
			t.Fatal(err)
		}
		size := int64(32 << 20)
		if name == "rest-2" {
			size = 40 << 20
		}
		s := v.Spec
		got := fmt.Sprint(v.Labels, " ", s.NumberOfReplicas, " ", s.DataLocality, " ", s.SnapshotDataIntegrity, " ",
			s.NodeSelector, " ", s.DiskSelector, " ", s.Parameters)
		if s.FromBackup != url || s.Size != size || got != c.want {
			t.Errorf("%s: %s, want %s; %+v", name, got, c.want, s)
		}
	}
	r := drover(t, kubeconfig("backup", "show", "rest-b")...)
	for _, say := range []string{"fast", "db/data", "team=db", "replicas=3", "disk-selector=hdd"} {
		r.mustSay(t, 0, say)
	}
	if err := status(t.Context(), "rest-b", func(b *api.Backup) {
		b.Status.RecordedVolume.BackupTargetName = "rest-elsewhere"
	}); err != nil {
		t.Fatal(err)
	}
	v := newVolume("rest-4")
	remove(t, v)
	pen(t, "rest-4", func(v *api.Volume) { v.Status.State = api.VolumeDetached })
	drover(t, kubeconfig("backup", "restore", "rest-b", "--name", "rest-4")...).mustSay(t, 0,
		`target "rest-elsewhere" of the backups of volume "rest" does not exist here`)
	if err := store.Get(t.Context(), client.ObjectKey{Name: "rest-4"}, v); err != nil || len(v.Spec.Parameters) > 0 {
		t.Errorf("%+v, %v", v.Spec.Parameters, err)
	}
	testStandby(t)
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

// testStandby: a standby volume follows the backups of a volume in a target, or of a backup's volume, and takes over
// labels and parameters of a backup that Drover knows. volume show says what it holds, an attach is refused, and volume
// activate says what it took.
func testStandby(t *testing.T) {
	t.Helper()
	bv := &api.BackupVolume{Spec: api.BackupVolumeSpec{VolumeName: "rest", BackupTargetName: "offsite"}}
	bv.Name = api.BackupVolumeName("rest", "offsite")
	place(t, bv)
	if err := status(t.Context(), bv.Name, func(v *api.BackupVolume) { v.Status.LastBackupName = "rest-b" }); err != nil {
		t.Fatal(err)
	}
	for args, say := range map[string]string{
		"--standby":                      "add --from-backup",
		"--from-backup rest --target t1": "add --standby",
		"--standby --from-backup none --target offsite": `has no backup of volume "none"`,
		"--standby --from-backup file:///offsite":       "no URL of a backup",
	} {
		r := drover(t, kubeconfig(append([]string{"volume", "create", "x"}, strings.Fields(args)...)...)...)
		if r.code == 0 || !strings.Contains(r.out+r.err, say) {
			t.Errorf("%s: code %d, %s%s", args, r.code, r.out, r.err)
		}
	}
	held := &api.StandbyBackup{Backup: "rest-b", URL: "u", SnapshotCreatedAt: "2026-01-02T03:04:05Z", BackingImage: "i"}
	for name, c := range map[string]struct {
		args []string
		want string // labels and parameters
	}{
		"dr-1": {[]string{"--from-backup", "rest", "--target", "offsite"}, "map[team:db tier:1] 3 [hdd]"},
		"dr-2": {[]string{"--from-backup", "rest-b", "--disk-selector", "ssd"}, "map[team:db tier:1] 3 [ssd]"},
		"dr-3": {[]string{"--from-backup", "file:///offsite?volume=rest", "--size", "32Mi", "--disk-selector", "ssd"},
			"map[] 1 [ssd]"},
	} {
		v := newVolume(name)
		remove(t, v)
		pen(t, name, func(v *api.Volume) {
			v.Status.State, v.Status.IsStandby = api.VolumeStandby, true
			v.Status.Standby = &api.StandbyStatus{Held: held, Next: held, Progress: 30}
		})
		drover(t, kubeconfig(append([]string{"volume", "create", name, "--standby"}, c.args...)...)...).mustSay(t, 0,
			`follows the backups of volume "rest"`)
		if err := store.Get(t.Context(), client.ObjectKey{Name: name}, v); err != nil {
			t.Fatal(err)
		}
		s := v.Spec
		if got := fmt.Sprint(v.Labels, " ", s.NumberOfReplicas, " ", s.DiskSelector); got != c.want ||
			s.FromBackup != "file:///offsite?volume=rest" || s.Size != 32<<20 || !s.Standby {
			t.Errorf("%s: %s, want %s; %+v", name, got, c.want, s)
		}
	}
	drover(t, kubeconfig("volume", "show", "dr-1")...).mustSay(t, 0, "holds backup rest-b of 2026-01-02",
		"rest-b of 2026-01-02T03:04:05Z, 30 %")
	drover(t, kubeconfig("volume", "attach", "dr-1", "--node", "n1")...).mustSay(t, 5, "drover volume activate dr-1")
	drover(t, kubeconfig("volume", "activate", "rest-1")...).mustSay(t, 2, "no standby volume")
}
