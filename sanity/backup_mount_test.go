package sanity_test

import (
	"bytes"
	little "encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestBackupMountStories: users read single files of backups.
func TestBackupMountStories(t *testing.T) {
	tell(t,
		story{"a file out of a backup", fileOutOfABackup},
		story{"a partition out of a backup", partitionOutOfABackup},
		story{"a file out of the backup of an image", fileOutOfAnImage},
		story{"a killed mount is cleaned up", killedMount},
		story{"a recovery key opens a store without keys", recoveryKey})
}

// backedFiles makes a backup of a mounted filesystem, whose journal is full, and deletes the volume. A file of 96 MiB
// has random bytes.
func (w *world) backedFiles(t *testing.T, backup string) (large []byte) {
	t.Helper()
	w.makeTarget(t, "default")
	dir := t.TempDir()
	w.must("volume", "create", "files", "--size", "256Mi")
	w.must("volume", "mount", "files", dir)
	large = make([]byte, 96*mib)
	_, _ = rand.NewChaCha8([32]byte{8}).Read(large)
	must(t, os.WriteFile(filepath.Join(dir, "large"), large, 0o600))
	must(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "a", "b", "note"), []byte("hello"), 0o644))
	syscall.Sync()
	w.must("backup", "create", "files", "--name", backup)
	w.must("volume", "umount", "files")
	w.must("volume", "delete", "files")
	return large
}

// mountsLeft are the volumes, attachments and images of mounts.
func (w *world) mountsLeft(t *testing.T) (names []string) {
	t.Helper()
	var volumes api.VolumeList
	must(t, w.objects.List(t.Context(), &volumes, client.HasLabels{api.LabelBackupMount}))
	for _, v := range volumes.Items {
		names = append(names, "volume "+v.Name)
	}
	var attachments api.AttachmentList
	must(t, w.objects.List(t.Context(), &attachments))
	for _, a := range attachments.Items {
		names = append(names, "attachment "+a.Name)
	}
	var images api.BackingImageList
	must(t, w.objects.List(t.Context(), &images, client.HasLabels{api.LabelHidden}))
	for _, i := range images.Items {
		names = append(names, "image "+i.Name)
	}
	return names
}

// unmounted compares the world after an unmount with the world before the mount.
func (w *world) unmounted(t *testing.T, dir string) {
	t.Helper()
	if !comes(func() bool { return len(w.mountsLeft(t)) == 0 }) {
		t.Errorf("the unmount leaves %v", w.mountsLeft(t))
	}
	if entries, err := os.ReadDir(dir); len(entries) > 0 {
		t.Errorf("%s is still mounted: %v, %v", dir, entries, err)
	}
}

// fileOutOfABackup: the files of a backup are read without the rest of the backup, cannot be changed, and are readable
// while serve is gone. The unmount leaves nothing.
func fileOutOfABackup(t *testing.T, w *world) {
	large := w.backedFiles(t, "friday")
	dir := filepath.Join(t.TempDir(), "new")
	began := time.Now()
	w.must("backup", "mount", "friday", dir)
	mounted := time.Since(began)
	note, err := os.ReadFile(filepath.Join(dir, "a", "b", "note"))
	if err != nil || string(note) != "hello" {
		t.Errorf("the note is %q: %v", note, err)
	}
	t.Logf("mounted after %v, first byte after %v", mounted.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
	if err := os.WriteFile(filepath.Join(dir, "new"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("a write: %v, want a read-only filesystem", err)
	}
	w.refused(5, "is mounted at", "backup", "mount", "friday", dir)

	first := func() []byte {
		f, err := os.OpenFile(filepath.Join(dir, "large"), os.O_RDONLY|syscall.O_DIRECT, 0)
		must(t, err)
		defer f.Close()
		b := aligned(64 << 10)
		_, err = f.ReadAt(b, 0)
		must(t, err)
		return b
	}
	first()
	var images api.BackingImageList
	must(t, w.objects.List(t.Context(), &images, client.HasLabels{api.LabelHidden}))
	if len(images.Items) != 1 || images.Items[0].Status.Progress != 0 || images.Items[0].Status.State != api.ImagePending {
		t.Errorf("more is fetched than what is read: %+v", images.Items)
	}
	w.signal(syscall.SIGKILL)
	if !bytes.Equal(first(), large[:64<<10]) {
		t.Error("without serve, the file has other bytes")
	}
	w.start(drover(t))
	if got, err := os.ReadFile(filepath.Join(dir, "large")); err != nil || !bytes.Equal(got, large) {
		t.Errorf("the file has other bytes: %d bytes, %v", len(got), err)
	}
	w.must("backup", "unmount", dir)
	w.unmounted(t, dir)
	w.refused(3, "neither the folder nor the backup", "backup", "unmount", dir)
	w.must("backup", "delete", "friday")
	w.must("target", "delete", "default")
}

// partitionOutOfABackup: a disk with partitions is mounted by partition, or attached as a device.
func partitionOutOfABackup(t *testing.T, w *world) {
	w.makeTarget(t, "default")
	w.must("volume", "create", "disk", "--size", "64Mi")
	w.must("volume", "attach", "disk")
	var att api.Attachment
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "disk"}, &att))
	tree := t.TempDir()
	must(t, os.WriteFile(filepath.Join(tree, "note"), []byte("hello"), 0o644))
	disk, err := os.OpenFile(att.Status.Device, os.O_RDWR, 0)
	must(t, err)
	record := make([]byte, 512) // a master boot record with two partitions of Linux
	for i, p := range []struct{ start, sectors uint32 }{{2048, 40960}, {65536, 4096}} {
		entry := record[446+16*i:]
		entry[4] = 0x83
		little.LittleEndian.PutUint32(entry[8:], p.start)
		little.LittleEndian.PutUint32(entry[12:], p.sectors)
	}
	record[510], record[511] = 0x55, 0xaa
	_, err = disk.WriteAt(record, 0)
	must(t, errors.Join(err, disk.Sync(), disk.Close()))
	out, err := exec.CommandContext(t.Context(), "mkfs.ext4", "-q", "-F", "-d", tree, "-E", "offset=1048576",
		att.Status.Device, "20480k").CombinedOutput()
	if err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	w.must("volume", "detach", "disk")
	w.must("backup", "create", "disk", "--name", "parts")
	w.must("volume", "delete", "disk")

	dir := t.TempDir()
	w.refused(1, "--partition", "backup", "mount", "parts", dir)
	w.refused(1, "--device-only", "backup", "mount", "parts", dir, "--partition", "2")
	w.refused(3, "has no partition 3: the partitions are 1, 2", "backup", "mount", "parts", dir, "--partition", "3")
	w.unmounted(t, dir)

	w.must("backup", "mount", "parts", dir, "--partition", "1")
	if note, err := os.ReadFile(filepath.Join(dir, "note")); err != nil || string(note) != "hello" {
		t.Errorf("the note is %q: %v", note, err)
	}
	said := w.must("backup", "mount", "parts", "--device-only")
	device := said[strings.Index(said, "/dev/"):]
	device = device[:strings.Index(device, ",")]
	if f, err := os.OpenFile(device, os.O_WRONLY, 0); err == nil {
		if _, err := f.Write(make([]byte, 4096)); err == nil && f.Sync() == nil {
			t.Errorf("%s can be written", device)
		}
		must(t, f.Close())
	}
	w.must("backup", "unmount", "parts") // both
	w.unmounted(t, dir)
	w.must("backup", "delete", "parts")
	w.must("target", "delete", "default")
}

// fileOutOfAnImage: the backup of an image is mounted as that of a volume is, while the image is gone.
func fileOutOfAnImage(t *testing.T, w *world) {
	w.makeTarget(t, "images")
	tree := t.TempDir()
	must(t, os.WriteFile(filepath.Join(tree, "note"), []byte("hello"), 0o644))
	raw := w.path("note.raw")
	if out, err := exec.CommandContext(t.Context(), "mkfs.ext4", "-q", "-F", "-d", tree, raw, "20481k").CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	w.must("image", "upload", raw, "--name", "noted")
	w.must("image", "backup", "noted", "--name", "noted-friday", "--target", "images")
	w.must("image", "delete", "noted")
	dir := t.TempDir()
	w.must("backup", "mount", "noted-friday", dir, "--image")
	if note, err := os.ReadFile(filepath.Join(dir, "note")); err != nil || string(note) != "hello" {
		t.Errorf("the note is %q: %v", note, err)
	}
	w.must("backup", "unmount", dir)
	w.unmounted(t, dir)
	w.must("backup", "delete", "--image", "noted-friday")
	w.must("target", "delete", "images")
}

// killedMount: whenever the command and everything else is killed, `backup unmount` finds what is left by the name of
// the backup or by the folder.
func killedMount(t *testing.T, w *world) {
	w.backedFiles(t, "sunday")
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), drover(t), "backup", "mount", "sunday", dir, "--kubeconfig",
		w.path("state", "kubeconfig"))
	must(t, cmd.Start())
	if !comes(func() bool { return len(w.mountsLeft(t)) > 0 }) {
		t.Error("the command makes no volume")
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	if entries, err := os.ReadDir(dir); err == nil && len(entries) == 0 { // the kill came before the mount
		w.refused(5, "ended early", "backup", "mount", "sunday", dir)
	}
	w.must("backup", "unmount", "sunday")
	w.unmounted(t, dir)

	w.must("backup", "mount", "sunday", dir)
	w.killAll()
	w.start(drover(t))
	w.must("backup", "unmount", dir)
	w.unmounted(t, dir)
	w.must("backup", "delete", "sunday")
	w.must("target", "delete", "default")
}

// recoveryKey: the exported file ends the warning that one password opens the repository. With the file, and by the lines
// in it, restic opens a repository whose key files are lost.
func recoveryKey(t *testing.T, w *world) {
	store := w.makeTarget(t, "safe")
	w.must("volume", "create", "v", "--size", "16Mi")
	w.must("backup", "create", "v", "--name", "kept", "--target", "safe")
	w.must("volume", "delete", "v")
	warns := func() bool {
		var target api.BackupTarget
		must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "safe"}, &target))
		return meta.IsStatusConditionTrue(target.Status.Conditions, api.ConditionNoRecoveryKey)
	}
	if !warns() {
		t.Error("a target with one password warns of nothing")
	}
	file := filepath.Join(t.TempDir(), "key")
	w.must("backup", "key", "export", "--target", "safe", "--out", file)
	w.refused(5, "exists already", "backup", "key", "export", "--target", "safe", "--out", file)
	if warns() {
		t.Error("after the export, the target warns that one password opens it")
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", st.Mode(), err)
	}
	staleLocks(t, w, store)

	text, err := os.ReadFile(file)
	must(t, err)
	lost := filepath.Join(t.TempDir(), "keys")
	must(t, os.Rename(filepath.Join(store, "keys"), lost))
	must(t, os.Mkdir(filepath.Join(store, "keys"), 0o700))
	var steps []string // to read the backups, and to write the key file back
	for line := range strings.Lines(string(text)) {
		if line, is := strings.CutPrefix(line, "#   "); is {
			steps = append(steps, strings.ReplaceAll(strings.TrimSpace(line), "THIS_FILE", file))
		}
	}
	if len(steps) != 3 {
		t.Fatalf("the file has the steps %q", steps)
	}
	restic(t, strings.Join([]string{"set -e", "unset RESTIC_PASSWORD", steps[2], steps[0], steps[1] + " >out",
		"grep /volumes/v out"}, "\n"))
	must(t, os.RemoveAll(filepath.Join(store, "keys")))
	must(t, os.Rename(lost, filepath.Join(store, "keys")))
	w.must("backup", "delete", "kept")
	w.must("target", "delete", "safe")
}

// staleLocks: the lock of a killed restic is listed, stays while it may be in use, and is removed when stale.
func staleLocks(t *testing.T, w *world, store string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "restic", "-r", store, "--no-cache", "backup", "--stdin")
	cmd.Env = append(os.Environ(), "RESTIC_PASSWORD="+backupPassword)
	_, err := cmd.StdinPipe() // restic waits for it
	must(t, err)
	must(t, cmd.Start())
	var locks []string
	if !comes(func() bool { locks, err = filepath.Glob(filepath.Join(store, "locks", "*")); return len(locks) > 0 }) {
		t.Error("restic makes no lock")
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	list := func(want string, args ...string) {
		t.Helper()
		if said := w.must(append([]string{"backup", "locks", "--target", "safe"}, args...)...); !strings.Contains(said, want) {
			t.Errorf("the locks %v, want %q: %s", args, want, said)
		}
	}
	list("0 stale locks removed", "--remove-stale")
	list("restic")
	old := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(locks[0], old, old))
	list("yes")
	list("1 stale lock removed", "--remove-stale")
	if _, err := os.Stat(locks[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the stale lock: %v", err)
	}
}
