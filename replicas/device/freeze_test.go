package device

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// mountNew makes an ext4 file system, with two mounts.
func mountNew(t *testing.T, d *Device) (dir string) {
	t.Helper()
	if out, err := exec.Command("mkfs.ext4", "-q", d.Path()).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	dir = filepath.Join(t.TempDir(), "a b")
	for _, sub := range []string{dir, dir + "-2"} {
		if err := os.Mkdir(sub, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(d.Path(), dir, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	if err := unix.Mount(dir, dir+"-2", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir+"-2", unix.MNT_DETACH) })
	return dir
}

// writing writes a file in another process, which a freeze stops.
func writing(t *testing.T, path string) (ended chan error) {
	ended = make(chan error, 1)
	cmd := exec.Command("sh", "-c", `echo x > "$0" && sync "$0"`, path)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { ended <- cmd.Wait() }()
	return ended
}

func isWriting(t *testing.T, ended chan error, want bool) {
	t.Helper()
	wait := time.Minute
	if want {
		wait = 300 * time.Millisecond
	}
	select {
	case err := <-ended:
		if err != nil || want {
			t.Fatalf("the writer ended: %v", err)
		}
	case <-time.After(wait):
		if !want {
			t.Fatal("the writer still waits")
		}
	}
}

func records(t *testing.T, runDir string) []string {
	t.Helper()
	a, _ := filepath.Glob(filepath.Join(runDir, freezePrefix+"*"))
	b, _ := filepath.Glob(filepath.Join(runDir, ".freeze-*"))
	return append(a, b...)
}

// detachSoon detaches an unmounted device: other processes may have the device open for a moment.
func detachSoon(t *testing.T, d *Device) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for range 600 {
		err := d.Detach(t.Context())
		if err == nil {
			return
		}
		t.Log(err)
		<-tick.C
	}
	t.Error("the device is held")
}

func TestFreeze(t *testing.T) {
	runDir := runHolder(t)
	h, l := openHost(t, runDir), runLoop(t)
	d, _ := attach(t, h, l, "freeze", 64*mib)
	if f, err := d.Freeze(t.Context()); f != nil || err != nil {
		t.Fatalf("not mounted: %v, %v", f, err)
	}
	dir := mountNew(t, d)
	f, err := d.Freeze(t.Context())
	if err != nil || f == nil {
		t.Fatal(f, err)
	}
	if n := len(records(t, runDir)); n != 1 {
		t.Errorf("%d records", n)
	}
	w := writing(t, dir+"/one")
	isWriting(t, w, true)
	if err := unix.Unmount(dir+"-2", 0); err != nil && err != unix.EBUSY {
		t.Error(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if f, err := d.Freeze(short); err == nil {
		t.Errorf("frozen twice: %v", f)
	}
	if err := f.Thaw(); err != nil {
		t.Fatal(err)
	}
	isWriting(t, w, false)
	if left := records(t, runDir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}

	// A freeze of another process stays.
	if out, err := exec.Command("fsfreeze", "-f", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if f, err := d.Freeze(t.Context()); err == nil {
		t.Errorf("frozen: %v", f)
	}
	if out, err := exec.Command("fsfreeze", "-u", dir).CombinedOutput(); err != nil {
		t.Errorf("it was thawed: %v: %s", err, out)
	}

	// The freezing process is killed: the record leads to the thaw.
	if f, err = d.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(f.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	w = writing(t, dir+"/two")
	isWriting(t, w, true)
	h.ThawLeft()
	isWriting(t, w, false)
	h.thaws.Wait()
	if left := records(t, runDir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}

	// The same, told to thaw.
	if f, err = d.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(f.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := f.Thaw(); err != nil {
		t.Fatal(err)
	}
	isWriting(t, writing(t, dir+"/three"), false)

	// A freeze whose caller gave up: the file system is not frozen in the end.
	ended, stop := context.WithCancel(t.Context())
	stop()
	if f, err := d.Freeze(ended); err == nil {
		t.Errorf("frozen: %v", f)
	}
	h.thaws.Wait()
	isWriting(t, writing(t, dir+"/four"), false)
	if left := records(t, runDir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	for _, m := range []string{dir, dir + "-2"} {
		if err := unix.Unmount(m, 0); err != nil && err != unix.EINVAL {
			t.Errorf("unmount %s: %v", m, err)
		}
	}
	detachSoon(t, d)
}
