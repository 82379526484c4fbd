package planner

import (
	"context"
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// addImage creates a ready image of a digest with a copy on each node.
func (w *world) addImage(name, digest string, nodes ...string) *api.BackingImage {
	w.T.Helper()
	img := &api.BackingImage{ObjectMeta: apitest.Named(name), Spec: api.BackingImageSpec{SourceType: api.SourceUpload,
		SourceParameters: map[string]string{}}}
	w.Create(img)
	uuid, layers := api.NewUID(), []api.UID{api.NewUID()}
	apitest.EditStatus(w.Server, img, func(i *api.BackingImage) {
		i.Status.UUID, i.Status.Layers, i.Status.State, i.Status.VirtualSize = uuid, layers, api.ImageReady, 10<<20
		i.Status.Digest, i.Status.Checksum = strings.Repeat(digest, 64), strings.Repeat(digest, 128)
	})
	for _, node := range nodes {
		c := &api.ImageCopy{ObjectMeta: apitest.Named(string(uuid) + "." + node), Spec: api.ImageCopySpec{Image: name,
			UUID: uuid, Layers: layers, Node: node, Disk: diskOf(node)}}
		w.Create(c)
		apitest.EditStatus(w.Server, c, func(c *api.ImageCopy) { c.Status.State = api.ImageReady })
	}
	return img
}

// addVolumeOf is addVolume for a volume of an image.
func (w *world) addVolumeOf(name, image string, nodes ...string) *api.Volume {
	w.T.Helper()
	v := apitest.Volume(name, 16<<20)
	v.Finalizers, v.Spec.BackingImage = []string{api.Finalizer}, image
	w.Create(v)
	w.addMembers(v, nodes...)
	return v
}

func (w *world) awaitImageBackup(name, what string, ok func(*api.BackupBackingImage) bool) *api.BackupBackingImage {
	w.T.Helper()
	return apitest.Await(w.Server, &api.BackupBackingImage{ObjectMeta: apitest.Named(name)}, &api.BackupBackingImageList{},
		what, ok)
}

// awaitImageSource waits until the backup of an image has its source on a node.
func (w *world) awaitImageSource(name, node string) *api.BackupBackingImage {
	w.T.Helper()
	return w.awaitImageBackup(name, "has its source on "+node, func(b *api.BackupBackingImage) bool {
		return b.Spec.Source != nil && b.Spec.Source.Node == node
	})
}

// storeImage ends the backup of an image as its node would.
func (w *world) storeImage(b *api.BackupBackingImage) {
	w.T.Helper()
	apitest.EditStatus(w.Server, b, func(b *api.BackupBackingImage) {
		s := &b.Status
		s.State, s.SnapshotID, s.Digest, s.Checksum = api.BackupCompleted, "0123", b.Spec.Digest, b.Spec.Source.Checksum
		s.URL = api.ImageBackupURL("file:///srv/t", b.Name, b.Spec.BackingImageName)
	})
}

func (w *world) awaitEvent(reason, part string) {
	w.T.Helper()
	w.awaitEventOf("", reason, part)
}

// awaitEventOf waits for an event about the object of a name; empty: of any.
func (w *world) awaitEventOf(name, reason, part string) {
	w.T.Helper()
	w.AwaitEvent(reason, func(e *eventsv1.Event) bool {
		return e.Reason == reason && strings.Contains(e.Note, part) && (name == "" || e.Regarding.Name == name)
	})
}

// TestImageIsTakenAlongOnce: the backup of a volume waits for a backup of its image, of which there is one for each
// content and target. An image of the same name with other content gets a second backup, and an event.
func TestImageIsTakenAlongOnce(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	w.addTarget("t")
	img := w.addImage("golden", "a", "n2")
	w.addSnapshot(w.addVolumeOf("v", "golden", "n1"), "s")
	w.addBackup("b1", "v", "s")
	const name = "golden-aaaaaaaa.t"
	w.awaitState("b1", api.BackupPending, "waits for BackupBackingImage "+name)
	x := w.awaitImageSource(name, "n2")
	if x.Spec.UserCreated || x.Spec.Digest != img.Status.Digest || x.Spec.Source.UUID != img.Status.UUID ||
		x.Spec.Source.Checksum != img.Status.Checksum || x.Labels[api.LabelImage] != "golden" || len(x.Finalizers) != 1 {
		t.Errorf("%+v", x)
	}
	w.stays("b1", "the image is not backed up yet")
	w.storeImage(x)
	w.complete(w.awaitSource("b1", "n1"))

	w.addSnapshot(w.addVolumeOf("v2", "golden", "n1"), "s2")
	w.addBackup("b2", "v2", "s2")
	w.complete(w.awaitSource("b2", "n1"))
	var list api.BackupBackingImageList
	if err := w.Client.List(w.Ctx, &list); err != nil || len(list.Items) != 1 {
		t.Errorf("%d backups of the image, %v", len(list.Items), err)
	}

	apitest.EditStatus(w.Server, img, func(i *api.BackingImage) {
		i.Status.Digest, i.Status.Checksum = strings.Repeat("b", 64), strings.Repeat("b", 128)
	})
	w.addBackup("b3", "v2", "s2")
	w.storeImage(w.awaitImageSource("golden-bbbbbbbb.t", "n2"))
	w.awaitEvent("ImageContentDiffers", name)
	w.awaitSource("b3", "n1")
}

// TestOtherContentOfAnImageIsReported: a target has a backup of an image. Further backups of an image of the same name
// with other content get an event: those of objects without and with a digest, and copies, also those that the node of
// a target makes with the copy of a volume's backup.
func TestOtherContentOfAnImageIsReported(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	w.addTarget("t")
	img := w.addImage("golden", "a", "n2")
	add := func(name, digest, origin string, byUser bool) {
		x := &api.BackupBackingImage{Spec: api.BackupBackingImageSpec{BackingImageName: "golden", BackupTargetName: "t",
			UserCreated: byUser, Digest: digest, CopyOf: origin}}
		x.Name = name
		w.Create(x)
	}
	add("first", "", "", true)
	w.storeImage(w.awaitImageSource("first", "n2"))
	other := strings.Repeat("b", 64)
	apitest.EditStatus(w.Server, img, func(i *api.BackingImage) { i.Status.Digest = other })
	if err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true,
		func(ctx context.Context) (bool, error) { // the planner takes the content from its cache
			var seen api.BackingImage
			return w.cached.Get(ctx, client.ObjectKeyFromObject(img), &seen) == nil && seen.Status.Digest == other, nil
		}); err != nil {
		t.Fatal(err)
	}
	add("plain", "", "", true)
	w.storeImage(w.awaitImageSource("plain", "n2"))
	add("with-digest", other, "", true)
	add("copy", "", "plain", true)
	add("taken-along", other, "plain", false)
	for _, name := range []string{"plain", "with-digest", "copy", "taken-along"} {
		w.awaitEventOf(name, "ImageContentDiffers", "first, of an image golden with other content: digest aaaa")
	}
}

// TestImageBackupThatFailsDelaysNoVolume: the backup of a volume continues when an attempt to back its image up failed,
// when no node can, and when the image's backup has an Error, which the next backup of a volume repeats.
func TestImageBackupThatFailsDelaysNoVolume(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	w.addTarget("t")
	w.addImage("golden", "a", "n2")
	w.addSnapshot(w.addVolumeOf("v", "golden", "n1"), "s")
	const name = "golden-aaaaaaaa.t"
	w.addBackup("attempts", "v", "s")
	x := w.awaitImageSource(name, "n2")
	apitest.EditStatus(w.Server, x, func(b *api.BackupBackingImage) { b.Status.State, b.Status.Attempts = api.BackupPending, 1 })
	w.awaitSource("attempts", "n1")

	w.editNode("n2", func(n *api.NodeStatus) { n.Disks[0].Ready = false })
	w.awaitImageBackup(name, "waits for a node", func(b *api.BackupBackingImage) bool {
		return b.Spec.Source == nil && strings.Contains(b.Status.Message, "is not ready")
	})
	w.addBackup("no-node", "v", "s")
	w.awaitSource("no-node", "n1")

	w.editNode("n2", func(n *api.NodeStatus) { n.Disks[0].Ready = true })
	x = w.awaitImageSource(name, "n2")
	apitest.EditStatus(w.Server, x, func(b *api.BackupBackingImage) { b.Status.State = api.BackupError })
	// The caches of the planner are of different age: with the older state of the image's backup, none would be repeated.
	w.awaitImageBackup(name, "has an Error in the cache of the planner", func(*api.BackupBackingImage) bool {
		var seen api.BackupBackingImage
		return w.cached.Get(w.Ctx, client.ObjectKey{Name: name}, &seen) == nil && seen.Status.State == api.BackupError
	})
	w.awaitLaterSecond(x.CreationTimestamp)
	w.addBackup("again", "v", "s")
	w.awaitImageBackup(name, "is being deleted", func(b *api.BackupBackingImage) bool {
		return b.DeletionTimestamp != nil || b.UID != x.UID
	})
	apitest.Edit(w.Server, x, func(b *api.BackupBackingImage) { b.Finalizers = nil }) // the target's owner
	next := w.awaitImageBackup(name, "is another", func(b *api.BackupBackingImage) bool { return b.UID != x.UID })
	w.awaitImageSource(name, "n2")
	apitest.EditStatus(w.Server, next, func(b *api.BackupBackingImage) { b.Status.State = api.BackupError })
	w.awaitSource("again", "n1")
}

// TestBackupFollowsTheDeletionOfItsImagesBackup: while the completed backup of the image is being deleted, the backup of
// a volume waits, and then for the next backup of the image. It does not wait for a deletion that waits itself.
func TestBackupFollowsTheDeletionOfItsImagesBackup(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	w.addTarget("t")
	w.addImage("golden", "a", "n2")
	w.addSnapshot(w.addVolumeOf("v", "golden", "n1"), "s")
	const name = "golden-aaaaaaaa.t"
	w.addBackup("first", "v", "s")
	x := w.awaitImageSource(name, "n2")
	w.storeImage(x)
	w.complete(w.awaitSource("first", "n1"))

	w.Delete(x)
	w.awaitDeletionSeen(x)
	w.addBackup("during", "v", "s")
	w.awaitState("during", api.BackupPending, "waits for BackupBackingImage "+name)
	w.stays("during", "the backup of the image is being deleted")
	apitest.Edit(w.Server, x, func(b *api.BackupBackingImage) { b.Finalizers = nil }) // the target's owner
	w.awaitImageBackup(name, "is another", func(b *api.BackupBackingImage) bool { return b.UID != x.UID })
	x = w.awaitImageSource(name, "n2")
	w.storeImage(x)
	w.complete(w.awaitSource("during", "n1"))

	w.Delete(x)
	w.awaitDeletionSeen(x)
	w.addBackup("held", "v", "s")
	w.awaitState("held", api.BackupPending, "waits for BackupBackingImage "+name)
	apitest.EditStatus(w.Server, x, func(b *api.BackupBackingImage) {
		b.Status.State, b.Status.Message = api.BackupDeleting, "backups of volumes need the image"
	})
	w.awaitSource("held", "n1")
}

// awaitDeletionSeen waits until the cache of the planner has the deletion of an image's backup.
func (w *world) awaitDeletionSeen(x *api.BackupBackingImage) {
	w.T.Helper()
	w.awaitImageBackup(x.Name, "is being deleted in the cache of the planner", func(*api.BackupBackingImage) bool {
		var seen api.BackupBackingImage
		return w.cached.Get(w.Ctx, client.ObjectKeyFromObject(x), &seen) == nil && seen.DeletionTimestamp != nil
	})
}

// awaitLaterSecond waits until the API server gives objects another second of creation.
func (w *world) awaitLaterSecond(than metav1.Time) {
	w.T.Helper()
	for {
		p := &api.BackupTarget{ObjectMeta: metav1.ObjectMeta{GenerateName: "clock-"},
			Spec: api.BackupTargetSpec{BackupTargetURL: "file:///srv/clock"}}
		w.Create(p)
		if than.Before(&p.CreationTimestamp) {
			return
		}
	}
}

// TestImageBackupNeedsACopy: a backup of an image moves to another copy when the copy is deleted before a node reads
// the copy, and when the node is lost. A node that reads the copy holds the layers, and continues. An image that was
// replaced meanwhile ends the backup.
func TestImageBackupNeedsACopy(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	w.addTarget("t")
	img := w.addImage("golden", "a", "n1", "n2")
	b := &api.BackupBackingImage{ObjectMeta: apitest.Named("mine"), Spec: api.BackupBackingImageSpec{
		BackingImageName: "golden", BackupTargetName: "t", UserCreated: true}}
	w.Create(b)
	w.awaitImageSource("mine", "n1")
	copyOn := func(node string) *api.ImageCopy {
		return &api.ImageCopy{ObjectMeta: apitest.Named(string(img.Status.UUID) + "." + node)}
	}
	w.Delete(copyOn("n1"))
	b = w.awaitImageSource("mine", "n2")
	apitest.EditStatus(w.Server, b, func(b *api.BackupBackingImage) { b.Status.State = api.BackupInProgress })
	w.Delete(copyOn("n2"))
	apitest.EditStatus(w.Server, b, func(b *api.BackupBackingImage) { b.Status.Progress = 50 })
	b = w.awaitImageBackup("mine", "is read by n2", func(b *api.BackupBackingImage) bool { return b.Status.Progress == 50 })
	if b.Spec.Source == nil {
		t.Error("the backup in progress loses its source with the copy")
	}
	w.editNode("n2", func(n *api.NodeStatus) { n.Disks[0].Ready = false })
	w.awaitImageBackup("mine", "waits for a copy", func(b *api.BackupBackingImage) bool {
		return b.Spec.Source == nil && b.Status.State == api.BackupPending && b.Status.Attempts == 1 &&
			strings.Contains(b.Status.Message, "no disk has a copy")
	})
	apitest.EditStatus(w.Server, img, func(i *api.BackingImage) { i.Status.Digest = strings.Repeat("b", 64) })
	w.awaitImageBackup("mine", "has an Error", func(b *api.BackupBackingImage) bool {
		return b.Status.State == api.BackupError && strings.Contains(b.Status.Message, "other content")
	})
}

// TestBackupVolumeMirrorsBackups: a volume with completed backups in a target has a BackupVolume, which is deleted with
// the last backup, and whose deletion deletes the backups.
func TestBackupVolumeMirrorsBackups(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	v := w.addVolume("v", "n1")
	w.addSnapshot(v, "s1")
	w.addSnapshot(v, "s2")
	var made []*api.Backup
	for i, s := range []string{"s1", "s2"} {
		w.addBackup("of-"+s, "v", s)
		b := w.awaitSource("of-"+s, "n1")
		w.complete(b)
		apitest.EditStatus(w.Server, b, func(b *api.Backup) {
			b.Status.VolumeSize, b.Status.NewlyUploadDataSize = int64(i+1)<<20, 5
			b.Status.RecordedVolume = &api.RecordedVolume{StorageClassName: "fast"}
			b.Status.URL = api.BackupURL("file:///srv/t", b.Name, "v")
			b.Status.BackupCreatedAt = "2026-01-0" + string(rune('2'-i)) + "T00:00:00Z"
		})
		made = append(made, b)
	}
	mirror := &api.BackupVolume{ObjectMeta: apitest.Named(api.BackupVolumeName("v", "t"))}
	await := func(what string, ok func(*api.BackupVolume) bool) {
		t.Helper()
		apitest.Await(w.Server, mirror, &api.BackupVolumeList{}, what, ok)
	}
	await("sums up two backups", func(m *api.BackupVolume) bool {
		s := m.Status
		return s.Backups == 2 && s.StorageClassName == "fast" && s.LastBackupName == "of-s2" && s.Size == 2<<20 &&
			s.DataStored == 10 &&
			s.CreatedAt == "2026-01-01T00:00:00Z" && s.LastBackupAt == made[1].Status.SnapshotCreatedAt
	})
	mustHaveMetrics(t, map[string]float64{
		`drover_backup_last_at{target="t",volume="v"}`:                  float64(made[1].CutAt().Unix()),
		`drover_backup_state{state="Completed",target="t",volume="v"}`:  1,
		`drover_backup_actual_size_bytes{target="t",volume="v"}`:        10,
		`drover_backup_last_at{target="t",volume="of-another-cluster"}`: -1,
	})
	w.Delete(made[1])
	await("sums up one backup", func(m *api.BackupVolume) bool {
		return m.Status.Backups == 1 && m.Status.LastBackupName == "of-s1"
	})
	leave := func(b *api.Backup) { apitest.Edit(w.Server, b, func(b *api.Backup) { b.Finalizers = nil }) }
	leave(made[1])
	w.Delete(made[0])
	leave(made[0])
	w.AwaitDeleted(mirror, &api.BackupVolumeList{})

	w.addBackup("again", "v", "s1")
	again := w.awaitSource("again", "n1")
	w.complete(again)
	await("exists again", func(m *api.BackupVolume) bool { return m.Status.Backups == 1 })
	w.Delete(mirror)
	awaitLeaving(w, again, &api.BackupList{})
	w.AwaitDeleted(mirror, &api.BackupVolumeList{})
}

// TestRestoredVolumeBringsItsImage: a volume from a backup creates the image of the backup, from the image's backup, with
// the labels, copies and selectors of the original.
func TestRestoredVolumeBringsItsImage(t *testing.T) {
	w := newWorld(t)
	img, x, url := w.addBackupWithImage("a")
	record := &api.RecordedImage{Labels: map[string]string{"team": "os"}, MinNumberOfCopies: 3,
		NodeSelector: []string{"ssd"}, DiskSelector: []string{"fast"}}
	apitest.EditStatus(w.Server, x, func(x *api.BackupBackingImage) { x.Status.RecordedImage = record })
	w.Delete(img)
	w.addRestored(url)
	w.awaitEvent("BackingImageRestored", "image golden is restored from backup golden-aaaaaaaa.t")
	now := apitest.Await(w.Server, &api.BackingImage{ObjectMeta: apitest.Named("golden")}, &api.BackingImageList{},
		"is restored", func(i *api.BackingImage) bool { return i.Spec.SourceType == api.SourceRestore })
	if now.Spec.SourceParameters[api.RestoreBackupURL] != x.Status.URL ||
		!equality.Semantic.DeepEqual(api.RecordImage(now), record) {
		t.Errorf("%+v", now)
	}
}

// TestRestoredVolumeKeepsTheUsersImage: an image of the name with other content stays, and an event tells. The image of
// a volume that has its content is the user's to delete.
func TestRestoredVolumeKeepsTheUsersImage(t *testing.T) {
	w := newWorld(t)
	img, _, url := w.addBackupWithImage("c")
	v := w.addRestored(url)
	w.awaitEvent("BackingImageMismatch", "image golden has other content than the image of backup b")
	if err := w.Client.Get(w.Ctx, client.ObjectKeyFromObject(img), img); err != nil ||
		img.Spec.SourceType != api.SourceUpload {
		t.Errorf("the image of the user is replaced: %+v, %v", img.Spec, err)
	}
	for state, waits := range map[api.VolumeState]bool{"": true, api.VolumeCreating: true, api.VolumeDetached: false,
		api.VolumeAttached: false} {
		if v.Status.State = state; v.WaitsForRestore() != waits {
			t.Errorf("a volume in state %q brings its image: %v", state, !waits)
		}
	}
}

// addBackupWithImage makes the completed backup b of a volume, and that of the image golden, whose content in the
// backup has a digest of these digits.
func (w *world) addBackupWithImage(digits string) (img *api.BackingImage, x *api.BackupBackingImage, url string) {
	w.T.Helper()
	w.addNodes("n1")
	w.addTarget("t")
	img = w.addImage("golden", "a", "n1")
	w.addSnapshot(w.addVolumeOf("v", "golden", "n1"), "s")
	w.addBackup("b", "v", "s")
	x = w.awaitImageSource("golden-aaaaaaaa.t", "n1")
	w.storeImage(x)
	url = "file:///srv/t?backup=b&volume=v"
	// The end and the URL come with one write, as from a node: the planner waits for no later one.
	w.completeWith(w.awaitSource("b", "n1"), func(b *api.Backup) {
		b.Status.URL, b.Status.VolumeBackingImageName = url, "golden"
		b.Status.VolumeBackingImageDigest = strings.Repeat(digits, 64)
		b.Status.VolumeBackingImageChecksum = strings.Repeat(digits, 128)
	})
	return img, x, url
}

// addRestored makes a volume of the backup with a URL.
func (w *world) addRestored(url string) *api.Volume {
	w.T.Helper()
	v := apitest.Volume("restored", 16<<20)
	v.Spec.FromBackup = url
	w.Create(v)
	return v
}
