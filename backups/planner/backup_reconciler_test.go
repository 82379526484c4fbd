package planner

import (
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestBackupWaitsForItsTargetAndItsSnapshot: a backup takes no snapshot before its target takes backups, and has a
// source as soon as the snapshot is ready. From then on the planner leaves the status to the node.
func TestBackupWaitsForItsTargetAndItsSnapshot(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	v := w.addVolume("v", "n1", "n2")
	apitest.EditStatus(w.Server, v, func(v *api.Volume) { v.Status.AttachedNode = "n1" })
	b := w.addBackup("b", "v", "")
	w.awaitState("b", api.BackupPending, "backup target t does not exist")
	target := &api.BackupTarget{ObjectMeta: apitest.Named("t"), Spec: api.BackupTargetSpec{BackupTargetURL: "file:///srv/t"}}
	w.Create(target)
	w.awaitState("b", api.BackupPending, "no node has looked")
	apitest.EditStatus(w.Server, target, func(t *api.BackupTarget) { t.Status.Message = "the folder is missing" })
	w.awaitState("b", api.BackupPending, "backup target t is unavailable: the folder is missing")
	apitest.Edit(w.Server, target, func(t *api.BackupTarget) { t.Spec.ReadOnly = true })
	apitest.EditStatus(w.Server, target, func(t *api.BackupTarget) { t.Status.Available = true })
	w.awaitState("b", api.BackupPending, "read-only")
	w.stays("b", "the target takes no backup")
	err := w.Client.Get(w.Ctx, client.ObjectKey{Name: b.OwnSnapshotName()}, &api.Snapshot{})
	if client.IgnoreNotFound(err) != nil || err == nil {
		t.Fatalf("a snapshot was taken for a target that takes no backup: %v", err)
	}
	apitest.Edit(w.Server, target, func(t *api.BackupTarget) { t.Spec.ReadOnly = false })

	s := w.awaitSnapshot(b)
	if s.Spec.Volume != "v" || !s.Spec.CreateSnapshot || s.Spec.Labels[api.LabelBackup] != "b" ||
		s.Spec.Labels[api.LabelClone] == "" || s.OfBackup() != b.UID {
		t.Errorf("%+v", s)
	}
	w.awaitState("b", api.BackupPending, "being taken")
	apitest.EditStatus(w.Server, s, func(s *api.Snapshot) { s.Status.Error = "no room" })
	w.awaitState("b", api.BackupPending, "snapshot "+s.Name+" of volume v is not ready: no room")
	s = w.cut(s, v)

	b = w.awaitSource("b", "n2") // n1 has the device
	var rep api.Replica
	if err := w.Client.Get(w.Ctx, client.ObjectKey{Name: "v.n2"}, &rep); err != nil {
		t.Fatal(err)
	}
	if want := (api.ExportFact{Volume: "v", VolumeUID: v.Status.UID, Snapshot: s.Name, SnapshotUID: s.Status.UID,
		Replica: rep.Spec.UID, Node: "n2", Disk: rep.Spec.Disk, CreationTime: s.Status.CreationTime}); *b.Spec.Source != want {
		t.Errorf("%+v, want %+v", *b.Spec.Source, want)
	}
	if b.Labels[api.LabelVolume] != "v" || b.Labels[api.LabelBackupTarget] != "t" || len(b.Finalizers) != 1 ||
		b.Finalizers[0] != api.Finalizer {
		t.Errorf("%+v", b.ObjectMeta)
	}
	apitest.EditStatus(w.Server, b, func(b *api.Backup) {
		b.Status = api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupInProgress, OwnerID: "n2", Progress: 40, Message: "uploads"}}
	})
	apitest.EditStatus(w.Server, target, func(t *api.BackupTarget) { t.Status.Available = false })
	w.stays("b", "the node owns the status")
}

// TestBackupWithoutATargetTakesItsVolumes: a backup that names no target gets the one that its volume's parameter names,
// else default. A parameter that names no target is an error.
func TestBackupWithoutATargetTakesItsVolumes(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("offsite")
	for name, parameters := range map[string]map[string]string{"parametered": {"backupTargetName": "offsite"},
		"plain": nil, "wrong": {"backupTargetName": strings.Repeat("x", 64)}} {
		v := apitest.Volume(name, 16<<20)
		v.Finalizers, v.Spec.Parameters = []string{api.Finalizer}, parameters
		w.Create(v)
		w.addMembers(v, "n1")
		w.addSnapshot(v, name+"-s")
		w.Create(&api.Backup{ObjectMeta: apitest.Named(name), Spec: api.BackupSpec{Volume: name, SnapshotName: name + "-s"}})
	}
	b := w.awaitSource("parametered", "n1")
	if b.Spec.BackupTargetName != "offsite" || b.Labels[api.LabelBackupTarget] != "offsite" {
		t.Errorf("the target is %q, the labels are %v", b.Spec.BackupTargetName, b.Labels)
	}
	if b := w.awaitState("plain", api.BackupPending, "target default does not exist"); b.Spec.BackupTargetName != "default" {
		t.Errorf("the target is %q", b.Spec.BackupTargetName)
	}
	w.awaitState("wrong", api.BackupError, "parameter backupTargetName of the volume")
	b.Spec.BackupTargetName = "default"
	if err := w.Client.Update(w.Ctx, b); err == nil {
		t.Error("a backup goes to another target")
	}
}

// TestImpossibleBackupsFail: a backup that no later change makes possible has an Error at once, with one event.
func TestImpossibleBackupsFail(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	v, other, leaving := w.addVolume("v", "n1"), w.addVolume("other", "n1"), w.addVolume("leaving", "n1")
	w.addSnapshot(other, "of-other")
	earlier := w.addSnapshot(v, "earlier")
	apitest.EditStatus(w.Server, earlier, func(s *api.Snapshot) { s.Status.VolumeUID = "earlier" })
	w.Delete(w.addSnapshot(v, "deleted"))
	w.Delete(leaving)
	for name, c := range map[string]struct{ volume, snapshot, why string }{
		"no-volume":      {"none", "", "volume none does not exist"},
		"lost-volume":    {"none", "of-other", "volume none does not exist"},
		"no-snapshot":    {"v", "none", "snapshot none of volume v does not exist"},
		"other-volume":   {"v", "of-other", "snapshot of-other is of volume other, not of volume v"},
		"earlier-volume": {"v", "earlier", "snapshot earlier is of an earlier volume v"},
		"deleted":        {"v", "deleted", "snapshot deleted of volume v is being deleted"},
		"volume-leaves":  {"leaving", "", "volume leaving is being deleted"},
		"no-name":        {"../v", "", `volume "../v" does not exist`},
		"no-name-either": {"v", "A snapshot", `snapshot "A snapshot" does not exist`},
	} {
		w.addBackup(name, c.volume, c.snapshot)
		b := w.awaitState(name, api.BackupError, c.why)
		if _, err := time.Parse(time.RFC3339, b.Status.BackupCreatedAt); err != nil || b.Spec.Source != nil {
			t.Errorf("%s: end %v, source %+v", name, err, b.Spec.Source)
		}
		e := w.AwaitEvent("BackupFailed "+name, func(e *eventsv1.Event) bool {
			return e.Reason == "BackupFailed" && e.Regarding.Name == name
		})
		if e.Type != "Warning" || !strings.Contains(e.Note, c.why) {
			t.Errorf("%s: event %s %q", name, e.Type, e.Note)
		}
	}
}

// TestKeptVolumeIsBackedUp: a deleted volume that stays for its snapshots is backed up from a snapshot.
func TestKeptVolumeIsBackedUp(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	v := w.addVolume("v", "n1")
	w.addSnapshot(v, "s")
	w.Delete(v)
	apitest.EditStatus(w.Server, v, func(v *api.Volume) {
		v.Status.State = api.VolumeDeleting
		meta.SetStatusCondition(&v.Status.Conditions, metav1.Condition{Type: api.ConditionKept, Status: "True", Reason: "Snapshots"})
	})
	w.addBackup("b", "v", "s")
	w.awaitSource("b", "n1")
}

// TestVolumeWithoutMembersIsAwaited: a backup of a volume in creation waits for the members, and takes its snapshot
// then.
func TestVolumeWithoutMembersIsAwaited(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	v := apitest.Volume("v", 16<<20)
	w.Create(v)
	b := w.addBackup("b", "v", "")
	w.awaitState("b", api.BackupPending, "volume v is not ready: it is new")
	w.addMembers(v, "n1")
	w.cut(w.awaitSnapshot(b), v)
	w.awaitSource("b", "n1")
}

// TestDeadNodeOfTheDevice: a volume attached to a node without heartbeats is backed up from another replica if the
// snapshot exists; a backup that needs a new snapshot waits, and says for which node.
func TestDeadNodeOfTheDevice(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	w.addTarget("t")
	v := w.addVolume("v", "n1", "n2")
	apitest.EditStatus(w.Server, v, func(v *api.Volume) { v.Status.AttachedNode = "n1" })
	w.addSnapshot(v, "s")
	w.editNode("n1", func(n *api.NodeStatus) { n.Heartbeat = metav1.NewTime(time.Now().Add(-time.Hour)) })
	w.addBackup("b", "v", "s")
	w.awaitSource("b", "n2")
	c := w.addBackup("c", "v", "")
	w.awaitState("c", api.BackupPending, "volume v is attached to node n1, which gives no sign of life")
	w.cut(w.awaitSnapshot(c), v)
	w.awaitSource("c", "n2")
}

// TestLongNames: names of 128 characters, the longest that a backup and its volume can have, make valid labels.
func TestLongNames(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	long := strings.Repeat("a", 62) + "." + strings.Repeat("b", 65)
	v := w.addVolume(long, "n1")
	b := w.addBackup(long, long, "")
	w.cut(w.awaitSnapshot(b), v)
	if b = w.awaitSource(long, "n1"); b.Labels[api.LabelVolume] != strings.Repeat("a", 62) {
		t.Errorf("%q", b.Labels)
	}
	s := w.awaitSnapshot(b)
	w.complete(b)
	w.Delete(w.awaitBackup(long, "completed", func(b *api.Backup) bool { return b.Ended() }))
	awaitLeaving(w, s, &api.SnapshotList{})
}

// TestTwoBackupsOfOneVolume: each backup of a volume has a snapshot of its own.
func TestTwoBackupsOfOneVolume(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	v := w.addVolume("v", "n1")
	a, b := w.addBackup("a", "v", ""), w.addBackup("b", "v", "")
	w.cut(w.awaitSnapshot(a), v)
	w.cut(w.awaitSnapshot(b), v)
	a, b = w.awaitSource("a", "n1"), w.awaitSource("b", "n1")
	if a.Spec.Source.Snapshot == b.Spec.Source.Snapshot {
		t.Errorf("both have snapshot %s", a.Spec.Source.Snapshot)
	}
}

// TestOwnSnapshotIsTakenAgain: a backup whose snapshot was deleted before the backup began takes another one.
func TestOwnSnapshotIsTakenAgain(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	v := w.addVolume("v", "n1")
	b := w.addBackup("b", "v", "")
	first := w.awaitSnapshot(b)
	w.Delete(first)
	w.awaitState("b", api.BackupPending, "takes another snapshot afterwards")
	apitest.Edit(w.Server, first, func(s *api.Snapshot) { s.Finalizers = nil })
	second := apitest.Await(w.Server, &api.Snapshot{ObjectMeta: apitest.Named(first.Name)}, &api.SnapshotList{}, "another",
		func(s *api.Snapshot) bool { return s.UID != first.UID })
	w.cut(second, v)
	if b = w.awaitSource("b", "n1"); b.Spec.Source.SnapshotUID != api.UID(second.UID) {
		t.Errorf("%+v", b.Spec.Source)
	}
}
