package controller

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

const cutTime = "2026-11-28T10:30:00.25Z"

// backupRoom stands in for the room backups: until the test ends, a new Backup gets a source, and its own Snapshot. The
// Backup "failing" gets an error, and "image-first" waits with its Snapshot, but without a source, for the backup of an
// image.
func backupRoom(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w, err := store.Watch(ctx, &api.BackupList{})
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range w.ResultChan() {
			b, is := e.Object.(*api.Backup)
			if !is || b.Spec.Source != nil || b.Status.State != "" || b.DeletionTimestamp != nil {
				continue
			}
			if b.Name == "failing" {
				b.Status.State, b.Status.Message = api.BackupError, "the disk is on fire"
				if err := store.Status().Update(ctx, b); err != nil {
					t.Error(err)
				}
				continue
			}
			snap := &api.Snapshot{ObjectMeta: metav1.ObjectMeta{Name: b.OwnSnapshotName()}, Spec: api.SnapshotSpec{
				Volume: b.Spec.Volume, CreateSnapshot: true, Labels: map[string]string{api.LabelClone: b.Name}}}
			if err := store.Create(ctx, snap); err != nil {
				t.Error(err)
			}
			snap.Status.CreationTime, snap.Status.RestoreSize = cutTime, 64<<20
			if err := store.Status().Update(ctx, snap); err != nil {
				t.Error(err)
			}
			if b.Name == "image-first" {
				b.Status.State, b.Status.Message = api.BackupPending, "image golden is backed up first"
				if err := store.Status().Update(ctx, b); err != nil {
					t.Error(err)
				}
				continue
			}
			b.Spec.Source = &api.ExportFact{Volume: b.Spec.Volume, Snapshot: snap.Name, CreationTime: cutTime}
			if err := store.Update(ctx, b); err != nil {
				t.Error(err)
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		must(t, store.DeleteAllOf(context.Background(), &api.Snapshot{}))
		must(t, store.DeleteAllOf(context.Background(), &api.Backup{}))
	})
}

func makeTarget(t *testing.T, name string, readOnly bool) {
	t.Helper()
	o := &api.BackupTarget{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: api.BackupTargetSpec{BackupTargetURL: "file:///" + name, ReadOnly: readOnly}}
	must(t, store.Create(t.Context(), o))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), o)) })
}

// completeBackup is the status of a backup that the store of a target has.
func completeBackup(t *testing.T, name string) *api.Backup {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	b, err := await.Until(ctx, store, name, func(b *api.Backup) (bool, error) { // the room is done with the backup
		return b.Spec.Source != nil || b.Spec.SnapshotID != "", nil
	})
	must(t, err)
	b.Status = api.BackupStatus{VolumeSize: 64 << 20, SnapshotCreatedAt: cutTime, VolumeBackingImageName: "golden",
		CommonBackupStatus: api.CommonBackupStatus{State: api.BackupCompleted, SnapshotID: strings.Repeat("a", 64),
			URL: api.BackupURL("file:///"+b.Target(), b.Name, b.Spec.Volume)}}
	must(t, store.Status().Update(t.Context(), b))
	return b
}

func backUp(name, volume string, kv ...string) (*csi.Snapshot, error) {
	r := &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume, Parameters: map[string]string{"type": "bak"}}
	for i := 0; i < len(kv); i += 2 {
		r.Parameters[kv[i]] = kv[i+1]
	}
	res, err := door.CreateSnapshot(context.Background(), r)
	return res.GetSnapshot(), err
}

// TestBackupSnapshot: a snapshot of type bak is a Backup: created once for its name, ready when the store has the
// backup, with one size and creation time in every answer, listed, and deleted with its handle.
func TestBackupSnapshot(t *testing.T) {
	loops(t, ready(t), nil)
	backupRoom(t)
	makeTarget(t, "default", false)
	makeTarget(t, "offsite", false)
	makeTarget(t, "read-only", true)
	create(t, request("backed"))
	create(t, request("other", "backupTargetName", "offsite"))

	for _, c := range []struct {
		name, volume string
		kind         api.Kind
		class        []string
	}{
		{"b", "none", api.NotFound, nil},
		{"b", "backed", api.Invalid, []string{"backupMode", "huge"}},
		{"b", "backed", api.Invalid, []string{"diskSelector", "ssd"}},
		{"b", "backed", api.Invalid, []string{"backupTargetName", "../x"}},
		{"b", "backed", api.Unavailable, []string{"backupTargetName", "missing"}},
		{"b", "backed", api.InUse, []string{"backupTargetName", "read-only"}},
		{"failing", "backed", api.Other, nil},
	} {
		if _, err := backUp(c.name, c.volume, c.class...); !api.Is(err, c.kind) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if _, err := backUp("failing", "backed"); err == nil || !strings.Contains(err.Error(), "on fire") {
		t.Errorf("the error does not say why: %v", err)
	}

	want := csi.Snapshot{SnapshotId: "bak://backed/b", SourceVolumeId: "backed", SizeBytes: 64 << 20}
	at, err := time.Parse(time.RFC3339Nano, cutTime)
	must(t, err)
	check := func(what string, s *csi.Snapshot, err error, ready bool) {
		t.Helper()
		must(t, err)
		if s.SnapshotId != want.SnapshotId || s.SourceVolumeId != want.SourceVolumeId || s.SizeBytes != want.SizeBytes ||
			!s.CreationTime.AsTime().Equal(at) || s.ReadyToUse != ready {
			t.Errorf("%s: %v", what, s)
		}
	}
	s, err := backUp("b", "backed", "backupMode", "full")
	check("new", s, err, false)
	s, err = backUp("b", "backed", "backupMode", "full")
	check("again", s, err, false)
	_, err = backUp("b", "other")
	wantKind(t, err, api.Exists, "backed")
	_, err = backUp("b", "backed", "backupTargetName", "offsite")
	wantKind(t, err, api.Exists, "default")

	_, err = backUp("of-other", "other")
	must(t, err)
	if b := completeBackup(t, "of-other"); b.Target() != "offsite" {
		t.Errorf("the volume's class names the target offsite; the backup is in %s", b.Target())
	}
	if b := completeBackup(t, "b"); b.Spec.BackupMode != api.BackupFull {
		t.Errorf("spec %+v", b.Spec)
	}
	s, err = backUp("b", "backed", "backupMode", "full")
	check("completed", s, err, true)
	got, err := door.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: "bak://backed/b"})
	check("read", got.GetSnapshot(), err, true)

	for _, c := range []struct {
		req  *csi.ListSnapshotsRequest
		want []string
	}{
		{&csi.ListSnapshotsRequest{}, []string{"bak://backed/b", "bak://other/of-other"}},
		{&csi.ListSnapshotsRequest{SourceVolumeId: "other"}, []string{"bak://other/of-other"}},
		{&csi.ListSnapshotsRequest{SnapshotId: "bak://backed/b"}, []string{"bak://backed/b"}},
		{&csi.ListSnapshotsRequest{SnapshotId: "bak://other/b"}, nil},
		{&csi.ListSnapshotsRequest{MaxEntries: 1}, []string{"bak://backed/b"}},
		{&csi.ListSnapshotsRequest{StartingToken: tokenPrefix + "bak.b"}, []string{"bak://other/of-other"}},
	} {
		res, err := door.ListSnapshots(t.Context(), c.req)
		must(t, err)
		var ids []string
		for _, e := range res.Entries {
			ids = append(ids, e.Snapshot.SnapshotId)
		}
		if !slices.Equal(ids, c.want) || c.req.MaxEntries == 1 && res.NextToken != tokenPrefix+"bak.b" {
			t.Errorf("%v: %v, then %q", c.req, ids, res.NextToken)
		}
	}
	for _, id := range []string{"bak://other/b", "bak://backed/none", "bak://b", "bak://../b/c", "bak://backed/b"} {
		_, err := door.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
		must(t, err)
		if _, err := door.readBackup(t.Context(), "bak://backed/b"); (err != nil) != (id == "bak://backed/b") {
			t.Errorf("after the deletion of %s: %v", id, err)
		}
	}
}

// TestBackupSnapshotReturnsAtTheCut: a snapshot of type bak of a volume on an image returns when the volume is cut, and
// does not wait for the backup of the image.
func TestBackupSnapshotReturnsAtTheCut(t *testing.T) {
	loops(t, ready(t), nil)
	backupRoom(t)
	makeTarget(t, "default", false)
	create(t, request("on-image"))
	s, err := backUp("image-first", "on-image")
	must(t, err)
	if s.ReadyToUse || s.SizeBytes != 64<<20 || s.CreationTime.AsTime().Format(time.RFC3339Nano) != cutTime {
		t.Errorf("%+v", s)
	}
	var b api.Backup
	must(t, store.Get(t.Context(), client.ObjectKey{Name: "image-first"}, &b))
	if b.Spec.Source != nil || b.Status.State != api.BackupPending {
		t.Errorf("%+v", b)
	}
}

// TestBackupBlockSizeIsNoted: a volume with another backupBlockSize than that of all backups gets an event, once.
func TestBackupBlockSizeIsNoted(t *testing.T) {
	loops(t, ready(t), nil)
	for _, size := range []string{"2Mi", "2097152", "16Mi", "16777216"} {
		r := request("blocks-"+strings.ToLower(size), "backupBlockSize", size)
		create(t, r)
		_, err := door.CreateVolume(t.Context(), r)
		must(t, err)
		if !strings.HasPrefix(size, "16") {
			continue
		}
		select {
		case e := <-heard.Events:
			if !strings.Contains(e, "ParameterIgnored") || !strings.Contains(e, "backupBlockSize="+size) {
				t.Error(e)
			}
		default:
			t.Errorf("nothing tells that backupBlockSize=%s has no effect", size)
		}
	}
	if n := len(heard.Events); n > 0 {
		t.Errorf("%d further events, the first is %s", n, <-heard.Events)
	}
}

// TestClaimOfAnUnlistedBackup: a claim of a backup that has no object, because the store has too many backups, makes a
// volume of the requested size, which seeks the backup by its URL. In other stores the backup does not exist.
func TestClaimOfAnUnlistedBackup(t *testing.T) {
	loops(t, ready(t), nil)
	makeTarget(t, "many", false)
	url := api.BackupURL("file:///many", "old", "elsewhere")
	r := request("of-unlisted", "fromBackup", url)
	_, err := door.CreateVolume(t.Context(), r)
	wantKind(t, err, api.NotFound)
	var target api.BackupTarget
	must(t, store.Get(t.Context(), client.ObjectKey{Name: "many"}, &target))
	meta.SetStatusCondition(&target.Status.Conditions, metav1.Condition{Type: api.ConditionTooManyBackups,
		Status: metav1.ConditionTrue, Reason: api.ReasonTooManyBackups})
	must(t, store.Status().Update(t.Context(), &target))
	_, err = door.CreateVolume(t.Context(), request("of-other-store", "fromBackup",
		api.BackupURL("file:///few", "old", "elsewhere")))
	wantKind(t, err, api.NotFound)
	sizeless := request("of-unlisted", "fromBackup", url)
	sizeless.CapacityRange = nil
	_, err = door.CreateVolume(t.Context(), sizeless)
	wantKind(t, err, api.Invalid, "request a size")
	create(t, r)
	_, err = door.CreateVolume(t.Context(), r)
	must(t, err)
	v, err := door.readVolume(t.Context(), "of-unlisted")
	must(t, err)
	if v.Spec.FromBackup != url || v.Spec.Size != 64<<20 {
		t.Errorf("%+v", v.Spec)
	}
}

// TestVolumeOfBackup: a volume begins with a backup that a content source, or its class, names, also with a backup of a
// volume that never was here.
func TestVolumeOfBackup(t *testing.T) {
	loops(t, ready(t), nil)
	found := &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: "found"}, Spec: api.BackupSpec{Volume: "elsewhere",
		BackupTargetName: "default", SnapshotID: strings.Repeat("a", 64)}}
	must(t, store.Create(t.Context(), found))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), found)) })
	from := func(name, handle string, kv ...string) *csi.CreateVolumeRequest {
		r := request(name, kv...)
		if handle != "" {
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
				Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: handle}}}
		}
		return r
	}
	const handle = "bak://elsewhere/found"
	_, err := door.CreateVolume(t.Context(), from("early", handle))
	wantKind(t, err, api.Unavailable, "not completed")
	url := completeBackup(t, "found").Status.URL

	small := from("small", handle)
	small.CapacityRange.RequiredBytes = 32 << 20
	_, err = door.CreateVolume(t.Context(), small)
	wantKind(t, err, api.OutOfRange)
	small = from("small", "", "fromBackup", url)
	small.CapacityRange.RequiredBytes = 32 << 20
	_, err = door.CreateVolume(t.Context(), small)
	wantKind(t, err, api.OutOfRange, "the backup")
	for _, c := range []struct {
		kind api.Kind
		req  *csi.CreateVolumeRequest
	}{
		{api.NotFound, from("x", "bak://elsewhere/none")},
		{api.NotFound, from("x", "bak://other/found")},
		{api.NotFound, from("x", "", "fromBackup", url+"x")},
		{api.NotFound, from("x", "", "fromBackup", "found", "backupTargetName", "offsite")},
		{api.Invalid, from("x", handle, "fromBackup", url)},
		{api.Invalid, from("x", handle, "backingImage", "debian")},
		{api.Invalid, from("x", "", "fromBackup", url, "backupBlockSize", "3")},
	} {
		if _, err := door.CreateVolume(t.Context(), c.req); !api.Is(err, c.kind) {
			t.Errorf("%v: %v", c.req, err)
		}
	}

	sized := from("by-source", handle)
	sized.CapacityRange = nil
	for _, r := range []*csi.CreateVolumeRequest{sized, from("by-url", "", "fromBackup", url, "backupBlockSize", "2Mi"),
		from("by-other-url", "", "fromBackup", strings.Replace(url, "?", "/?", 1)),
		from("by-name", "", "fromBackup", "found", "backupTargetName", "default", "backingImage", "golden")} {
		v := create(t, r)
		again, err := door.CreateVolume(t.Context(), r)
		must(t, err)
		o, err := door.readVolume(t.Context(), r.Name)
		must(t, err)
		if again.Volume.VolumeId != v.VolumeId || v.CapacityBytes != 64<<20 || o.Spec.FromBackup != url ||
			o.Spec.BackingImage != "" || o.Spec.DataSource != "" {
			t.Errorf("%s: %v, spec %+v", r.Name, v, o.Spec)
		}
		if id := v.GetContentSource().GetSnapshot().GetSnapshotId(); (id == handle) != (r == sized) {
			t.Errorf("%s: the content source is %q", r.Name, id)
		}
	}
	_, err = door.CreateVolume(t.Context(), from("by-source", ""))
	wantKind(t, err, api.Exists, handle)
	_, err = door.CreateVolume(t.Context(), from("by-url", handle, "backupBlockSize", "2Mi"))
	wantKind(t, err, api.Exists)
	o, err := door.readVolume(t.Context(), "by-url")
	must(t, err)
	for what, change := range map[string]func(*api.VolumeSpec){
		"another backup": func(s *api.VolumeSpec) { s.FromBackup += "x" },
		"no backup":      func(s *api.VolumeSpec) { s.FromBackup = "" },
	} {
		v := o.DeepCopy()
		change(&v.Spec)
		if err := store.Update(t.Context(), v); err == nil {
			t.Errorf("a volume of a backup became one of %s", what)
		}
	}
	both := &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "both"},
		Spec: api.VolumeSpec{Size: 64 << 20, FromBackup: url, BackingImage: "golden"}}
	if err := store.Create(t.Context(), both); err == nil {
		t.Error("a volume of a backup and an image was made")
	}
}
