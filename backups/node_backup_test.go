package backups_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/tags"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestBackupsUploadOnlyChanges: a first backup is full, the next one uploads the changed parts, and the same content of
// another volume, or a backup of mode full, uploads nothing but lists. restic reads the content of each.
func TestBackupsUploadOnlyChanges(t *testing.T) {
	w := newWorld(t)
	data := randomBytes(1, 5*chunk)
	v := w.newVolume("v", 12*chunk, map[int64][]byte{0: data},
		map[int64][]byte{chunk + 64<<10: randomBytes(2, 8<<10), 8 * chunk: randomBytes(3, 4<<10)},
		map[int64][]byte{chunk + 512<<10: randomBytes(4, 8<<10)})
	w.start(nil)

	first := w.newBackup("first", v, 0)
	w.awaitState(first, api.BackupCompleted)
	s := first.Status
	if s.BackupMode != api.BackupFull || s.NewlyUploadDataSize < int64(len(data)) || s.Progress != 100 ||
		s.VolumeName != "v" || s.VolumeUID != v.uid || s.VolumeSize != v.size || s.SnapshotUID != v.snapshots[0] ||
		s.SnapshotName != "v-s0" || s.SnapshotCreatedAt != cutTime || s.BackupCreatedAt == "" || s.OwnerID != nodeName ||
		s.Labels["of"] != "first" || s.URL != "file://"+w.folder+"?backup=first&volume=v" || s.SizeText == "" {
		t.Errorf("status %+v", s)
	}
	w.awaitEvent(first, "Normal", "BackupCompleted")
	w.awaitReleased()

	second := w.newBackup("second", v, 1)
	w.awaitState(second, api.BackupCompleted)
	// Chunk 1 in fragments, and chunk 8, which is mostly zeros.
	const lists = 64 << 10
	if n := second.Status.NewlyUploadDataSize; second.Status.BackupMode != api.BackupIncremental || n < chunk ||
		n > chunk+lists || second.Status.BytesTotal != 2*chunk || second.Status.BytesDone != 2*chunk {
		t.Errorf("the incremental backup uploaded %d bytes: %+v", n, second.Status)
	}
	hot := w.newBackup("hot", v, 2)
	w.awaitState(hot, api.BackupCompleted)
	// One fragment of chunk 1.
	if n := hot.Status.NewlyUploadDataSize; n < 128<<10 || n > 128<<10+lists || hot.Status.BytesTotal != chunk ||
		hot.Status.SkippedBytes != chunk-128<<10 {
		t.Errorf("the backup of a chunk with fragments uploaded %d bytes: %+v", n, hot.Status)
	}

	twin := w.newVolume("twin", 12*chunk, map[int64][]byte{0: data})
	third := w.newBackup("third", twin, 0)
	w.awaitState(third, api.BackupCompleted)
	if n := third.Status.NewlyUploadDataSize; n > lists || third.Status.BackupMode != api.BackupFull ||
		third.Status.SkippedBytes != int64(len(data)) {
		t.Errorf("the backup of known content uploaded %d bytes: %+v", n, third.Status)
	}

	fourth := w.newBackup("fourth", v, 2, func(b *api.Backup) { b.Spec.BackupMode = api.BackupFull })
	w.awaitState(fourth, api.BackupCompleted)
	// Chunk 1 is in fragments in the repository, and a full backup stores the chunk as a whole.
	if n := fourth.Status.NewlyUploadDataSize; n > chunk+lists || fourth.Status.BackupMode != api.BackupFull ||
		fourth.Status.BytesTotal != 6*chunk {
		t.Errorf("the full backup uploaded %d bytes: %+v", n, fourth.Status)
	}
	w.awaitReleased()
	w.check(5)
	w.compare(first, v, 0)
	w.compare(second, v, 1)
	w.compare(hot, v, 2)
	w.compare(third, twin, 0)
	w.compare(fourth, v, 2)
}

// TestBackupDescribesItsVolume: the description has what a restore needs to make the volume again.
func TestBackupDescribesItsVolume(t *testing.T) {
	w := newWorld(t)
	image := &api.BackingImage{ObjectMeta: apitest.Named("golden"),
		Spec: api.BackingImageSpec{SourceType: api.SourceUpload}}
	w.Create(image)
	sum := strings.Repeat("ab", 64)
	apitest.EditStatus(w.Server, image, func(i *api.BackingImage) { i.Status.Checksum = sum })
	object := apitest.Volume("v", 5*chunk)
	object.Spec.BackingImage, object.Labels = "golden", map[string]string{"app": "db", api.LabelNode: "n"}
	object.Annotations = map[string]string{api.AnnotationStorageClass: "fast", api.AnnotationClaim: "db/data"}
	object.Spec.NodeSelector = []string{"rack"}
	v := w.newVolumeOf(object, map[int64][]byte{0: randomBytes(1, chunk)})
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.awaitState(b, api.BackupCompleted)
	var got struct {
		Kind, Name string
		Object     struct {
			Name   string
			Labels map[string]string
			Spec   api.VolumeSpec
			Image  struct{ Name, Checksum string }
		}
	}
	must(t, json.Unmarshal(w.restic("dump", b.Status.SnapshotID, "/volumes/v/drover.json"), &got))
	o := got.Object
	if got.Kind != "volume" || got.Name != "v" || o.Name != "v" || o.Labels["app"] != "db" || o.Spec.Size != v.size ||
		o.Image.Name != "golden" || o.Image.Checksum != sum || b.Status.VolumeBackingImageName != "golden" {
		t.Errorf("description %+v, status %+v", got, b.Status)
	}
	want := &api.RecordedVolume{StorageClassName: "fast", Claim: "db/data", Labels: map[string]string{"app": "db"},
		NumberOfReplicas: 1, DataLocality: "disabled", StaleReplicaTimeout: 2880, NodeSelector: []string{"rack"}}
	if !reflect.DeepEqual(b.Status.RecordedVolume, want) {
		t.Errorf("the record is %+v", b.Status.RecordedVolume)
	}
}

// TestKilledProcessLeavesItsSnapshotToTheNext: a process that ends between the snapshot in the repository and the
// status does not make the next one upload: the next process adopts the snapshot, which leaves a single one.
func TestKilledProcessLeavesItsSnapshotToTheNext(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	w.startUntilCompleted()
	b := w.newBackup("b", v, 0)
	w.killed(b)
	w.held(b)
	w.store.set(func(_ context.Context, operation, name string) error {
		if operation == "put" && (strings.HasPrefix(name, "data/") || strings.HasPrefix(name, "index/")) {
			t.Errorf("the second process writes %s", name)
		}
		return nil
	}, nil)
	w.start(nil)
	w.awaitState(b, api.BackupCompleted)
	s := b.Status
	if s.NewlyUploadDataSize < 2*chunk || s.BackupMode != api.BackupFull || s.SnapshotUID != v.snapshots[0] ||
		s.VolumeSize != v.size || s.SnapshotCreatedAt != cutTime || s.Labels["of"] != "b" || s.URL == "" {
		t.Errorf("status %+v", s)
	}
	w.awaitReleased()
	w.check(1)
	w.compare(b, v, 0)
}

// TestAdoptedSnapshotIsNotCompletedWith: a node has stored a backup, and cannot write the status. Another node begins the
// backup, adopts the snapshot and loses the backup to the first node again. The first node does not complete the Backup
// with its own snapshot, which the other node deleted.
func TestAdoptedSnapshotIsNotCompletedWith(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	allow := w.startUntilAllowed()
	b := w.newBackup("b", v, 0)
	w.receive(w.refused, "the node has made the backup")
	w.adoptElsewhere(b)
	allow()
	w.awaitState(b, api.BackupCompleted)
	w.awaitReleased()
	w.compare(b, v, 0)
	w.check(1)
}

// TestIncompleteSnapshotIsNotAdopted: if the repository lost blobs of a killed process's snapshot, the next process
// deletes the snapshot, and makes the backup again.
func TestIncompleteSnapshotIsNotAdopted(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	w.startUntilCompleted()
	b := w.newBackup("b", v, 0)
	w.killed(b)
	must(t, os.RemoveAll(filepath.Join(w.folder, "index")))
	w.start(nil)
	w.awaitState(b, api.BackupCompleted)
	w.awaitReleased()
	w.check(1)
	w.compare(b, v, 0)
}

// TestWorkBeginsAfterItsStatus: no byte moves before the status says so, because only the status tells the next process
// that the repository may have a snapshot of the backup.
func TestWorkBeginsAfterItsStatus(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	var allowed atomic.Bool
	var refusals atomic.Int32
	w.store.set(func(_ context.Context, operation, name string) error {
		if operation == "put" && !allowed.Load() {
			t.Errorf("the backup writes %s before its status", name)
		}
		return nil
	}, nil)
	w.start(func(o client.Object) error {
		b, ok := o.(*api.Backup)
		if !ok || b.Status.State != api.BackupInProgress {
			return nil
		}
		if refusals.Add(1) <= 3 {
			return errors.New("not now")
		}
		allowed.Store(true)
		return nil
	})
	b := w.newBackup("b", v, 0)
	w.awaitState(b, api.BackupCompleted)
	w.check(1)
}

// TestStoreFailsForAWhile: a backup outlives failures of the store, and says meanwhile why it waits.
func TestStoreFailsForAWhile(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	w.store.set(func(_ context.Context, operation, name string) error {
		if operation == "put" && strings.HasPrefix(name, "data/") {
			return api.Errorf(api.Unavailable, "the store is on holiday")
		}
		return nil
	}, nil)
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.await(b, "Pending after an attempt", func(b *api.Backup) bool {
		return b.Status.State == api.BackupPending && b.Status.Attempts > 0 && b.Status.NextTry != nil &&
			strings.Contains(b.Status.Message, "on holiday")
	})
	w.store.set(nil, nil)
	w.awaitState(b, api.BackupCompleted)
	if s := b.Status; s.Attempts != 0 || s.NextTry != nil || s.Message != "" {
		t.Errorf("status %+v", s)
	}
	w.awaitReleased()
	w.check(1)
	w.compare(b, v, 0)
}

// TestCredentialsChangeDuringABackup: a store that denies the access in the middle of a backup costs the backup an
// attempt, and the target's owner looks at the store, and says so at the target. The backup continues with the next
// credentials.
func TestCredentialsChangeDuringABackup(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, 2*chunk)})
	var revoked atomic.Bool
	w.store.set(func(_ context.Context, operation, name string) error {
		if operation == "put" && strings.HasPrefix(name, "data/") {
			revoked.Store(true)
		}
		if revoked.Load() && operation != "delete" { // else the lock stays
			return api.Errorf(api.Denied, "the key is revoked")
		}
		return nil
	}, nil)
	w.opts.Targets.Retry = 100 * time.Millisecond
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.await(b, "Pending after an attempt", func(b *api.Backup) bool {
		return b.Status.State == api.BackupPending && b.Status.Attempts > 0 &&
			strings.Contains(b.Status.Message, "the key is revoked")
	})
	apitest.Await(w.Server, w.target, &api.BackupTargetList{}, "without access", func(t *api.BackupTarget) bool {
		c := meta.FindStatusCondition(t.Status.Conditions, api.ConditionUnavailable)
		return c != nil && c.Reason == api.ReasonDenied
	})
	w.store.set(nil, nil)
	w.awaitState(b, api.BackupCompleted)
	w.awaitReleased()
	w.check(1)
	w.compare(b, v, 0)
}

// TestReplicaIsMissing: a replica without the snapshot delays the backup until the planner names another replica. If
// the snapshot itself is deleted, the backup has an Error at once.
func TestReplicaIsMissing(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.start(nil)
	moved := w.newBackup("moved", v, 0, func(b *api.Backup) { b.Spec.Source.Replica = api.NewUID() })
	w.await(moved, "Pending after an attempt", func(b *api.Backup) bool {
		return b.Status.State == api.BackupPending && b.Status.Attempts > 0
	})
	apitest.Edit(w.Server, moved, func(b *api.Backup) { b.Spec.Source.Replica = v.replica })
	w.awaitState(moved, api.BackupCompleted)

	gone := w.newBackup("gone", v, 0, func(b *api.Backup) {
		b.Spec.SnapshotName, b.Spec.Source.Snapshot, b.Spec.Source.SnapshotUID = "nameless", "nameless", api.NewUID()
	})
	w.awaitState(gone, api.BackupError)
	if s := gone.Status; s.Attempts != 1 || !strings.Contains(s.Message, "does not exist any more") {
		t.Errorf("status %+v", s)
	}
	w.awaitReleased()
	w.check(1)
}

// TestPlacesBoundTheBackups: with a single place the second backup waits for the first, unless the setting grows.
func TestPlacesBoundTheBackups(t *testing.T) {
	for _, grows := range []bool{false, true} {
		t.Run(map[bool]string{false: "first ends", true: "setting grows"}[grows], func(t *testing.T) {
			w := newWorld(t)
			places := &api.Setting{ObjectMeta: apitest.Named("concurrent-backups-per-node"), Value: "1"}
			w.Create(places)
			v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
			other := w.newVolume("other", 5*chunk, map[int64][]byte{0: randomBytes(2, chunk)})
			g := newGate("put", "data/")
			w.store.set(g.hook, nil)
			w.start(nil)
			first := w.newBackup("first", v, 0)
			w.receive(g.reached, "the first backup uploads")
			second := w.newBackup("second", other, 0)
			w.await(second, "Pending", func(b *api.Backup) bool {
				return b.Status.State == api.BackupPending && strings.HasPrefix(b.Status.Message, "waits until")
			})
			if grows {
				apitest.Edit(w.Server, places, func(s *api.Setting) { s.Value = "2" })
				w.awaitState(second, api.BackupCompleted)
				w.awaitState(first, api.BackupInProgress)
			}
			close(g.opened)
			w.awaitState(first, api.BackupCompleted)
			w.awaitState(second, api.BackupCompleted)
			if second.Status.Attempts != 0 {
				t.Errorf("status %+v", second.Status)
			}
			w.awaitReleased()
			w.check(2)
		})
	}
}

// TestFactsTravel: the tags of the snapshot have the facts of the status.
func TestFactsTravel(t *testing.T) {
	w := newWorld(t)
	v := w.newVolume("v", 5*chunk, map[int64][]byte{0: randomBytes(1, chunk)})
	w.start(nil)
	b := w.newBackup("b", v, 0)
	w.awaitState(b, api.BackupCompleted)
	var list []struct{ Tags []string }
	must(t, json.Unmarshal(w.restic("snapshots", "--json"), &list))
	if len(list) != 1 {
		t.Fatalf("%d snapshots", len(list))
	}
	f, ok := tags.Parse(list[0].Tags)
	if !ok || f.Object != api.UID(b.UID) || f.Backup != "b" || f.Uploaded != b.Status.NewlyUploadDataSize ||
		f.Mode != api.BackupFull || f.SnapshotUID != v.snapshots[0] || f.VolumeSize != v.size || f.Labels["of"] != "b" {
		t.Errorf("facts %+v", f)
	}
}
