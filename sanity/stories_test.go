package sanity_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	mib = int64(1) << 20
	gib = int64(1) << 30
)

func mountCap(fs string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fs}},
	}
}

func blockCap() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

// pod is a volume used by a workload: what a CO does for it, and where it put it.
type pod struct {
	w       *world
	id      string
	cap     *csi.VolumeCapability
	staging string
	target  string
}

func (w *world) create(name string, size int64, c *csi.VolumeCapability, parameters ...string) (*pod, error) {
	req := &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{c},
		Parameters: map[string]string{}}
	if size > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	for i := 0; i < len(parameters); i += 2 {
		req.Parameters[parameters[i]] = parameters[i+1]
	}
	ctx, cancel := context.WithTimeout(w.t.Context(), settle)
	defer cancel()
	res, err := w.controller.CreateVolume(ctx, req)
	if err != nil {
		return nil, err
	}
	id := res.Volume.VolumeId
	return &pod{w: w, id: id, cap: c, staging: w.path(id + "-staging"), target: w.path(id + "-target")}, nil
}

func (p *pod) up() error {
	ctx, cancel := context.WithTimeout(p.w.t.Context(), settle)
	defer cancel()
	if err := os.MkdirAll(p.staging, 0o700); err != nil {
		return err
	}
	if _, err := p.w.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: p.id,
		NodeId: p.w.name, VolumeCapability: p.cap}); err != nil {
		return err
	}
	if _, err := p.w.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: p.id, StagingTargetPath: p.staging,
		VolumeCapability: p.cap}); err != nil {
		return err
	}
	_, err := p.w.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: p.id,
		StagingTargetPath: p.staging, TargetPath: p.target, VolumeCapability: p.cap})
	return err
}

func (p *pod) down() error {
	ctx, cancel := context.WithTimeout(p.w.t.Context(), settle)
	defer cancel()
	if _, err := p.w.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: p.id,
		TargetPath: p.target}); err != nil {
		return err
	}
	if _, err := p.w.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: p.id,
		StagingTargetPath: p.staging}); err != nil {
		return err
	}
	_, err := p.w.controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: p.id,
		NodeId: p.w.name})
	return err
}

func (p *pod) remove() error {
	ctx, cancel := context.WithTimeout(p.w.t.Context(), settle)
	defer cancel()
	_, err := p.w.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: p.id})
	return err
}

func (p *pod) expand(size int64) error {
	ctx, cancel := context.WithTimeout(p.w.t.Context(), settle)
	defer cancel()
	res, err := p.w.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: p.id,
		CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: p.cap})
	if err == nil && res.CapacityBytes != size {
		err = fmt.Errorf("expanded to %d bytes, not %d", res.CapacityBytes, size)
	}
	return err
}

func (p *pod) expandNode(size int64) error {
	_, err := p.w.node.NodeExpandVolume(p.w.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: p.id,
		VolumePath: p.target, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: p.cap})
	return err
}

func (p *pod) total() int64 {
	p.w.t.Helper()
	r, err := p.w.node.NodeGetVolumeStats(p.w.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: p.id,
		VolumePath: p.target})
	must(p.w.t, err)
	return r.Usage[0].Total
}

func (p *pod) file(name string) string { return filepath.Join(p.target, name) }

// write makes a file of random bytes, durable, and returns its sum.
func (p *pod) write(name string, size int64) [32]byte {
	p.w.t.Helper()
	b := make([]byte, size)
	seed := sha256.Sum256([]byte(p.id + name))
	_, _ = rand.NewChaCha8(seed).Read(b)
	f, err := os.Create(p.file(name))
	must(p.w.t, err)
	_, err = f.Write(b)
	must(p.w.t, err)
	must(p.w.t, f.Sync())
	must(p.w.t, f.Close())
	return sha256.Sum256(b)
}

func (p *pod) check(name string, sum [32]byte) {
	p.w.t.Helper()
	b, err := os.ReadFile(p.file(name))
	must(p.w.t, err)
	if sha256.Sum256(b) != sum {
		p.w.t.Errorf("volume %s: file %s is not what was written", p.id, name)
	}
}

func wantCode(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("code %v, want %v: %v", status.Code(err), code, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

func do(t *testing.T, steps ...func() error) {
	t.Helper()
	for _, s := range steps {
		must(t, s())
	}
}

// TestStories are what users do, in one world after another state of it.
func TestStories(t *testing.T) {
	w := newWorld(t)
	run := func(name string, story func(t *testing.T, w *world)) {
		t.Run(name, func(t *testing.T) {
			w.t = t
			defer func() { w.t = t }()
			story(t, w)
		})
		w.t = t
	}
	run("data stays", dataStays)
	run("two volumes of one image", twoOfOneImage)
	run("grow", grow)
	run("never over data", neverOverData)
	run("the same call many times at once", manyAtOnce)
	run("names", names)
	run("what differs is another volume", differs)
	run("pages", pages)
	run("serve is stopped and started", restarts)
	run("serve is killed", killServe)
	run("all of the node dies", nodeDies)
	run("data is killed under load", killData)
	run("data is killed under fio", killUnderFio)
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

// golden makes a qcow2 of an ext4 with a file in it.
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
		wantCode(t, err, codes.FailedPrecondition, "not formatted")
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

	all(func(i int) (err error) { // and different ones, all their lives
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
	must(t, err) // it is large enough
	must(t, p.remove())
	for _, c := range [][]string{
		{"noSuchKey", "1", "unknown", "numberOfReplicas"}, {"fstype", "ext4", "did you mean fsType", ""},
		{"encrypted", "true", "encrypted", "not supported yet"}, {"numberOfReplicas", "3", "not supported yet", ""},
		{"fromBackup", "s3://x", "fromBackup", "not supported yet"}, {"dataLocality", "some", "strict-local", ""},
	} {
		_, err := w.create("two", 64*mib, mountCap(""), c[0], c[1])
		wantCode(t, err, codes.InvalidArgument, c[2], c[3])
	}
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
		if n == 0 { // between pages: the last one shown goes, and one before it comes
			must(t, pods[1].remove())
			p, err := w.create("page-00", 16*mib, blockCap())
			must(t, err)
			pods[1] = p
		}
	}
	want := []string{"page-0", "page-1", "page-2", "page-3", "page-4", "page-5", "page-6"}
	if i := slices.Index(ids, "page-00"); i >= 0 { // after page-0: it may be shown
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

// restarts: mounts and their I/O go on while serve is away, and the next serve takes them over.
func restarts(t *testing.T, w *world) {
	p, err := w.create("restart", 512*mib, mountCap("xfs"))
	must(t, err)
	must(t, p.up())
	before := p.write("before", 8*mib)
	data, hold := w.child("data"), w.child("hold")
	w.signal(syscall.SIGTERM)
	during := p.write("during", 8*mib)
	w.start(drover(t))
	if w.child("data") != data || w.child("hold") != hold || data == 0 || hold == 0 {
		t.Errorf("data and hold were %d and %d and are %d and %d: not adopted", data, hold,
			w.child("data"), w.child("hold"))
	}
	p.check("before", before)
	p.check("during", during)
	must(t, p.up()) // all again: nothing to do
	do(t, p.down, p.up)
	p.check("during", during)
	do(t, p.down, p.remove)
	w.signal(syscall.SIGTERM)
	if w.child("data") != 0 || w.child("hold") != 0 {
		t.Error("with no volume attached, data and hold stay behind")
	}
	w.start(drover(t))
}

// killServe: after kill -9 of serve, data and the holder, objects and data are there, and half-done work goes on.
func killServe(t *testing.T, w *world) {
	p, err := w.create("killed", 512*mib, mountCap("ext4"))
	must(t, err)
	must(t, p.up())
	sum := p.write("file", 8*mib)
	must(t, p.down())
	data, hold := w.child("data"), w.child("hold")
	w.signal(syscall.SIGKILL)
	for _, pid := range []int{data, hold} {
		must(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	w.start(drover(t))
	must(t, p.up())
	p.check("file", sum)
	do(t, p.down, p.remove)
}

// killData kills the data process again and again while verified writes run.
func killData(t *testing.T, w *world) {
	p, err := w.create("load", 256*mib, blockCap())
	must(t, err)
	must(t, p.up())
	f, err := os.OpenFile(p.target, os.O_RDWR|syscall.O_DIRECT|syscall.O_EXCL, 0)
	must(t, err)
	stop, ended := make(chan struct{}), make(chan error, 1)
	progress := make(chan struct{}, 1)
	go func() { ended <- load(f, 256*mib, stop, progress) }()
	n := kills(t, 5)
	var slowest time.Duration
	for range n {
		pid := w.child("data")
		began := time.Now()
		must(t, syscall.Kill(pid, syscall.SIGKILL))
		// Only work that began after the kill is a sign of life: two are read, since one may have waited here.
		for range 2 {
			select {
			case <-progress:
			case err := <-ended:
				t.Fatalf("the load ended: %v", err)
			case <-time.After(settle):
				w.fatal("no I/O for %v after a kill", settle)
			}
		}
		slowest = max(slowest, time.Since(began))
		for w.child("data") == pid || w.child("data") == 0 { // the pid file of the next one comes with its first I/O
			select {
			case <-progress:
			case <-time.After(settle):
				w.fatal("data was not started again")
			}
		}
	}
	close(stop)
	must(t, <-ended)
	must(t, f.Close())
	t.Logf("%d kills, at most %v until I/O went on", n, slowest.Round(time.Millisecond))
	do(t, p.down, p.remove)
}

// load writes random blocks, reads some back at once and all at the end. Any error or difference ends it.
func load(f *os.File, size int64, stop, progress chan struct{}) error {
	const block = 16 << 10
	versions := make([]uint64, size/block)
	buf, got := aligned(block), aligned(block)
	fill := func(b []byte, i int64, v uint64) {
		rng := rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%d %d", i, v)))
		_, _ = rng.Read(b)
	}
	verify := func(i int64) error {
		if _, err := f.ReadAt(got, i*block); err != nil {
			return fmt.Errorf("read block %d: %w", i, err)
		}
		clear(buf)
		if versions[i] > 0 {
			fill(buf, i, versions[i])
		}
		if !bytes.Equal(buf, got) {
			return fmt.Errorf("block %d is not what was written, version %d", i, versions[i])
		}
		return nil
	}
	for n := 0; ; n++ {
		select {
		case <-stop:
			for i := range versions {
				if err := verify(int64(i)); err != nil {
					return err
				}
			}
			return nil
		default:
		}
		i := rand.Int64N(int64(len(versions)))
		fill(buf, i, versions[i]+1)
		if _, err := f.WriteAt(buf, i*block); err != nil {
			return fmt.Errorf("write block %d: %w", i, err)
		}
		versions[i]++
		if n%64 == 0 {
			if err := f.Sync(); err != nil {
				return err
			}
		}
		if err := verify(rand.Int64N(int64(len(versions)))); err != nil {
			return err
		}
		select {
		case progress <- struct{}{}:
		default:
		}
	}
}

// aligned is memory that direct I/O takes.
func aligned(n int) []byte {
	b, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		panic(err)
	}
	return b // for as long as the test runs
}
