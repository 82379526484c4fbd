package cli_test

import (
	"context"
	"maps"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// newBackup is a Backup as the planner leaves it.
func newBackup(name, volume, target string) *api.Backup {
	b := &api.Backup{Spec: api.BackupSpec{Volume: volume, BackupTargetName: target}}
	b.Name, b.Finalizers = name, []string{api.Finalizer}
	return b
}

func newVolume(name string) *api.Volume {
	v := &api.Volume{Spec: api.VolumeSpec{Size: 10 << 20}}
	v.Name = name
	return v
}

// TestBackupCreateFollowsTheBackup: backup create remarks each reason for waiting, shows the progress, and prints the
// outcome. The flags become the spec.
func TestBackupCreateFollowsTheBackup(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	v := newVolume("followed")
	place(t, v, newTarget("followed"))
	place(t, api.NewSnapshot(v, "followed-1"))
	remove(t, newBackup("followed-b", "", ""))
	remarks, done := make(heard, 1000), make(chan result, 1)
	go func() {
		done <- droverTo(ctx, remarks, kubeconfig("backup", "create", "followed", "--name", "followed-b", "--snapshot",
			"followed-1", "--target", "followed", "--full", "--label", "a=b,c=d")...)
	}()
	write := func(change func(*api.BackupStatus)) {
		t.Helper()
		if err := status(ctx, "followed-b", func(b *api.Backup) { change(&b.Status) }); err != nil {
			t.Fatal(err)
		}
	}
	for _, why := range []string{"target is unavailable", "all places are taken"} {
		write(func(s *api.BackupStatus) { s.State, s.Message = api.BackupPending, why })
		remarks.await(t, ctx, `backup "followed-b" waits: `+why)
	}
	write(func(s *api.BackupStatus) {
		s.State, s.Message, s.BytesDone, s.BytesTotal = api.BackupInProgress, "", 5<<20, 10<<20
	})
	remarks.await(t, ctx, "backup followed-b: in-progress, 50 %, 5 MiB of 10 MiB")
	write(func(s *api.BackupStatus) {
		s.State, s.VolumeSize, s.NewlyUploadDataSize, s.BackupMode = api.BackupCompleted, 10<<20, 3<<20, api.BackupFull
	})
	r := within(t, "end of backup create", done)
	r.mustSay(t, 0, `backup "followed-b" of volume "followed" completed: 10 MiB, 3 MiB uploaded, full, in`)
	var b api.Backup
	if err := store.Get(ctx, client.ObjectKey{Name: "followed-b"}, &b); err != nil {
		t.Fatal(err)
	}
	if s := b.Spec; s.Volume != "followed" || s.BackupTargetName != "followed" || s.SnapshotName != "followed-1" ||
		s.BackupMode != api.BackupFull || !maps.Equal(s.Labels, map[string]string{"a": "b", "c": "d"}) {
		t.Errorf("%+v", s)
	}
}

// TestBackupCreateTakesTheTargetOfTheVolume: without --target, a backup goes to the target that the volume's parameter
// names.
func TestBackupCreateTakesTheTargetOfTheVolume(t *testing.T) {
	v := newVolume("parametered")
	v.Spec.Parameters = map[string]string{api.ParameterBackupTarget: "of-volume"}
	b := newBackup("parametered-b", "", "")
	place(t, v, newTarget("of-volume"))
	remove(t, b)
	drover(t, kubeconfig("backup", "create", "parametered", "--name", b.Name, "--wait=false")...).mustSay(t, 0, b.Name)
	if err := store.Get(t.Context(), client.ObjectKeyFromObject(b), b); err != nil || b.Target() != "of-volume" {
		t.Errorf("the target is %q: %v", b.Target(), err)
	}
}

// TestBackupCreateEndsWithTheErrorOfTheBackup: exit code and message of backup create are those of the backup.
func TestBackupCreateEndsWithTheErrorOfTheBackup(t *testing.T) {
	place(t, newVolume("failing"), newTarget("failing"))
	remove(t, newBackup("failing-b", "", ""))
	pen(t, "failing-b", func(b *api.Backup) {
		b.Status.State, b.Status.Message = api.BackupError, "store: access denied"
	})
	drover(t, kubeconfig("backup", "create", "failing", "--name", "failing-b", "--target", "failing")...).
		mustSay(t, 1, `backup "failing-b" failed: store: access denied`)
}

// TestBackupCreateOfADeletedBackup: backup create does not wait for a backup that another command deletes.
func TestBackupCreateOfADeletedBackup(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	place(t, newVolume("undone"), newTarget("undone"))
	remove(t, newBackup("undone-b", "", ""))
	done := make(chan result, 1)
	go func() {
		done <- droverIn(ctx, kubeconfig("backup", "create", "undone", "--name", "undone-b", "--target", "undone")...)
	}()
	if err := status(ctx, "undone-b", func(b *api.Backup) { b.Status.State = api.BackupPending }); err != nil {
		t.Fatal(err)
	}
	if _, err := await.Edit(ctx, store, "undone-b", func(b *api.Backup) (bool, error) {
		b.Finalizers = []string{api.Finalizer}
		return true, nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := store.Delete(ctx, newBackup("undone-b", "", "")); err != nil {
		t.Fatal(err)
	}
	r := within(t, "end of backup create", done)
	r.mustSay(t, 3, `backup "undone-b" was deleted meanwhile`)
}

// TestBackupCreateInterrupted: Ctrl-C and --timeout end the command, but not the backup. The command says so, and how
// to follow or end the backup.
func TestBackupCreateInterrupted(t *testing.T) {
	place(t, newVolume("stopped"), newTarget("stopped"))
	ctx, interrupt := context.WithTimeout(t.Context(), 5*time.Minute)
	defer interrupt()
	remove(t, newBackup("stopped-0s", "", ""))
	done := make(chan result, 1)
	go func() {
		done <- droverIn(ctx, kubeconfig("backup", "create", "stopped", "--name", "stopped-0s", "--target", "stopped")...)
	}()
	if err := created[*api.Backup](ctx, "stopped-0s"); err != nil {
		t.Fatal(err)
	}
	interrupt()
	r := within(t, "end of backup create", done)
	r.mustSay(t, 130, `interrupted: backup "stopped-0s" continues`, "drover backup show stopped-0s",
		"drover backup delete stopped-0s")
	continues(t, "stopped-0s")
	for _, patience := range []string{"1s", "5s", "30s"} { // a busy machine may need a second before the backup exists
		name := "stopped-" + patience
		remove(t, newBackup(name, "", ""))
		r := drover(t, kubeconfig("backup", "create", "stopped", "--name", name, "--target", "stopped", "--timeout",
			patience)...)
		if patience == "30s" || strings.Contains(r.err, "continues") {
			r.mustSay(t, 4, "timed out after "+patience+`: backup "`+name+`" continues`)
			continues(t, name)
			return
		}
	}
}

// continues fails if a backup is being deleted.
func continues(t *testing.T, name string) {
	t.Helper()
	var b api.Backup
	if err := store.Get(t.Context(), client.ObjectKey{Name: name}, &b); err != nil || b.DeletionTimestamp != nil {
		t.Errorf("backup %s ended with the command: %v", name, err)
	}
}

// TestBackupCreateRefusesAtOnce: backup create refuses what no node can do, and makes no object. Without --name the
// command finds a free name.
func TestBackupCreateRefusesAtOnce(t *testing.T) {
	deleted, closed, other := newVolume("refused-gone"), newTarget("refused-closed"), newVolume("refused-other")
	deleted.Finalizers, closed.Spec.ReadOnly = []string{"drover.io/test"}, true
	place(t, newVolume("refused"), deleted, other, newTarget("refused"), closed)
	place(t, api.NewSnapshot(other, "refused-s"))
	if err := store.Delete(t.Context(), deleted.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		code int
		args string
		want string
	}{
		{3, "nosuch --target refused", "drover volume list"},
		{3, "refused", "drover target create URL"},
		{3, "refused --target nosuch", "drover target list"},
		{3, "refused --target refused --snapshot nosuch", "drover snapshot list"},
		{2, "refused --target refused --snapshot refused-s", `snapshot "refused-s" is one of volume "refused-other"`},
		{2, "refused --target refused --name Not_A_Name", "lower-case"},
		{5, "refused --target refused-closed", "read-only"},
		{5, "refused-gone --target refused", "is deleted"},
	} {
		argv := append([]string{"backup", "create", "--wait=false"}, strings.Fields(c.args)...)
		drover(t, kubeconfig(argv...)...).mustSay(t, c.code, c.want)
	}
	drover(t, kubeconfig("backup", "list", "--target", "refused", "-o", "name")...).mustSay(t, 0)
	argv := kubeconfig("backup", "create", "refused", "--target", "refused", "--wait=false", "-o", "name")
	names := map[string]bool{}
	for range 3 {
		r := drover(t, argv...)
		r.mustSay(t, 0, "backup.storage.drover.io/refused-")
		names[r.out] = true
		b := newBackup(strings.TrimPrefix(strings.TrimSpace(r.out), "backup.storage.drover.io/"), "", "")
		remove(t, b)
	}
	if len(names) != 3 {
		t.Errorf("%v", names)
	}
	for name := range names {
		name = strings.TrimPrefix(strings.TrimSpace(name), "backup.storage.drover.io/")
		drover(t, kubeconfig("backup", "create", "refused", "--target", "refused", "--name", name)...).
			mustSay(t, 5, "already")
	}
}

// TestBackupListAndShow: backup list is in the order of volumes and instants, and selects; backup show has the facts,
// and prints no control characters of a store.
func TestBackupListAndShow(t *testing.T) {
	late, early, other := newBackup("listed-a", "listed", "listed-1"), newBackup("listed-b", "listed", "listed-2"),
		newBackup("listed-c", "alisted", "listed-1")
	place(t, late, early, other)
	id := strings.Repeat("0a", 32)
	next := metav1.NewTime(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC))
	for b, s := range map[*api.Backup]api.BackupStatus{
		late: {CommonBackupStatus: api.CommonBackupStatus{State: api.BackupCompleted, SnapshotID: id,
			NewlyUploadDataSize: 3 << 20, Cluster: "elsewhere-1", Labels: map[string]string{"k": "v\x1b[2J"}},
			SnapshotCreatedAt: "2026-11-28T00:30:00Z", VolumeSize: 10 << 30, BackupMode: api.BackupIncremental},
		early: {CommonBackupStatus: api.CommonBackupStatus{State: api.BackupCompleted},
			SnapshotCreatedAt: "2026-11-28T01:00:00+01:00"},
		other: {CommonBackupStatus: api.CommonBackupStatus{State: api.BackupPending, Message: "no answer", Attempts: 2,
			NextTry: &next}, SnapshotCreatedAt: "2026-11-28T00:10:00Z"},
	} {
		b.Status = s
		if err := store.Status().Update(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
	for line, want := range map[string][]string{
		"backup list --volume listed":                     {"listed-b", "listed-a"},
		"backup list --target listed-1":                   {"listed-c", "listed-a"},
		"backup list --target listed-1 --volume listed":   {"listed-a"},
		"backup list --target listed-1 --volume listed-2": nil,
	} {
		r := drover(t, kubeconfig(append(strings.Fields(line), "-o", "name")...)...)
		r.mustSay(t, 0)
		got := strings.Fields(strings.ReplaceAll(r.out, "backup.storage.drover.io/", ""))
		if strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("%s: %v, want %v", line, got, want)
		}
	}
	drover(t, kubeconfig("backup", "list", "--volume", "listed")...).
		mustSay(t, 0, "NAME", "Completed", "10 GiB", "3 MiB", "2026-11-28T00:30:00Z")
	for form, shown := range map[string]bool{"table": false, "wide": true} {
		r := drover(t, kubeconfig("backup", "list", "--volume", "listed", "-o", form)...)
		if r.mustSay(t, 0); strings.Contains(r.out, "elsewhere-1") != shown || strings.Contains(r.out, "CLUSTER") != shown {
			t.Errorf("-o %s: %s", form, r.out)
		}
	}
	r := drover(t, kubeconfig("backup", "show", "listed-a")...)
	r.mustSay(t, 0, id, "10 GiB", "incremental", "k=v", "listed-1", "elsewhere-1")
	if strings.Contains(r.out, "\x1b") {
		t.Errorf("a label moves the cursor: %q", r.out)
	}
	drover(t, kubeconfig("backup", "show", "listed-c")...).
		mustSay(t, 0, "2 attempts failed, the next is at 2030-01-02T03:04:05Z", "no answer")
}

// TestBackupDeleteWaitsForTheStore: backup delete ends when the Backup is gone, and remarks why it waits; with
// --wait=false the command ends at once.
func TestBackupDeleteWaitsForTheStore(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	place(t, newBackup("deleted-1", "v", "t"), newBackup("deleted-2", "v", "t"))
	remarks, done := make(heard, 1000), make(chan result, 1)
	go func() { done <- droverTo(ctx, remarks, kubeconfig("backup", "delete", "deleted-1")...) }()
	if _, err := await.Until(ctx, store, "deleted-1", func(b *api.Backup) (bool, error) {
		return b.DeletionTimestamp != nil, nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := status(ctx, "deleted-1", func(b *api.Backup) {
		b.Status.State, b.Status.Message = api.BackupDeleting, "target is read-only"
	}); err != nil {
		t.Fatal(err)
	}
	remarks.await(t, ctx, `backup "deleted-1" waits: target is read-only`)
	if _, err := await.Edit(ctx, store, "deleted-1", func(b *api.Backup) (bool, error) {
		b.Finalizers = nil
		return true, nil
	}); err != nil {
		t.Fatal(err)
	}
	r := within(t, "end of backup delete", done)
	r.mustSay(t, 0, `backup "deleted-1" deleted`)
	drover(t, kubeconfig("backup", "delete", "deleted-2", "--wait=false")...).
		mustSay(t, 0, `backup "deleted-2" is being deleted`)
	drover(t, kubeconfig("backup", "delete", "nosuch")...).mustSay(t, 3, "drover backup list")
}

// TestImageBackupCommands: `image backup` names the backup by content and target, refuses a second one and an image that
// is not ready; `backup images` and `backup volumes` list; the only backup of an image that a volume's backup has is
// deleted by force alone.
func TestImageBackupCommands(t *testing.T) {
	digest, sum := strings.Repeat("1f", 32), strings.Repeat("2e", 64)
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceUpload, SourceParameters: map[string]string{}}}
	img.Name = "travels"
	target := &api.BackupTarget{Spec: api.BackupTargetSpec{BackupTargetURL: "file:///srv/travel"}}
	target.Name = "travel"
	user, mirror := newBackup("of-traveller", "traveller", "travel"), &api.BackupVolume{
		Spec: api.BackupVolumeSpec{VolumeName: "traveller", BackupTargetName: "travel"}}
	mirror.Name = api.BackupVolumeName("traveller", "travel")
	place(t, img, target, user, mirror)
	backUp := []string{"image", "backup", "travels", "--target", "travel", "--wait=false"}
	drover(t, kubeconfig(backUp...)...).mustSay(t, 6, "not ready")
	img.Status.Digest, img.Status.Checksum, img.Status.State = digest, sum, api.ImageReady
	mirror.Status = api.BackupVolumeStatus{Backups: 3, LastBackupName: "of-traveller", Size: 1 << 30}
	user.Status.State, user.Status.SnapshotID = api.BackupCompleted, strings.Repeat("0a", 32)
	user.Status.VolumeBackingImageName, user.Status.VolumeBackingImageDigest = "travels", digest
	for _, o := range []client.Object{img, mirror, user} {
		if err := store.Status().Update(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	const name = "travels-1f1f1f1f.travel"
	drover(t, kubeconfig(backUp...)...).mustSay(t, 0, name)
	drover(t, kubeconfig(backUp...)...).mustSay(t, 5, "exists already")
	var b api.BackupBackingImage
	if err := store.Get(t.Context(), client.ObjectKey{Name: name}, &b); err != nil || !b.Spec.UserCreated ||
		b.Spec.Digest != digest || b.Target() != "travel" {
		t.Fatalf("%+v, %v", b.Spec, err)
	}
	b.Status.State, b.Status.SnapshotID, b.Status.Checksum = api.BackupCompleted, strings.Repeat("0b", 32), sum
	b.Status.Size, b.Status.Digest = 3<<30, digest
	if err := store.Status().Update(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("backup", "images", "--target", "travel")...).mustSay(t, 0, name, "3 GiB", "Completed", sum[:16])
	drover(t, kubeconfig("backup", "images", name)...).mustSay(t, 0, sum, digest)
	b.Status.Damaged = true
	if err := store.Status().Update(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("backup", "images", "--target", "travel")...).mustSay(t, 0, "DAMAGED", "yes")
	drover(t, kubeconfig("backup", "images", name)...).mustSay(t, 0, "drover target show travel")
	img.Status.Digest = strings.Repeat("2e", 32)
	if err := store.Status().Update(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig(backUp...)...).mustSay(t, 0, "other content: digest 1f1f1f1f1f1f1f1f instead of 2e2e")
	other := &api.BackupBackingImage{}
	other.Name = "travels-2e2e2e2e.travel"
	if err := store.Delete(t.Context(), other); err != nil {
		t.Error(err)
	}
	drover(t, kubeconfig("backup", "volumes", "--target", "travel")...).mustSay(t, 0, "traveller", "of-traveller", "1 GiB")
	drover(t, kubeconfig("backup", "delete", "--image", name)...).mustSay(t, 5, "of-traveller", "--force")
	drover(t, kubeconfig("backup", "delete", "--image", "--force", name)...).mustSay(t, 0, "deleted")
}

// TestVerifyOfAnImagesBackup: `backup verify NAME` finds the backup of an image, too, and ends with an error for the
// damage of that backup alone.
func TestVerifyOfAnImagesBackup(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	target := &api.BackupTarget{Spec: api.BackupTargetSpec{BackupTargetURL: "file:///srv/verified"}}
	target.Name = "verified"
	image := &api.BackupBackingImage{Spec: api.BackupBackingImageSpec{BackupTargetName: "verified",
		BackingImageName: "golden", Digest: strings.Repeat("1f", 32)}}
	image.Name = "golden-1f"
	place(t, target, image)
	for damaged, code := range map[bool]int{false: 0, true: 1} {
		image.Status.Damaged = damaged
		if err := store.Status().Update(ctx, image); err != nil {
			t.Fatal(err)
		}
		remarks, done := make(heard, 1000), make(chan result, 1)
		go func() { done <- droverTo(ctx, remarks, kubeconfig("backup", "verify", "golden-1f")...) }()
		before := target.Spec.VerifyRequestedAt
		asked, err := await.Until(ctx, store, "verified", func(t *api.BackupTarget) (bool, error) {
			return t.Spec.VerifyRequestedAt != nil && !t.Spec.VerifyRequestedAt.Equal(before), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		target = asked
		target.Status.Verification = &api.VerificationFact{Request: asked.Spec.VerifyRequestedAt, DamagedBlobs: 1}
		if err := store.Status().Update(ctx, target); err != nil {
			t.Fatal(err)
		}
		within(t, "end of backup verify", done).mustSay(t, code, `target "verified" verified`)
		if damaged {
			remarks.await(t, ctx, `backup "golden-1f" is damaged`)
		}
	}
}
