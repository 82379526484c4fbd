package sanity_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// finding is a line of `drover recover -o json`.
type finding struct{ Kind, Name, UID, Disk, State, Action, Note string }

// recover runs `drover recover` and returns its findings and its exit code.
func (w *world) recover(args ...string) (all []finding, code int) {
	w.t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(drover(w.t), append([]string{"recover", "-o", "json", "--kubeconfig",
		w.path("state", "kubeconfig")}, args...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if cmd.ProcessState == nil {
		w.t.Fatal(err)
	}
	if len(out) > 0 {
		must(w.t, json.Unmarshal(out, &all))
	}
	for _, f := range all {
		w.t.Logf("%+v", f)
	}
	w.t.Logf("recover %v: code %d: %s", args, cmd.ProcessState.ExitCode(), stderr.String())
	return all, cmd.ProcessState.ExitCode()
}

// states counts findings of a kind in a state, with an action.
func states(all []finding, kind, state, action string) int {
	n := 0
	for _, f := range all {
		if f.Kind == kind && f.State == state && f.Action == action {
			n++
		}
	}
	return n
}

func (w *world) cli(args ...string) {
	w.t.Helper()
	cmd := exec.Command(drover(w.t), append(args, "--kubeconfig", w.path("state", "kubeconfig"))...)
	if out, err := cmd.CombinedOutput(); err != nil {
		w.fatal("drover %v: %v\n%s", args, err, out)
	}
}

// onDisk lists the folders of the disk's layers, replicas and images: no folder may get lost.
func (w *world) onDisk() (names []string) {
	w.t.Helper()
	for _, dir := range []string{"layers", "replicas", "images"} {
		entries, err := os.ReadDir(w.path("disk", dir))
		must(w.t, err)
		for _, e := range entries {
			names = append(names, dir+"/"+e.Name())
		}
	}
	slices.Sort(names)
	return names
}

// loseState replaces the embedded API server's state by another folder's content, or by nothing.
func (w *world) loseState(other string) {
	w.t.Helper()
	w.signal(syscall.SIGKILL)
	must(w.t, os.RemoveAll(w.path("state", "etcd")))
	if other != "" {
		must(w.t, os.CopyFS(w.path("state", "etcd"), os.DirFS(other)))
	}
	w.start(drover(w.t))
}

func (w *world) volume(name string) *api.Volume {
	w.t.Helper()
	var v api.Volume
	must(w.t, w.objects.Get(w.t.Context(), client.ObjectKey{Name: name}, &v))
	return &v
}

// TestRecoverLostState: the API's state is lost. `drover recover` restores images and volumes from the disk; a
// mounted volume works all the while.
func TestRecoverLostState(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	dir := t.TempDir()
	gold := golden(t, filepath.Join(dir, "golden.qcow2"), 128*mib)
	w.cli("image", "import", filepath.Join(dir, "golden.qcow2"), "--name", "golden")
	blank, err := w.create("blank", 320*mib, mountCap("xfs"), "fsType", "xfs", "dataLocality", "best-effort")
	must(t, err)
	from, err := w.create("from-image", 512*mib, mountCap("ext4"), "backingImage", "golden")
	must(t, err)
	busy, err := w.create("busy", 256*mib, mountCap("ext4"))
	must(t, err)
	never, err := w.create("never-used", 256*mib, mountCap("ext4"))
	must(t, err)
	do(t, blank.up, from.up, busy.up)
	from.check("golden", gold)
	sums := [][32]byte{blank.write("a", 16*mib), from.write("b", 16*mib), busy.write("c", 16*mib)}
	do(t, blank.down, from.down)
	do(t, func() error { return blank.expand(400 * mib) })
	var image api.BackingImage
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "golden"}, &image))
	old := map[string]*api.Volume{}
	for _, p := range []*pod{blank, from, busy, never} {
		old[p.id] = w.volume(p.id)
	}
	was := w.onDisk()

	w.loseState("")
	busy.check("c", sums[2]) // mounts are served all the while
	if now := w.onDisk(); !slices.Equal(now, was) {
		t.Fatalf("an empty API and a full disk: %v became %v", was, now)
	}
	all, code := w.recover()
	if code != 0 || states(all, "Volume", "missing", "create") != 4 || states(all, "Replica", "missing", "create") != 4 ||
		states(all, "BackingImage", "missing", "create") != 1 || states(all, "Disk", "there", "") != 1 {
		t.Fatalf("dry run: code %d", code)
	}
	var volumes api.VolumeList
	must(t, w.objects.List(t.Context(), &volumes))
	if len(volumes.Items) != 0 {
		t.Fatalf("a dry run created %d volumes", len(volumes.Items))
	}
	all, code = w.recover("--yes")
	if code != 0 || states(all, "Volume", "missing", "created") != 4 {
		w.fatal("recover: code %d", code)
	}
	if all, code = w.recover("--yes"); code != 0 || states(all, "Volume", "there", "") != 4 ||
		states(all, "BackingImage", "there", "") != 1 || states(all, "ImageCopy", "there", "") != 1 || len(all) != 11 {
		t.Errorf("a second time: code %d, %d findings", code, len(all))
	}

	var again api.BackingImage
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "golden"}, &again))
	if again.Status.UUID != image.Status.UUID || again.Status.Digest != image.Status.Digest ||
		again.Status.Checksum != image.Status.Checksum || !equalJSON(t, again.Spec, image.Spec) {
		t.Errorf("image: %+v, was %+v", again, image)
	}
	for name, o := range old {
		v := w.volume(name)
		if v.Status.UID != o.Status.UID || v.Status.Epoch < o.Status.Epoch || v.Status.Size != o.Status.Size ||
			!slices.Equal(v.Status.Members, o.Status.Members) || !equalJSON(t, v.Spec, o.Spec) ||
			!equalJSON(t, v.Annotations, o.Annotations) {
			t.Errorf("volume %s:\n%+v, was\n%+v", name, v, o)
		}
	}
	busy.check("c", sums[2])
	do(t, busy.up) // joins the attachment that exists
	do(t, blank.up, from.up, never.up)
	blank.check("a", sums[0])
	from.check("b", sums[1])
	from.check("golden", gold)
	do(t, busy.down, busy.up)
	busy.check("c", sums[2])
	for _, p := range []*pod{blank, from, busy, never} {
		do(t, p.down, p.remove)
	}
	w.cli("image", "delete", "golden")
	if left := w.onDisk(); len(left) != 0 {
		t.Errorf("recovered objects were deleted and leave %v", left)
	}
}

func equalJSON(t *testing.T, a, b any) bool {
	t.Helper()
	x, err := json.Marshal(a)
	must(t, err)
	y, err := json.Marshal(b)
	must(t, err)
	return bytes.Equal(x, y)
}

// TestRecoverOldState: the API went back in time. No newer data is destroyed, an attach refuses until the epoch is
// raised, and `drover recover` reports conflicts and leaves both sides alone.
func TestRecoverOldState(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	early, err := w.create("early", 256*mib, mountCap("ext4"))
	must(t, err)
	do(t, early.up)
	first := early.write("first", 8*mib)
	do(t, early.down)
	w.signal(syscall.SIGTERM)
	backup := filepath.Join(t.TempDir(), "etcd")
	must(t, os.CopyFS(backup, os.DirFS(w.path("state", "etcd"))))
	w.start(drover(t))
	do(t, early.up)
	second := early.write("second", 8*mib)
	do(t, early.down)
	late, err := w.create("late", 256*mib, mountCap("ext4"))
	must(t, err)
	do(t, late.up)
	third := late.write("third", 8*mib)
	do(t, late.down)
	taken, err := w.create("taken", 256*mib, mountCap("ext4"))
	must(t, err)
	was := w.onDisk()

	w.loseState(backup)
	// A user creates a volume of the same name meanwhile.
	must(t, w.objects.Create(t.Context(), &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: taken.id},
		Spec: api.VolumeSpec{Size: 256 * mib}}))
	if !comes(func() bool { // on a busy machine the reason may come later
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err = w.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: early.id,
			NodeId: w.name, VolumeCapability: early.cap})
		return err == nil || strings.Contains(err.Error(), "back in time")
	}) || err == nil {
		t.Fatalf("attach with an epoch below the disk's: %v", err)
	}
	must(t, early.down())
	all, code := w.recover("--yes")
	if code == 0 || states(all, "Volume", "behind", "") != 1 || states(all, "Volume", "missing", "created") != 1 ||
		states(all, "Volume", "conflict", "") != 1 {
		t.Fatalf("recover: code %d", code)
	}
	all, code = w.recover("--yes", "--raise-epochs")
	if code == 0 || states(all, "Volume", "behind", "raised") != 1 || states(all, "Volume", "there", "") < 1 ||
		states(all, "Volume", "conflict", "") != 1 {
		t.Fatalf("recover with epochs: code %d", code)
	}
	do(t, early.up, late.up)
	early.check("first", first)
	early.check("second", second)
	late.check("third", third)
	do(t, early.down, late.down)
	for _, name := range was {
		if !slices.Contains(w.onDisk(), name) {
			t.Errorf("%s is gone from the disk", name)
		}
	}
	do(t, early.remove, late.remove, taken.remove)
}

// TestRestoreState: the API's state goes back to a snapshot, then `drover recover` adds the disk's newer objects.
func TestRestoreState(t *testing.T) {
	w := newWorld(t)
	var snaps []string
	if !comes(func() bool { // from before the first volume
		snaps, _ = filepath.Glob(w.path("state", "etcd-snapshots", "state-*.db"))
		return len(snaps) > 0
	}) {
		w.fatal("no snapshot of the state")
	}
	p, err := w.create("kept", 256*mib, mountCap("ext4"))
	must(t, err)
	must(t, p.up())
	sum := p.write("file", 8*mib)
	data := w.child("data")
	restore := []string{"recover", "--restore-state", snaps[0], "--state-dir", w.path("state"), "--yes"}
	out, err := exec.Command(drover(t), restore...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "in use") {
		t.Fatalf("restored under a running server: %v, %s", err, out)
	}
	w.signal(syscall.SIGTERM) // the volume stays mounted
	if out, err := exec.Command(drover(t), restore...).CombinedOutput(); err != nil {
		t.Fatalf("restore: %v, %s", err, out)
	}
	w.start(drover(t))
	var now int
	if !comes(func() bool { now = w.child("data"); return now != data && now != 0 }) { // replaced after serve is ready
		t.Errorf("the data process was %d and is %d: it still waits for changes of the lost state", data, now)
	}
	p.check("file", sum)
	if all, code := w.recover("--yes", "--raise-epochs"); code != 0 || states(all, "Volume", "missing", "created") != 1 {
		t.Fatalf("recover: code %d", code)
	}
	do(t, p.up, p.down, p.up)
	p.check("file", sum)
	do(t, p.down, p.remove)
}
