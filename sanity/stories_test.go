package sanity_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// A story is a user's sequence of actions. A story finds a world as new, and leaves the world so.
type story struct {
	name string
	tell func(t *testing.T, w *world)
}

// tell runs stories one after another in one world. Tests of stories run in parallel.
func tell(t *testing.T, stories ...story) {
	t.Helper()
	t.Parallel()
	w := newWorld(t)
	for _, s := range stories {
		t.Run(s.name, func(t *testing.T) {
			w.t = t
			s.tell(t, w)
		})
		w.t = t
	}
}

func TestStories(t *testing.T) {
	tell(t,
		story{"data stays", dataStays},
		story{"two volumes of one image", twoOfOneImage},
		story{"grow", grow},
		story{"never over data", neverOverData},
		story{"the same call many times at once", manyAtOnce},
		story{"names", names},
		story{"what differs is another volume", differs},
		story{"pages", pages},
		story{"serve is stopped and started", restarts},
		story{"serve is killed", killServe},
		story{"all of the node dies", nodeDies},
		story{"data is killed under load", killData},
		story{"data is killed under fio", killUnderFio},
		story{"not on a volume of its own", notOnItself},
		story{"memory is its own", ownMemory},
		story{"memory is scarce", scarceMemory})
}

func dataStays(t *testing.T, w *world) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		p, err := w.create("stays-"+fs, gib, mountCap(""), "fsType", fs)
		must(t, err)
		must(t, p.up())
		sum := p.write("file", 32*mib)
		wantCode(t, p.remove(), codes.FailedPrecondition, "attached")
		do(t, p.down, p.up)
		p.check("file", sum)
		do(t, p.down, p.remove)
	}
}

// golden makes a qcow2 image of an ext4 file system with one file.
func golden(t *testing.T, path string, size int64) [32]byte {
	t.Helper()
	dir := t.TempDir()
	content := bytes.Repeat([]byte("golden image "), 1<<18)
	must(t, os.WriteFile(filepath.Join(dir, "golden"), content, 0o600))
	raw := path + ".raw"
	for _, args := range [][]string{
		{"mkfs.ext4", "-q", "-d", dir, raw, fmt.Sprint(size / 1024)},
		{"qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-c", raw, path},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	must(t, os.Remove(raw))
	return sha256.Sum256(content)
}

func twoOfOneImage(t *testing.T, w *world) {
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Fatal("this story needs qemu-img (package qemu-utils)")
	}
	dir := t.TempDir()
	sum := golden(t, filepath.Join(dir, "golden.qcow2"), 128*mib)
	url := serveFiles(t, dir) + "/golden.qcow2"
	w.set("allow-private-image-sources", "true")

	_, err := w.create("no-image", 0, mountCap(""), "backingImage", "golden")
	wantCode(t, err, codes.NotFound, "golden", "backingImageURL")

	var pods []*pod
	for _, name := range []string{"left", "right"} {
		p, err := w.create(name, 512*mib, mountCap(""), "backingImage", "golden", "backingImageURL", url)
		must(t, err)
		must(t, p.up())
		p.check("golden", sum)
		if n := p.total(); n < 400*mib {
			t.Errorf("the image's file system did not grow: %d bytes", n)
		}
		pods = append(pods, p)
	}
	sums := [][32]byte{pods[0].write("mine", 8*mib), pods[1].write("mine", 8*mib)}
	must(t, os.WriteFile(pods[0].file("golden"), []byte("changed"), 0o600))
	if sums[0] == sums[1] {
		t.Fatal("the test writes the same to both")
	}
	pods[1].check("golden", sum)
	for i, p := range pods {
		do(t, p.down, p.up)
		p.check("mine", sums[i])
	}
	pods[1].check("golden", sum)
	pods[0].check("golden", sha256.Sum256([]byte("changed")))

	_, err = w.create("other", 512*mib, mountCap(""), "backingImage", "golden", "backingImageURL", url+"?other")
	wantCode(t, err, codes.InvalidArgument, "golden", "match")
	_, err = w.create("too-small", 64*mib, mountCap(""), "backingImage", "golden")
	wantCode(t, err, codes.OutOfRange, "golden")
	p, err := w.create("as-large", 0, mountCap(""), "backingImage", "golden")
	must(t, err)
	must(t, p.remove())
	for _, p := range pods {
		do(t, p.down, p.remove)
	}
}

func grow(t *testing.T, w *world) {
	x, err := w.create("grow-xfs", gib, mountCap("xfs"))
	must(t, err)
	must(t, x.up())
	sum := x.write("file", 4*mib)
	do(t, func() error { return x.expand(2 * gib) }, func() error { return x.expandNode(2 * gib) })
	if n := x.total(); n < 19*gib/10 {
		t.Errorf("xfs has %d bytes after growing while mounted", n)
	}
	x.check("file", sum)

	e, err := w.create("grow-ext4", gib, mountCap("ext4"))
	must(t, err)
	must(t, e.up())
	sum2 := e.write("file", 4*mib)
	do(t, e.down, func() error { return e.expand(2 * gib) }, e.up, func() error { return e.expandNode(2 * gib) })
	if n := e.total(); n < 18*gib/10 {
		t.Errorf("ext4 has %d bytes after growing while detached", n)
	}
	e.check("file", sum2)
	wantCode(t, e.expandNode(4*gib), codes.OutOfRange)

	b, err := w.create("grow-block", 64*mib, blockCap())
	must(t, err)
	do(t, b.up, func() error { return b.expand(128 * mib) }, func() error { return b.expandNode(128 * mib) })
	if n := b.total(); n != 128*mib {
		t.Errorf("the block volume has %d bytes", n)
	}
	for _, p := range []*pod{x, e, b} {
		do(t, p.down, p.remove)
	}
}

// serveFiles serves a folder over HTTP until the test ends.
func serveFiles(t *testing.T, dir string) string {
	t.Helper()
	s := httptest.NewServer(http.FileServer(http.Dir(dir)))
	t.Cleanup(s.Close)
	return s.URL
}

func neverOverData(t *testing.T, w *world) {
	p, err := w.create("raw-data", 256*mib, blockCap())
	must(t, err)
	must(t, p.up())
	data := bytes.Repeat([]byte("precious"), 8192)
	f, err := os.OpenFile(p.target, os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt(data, 100*mib+4096)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	for range 2 { // in the same attachment, and in the next one
		if _, err := w.node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: p.id,
			TargetPath: p.target}); err != nil {
			t.Fatal(err)
		}
		_, err = w.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: p.id,
			StagingTargetPath: p.staging, VolumeCapability: mountCap("ext4")})
		wantCode(t, err, codes.FailedPrecondition, "does not format")
		do(t, p.down, p.up)
	}
	b := make([]byte, len(data))
	f, err = os.Open(p.target)
	must(t, err)
	_, err = f.ReadAt(b, 100*mib+4096)
	must(t, err)
	must(t, f.Close())
	if !bytes.Equal(b, data) {
		t.Error("the data was overwritten")
	}
	do(t, p.down, p.remove)
}

func manyAtOnce(t *testing.T, w *world) {
	const callers = 16
	pods := make([]*pod, callers)
	all := func(call func(i int) error) {
		t.Helper()
		var wg sync.WaitGroup
		errs := make([]error, callers)
		for i := range errs {
			wg.Go(func() { errs[i] = call(i) })
		}
		wg.Wait()
		must(t, errors.Join(errs...))
	}
	all(func(i int) (err error) {
		pods[i], err = w.create("the-same", 512*mib, mountCap("xfs"))
		return err
	})
	for _, p := range pods {
		if p.id != pods[0].id {
			t.Fatalf("one name made two volumes, %s and %s", p.id, pods[0].id)
		}
	}
	all(func(i int) error { return pods[i].up() })
	out, err := exec.Command("findmnt", "-rno", "TARGET").Output()
	must(t, err)
	if n := strings.Count(string(out), w.path("the-same-")); n != 2 {
		t.Errorf("%d mounts, want one staged and one published", n)
	}
	sum := pods[0].write("file", mib)
	pods[1].check("file", sum)
	all(func(i int) error { return pods[i].down() })
	all(func(i int) error { return pods[i].remove() })

	all(func(i int) (err error) { // and different volumes, all their lives
		p, err := w.create(fmt.Sprintf("another-%d", i), 64*mib, mountCap(""))
		for _, step := range []func() error{func() error { return p.up() }, func() error { return p.down() },
			func() error { return p.remove() }} {
			if err != nil {
				return err
			}
			err = step()
		}
		return err
	})
}

func names(t *testing.T, w *world) {
	seen := map[string]string{}
	for _, name := range []string{"Großes Volumen", "../../etc/passwd", "a/b", "数据卷", strings.Repeat("x", 128),
		"UPPER", "upper", "-dash-", "dots.are.here", strings.Repeat("y", 63)} {
		p, err := w.create(name, 16*mib, blockCap())
		must(t, err)
		if other := seen[p.id]; other != "" {
			t.Errorf("%q and %q are one volume", name, other)
		}
		seen[p.id] = name
		again, err := w.create(name, 16*mib, blockCap())
		must(t, err)
		if again.id != p.id {
			t.Errorf("%q is volume %s, then %s", name, p.id, again.id)
		}
		do(t, p.up, p.down, p.remove)
	}
	for _, name := range []string{"", "nul\x00", "bell\x07", "c1\u0085", strings.Repeat("x", 129)} {
		_, err := w.create(name, 16*mib, blockCap())
		wantCode(t, err, codes.InvalidArgument)
	}
	for _, id := range []string{"../x", "No Such", "none"} {
		p := &pod{w: w, id: id, cap: blockCap(), staging: w.path("s"), target: w.path("t")}
		must(t, p.remove())
		must(t, p.down())
		wantCode(t, p.up(), codes.NotFound)
	}
}

func differs(t *testing.T, w *world) {
	p, err := w.create("one", 64*mib, mountCap("ext4"), "mkfsParams", "-i 8192")
	must(t, err)
	for _, c := range []struct {
		size int64
		fs   string
		more []string
	}{
		{128 * mib, "ext4", []string{"mkfsParams", "-i 8192"}},
		{64 * mib, "", []string{"mkfsParams", "-i 8192"}},
		{64 * mib, "ext4", []string{"mkfsParams", "-i 4096"}},
		{64 * mib, "ext4", nil},
		{64 * mib, "ext4", []string{"mkfsParams", "-i 8192", "dataLocality", "best-effort"}},
	} {
		_, err := w.create("one", c.size, mountCap(c.fs), c.more...)
		wantCode(t, err, codes.AlreadyExists, "one")
	}
	_, err = w.create("one", 32*mib, mountCap("ext4"), "mkfsParams", "-i 8192", "csi.storage.k8s.io/pvc/name", "claim")
	must(t, err) // the volume is large enough
	must(t, p.remove())
	for _, c := range [][]string{
		{"noSuchKey", "1", "unknown", "numberOfReplicas"}, {"fstype", "ext4", "did you mean fsType", ""},
		{"encrypted", "true", "encrypted", "not supported yet"}, {"numberOfReplicas", "30", "1 to 20", ""},
		{"dataLocality", "some", "strict-local", ""},
	} {
		_, err := w.create("two", 64*mib, mountCap(""), c[0], c[1])
		wantCode(t, err, codes.InvalidArgument, c[2], c[3])
	}
	_, err = w.create("two", 64*mib, mountCap(""), "fromBackup", "s3://x")
	wantCode(t, err, codes.NotFound, "fromBackup")
}

func pages(t *testing.T, w *world) {
	var pods []*pod
	for i := range 7 {
		p, err := w.create(fmt.Sprintf("page-%d", i), 16*mib, blockCap())
		must(t, err)
		pods = append(pods, p)
	}
	must(t, pods[6].up())
	var ids, on []string
	token := ""
	for n := 0; ; n++ {
		r, err := w.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
		must(t, err)
		for _, e := range r.Entries {
			ids = append(ids, e.Volume.VolumeId)
			on = append(on, e.Status.PublishedNodeIds...)
		}
		if token = r.NextToken; token == "" {
			break
		}
		if n == 0 { // between pages: the last volume shown is deleted, and an earlier volume is added
			must(t, pods[1].remove())
			p, err := w.create("page-00", 16*mib, blockCap())
			must(t, err)
			pods[1] = p
		}
	}
	want := []string{"page-0", "page-1", "page-2", "page-3", "page-4", "page-5", "page-6"}
	if i := slices.Index(ids, "page-00"); i >= 0 { // after page-0: allowed on a page
		ids = slices.Delete(ids, i, i+1)
	}
	if !slices.Equal(ids, want) {
		t.Errorf("the pages show %v, want %v", ids, want)
	}
	if !slices.Equal(on, []string{w.name}) {
		t.Errorf("published on %v, want one volume on %s", on, w.name)
	}
	must(t, pods[6].down())
	for _, p := range pods {
		must(t, p.remove())
	}
	for _, bad := range []string{"page-3", "after:", "after:../x", "\x00"} {
		_, err := w.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: bad})
		wantCode(t, err, codes.Aborted)
	}
	_, err := w.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument)
}
