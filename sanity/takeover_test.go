package sanity_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"drover.io/drover/sanity/released"
)

// TestNewBinaryTakesOverDevicesOfReleasedBinary upgrades a node as docs/operations.md says, under verified load: the
// holder stays, and the new binary resumes the devices from the old binary's device records and disk. Both binaries
// are asked through their own commands and CSI: the test knows no path of the API.
func TestNewBinaryTakesOverDevicesOfReleasedBinary(t *testing.T) {
	t.Parallel()
	now := drover(t)
	old := released.Binary(t)
	for name, stop := range map[string]func(w *world){
		"stopped": func(w *world) { w.signal(syscall.SIGTERM) },
		"killed":  func(w *world) { w.signal(syscall.SIGKILL); w.kill("data") },
	} {
		t.Run(name, func(t *testing.T) { takeOver(t, old, now, stop) })
	}
}

// worldOf is a world whose server is the given binary.
func worldOf(t *testing.T, bin string) *world {
	dir, err := os.MkdirTemp("", "drover-")
	must(t, err)
	w := &world{t: t, dir: dir, name: "node-one"}
	must(t, os.Mkdir(w.path("disk"), 0o700))
	w.log, err = os.Create(w.path("log"))
	must(t, err)
	t.Cleanup(w.end)
	w.serve(bin)
	// As world.start does, for any API group of the binary's settings.
	kind, err := w.objects.RESTMapper().KindFor(schema.GroupVersionResource{Resource: "settings"})
	must(t, err)
	for name, value := range map[string]string{"storage-minimal-available-percentage": "0",
		"storage-over-provisioning-percentage": "100000"} {
		s := &unstructured.Unstructured{Object: map[string]any{"value": value}}
		s.SetGroupVersionKind(kind)
		s.SetName(name)
		must(t, w.objects.Create(t.Context(), s))
	}
	return w
}

// tells runs a command of a binary, and returns the output.
func (w *world) tells(bin string, args ...string) []byte {
	w.t.Helper()
	var errs bytes.Buffer
	cmd := exec.CommandContext(w.t.Context(), bin, append(args, "--kubeconfig", w.path("state", "kubeconfig"))...)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		w.fatal("drover %s: %v: %s", strings.Join(args, " "), err, errs.Bytes())
	}
	return out
}

// names lists all objects of a kind by name, with the size that a binary reports.
func (w *world) names(bin, kind string) (all []string) {
	w.t.Helper()
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ Size json.RawMessage }
		}
	}
	out := w.tells(bin, kind, "list", "-o", "json")
	if err := json.Unmarshal(out, &list); err != nil {
		w.fatal("%s list: %v\n%s", kind, err, out)
	}
	for _, i := range list.Items {
		all = append(all, fmt.Sprintf("%s of %s bytes", i.Metadata.Name, i.Spec.Size))
	}
	slices.Sort(all)
	return all
}

// worker is a load on a volume.
type worker struct {
	p        *pod
	f        *os.File
	number   uint64 // of the device
	progress chan struct{}
	stop     chan struct{}
	ended    chan error
}

// work begins a verified load: on the device itself, or on a file of its file system.
func work(t *testing.T, p *pod) *worker {
	t.Helper()
	const size = 32 * mib
	x := &worker{p: p, number: deviceOf(t, p), progress: make(chan struct{}, 1), stop: make(chan struct{}),
		ended: make(chan error, 1)}
	path, flag := p.target, os.O_RDWR|syscall.O_DIRECT
	if p.cap.GetMount() != nil {
		path, flag = p.file("load"), flag|os.O_CREATE|os.O_EXCL
	}
	var err error
	x.f, err = os.OpenFile(path, flag, 0o600)
	must(t, err)
	if p.cap.GetMount() != nil {
		must(t, x.f.Truncate(size))
	}
	go func() { x.ended <- load(x.f, size, x.stop, x.progress) }()
	return x
}

// goesOn returns after work that began after the call.
func (x *worker) goesOn(w *world) {
	w.t.Helper()
	for range 20 {
		select {
		case <-x.progress:
		case err := <-x.ended:
			w.fatal("the load on volume %s ended: %v", x.p.id, err)
		case <-time.After(settle):
			w.fatal("volume %s: no I/O for %v", x.p.id, settle)
		}
	}
}

// deviceOf is the device number of a pod's file system, or of its raw device.
func deviceOf(t *testing.T, p *pod) uint64 {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Stat(p.target, &st))
	if p.cap.GetMount() != nil {
		return st.Dev
	}
	return st.Rdev
}

func takeOver(t *testing.T, old, now string, stop func(w *world)) {
	w := worldOf(t, old)
	var raw *pod
	var err error
	if !comes(func() bool { raw, err = w.create("raw", 128*mib, blockCap()); return err == nil }) { // the disk is added
		w.fatal("no volume can be made: %v", err)
	}
	snapped, err := w.create("snapped", 512*mib, mountCap("xfs"))
	must(t, err)
	golden, inside := goldenImage(t, w)
	w.tells(old, "image", "upload", golden, "--name", "golden")
	ofImage, err := w.from("bi://backing?backingImage=golden", "of-image", 128*mib, mountCap("ext4"))
	must(t, err)
	pods := []*pod{raw, snapped, ofImage}
	for _, p := range pods {
		must(t, p.up())
	}
	before := snapped.write("before", 4*mib)
	snapshot, err := w.snap(snapped.id, "nightly")
	must(t, err)
	after := snapped.write("after", 4*mib)
	kinds := []string{"volume", "image", "snapshot", "node"}
	objects := map[string][]string{}
	for _, kind := range kinds {
		if objects[kind] = w.names(old, kind); len(objects[kind]) == 0 {
			w.fatal("no %s is listed", kind)
		}
	}
	var workers []*worker
	for _, p := range pods {
		workers = append(workers, work(t, p))
	}
	for _, x := range workers {
		x.goesOn(w)
	}

	data, hold := w.child("data"), w.child("hold")
	stop(w)
	if w.child("hold") != hold {
		t.Fatal("the holder ended with the old binary")
	}
	w.serve(now)
	if !comes(func() bool { pid := w.child("data"); return pid != 0 && pid != data }) {
		w.fatal("the data process is that of the old binary")
	}
	if w.child("hold") != hold {
		t.Errorf("the holder is another process now")
	}
	for _, x := range workers {
		x.goesOn(w)
		if is := deviceOf(t, x.p); is != x.number {
			t.Errorf("volume %s: the device is %#x, and was %#x", x.p.id, is, x.number)
		}
	}
	for _, kind := range kinds {
		var is []string
		if !comes(func() bool { is = w.names(now, kind); return slices.Equal(is, objects[kind]) }) {
			t.Errorf("of kind %s there are %q, and were %q", kind, is, objects[kind])
		}
	}
	for _, x := range workers {
		close(x.stop)
		if err := <-x.ended; err != nil { // all blocks were compared in the end
			t.Errorf("volume %s: %v", x.p.id, err)
		}
		must(t, x.f.Close())
	}

	// The new binary continues with all objects and data of the old binary.
	snapped.check("before", before)
	for _, x := range workers {
		sum := contentOf(t, x)
		do(t, x.p.down, x.p.up)
		if contentOf(t, x) != sum {
			t.Errorf("volume %s holds something else after it was attached again", x.p.id)
		}
	}
	snapped.check("after", after)
	same(t, ofImage.file("golden"), inside)
	restored, err := w.from(snapshot, "restored", 0, mountCap("xfs"))
	must(t, err)
	must(t, restored.up())
	restored.check("before", before)
	if _, err := os.Stat(restored.file("after")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is younger than the snapshot: %v", err)
	}
	do(t, restored.down, restored.remove)
	again, err := w.from("bi://backing?backingImage=golden", "of-image-again", 0, mountCap("ext4"))
	must(t, err)
	must(t, again.up())
	same(t, again.file("golden"), inside)
	do(t, again.down, again.remove)
	w.unsnap(snapshot)
	for _, p := range pods {
		do(t, p.down, p.remove)
	}
	w.tells(now, "image", "delete", "golden")
}

// contentOf sums the load's data.
func contentOf(t *testing.T, x *worker) string {
	t.Helper()
	path := x.p.target
	if x.p.cap.GetMount() != nil {
		path = x.p.file("load")
	}
	out, err := exec.Command("sha256sum", path).Output()
	must(t, err)
	return strings.Fields(string(out))[0]
}

// goldenImage makes a file system with one file, and returns the content of the file.
func goldenImage(t *testing.T, w *world) (path string, inside []byte) {
	t.Helper()
	inside = bytes.Repeat([]byte("golden image\n"), 5*4096)
	dir, path := w.path("golden"), w.path("golden.raw")
	must(t, os.Mkdir(dir, 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "golden"), inside, 0o600))
	mustRun(t, "mkfs.ext4", "-q", "-F", "-b", "4096", "-d", dir, path, "64M")
	return path, inside
}
