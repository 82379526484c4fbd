package sanity_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// disks adds disks to the node and returns the paths of all: the first is the world's first disk.
func (w *world) disks(tags ...string) []string {
	w.t.Helper()
	paths := []string{w.path("disk")}
	for _, tag := range tags {
		path := w.path(tag)
		must(w.t, os.Mkdir(path, 0o700))
		w.must("disk", "add", path, "--tags", tag)
		paths = append(paths, path)
	}
	return paths
}

// image waits until an image satisfies ok.
func (w *world) image(name, what string, ok func(i *api.BackingImage) bool) *api.BackingImage {
	w.t.Helper()
	ctx, cancel := timeout(w.t)
	defer cancel()
	var last api.BackingImageStatus
	img, err := await.Until(ctx, w.objects, name, func(i *api.BackingImage) (bool, error) {
		last = i.Status
		return ok(i), nil
	})
	if err != nil {
		w.fatal("image %s %s: %v: %+v", name, what, err, last)
	}
	return img
}

// readyOn waits until an image has ready copies on these disks, and no other copies.
func (w *world) readyOn(name string, disks ...string) *api.BackingImage {
	w.t.Helper()
	var uids []api.UID
	for _, d := range disks {
		uids = append(uids, w.diskAt(d).UID)
	}
	slices.Sort(uids)
	return w.image(name, fmt.Sprintf("is on %v alone", disks), func(i *api.BackingImage) bool {
		var on []api.UID
		for _, c := range i.Status.Copies {
			if c.State != api.ImageReady {
				return false
			}
			on = append(on, c.Disk)
		}
		slices.Sort(on)
		return slices.Equal(on, uids)
	})
}

// stateOn waits until an image's copy on a disk has a state.
func (w *world) stateOn(name string, disk api.UID, state api.ImageState) {
	w.t.Helper()
	w.image(name, fmt.Sprintf("is %s on disk %s", state, disk), func(i *api.BackingImage) bool {
		return slices.ContainsFunc(i.Status.Copies, func(c api.ImageCopySummary) bool {
			return c.Disk == disk && c.State == state
		})
	})
}

func (w *world) diskAt(path string) api.DiskStatus {
	w.t.Helper()
	return w.awaitDiskAt(path, "is known", func(d api.DiskStatus) bool { return d.UID != "" })
}

func (w *world) awaitDiskAt(path, what string, ok func(api.DiskStatus) bool) (found api.DiskStatus) {
	w.t.Helper()
	ctx, cancel := timeout(w.t)
	defer cancel()
	_, err := await.Until(ctx, w.objects, w.name, func(n *api.Node) (bool, error) {
		i := slices.IndexFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.Path == path })
		if i < 0 {
			return false, nil
		}
		found = n.Status.Disks[i]
		return ok(found), nil
	})
	if err != nil {
		w.fatal("disk %s %s: %v: %+v", path, what, err, found)
	}
	return found
}

// hide mounts another folder over a disk, as if the file system were not mounted or another were; end unmounts the
// folder.
func hide(t *testing.T, path, with string) (end func()) {
	t.Helper()
	must(t, unix.Mount(with, path, "", unix.MS_BIND, ""))
	up := true
	end = func() {
		t.Helper()
		if up {
			up = false
			unmount(t, path)
		}
	}
	t.Cleanup(end)
	return end
}

// unmount unmounts a file system that another process may be reading.
func unmount(t *testing.T, path string) {
	t.Helper()
	var err error
	comes(func() bool { err = unix.Unmount(path, 0); return !errors.Is(err, unix.EBUSY) })
	must(t, err)
}

// files lists the files below a folder, with inode, size and time: a file created again differs.
func files(t *testing.T, dir string) (all []string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) { // deleted just now
			return nil
		}
		if err != nil || e.IsDir() {
			return err
		}
		var st unix.Stat_t
		if err = unix.Stat(path, &st); errors.Is(err, unix.ENOENT) {
			return nil
		}
		all = append(all, fmt.Sprint(path, " ", st.Ino, " ", st.Size, " ", st.Mtim))
		return err
	}))
	return all
}

// imagesOnDisks: the life of an image on several disks: the minimum of copies, a copy where a volume needs the image,
// clean-up by hand, eviction, a missing disk, a swapped disk, and the return of both disks.
func imagesOnDisks(t *testing.T, w *world) {
	at := w.disks("two", "three")
	first, two, three := at[0], at[1], at[2]
	sum := golden(t, w.path("golden.qcow2"), 64*mib)
	url := serveFiles(t, w.dir) + "/golden.qcow2"
	w.set("allow-private-image-sources", "true")
	w.must("image", "import", url, "--name", "single", "--disk-selector", "two")
	w.must("image", "import", url, "--name", "safe", "--min-copies", "2")
	img := w.readyOn("single", two)
	if a, b := w.image("safe", "has two copies", func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 2 }),
		img; a.Status.Digest != b.Status.Digest || a.Status.UUID == b.Status.UUID {
		t.Errorf("%+v and %+v", a.Status, b.Status)
	}

	// A volume stays off disks on which its image may not be. A volume placed elsewhere by right waits for no copy
	// there, and gets a copy, which stays when the image's selectors change.
	asks := func(disks ...string) {
		t.Helper()
		_, err := await.Edit(t.Context(), w.objects, "single", func(i *api.BackingImage) (bool, error) {
			i.Spec.DiskSelector = disks
			return true, nil
		})
		must(t, err)
	}
	_, err := w.create("barred", 256*mib, mountCap(""), "backingImage", "single", "diskSelector", "three")
	wantCode(t, err, codes.ResourceExhausted, "the tag two, which backing image single asks for")
	asks()
	var p *pod
	comes(func() bool { // the planner may not have seen the edit yet
		p, err = w.create("elsewhere", 256*mib, mountCap(""), "backingImage", "single", "diskSelector", "three")
		return status.Code(err) != codes.ResourceExhausted
	})
	must(t, err)
	must(t, p.up())
	p.check("golden", sum)
	asks("two")
	w.readyOn("single", two, three)
	out := w.must("image", "show", "single")
	for _, words := range []string{two, three, "by 1 volume"} {
		if !strings.Contains(out, words) {
			t.Errorf("image show does not say %q:\n%s", words, out)
		}
	}
	// A copy that a volume needs stays; other copies are deleted at once, but not the last copy.
	w.must("image", "cleanup", "single")
	w.readyOn("single", three)
	w.must("image", "cleanup", "single", "--disk", three)
	w.readyOn("single", three)
	mine := p.write("mine", 8*mib)
	do(t, p.down, p.up)
	p.check("golden", sum)
	p.check("mine", mine)
	w.refused(5, "elsewhere", "image", "delete", "single")
	_, err = w.create("nowhere", 256*mib, mountCap(""), "backingImage", "single", "diskSelector", "four")
	wantCode(t, err, codes.ResourceExhausted, "four")

	// A disk is evicted: a copy that a volume needs stays, and the image's condition says why. Any other copy first
	// moves elsewhere.
	w.must("disk", "evict", three)
	w.image("single", "says that it stays", func(i *api.BackingImage) bool {
		c := meta.FindStatusCondition(i.Status.Conditions, "Evicted")
		return c != nil && c.Status == metav1.ConditionFalse && strings.Contains(c.Message, "a volume on the disk needs the copy")
	})
	must(t, p.up())
	p.check("golden", sum)
	p.check("mine", mine)
	do(t, p.down, p.remove)
	w.readyOn("single", two)
	w.readyOn("safe", first, two)
	w.must("disk", "evict", three, "--undo")

	// One disk is missing, another disk is swapped: the node sees both, and writes nothing to the folders in their
	// place.
	w.must("image", "import", url, "--name", "third", "--disk-selector", "three")
	w.readyOn("third", three)
	was := [][]string{files(t, filepath.Join(two, "images")), files(t, filepath.Join(three, "layers"))}
	must(t, os.Mkdir(w.path("empty"), 0o700))
	must(t, os.Mkdir(w.path("other"), 0o700))
	w.must("disk", "add", w.path("other")) // becomes a disk of its own
	w.must("disk", "remove", w.path("other"))
	uids := []api.UID{w.diskAt(two).UID, w.diskAt(three).UID}
	other := files(t, w.path("other"))
	back := []func(){hide(t, two, w.path("empty")), hide(t, three, w.path("other"))}
	w.awaitDiskAt(two, "is away", func(d api.DiskStatus) bool { return !d.Ready && d.Message != "" })
	w.awaitDiskAt(three, "is another one", func(d api.DiskStatus) bool {
		return !d.Ready && strings.Contains(d.Message, "the folder holds another disk")
	})
	w.stateOn("third", uids[1], api.ImageUnknown)
	if left := files(t, w.path("empty")); len(left) > 0 {
		t.Errorf("written below the disk that is not mounted: %q", left)
	}
	if now := files(t, w.path("other")); !slices.Equal(now, other) {
		t.Errorf("written to another disk: %q, it was %q", now, other)
	}
	for _, end := range back {
		end()
	}
	for i, path := range []string{two, three} {
		if d := w.awaitDiskAt(path, "is back", func(d api.DiskStatus) bool { return d.Ready }); d.UID != uids[i] {
			t.Errorf("%s was %s and is %s", path, uids[i], d.UID)
		}
	}
	w.readyOn("third", three)
	for i, dir := range []string{filepath.Join(two, "images"), filepath.Join(three, "layers")} {
		if now := files(t, dir); !slices.Equal(now, was[i]) {
			t.Errorf("made anew: %q, it was %q", now, was[i])
		}
	}

	// Deleted images leave no files.
	w.must("image", "delete", "single", "safe", "third")
	for _, path := range at {
		for _, sub := range []string{"images", "layers", "replicas"} {
			var left []string
			if !comes(func() bool { left = files(t, filepath.Join(path, sub)); return len(left) == 0 }) {
				t.Errorf("left: %q", left)
			}
		}
	}
	for _, path := range at[1:] {
		w.must("disk", "remove", path)
	}
}

// TestImagesOnDisks runs the life of images on three disks of one node.
func TestImagesOnDisks(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Fatal("this story needs qemu-img (package qemu-utils)")
	}
	w := newWorld(t)
	if res, err := w.controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{}); err != nil || res.AvailableCapacity <= 0 {
		t.Fatalf("%v, %v", res, err)
	}
	imagesOnDisks(t, w)
}

// TestDamagedImages runs the story of images whose files change on the disk.
func TestDamagedImages(t *testing.T) {
	t.Parallel()
	damagedImages(t, newWorld(t))
}
