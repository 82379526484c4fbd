package sanity_test

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// TestBackupStories: users back volumes up, read them with restic, and get space back.
func TestBackupStories(t *testing.T) {
	tell(t,
		story{"restic reads what Drover backed up", resticReadsBackups},
		story{"a backup survives kill -9", killedBackup},
		story{"a damaged backup is restored with zeros", damagedBackup},
		story{"an image travels with its volume", imageTravels},
		story{"a claim is made of a backup", claimOfBackup},
		story{"a snapshot does not wait for the backup of the image", snapshotBeforeImage},
		story{"labels and parameters of a volume travel with its backup", recordTravels},
		story{"a standby volume follows backups and is activated", standbyFollows})
}

// backupPassword is the password of the stores of these stories.
const backupPassword = "correct horse battery staple"

// makeTarget makes a target in a new folder, and returns the folder.
func (w *world) makeTarget(t *testing.T, name string) string {
	t.Helper()
	store := t.TempDir()
	w.openTarget(t, name, store)
	return store
}

// openTarget makes a target in a folder.
func (w *world) openTarget(t *testing.T, name, store string) {
	t.Helper()
	password := filepath.Join(t.TempDir(), "password")
	must(t, os.WriteFile(password, []byte(backupPassword+"\n"), 0o600))
	w.must("target", "create", name, "file://"+store, "--password-file", password)
}

// backup is the object of a backup.
func (w *world) backup(name string) *api.Backup {
	w.t.Helper()
	var b api.Backup
	must(w.t, w.objects.Get(w.t.Context(), client.ObjectKey{Name: name}, &b))
	return &b
}

// restic runs a shell command that uses restic, in a new folder, and returns the folder.
func restic(t *testing.T, line string) string {
	t.Helper()
	if _, err := exec.LookPath("restic"); err != nil {
		t.Fatal("this story needs restic (package restic)")
	}
	ctx, cancel := context.WithTimeout(t.Context(), settle)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", line)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), "RESTIC_PASSWORD="+backupPassword, "RESTIC_CACHE_DIR="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return cmd.Dir
}

// documented is the only command of docs/backups.md that begins with restic and the words, for a folder and a name.
func documented(t *testing.T, words, store, name string) string {
	t.Helper()
	page, err := os.ReadFile("../docs/backups.md")
	must(t, err)
	var found []string
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "restic -r /PATH "+words) {
			line = strings.ReplaceAll(line, "/PATH", store)
			for _, place := range []string{"volumes/V", "images/I"} {
				kind, _, _ := strings.Cut(place, "/")
				for _, end := range []string{"/", " "} {
					line = strings.ReplaceAll(line, place+end, kind+"/"+name+end)
				}
			}
			found = append(found, line)
		}
	}
	if len(found) != 1 {
		t.Fatalf("docs/backups.md has %d commands for %q", len(found), words)
	}
	return found[0]
}

// compareWithRestic reads the newest backup of a volume or an image by the documented command. kind is volumes or
// images.
func compareWithRestic(t *testing.T, store, kind, name string, want []byte) {
	t.Helper()
	dir := restic(t, documented(t, "restore latest --path /"+kind, store, name))
	got, err := os.ReadFile(filepath.Join(dir, "disk.raw"))
	must(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("restic reads other bytes than %s/%s had: %d bytes, want %d", kind, name, len(got), len(want))
	}
}

// findNoPlainText looks for words in the names and bytes of all files of a store.
func findNoPlainText(t *testing.T, store string, words ...[]byte) {
	t.Helper()
	must(t, filepath.WalkDir(store, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		content := []byte(strings.TrimPrefix(path, store))
		if e.Type().IsRegular() {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content = append(content, b...)
		}
		for _, word := range words {
			if bytes.Contains(content, word) {
				t.Errorf("%s tells %.64q", path, word)
			}
		}
		return nil
	}))
}

// compareWithDevice reads an attached volume.
func compareWithDevice(t *testing.T, p *pod, want []byte) {
	t.Helper()
	got, err := os.ReadFile(p.target)
	must(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("the restored volume has other bytes: %d bytes, want %d", len(got), len(want))
	}
}

// folderSize is the sum of the sizes of all files below a folder.
func folderSize(t *testing.T, dir string) (sum int64) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	}))
	return sum
}

// device is an attached volume, and the content that it has to have.
type device struct {
	t    *testing.T
	f    *os.File
	want []byte
	rnd  *rand.Rand
}

func openDevice(t *testing.T, p *pod, size int64) *device {
	t.Helper()
	f, err := os.OpenFile(p.target, os.O_RDWR|syscall.O_DIRECT, 0)
	must(t, err)
	return &device{t: t, f: f, want: make([]byte, size), rnd: rand.New(rand.NewPCG(1, uint64(size)))}
}

// write writes n random bytes at off, durably.
func (d *device) write(off, n int64) {
	d.t.Helper()
	b := aligned(int(n))
	for i := 0; i < int(n); i += 8 {
		v := d.rnd.Uint64()
		for k := range 8 {
			b[i+k] = byte(v >> (8 * k))
		}
	}
	_, err := d.f.WriteAt(b, off)
	must(d.t, err)
	must(d.t, d.f.Sync())
	copy(d.want[off:], b)
}

// resticReadsBackups: a full backup of an attached volume, an incremental one, and one of the detached volume; restic
// restores each by the words of docs/backups.md. The deletion of backups gives their space back.
func resticReadsBackups(t *testing.T, w *world) {
	store := w.makeTarget(t, "default")
	a, err := w.create("backed", 128*mib, blockCap())
	must(t, err)
	must(t, a.up())
	d := openDevice(t, a, 128*mib)
	d.write(0, 24*mib)
	d.write(64*mib, 8*mib)
	w.must("backup", "create", "backed", "--name", "first")
	first := w.backup("first").Status
	if first.BackupMode != api.BackupFull || first.NewlyUploadDataSize < 32*mib || first.NewlyUploadDataSize > 40*mib {
		t.Errorf("32 MiB are backed up as %+v", first)
	}
	compareWithRestic(t, store, "volumes", "backed", d.want)

	d.write(10*mib, 64<<10)
	d.write(100*mib, 2*mib)
	w.must("backup", "create", "backed", "--name", "second", "--label", "why=test")
	second := w.backup("second").Status
	if second.BackupMode != api.BackupIncremental || second.NewlyUploadDataSize > 6*mib {
		t.Errorf("after a change of 2 MiB and 64 KiB, the backup is %+v", second)
	}
	compareWithRestic(t, store, "volumes", "backed", d.want)

	// Detached: the backup attaches nothing.
	d.write(120*mib, 2*mib)
	must(t, d.f.Close())
	must(t, a.down())
	w.must("backup", "create", "backed", "--name", "third")
	var attachments api.AttachmentList
	must(t, w.objects.List(t.Context(), &attachments))
	if len(attachments.Items) > 0 {
		t.Errorf("the backup of a detached volume attached it: %+v", attachments.Items)
	}
	compareWithRestic(t, store, "volumes", "backed", d.want)

	// Drover keeps the snapshot of the newest backup alone.
	if !comes(func() bool {
		var list api.SnapshotList
		must(t, w.objects.List(t.Context(), &list))
		return len(list.Items) == 1 && list.Items[0].Spec.Labels[api.LabelBackup] == "third"
	}) {
		t.Errorf("Drover keeps more snapshots than the newest backup needs: %s", w.must("snapshot", "list"))
	}

	// A volume of an image of the backup has the content of the backup.
	w.must("image", "restore", "third", "--name", "of-third")
	c, err := w.create("restored", 128*mib, blockCap(), "backingImage", "of-third")
	must(t, err)
	must(t, c.up())
	compareWithDevice(t, c, d.want)
	do(t, c.down, c.remove)
	w.must("image", "delete", "of-third")

	// So has a volume of the backup, and a clone of this volume, also when the hidden image is deleted.
	w.must("backup", "restore", "third", "--name", "again")
	if !comes(func() bool {
		var v api.Volume
		must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "again"}, &v))
		var images api.BackingImageList
		must(t, w.objects.List(t.Context(), &images))
		return v.Status.RestoreStatus.State == api.CloneCompleted && len(images.Items) == 0
	}) {
		t.Errorf("the restore does not end: %s%s", w.must("volume", "show", "again"), w.must("image", "list", "--all"))
	}
	w.must("volume", "create", "clone-of-again", "--from", "again")
	w.must("volume", "delete", "again")
	w.must("volume", "attach", "clone-of-again")
	var att api.Attachment
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "clone-of-again"}, &att))
	compareWithDevice(t, &pod{target: att.Status.Device}, d.want)
	w.must("volume", "detach", "clone-of-again")
	w.must("volume", "delete", "clone-of-again")

	// The backup outlives the volume; the rest is deleted, with its space.
	for _, s := range []string{"first", "second"} {
		w.must("backup", "delete", s)
	}
	restic(t, documented(t, "check", store, ""))
	restic(t, documented(t, "snapshots", store, ""))
	compareWithRestic(t, store, "volumes", "backed", d.want)
	third := w.backup("third")
	findNoPlainText(t, store, []byte("backed"), []byte(third.UID), []byte(third.Status.VolumeUID),
		[]byte(third.Status.SnapshotName), d.want[:64])
	must(t, a.remove())
	w.awaitNoLayers(t)
	readWhileRestoring(t, w, "third", d.want)
	w.awaitNoLayers(t)
	deleteWhileRestoring(t, w, "third", d.want)
	w.must("backup", "delete", "third")
	if !comes(func() bool { return folderSize(t, store) < mib }) {
		t.Errorf("the deletion of all backups leaves %d bytes: %s", folderSize(t, store), w.must("target", "show", "default"))
	}
	restic(t, "restic -r "+store+" check --read-data")
	w.must("target", "delete", "default")
}

// killedBackup: everything is killed in the middle of a backup. The next process continues, and uploads little twice.
func killedBackup(t *testing.T, w *world) {
	store := w.makeTarget(t, "offsite")
	a, err := w.create("large", 512*mib, blockCap())
	must(t, err)
	must(t, a.up())
	d := openDevice(t, a, 512*mib)
	for off := int64(0); off < 384*mib; off += 32 * mib {
		d.write(off, 32*mib)
	}
	must(t, d.f.Close())
	must(t, a.down())
	w.must("backup", "create", "large", "--name", "killed", "--target", "offsite", "--wait=false")
	ctx, cancel := context.WithTimeout(t.Context(), settle)
	defer cancel()
	_, err = await.Until(ctx, w.objects, "killed", func(b *api.Backup) (bool, error) {
		return b.Status.State == api.BackupInProgress || b.Status.State == api.BackupCompleted, nil
	})
	must(t, err)
	if !comes(func() bool { return folderSize(t, store) > 64*mib }) {
		t.Fatal("the backup uploads nothing")
	}
	w.signal(syscall.SIGKILL)
	w.kill("data")
	w.kill("hold")
	w.start(drover(t))
	began := time.Now()
	_, err = await.Until(ctx, w.objects, "killed", func(b *api.Backup) (bool, error) {
		return b.Status.State == api.BackupCompleted, nil
	})
	if err != nil {
		w.fatal("the backup does not end: %v: %s", err, w.must("backup", "show", "killed"))
	}
	t.Logf("completed %v after the start", time.Since(began).Round(time.Millisecond))
	compareWithRestic(t, store, "volumes", "large", d.want)
	restic(t, "restic -r "+store+" check --read-data --no-lock") // the lock of the killed process is stale in 30 minutes
	w.must("backup", "delete", "killed")
	do(t, a.remove)
	w.must("target", "delete", "offsite")
}

// damagedBackup: the store damaged a chunk. A volume of the backup says which chunk, and what to do, and is restored
// once the store has the chunk again; with --allow-damaged it has zeros there, the other bytes of the backup, and the
// list.
func damagedBackup(t *testing.T, w *world) {
	store := w.makeTarget(t, "rotten")
	a, err := w.create("sound", 32*mib, blockCap())
	must(t, err)
	must(t, a.up())
	d := openDevice(t, a, 32*mib)
	d.write(0, 24*mib)
	must(t, d.f.Close())
	w.must("backup", "create", "sound", "--name", "rotten", "--target", "rotten")
	do(t, a.down, a.remove)
	w.awaitNoLayers(t)
	damageLargestFile(t, filepath.Join(store, "data"))

	v := api.Volume{Spec: api.VolumeSpec{Size: 32 * mib, FromBackup: w.backup("rotten").Status.URL}}
	v.Name = "fails"
	must(t, w.objects.Create(t.Context(), &v))
	reaches := func(name string, state api.CloneState) bool {
		return comes(func() bool {
			must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: name}, &v))
			return v.Status.RestoreStatus != nil && v.Status.RestoreStatus.State == state
		})
	}
	if !reaches("fails", api.CloneFailed) {
		w.fatal("the restore of a damaged backup does not fail: %+v", v.Status.RestoreStatus)
	}
	text := w.must("volume", "show", "fails")
	if !strings.Contains(text, "1 chunk of the backup") || !strings.Contains(text, "(offset ") ||
		!strings.Contains(text, "--allow-damaged") {
		t.Errorf("the volume names no chunk, or no remedy: %s", text)
	}
	damageLargestFile(t, filepath.Join(store, "data")) // the same bit
	if !reaches("fails", api.CloneCompleted) {
		w.fatal("the restore of a healed backup does not end: %+v", v.Status.RestoreStatus)
	}
	w.must("volume", "delete", "fails")
	w.awaitNoLayers(t)
	damageLargestFile(t, filepath.Join(store, "data"))

	w.must("backup", "restore", "rotten", "--name", "holed", "--allow-damaged")
	if !reaches("holed", api.CloneCompleted) {
		t.Errorf("the restore does not end: %+v", v.Status.RestoreStatus)
	}
	w.must("volume", "attach", "holed")
	var att api.Attachment
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "holed"}, &att))
	got, err := os.ReadFile(att.Status.Device)
	must(t, err)
	var zeros int64
	for off := int64(0); off < 24*mib; off += 2 * mib {
		if !bytes.Equal(got[off:off+2*mib], d.want[off:off+2*mib]) {
			zeros++
			clear(d.want[off : off+2*mib])
			want := fmt.Sprintf("%d (offset %d)", off/(2*mib), off)
			if st := v.Status.RestoreStatus; !strings.Contains(st.Message, want) {
				t.Errorf("the status does not list chunk %s: %+v", want, st)
			}
		}
	}
	if zeros != 1 {
		t.Errorf("%d chunks are not the backup's", zeros)
	}
	compareWithDevice(t, &pod{target: att.Status.Device}, d.want)
	w.must("volume", "detach", "holed")
	w.must("volume", "delete", "holed")
	w.must("backup", "delete", "rotten")
	w.must("target", "delete", "rotten")
}

// damageLargestFile changes a byte in the middle of the largest file below a folder.
func damageLargestFile(t *testing.T, dir string) {
	t.Helper()
	var path string
	var size int64
	must(t, filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil && info.Size() > size {
			path, size = p, info.Size()
		}
		return err
	}))
	must(t, os.Chmod(path, 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	b := make([]byte, 1)
	_, err = f.ReadAt(b, size/2)
	must(t, err)
	b[0] ^= 1
	_, err = f.WriteAt(b, size/2)
	must(t, err)
	must(t, f.Close())
}

// recordTravels: a cluster that knows the store alone makes a volume like the one that was backed up.
func recordTravels(t *testing.T, w *world) {
	store := w.makeTarget(t, "record")
	w.must("volume", "create", "origin", "--size", "16Mi", "--label", "team=db", "--auto-balance", "least-effort")
	w.must("backup", "create", "origin", "--name", "of-origin", "--target", "record")
	w.must("volume", "delete", "origin")
	w.must("target", "delete", "record", "--force")
	w.openTarget(t, "record", store)
	w.must("target", "sync", "record")
	w.must("backup", "restore", "of-origin", "--name", "same")
	w.must("backup", "restore", "of-origin", "--name", "other", "--auto-balance", "disabled", "--label", "team=qa")
	for name, want := range map[string][2]string{"same": {"db", "least-effort"}, "other": {"qa", "disabled"}} {
		var v api.Volume
		must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: name}, &v))
		if got := [2]string{v.Labels["team"], v.Spec.ReplicaAutoBalance}; got != want {
			t.Errorf("volume %s has the label and the auto-balance %q, want %q", name, got, want)
		}
		w.must("volume", "delete", name)
	}
	w.must("backup", "delete", "of-origin")
	w.must("target", "delete", "record")
}

// imageTravels: the backup of a volume takes its image along, and uploads the image's chunks once. The image, deleted
// meanwhile, is restored with its checksum and its bytes, and restic reads them, too.
func imageTravels(t *testing.T, w *world) {
	ctx, cancel := timeout(t)
	defer cancel()
	store := w.makeTarget(t, "images")
	body := make([]byte, 20*mib+512)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(body)
	must(t, os.WriteFile(w.path("gold.raw"), body, 0o600))
	w.must("image", "upload", w.path("gold.raw"), "--name", "gold")
	var img api.BackingImage
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "gold"}, &img))
	a, err := w.create("of-gold", 32*mib, blockCap(), "backingImage", "gold")
	must(t, err)
	w.must("backup", "create", "of-gold", "--name", "with-gold", "--target", "images")
	name := api.ImageBackupName("gold", img.ContentDigest(), "images")
	var stored api.BackupBackingImage
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: name}, &stored))
	if s := stored.Status; s.State != api.BackupCompleted || s.Checksum != img.Status.Checksum || s.Checksum == "" ||
		s.Size != int64(len(body)) {
		t.Errorf("the image's backup is %+v", s)
	}
	if n := folderSize(t, store); n > 24*mib {
		t.Errorf("an image of 20 MiB and an unchanged volume take %d bytes", n)
	}
	var v api.Volume
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "of-gold"}, &v))
	do(t, a.remove)
	must(t, await.Gone(ctx, w.objects, &v, nil)) // the volume stays until the snapshot of the backup is deleted
	w.must("image", "delete", "gold")
	w.must("image", "restore", name)
	again := w.image("gold", "is ready again", func(i *api.BackingImage) bool { return i.Status.State == api.ImageReady })
	if again.Status.Checksum != stored.Status.Checksum || again.Status.VirtualSize != int64(len(body)) {
		t.Errorf("the restored image is %+v", again.Status)
	}
	b, err := w.create("again", 32*mib, blockCap(), "backingImage", "gold")
	must(t, err)
	must(t, b.up())
	compareWithDevice(t, b, append(body, make([]byte, 32*mib-int64(len(body)))...))
	compareWithRestic(t, store, "images", "gold", body)

	// An image that was exported from a changed volume of gold costs the store the change.
	d := openDevice(t, b, 32*mib)
	copy(d.want, body)
	d.write(4*mib, 2*mib)
	must(t, d.f.Close())
	_, err = w.imageSnap(b.id, "of-again")
	must(t, err)
	before := folderSize(t, store)
	w.must("image", "backup", "of-again", "--target", "images")
	if n := folderSize(t, store) - before; n < 2*mib || n > 3*mib {
		t.Errorf("the backup of an image with 2 MiB of its own takes %d bytes", n)
	}
	compareWithRestic(t, store, "images", "of-again", d.want)
	do(t, b.down, b.remove)
	w.must("image", "delete", "of-again")
	w.must("image", "delete", "gold")

	// The restored volume brings the deleted image.
	w.must("backup", "restore", "with-gold", "--name", "carried")
	again = w.image("gold", "came with the volume", func(i *api.BackingImage) bool {
		return i.Status.State == api.ImageReady
	})
	if again.Status.Checksum != stored.Status.Checksum {
		t.Errorf("the image that came with the volume is %+v", again.Status)
	}
	w.must("volume", "attach", "carried")
	var att api.Attachment
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "carried"}, &att))
	compareWithDevice(t, &pod{target: att.Status.Device}, append(body, make([]byte, 32*mib-int64(len(body)))...))
	w.must("volume", "detach", "carried")
	w.must("volume", "delete", "carried")
	w.must("image", "delete", "gold")
	w.must("backup", "delete", "with-gold")
	var images api.BackupBackingImageList
	must(t, w.objects.List(t.Context(), &images))
	for i := range images.Items {
		w.must("backup", "delete", "--image", images.Items[i].Name)
	}
	w.must("target", "delete", "images")
}
