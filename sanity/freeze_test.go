package sanity_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// lazily writes a file without a sync.
func (p *pod) lazily(name string) []byte {
	p.w.t.Helper()
	b := bytes.Repeat([]byte(p.id+name), 4096)
	must(p.w.t, os.WriteFile(p.file(name), b, 0o600))
	return b
}

// restored returns the content of a file of a snapshot of the volume.
func (p *pod) restored(name, file string) []byte {
	p.w.t.Helper()
	t := p.w.t
	id, err := p.w.snap(p.id, name)
	must(t, err)
	c, err := p.w.from(id, "restored-"+name, 0, mountCap(""))
	must(t, err)
	must(t, c.up())
	b, _ := os.ReadFile(c.file(file))
	do(t, c.down, c.remove)
	p.w.unsnap(id)
	return b
}

// writable waits until a write to the file system is durable.
func (p *pod) writable() {
	p.w.t.Helper()
	ended := make(chan error, 1)
	go func() {
		f, err := os.Create(p.file("writable"))
		if err == nil {
			_, err = f.WriteString("x")
		}
		if err == nil {
			err = f.Sync()
		}
		if f != nil {
			_ = f.Close()
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		must(p.w.t, err)
	case <-time.After(settle):
		p.w.fatal("the file system of volume %s is still frozen", p.id)
	}
}

// noFreeze waits until no record of a freeze is left.
func (w *world) noFreeze() {
	w.t.Helper()
	var left []string
	if !comes(func() bool {
		var err error
		left, err = filepath.Glob(w.path("state", "run", "freeze-*"))
		must(w.t, err)
		return len(left) == 0
	}) {
		w.fatal("records of freezes are left: %v", left)
	}
}

// frozenSnapshots: the snapshot of a volume with freezes has all writes to files, synced or not.
func frozenSnapshots(t *testing.T, w *world) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		a, err := w.create("frozen-"+fs, gib, mountCap(""), "fsType", fs, "freezeFilesystemForSnapshot", "true")
		must(t, err)
		must(t, a.up())
		// A file system that cannot be frozen within 10 s is cut without a freeze, and a busy disk may take as long.
		if !within(5, func(i int) bool {
			file := fmt.Sprintf("lazy-%d", i)
			want := a.lazily(file)
			return bytes.Equal(a.restored(fmt.Sprintf("frozen-%s-%d", fs, i), file), want)
		}) {
			t.Errorf("%s: a file that was written before the snapshot is not in it", fs)
		}
		a.writable()
		w.noFreeze()
		do(t, a.down, a.remove)
	}
	b, err := w.create("not-frozen", gib, mountCap("ext4"))
	must(t, err)
	must(t, b.up())
	// The kernel writes files without a sync, at once if other processes write much; but the file lacks the new data
	// before the journal has the commit.
	mustRun(t, "mount", "-o", "remount,commit=600", b.target)
	if !within(10, func(i int) bool { // another process may sync the whole machine
		file := fmt.Sprintf("lazy-%d", i)
		is := b.lazily(file)
		return !bytes.Equal(b.restored(fmt.Sprintf("not-frozen-%d", i), file), is)
	}) {
		t.Error("a file that was not synced is in a snapshot that was taken without a freeze: this test proves nothing")
	}
	s := &api.Setting{}
	s.Name, s.Value = "freeze-filesystem-for-snapshot", "true"
	must(t, w.objects.Create(t.Context(), s))
	if !within(5, func(i int) bool { // the node hears of the setting a little later
		file := fmt.Sprintf("lazier-%d", i)
		want := b.lazily(file)
		return bytes.Equal(b.restored(fmt.Sprintf("by-setting-%d", i), file), want)
	}) {
		t.Error("the setting freezes nothing")
	}

	// Another program's freeze: the node makes the snapshot, and the freeze stays.
	mustRun(t, "fsfreeze", "-f", b.target)
	id, err := w.snap(b.id, "of-frozen")
	must(t, err)
	mustRun(t, "fsfreeze", "-u", b.target)
	w.unsnap(id)
	must(t, w.objects.Delete(t.Context(), s))
	do(t, b.down, b.remove)
}

// within reports whether a try succeeds within so many tries.
func within(tries int, try func(i int) bool) bool {
	for i := range tries {
		if try(i) {
			return true
		}
	}
	return false
}

func mustRun(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}

// frozenKilled: no moment of a kill of the data process leaves the file system frozen.
func frozenKilled(t *testing.T, w *world) {
	a, err := w.create("frozen-killed", gib, mountCap("ext4"), "freezeFilesystemForSnapshot", "true")
	must(t, err)
	must(t, a.up())
	var ids []string
	for i := range kills(t, 4) {
		a.lazily(fmt.Sprint("file-", i))
		done := make(chan error, 1)
		go func() {
			id, err := w.snap(a.id, fmt.Sprintf("frozen-killed-%d", i))
			ids = append(ids, id)
			done <- err
		}()
		time.Sleep(time.Duration(i*12) * time.Millisecond) // another moment each time
		if pid := w.child("data"); pid != 0 {
			must(t, syscall.Kill(pid, syscall.SIGKILL))
		}
		must(t, <-done)
		a.writable()
		w.noFreeze()
	}
	w.unsnap(ids...)

	// As if the process with the freeze had been killed too, in between: only the record tells.
	var att api.Attachment
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: a.id}, &att))
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	must(t, err)
	var loop int
	_, err = fmt.Sscanf(att.Status.Device, "/dev/loop%d", &loop)
	must(t, err)
	key := string(w.volume(a.id).Status.UID)
	rec, err := json.Marshal(map[string]any{"boot": strings.TrimSpace(string(boot)), "key": key, "loop": loop})
	must(t, err)
	must(t, os.WriteFile(w.path("state", "run", "freeze-"+key), rec, 0o600))
	mustRun(t, "fsfreeze", "-f", a.target)
	w.kill("data")
	a.writable()
	w.noFreeze()
	do(t, a.down, a.remove)
}
