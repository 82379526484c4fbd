package sanity_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/longhorntest"
	"drover.io/drover/backups/target/folder"
)

// TestLonghornStories: users leave Longhorn with its backups.
func TestLonghornStories(t *testing.T) {
	tell(t,
		story{"a verified backup of Longhorn is used at once", longhornAtOnce},
		story{"a damaged backup of Longhorn is restored with zeros", damagedLonghorn},
		story{"a standby volume follows backups of Longhorn", longhornStandby})
}

// longhornStore is a folder with backups of Longhorn.
type longhornStore struct {
	*testing.T
	dir string
}

// newLonghornStore makes a target of a new folder with backups, which add writes.
func (w *world) newLonghornStore(t *testing.T, name string, add func(longhornStore)) longhornStore {
	t.Helper()
	s := longhornStore{t, t.TempDir()}
	add(s)
	w.must("target", "create", name, "file://"+s.dir)
	return s
}

// add writes a backup of a day with the blocks of content that do not begin with zeros.
func (s longhornStore) add(volume, name string, day int, blockSize int64, content []byte) {
	s.Helper()
	to, err := folder.Open(s.Context(), s.dir)
	must(s.T, err)
	blocks := map[int64][]byte{}
	for off := int64(0); off < int64(len(content)); off += blockSize {
		if b := content[off:min(off+blockSize, int64(len(content)))]; b[0] != 0 {
			blocks[off] = b
		}
	}
	longhorntest.AddBackup(s.T, to, longhorntest.Backup{Volume: volume, Name: name, Size: int64(len(content)),
		BlockSize: blockSize, Method: "gzip", Blocks: blocks, Day: day})
}

// longhornContent is n bytes of which compression leaves a sixteenth.
func longhornContent(seed byte, n int64) []byte {
	b := bytes.Repeat([]byte{seed}, int(n))
	random := rand.NewChaCha8([32]byte{seed})
	for off := int64(0); off < n; off += mib {
		_, _ = random.Read(b[off:][:64<<10])
		b[off] |= 1
	}
	return b
}

// mountedImage is the only hidden image.
func (w *world) mountedImage(t *testing.T) *api.BackingImage {
	t.Helper()
	var images api.BackingImageList
	must(t, w.objects.List(t.Context(), &images, client.HasLabels{api.LabelHidden}))
	if len(images.Items) != 1 {
		w.fatal("the hidden images are %+v", images.Items)
	}
	return &images.Items[0]
}

// longhornAtOnce: a backup with blocks of 16 MiB is neither mounted nor readable before its end, until a verification
// has read it. Then a volume of it is read while the store has most of the data still, also after kill -9, and a mount
// fetches what is read. Without the table of digests, a restore reads the whole backup, has its bytes, and fills the
// table again.
func longhornAtOnce(t *testing.T, w *world) {
	want := longhornContent(3, 162*mib)
	clear(want[32*mib : 48*mib])
	clear(want[100*mib : 106*mib])
	w.newLonghornStore(t, "default", func(s longhornStore) { s.add("pvc-1", "big", 1, 16*mib, want) })
	w.refused(1, "drover backup verify big", "backup", "mount", "big", "--device-only")
	if text := w.must("backup", "verify", "big"); !strings.Contains(text, "146 MiB in 10 blocks read") {
		t.Errorf("the verification says: %s", text)
	}
	if text := w.must("backup", "show", "big"); !strings.Contains(text, "Restored at once") {
		t.Errorf("the backup shows: %s", text)
	}
	readWhileRestoring(t, w, "big", want)
	w.awaitNoLayers(t)

	mount := func() {
		device := regexp.MustCompile(`/dev/\w+`).FindString(w.must("backup", "mount", "big", "--device-only"))
		f, err := os.OpenFile(device, os.O_RDONLY|syscall.O_DIRECT, 0)
		must(t, err)
		b := aligned(64 << 10)
		_, err = f.ReadAt(b, 70*mib)
		must(t, err)
		must(t, f.Close())
		if !bytes.Equal(b, want[70*mib:][:len(b)]) {
			t.Error("the mount has other bytes than the backup")
		}
		if i := w.mountedImage(t); i.Status.Progress != 0 || i.Status.State != api.ImagePending {
			t.Errorf("more is fetched than what is read: %+v", i.Status)
		}
		w.must("backup", "unmount", "big")
		w.unmounted(t, t.TempDir())
	}
	mount()

	table := w.path("state", "backups", "longhorn-digests")
	b, err := os.ReadFile(table)
	must(t, err)
	for off := 0; off < len(b); off += 1000 {
		b[off] ^= 1
	}
	must(t, os.WriteFile(table, b, 0o600))
	w.setDownloadRate(256 << 10)
	whole := api.Volume{Spec: api.VolumeSpec{Size: int64(len(want)), FromBackup: w.backup("big").Status.URL}}
	whole.Name = "whole"
	must(t, w.objects.Create(t.Context(), &whole))
	w.awaitVolume("whole", func(v *api.Volume) bool {
		return v.Status.RestoreStatus != nil && strings.Contains(v.Status.RestoreStatus.Message, "0 % of the chunks")
	})
	w.setDownloadRate(0)
	w.awaitVolume("whole", func(v *api.Volume) bool {
		return v.Status.RestoreStatus != nil && v.Status.RestoreStatus.State == api.CloneCompleted
	})
	w.compareActivated(t, "whole", want)
	w.must("volume", "detach", "whole")
	w.must("volume", "delete", "whole")
	w.awaitNoLayers(t)
	mount()
	w.must("target", "delete", "default", "--force")
}

// damagedLonghorn: a verification names the backup of which the store lost a block. A volume of the backup is read
// elsewhere, and is restored with zeros in place of the block.
func damagedLonghorn(t *testing.T, w *world) {
	want := longhornContent(5, 24*mib)
	s := w.newLonghornStore(t, "lossy", func(s longhornStore) { s.add("pvc-1", "rotten", 1, 2*mib, want) })
	w.must("backup", "verify", "rotten")
	lost := longhorntest.BlockName(longhorntest.VolumeFolder("pvc-1")+"blocks/", want[4*mib:6*mib])
	must(t, os.Remove(filepath.Join(s.dir, lost)))
	w.refused(1, `backup "rotten" is damaged`, "backup", "verify", "rotten")
	w.must("backup", "restore", "rotten", "--name", "waits")
	w.must("volume", "attach", "waits")
	f, err := os.OpenFile(w.attached("waits", 0).Status.Device, os.O_RDONLY|syscall.O_DIRECT, 0)
	must(t, err)
	b := aligned(64 << 10)
	_, err = f.ReadAt(b, 20*mib)
	must(t, err)
	must(t, f.Close())
	if !bytes.Equal(b, want[20*mib:][:len(b)]) {
		t.Error("a volume of a damaged backup has other bytes elsewhere")
	}
	v := w.awaitVolume("waits", func(v *api.Volume) bool {
		return v.Status.RestoreStatus != nil && v.Status.RestoreStatus.State == api.CloneFailed
	})
	if place := fmt.Sprintf("(offset %d)", 4*mib); !strings.Contains(v.Status.RestoreStatus.Message, place) {
		t.Errorf("the restore of a damaged backup says: %+v", v.Status.RestoreStatus)
	}
	w.must("volume", "detach", "waits")
	w.must("volume", "delete", "waits")
	w.must("backup", "restore", "rotten", "--name", "holed", "--allow-damaged")
	w.awaitVolume("holed", func(v *api.Volume) bool { return v.Status.RestoreStatus.State == api.CloneCompleted })
	clear(want[4*mib : 6*mib])
	w.compareActivated(t, "holed", want)
	w.must("volume", "detach", "holed")
	w.must("volume", "delete", "holed")
	w.must("target", "delete", "lossy", "--force")
}

// longhornStandby: the second backup costs a standby volume the changed blocks alone.
func longhornStandby(t *testing.T, w *world) {
	want := longhornContent(7, 40*mib)
	s := w.newLonghornStore(t, "dr", func(s longhornStore) { s.add("pvc-1", "one", 1, 2*mib, want) })
	before := w.restored(t, "store")
	w.must("volume", "create", "standby", "--standby", "--from-backup", "pvc-1", "--target", "dr")
	holds := func(backup string) {
		w.awaitVolume("standby", func(v *api.Volume) bool {
			return v.Status.LastBackup == backup && v.Status.Standby.Next == nil
		})
	}
	holds("one")
	if n := w.restored(t, "store") - before; n != 40*mib {
		t.Errorf("the first backup costs the store %d bytes, want 40 MiB", n)
	}
	copy(want[8*mib:10*mib], longhornContent(8, 2*mib))
	s.add("pvc-1", "two", 2, 2*mib, want)
	w.must("target", "sync", "dr")
	holds("two")
	if n := w.restored(t, "store") - before; n != 42*mib {
		t.Errorf("two backups cost the store %d bytes, want 40 MiB and the changed 2 MiB", n)
	}
	w.must("volume", "activate", "standby")
	w.compareActivated(t, "standby", want)
	w.must("volume", "detach", "standby")
	w.must("volume", "delete", "standby")
	w.must("target", "delete", "dr", "--force")
}
