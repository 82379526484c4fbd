package sanity_test

import (
	"bytes"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// awaitNoLayers waits until the disk has no layer: restores take all chunks from the store then.
func (w *world) awaitNoLayers(t *testing.T) {
	t.Helper()
	if !comes(func() bool {
		entries, err := os.ReadDir(w.path("disk", "layers"))
		return err == nil && len(entries) == 0
	}) {
		w.fatal("layers of deleted volumes are left")
	}
}

// setDownloadRate bounds what the node reads from the target default, in bytes per second; 0: no bound.
func (w *world) setDownloadRate(rate int64) {
	w.t.Helper()
	var target api.BackupTarget
	must(w.t, w.objects.Get(w.t.Context(), client.ObjectKey{Name: "default"}, &target))
	base := target.DeepCopy()
	target.Spec.MaxDownloadRate = rate
	must(w.t, w.objects.Patch(w.t.Context(), &target, client.MergeFrom(base)))
}

// deleteWhileRestoring: while a program has the device of a restoring volume open, the detach waits and says why, and
// the device serves. When the program closes the device, the volume is detached, and deleted long before the restore
// ends.
func deleteWhileRestoring(t *testing.T, w *world, backup string, want []byte) {
	w.setDownloadRate(256 << 10)
	defer w.setDownloadRate(0)
	w.must("backup", "restore", backup, "--name", "opened")
	w.must("volume", "attach", "opened")
	f, err := os.OpenFile(w.attached("opened", 0).Status.Device, os.O_RDONLY|syscall.O_DIRECT, 0)
	must(t, err)
	defer f.Close()
	out, code := "", 0
	told := func() bool {
		out, code = w.command("volume", "detach", "opened", "--timeout", "5s")
		return code != 4 || strings.Contains(out, `"opened" waits: `) // on a busy machine the reason may come later
	}
	if !comes(told) || code != 4 || !strings.Contains(out, "is open in some process") {
		t.Errorf("volume detach: exit code %d: %s", code, out)
	}
	if out, code := w.command("volume", "delete", "opened"); code != 5 || !strings.Contains(out, "is attached") {
		t.Errorf("volume delete: exit code %d: %s", code, out)
	}
	got := aligned(4096)
	_, err = f.ReadAt(got, 64*mib)
	must(t, err)
	if !bytes.Equal(got, want[64*mib:64*mib+4096]) {
		t.Error("the volume that waits for its detach has other bytes")
	}
	must(t, f.Close())
	gone(w, &api.Attachment{ObjectMeta: metav1.ObjectMeta{Name: "opened"}})
	w.must("volume", "delete", "opened")
}

// readWhileRestoring: a volume of a backup is attached and read while the store, which the target's rate makes slow,
// has most of the data still, also after kill -9 of serve and of the data process. When the rate ends, the restore
// ends, and every byte is the backup's, or was written meanwhile.
func readWhileRestoring(t *testing.T, w *world, backup string, want []byte) {
	state := func() *api.RestoreStatus {
		var v api.Volume
		must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "slow"}, &v))
		return v.Status.RestoreStatus
	}
	w.setDownloadRate(256 << 10) // minutes for the whole
	began := time.Now()
	w.must("backup", "restore", backup, "--name", "slow")
	w.must("volume", "attach", "slow")
	var att api.Attachment
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "slow"}, &att))
	d := openDevice(t, &pod{target: att.Status.Device}, int64(len(want)))
	copy(d.want, want)
	first := aligned(4096)
	_, err := d.f.ReadAt(first, 64*mib)
	must(t, err)
	if !bytes.Equal(first, want[64*mib:64*mib+4096]) {
		t.Error("the first read of the restoring volume has other bytes")
	}
	t.Logf("read %v after the restore began", time.Since(began).Round(time.Millisecond))
	d.write(mib, 64<<10)
	if s := state(); s.State != api.CloneInitiated {
		t.Errorf("the volume was read at the end of the restore only: %+v", s)
	}
	w.signal(syscall.SIGKILL)
	w.kill("data")
	again := make(chan error, 1)
	go func() {
		_, err := d.f.ReadAt(aligned(4096), 66*mib)
		again <- err
	}()
	w.start(drover(t))
	must(t, <-again)
	w.setDownloadRate(0)
	if !comes(func() bool { return state().State == api.CloneCompleted }) {
		t.Errorf("the restore does not end: %+v", state())
	}
	must(t, d.f.Close())
	compareWithDevice(t, &pod{target: att.Status.Device}, d.want)
	w.must("volume", "detach", "slow")
	w.must("volume", "delete", "slow")
}
