package sanity_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// command runs a command of the program against this world, as a user would.
func (w *world) command(args ...string) (out string, code int) {
	w.t.Helper()
	args = append(args, "--kubeconfig", w.path("state", "kubeconfig"))
	if !slices.Contains(args, "--timeout") {
		args = append(args, "--timeout", settle.String())
	}
	cmd := exec.CommandContext(w.t.Context(), drover(w.t), args...)
	b, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.t.Fatal(err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

// must runs a command that has to succeed.
func (w *world) must(args ...string) string {
	w.t.Helper()
	out, code := w.command(args...)
	if code != 0 {
		w.fatal("drover %s: exit code %d: %s", strings.Join(args, " "), code, out)
	}
	return out
}

// refused runs a command that has to fail with a code and words.
func (w *world) refused(code int, words string, args ...string) {
	w.t.Helper()
	if out, got := w.command(args...); got != code || !strings.Contains(out, words) {
		w.t.Errorf("drover %s: exit code %d, want %d with %q: %s", strings.Join(args, " "), got, code, words, out)
	}
}

func timeout(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), settle)
}

// loopsOf lists the loop devices on a volume's file.
func loopsOf(volume api.UID) (out []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), string(volume)) {
			out = append(out, strings.Split(f, "/")[3])
		}
	}
	return out
}

// killAll kills serve, data and hold at once: nothing can be handed over.
func (w *world) killAll() {
	w.t.Helper()
	must(w.t, w.cmd.Process.Kill())
	w.kill("data")
	w.kill("hold")
	<-w.done
}

func volumeIs(ok func(*api.Volume) bool) func(*api.Volume) (bool, error) {
	return func(v *api.Volume) (bool, error) { return ok(v), nil }
}

func (w *world) awaitVolume(name string, ok func(*api.Volume) bool) *api.Volume {
	w.t.Helper()
	ctx, cancel := timeout(w.t)
	defer cancel()
	v, err := await.Until(ctx, w.objects, name, volumeIs(ok))
	if err != nil {
		w.fatal("volume %s: %v; it is %+v", name, err, v)
	}
	return v
}

// attached waits until a volume is attached in an epoch later than after.
func (w *world) attached(name string, after int64) *api.Attachment {
	w.t.Helper()
	ctx, cancel := timeout(w.t)
	defer cancel()
	var last api.AttachmentStatus
	att, err := await.Until(ctx, w.objects, name, func(a *api.Attachment) (bool, error) {
		last = a.Status
		return a.Status.Ready && a.Status.Epoch > after, nil
	})
	if err != nil {
		w.fatal("volume %s is not attached after epoch %d: %v: %+v", name, after, err, last)
	}
	return att
}

// gone waits until an object no longer exists.
func gone[T client.Object](w *world, obj T) {
	w.t.Helper()
	ctx, cancel := timeout(w.t)
	defer cancel()
	err := w.objects.Get(ctx, client.ObjectKeyFromObject(obj), obj)
	if err == nil {
		err = await.Gone(ctx, w.objects, obj, nil)
	}
	if client.IgnoreNotFound(err) != nil {
		w.fatal("%T %s is not gone: %v", obj, obj.GetName(), err)
	}
}

// TestKillEverything kills all processes with volumes attached and mounted, and with an import, an expansion and a
// deletion in progress. After a start the work continues, the flushed data exists, and the lost mount can be
// unmounted.
func TestKillEverything(t *testing.T) {
	w := newWorld(t)
	content := bytes.Repeat([]byte("golden image "), 3<<20) // 39 MiB
	begun, proceed := make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	first.Store(true)
	src := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && first.Swap(false) {
			rw.Header().Set("Content-Length", fmt.Sprint(len(content)))
			_, _ = rw.Write(content[:len(content)/2])
			rw.(http.Flusher).Flush()
			close(begun)
			select {
			case <-proceed:
			case <-r.Context().Done():
			}
			return
		}
		http.ServeContent(rw, r, "golden.img", time.Time{}, bytes.NewReader(content))
	}))
	defer src.Close()
	defer close(proceed)
	w.set("allow-private-image-sources", "true")

	mnt := w.path("mnt")
	w.must("volume", "create", "mounted", "--size", "128Mi")
	w.must("volume", "mount", "mounted", mnt)
	data := bytes.Repeat([]byte("flushed "), 1<<20)
	f, err := os.Create(filepath.Join(mnt, "file"))
	must(t, err)
	_, err = f.Write(data)
	must(t, errors.Join(err, f.Sync(), f.Close()))
	w.must("volume", "create", "raw", "--size", "64Mi")
	w.must("volume", "attach", "raw")
	dev := w.awaitVolume("raw", func(v *api.Volume) bool { return v.Status.State == api.VolumeAttached })
	lost := loopsOf(dev.Status.UID)
	if len(lost) != 1 {
		t.Fatalf("the volume has loop devices %v", lost)
	}
	w.must("volume", "create", "doomed", "--size", "64Mi")
	w.must("volume", "create", "grown", "--size", "64Mi")

	image := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceDownload,
		SourceParameters: map[string]string{"url": src.URL + "/golden.img"}}}
	image.Name = "golden"
	must(t, w.objects.Create(t.Context(), image))
	select {
	case <-begun:
	case <-time.After(settle):
		w.fatal("the import does not begin")
	}
	// The data process does not see these wishes before the kill.
	w.send("data", syscall.SIGSTOP)
	var v api.Volume
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "doomed"}, &v))
	must(t, w.objects.Delete(t.Context(), &v))
	patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"size":134217728}}`))
	must(t, w.objects.Patch(t.Context(), &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "grown"}}, patch))
	w.killAll()
	w.start(drover(t))

	w.awaitVolume("grown", func(v *api.Volume) bool { return v.Status.Size == 128<<20 })
	gone(w, &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "doomed"}})
	img := w.image("golden", "is ready", func(i *api.BackingImage) bool { return i.Status.State == api.ImageReady })
	if want := fmt.Sprintf("%x", sha512.Sum512(content)); img.Status.Checksum != want {
		t.Errorf("the image's checksum is %s, want %s", img.Status.Checksum, want)
	}

	// The unused device is gone; the user can unmount the mounted device.
	for _, name := range []string{"raw", "mounted"} {
		w.attached(name, 2)
	}
	if !comes(func() bool { return len(loopsOf(dev.Status.UID)) == 1 }) {
		t.Errorf("the volume has loop devices %v, before the kill %v", loopsOf(dev.Status.UID), lost)
	}
	w.must("volume", "umount", "mounted")
	if b, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(b), mnt) {
		t.Error("umount left the mount of the lost device")
	}
	w.must("volume", "mount", "mounted", mnt)
	got, err := os.ReadFile(filepath.Join(mnt, "file"))
	if err != nil || sha256.Sum256(got) != sha256.Sum256(data) {
		t.Errorf("flushed data is not there: %d bytes, %v", len(got), err)
	}
	w.must("volume", "umount", "mounted")
	w.must("volume", "detach", "raw")
}

// TestServeNotifiesSystemd: serve says when it is ready and when it begins to stop, as a service of Type=notify does.
func TestServeNotifiesSystemd(t *testing.T) {
	name := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	must(t, err)
	defer func() { _ = socket.Close() }()
	t.Setenv("NOTIFY_SOCKET", name)
	w := newWorld(t)
	says := func(want string) {
		t.Helper()
		must(t, socket.SetReadDeadline(time.Now().Add(settle)))
		got := make([]byte, 100)
		n, err := socket.Read(got)
		must(t, err)
		if string(got[:n]) != want {
			t.Errorf("systemd reads %q, want %q", got[:n], want)
		}
	}
	says("READY=1")
	w.signal(syscall.SIGTERM)
	says("STOPPING=1")
}

// TestOneServe: a state folder and a disk belong to one instance.
func TestOneServe(t *testing.T) {
	w := newWorld(t)
	out, err := exec.Command(drover(t), "serve", "--state-dir", w.path("state")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "another `drover serve` runs on state folder") {
		t.Errorf("a second serve in the state folder: %v: %s", err, out)
	}
	other := &world{t: t, dir: w.path("other"), name: "node-two"}
	must(t, os.MkdirAll(other.dir, 0o700))
	must(t, os.Symlink(w.path("disk"), other.path("disk")))
	other.log, err = os.Create(other.path("log"))
	must(t, err)
	t.Cleanup(other.end)
	other.serve(drover(t))
	ctx, cancel := timeout(t)
	defer cancel()
	n, err := await.Until(ctx, other.objects, other.name, func(n *api.Node) (bool, error) {
		return len(n.Status.Disks) == 1 && n.Status.Disks[0].Message != "", nil
	})
	if err != nil {
		other.fatal("%v", err)
	}
	if d := n.Status.Disks[0]; d.Ready || !strings.Contains(d.Message, "in use by another Drover (node node-one") {
		t.Errorf("the disk of another instance: %+v", d)
	}
}

// TestFullDisk: a volume whose disk is full waits, says so everywhere, and continues once the disk has room; a volume
// on another disk is not affected. A restart of serve and data changes nothing.
func TestFullDisk(t *testing.T) {
	w := newWorld(t)
	small := smallDisk(t, w.path("small"), 256<<20)
	filler := filepath.Join(small, "filler")
	must(t, fill(filler, 150<<20))
	w.must("disk", "add", small, "--tags", "small")
	w.must("volume", "create", "full", "--size", "1Gi", "--disk-selector", "small")
	w.must("volume", "create", "other", "--size", "1Gi")
	w.must("volume", "attach", "full")
	w.must("volume", "attach", "other")
	device := w.attached("full", 0).Status.Device
	written := make(chan error, 1)
	go func() { written <- fill(device, 96<<20) }()
	full := func(v *api.Volume) bool { return meta.IsStatusConditionFalse(v.Status.Conditions, api.ConditionSpace) }
	w.awaitVolume("full", full)
	if out := w.must("volume", "show", "full"); !strings.Contains(out, "is full: writes to the volume wait") {
		t.Errorf("volume show does not tell: %s", out)
	}
	must(t, fill(w.attached("other", 0).Status.Device, 16<<20))
	out, code := "", 4
	told := func() bool {
		out, code = w.command("volume", "detach", "full", "--timeout", "2s")
		return code != 4 || strings.Contains(out, "is full") // on a busy machine the reason may come later
	}
	if !comes(told) || code != 4 {
		t.Errorf("volume detach: exit code %d: %s", code, out)
	}
	w.signal(syscall.SIGTERM)
	w.start(drover(t))
	w.kill("data")
	select {
	case err := <-written:
		t.Fatalf("the write ended before there was room: %v", err)
	case <-time.After(time.Second):
	}
	must(t, os.Remove(filler))
	select {
	case err := <-written:
		if err != nil {
			t.Errorf("the write that waited: %v", err)
		}
	case <-time.After(settle):
		w.fatal("the write does not go on")
	}
	gone(w, &api.Attachment{ObjectMeta: metav1.ObjectMeta{Name: "full"}}) // the requested detach
	for _, name := range []string{"full", "other"} {
		w.must("volume", "detach", name)
		w.must("volume", "delete", name)
	}
	w.must("disk", "remove", small)
	ctx, cancel := timeout(t)
	defer cancel()
	_, err := await.Until(ctx, w.objects, w.name, func(n *api.Node) (bool, error) { return len(n.Status.Disks) == 1, nil })
	must(t, err)
}

// smallDisk makes a separate file system of the given size.
func smallDisk(t *testing.T, dir string, size int64) string {
	t.Helper()
	file := dir + ".img"
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Truncate(file, size))
	must(t, os.Mkdir(dir, 0o700))
	for _, argv := range [][]string{{"mkfs.ext4", "-q", "-F", "-b4096", file}, {"mount", "-o", "loop", file, dir}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// fill writes n non-zero bytes to a file or a device.
func fill(path string, n int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	chunk := bytes.Repeat([]byte{0xd0}, 1<<20)
	for ; n > 0 && err == nil; n -= int64(len(chunk)) {
		_, err = f.Write(chunk)
	}
	return errors.Join(err, f.Sync(), f.Close())
}
