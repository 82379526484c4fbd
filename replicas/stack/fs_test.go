package stack

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
)

// mounted makes and mounts a file system on a loop device.
func mounted(t *testing.T, size int64, options string, mkfs ...string) (dir string, remount func()) {
	t.Helper()
	suite.System(t)
	if _, err := exec.LookPath(mkfs[0]); err != nil {
		t.Skipf("%s is not installed", mkfs[0])
	}
	img := filepath.Join(t.TempDir(), "img")
	dir = t.TempDir()
	if err := os.WriteFile(img, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(img, size); err != nil {
		t.Fatal(err)
	}
	run(t, append(mkfs, img)...)
	dev := strings.TrimSpace(run(t, "losetup", "--find", "--show", img))
	t.Cleanup(func() { run(t, "losetup", "-d", dev) })
	mount := func() {
		t.Helper()
		run(t, "mount", "-o", "rw"+options, dev, dir)
	}
	mount()
	up := true
	t.Cleanup(func() {
		if up {
			unmount(t, dir)
		}
	})
	return dir, func() {
		t.Helper()
		unmount(t, dir)
		up = false
		mount()
		up = true
	}
}

// unmount unmounts a file system. A starting process with a copy of the mount table keeps the mount busy for a moment.
func unmount(t *testing.T, dir string) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	err := unix.Unmount(dir, 0)
	for end := time.Now().Add(time.Minute); errors.Is(err, unix.EBUSY) && time.Now().Before(end); <-tick.C {
		err = unix.Unmount(dir, 0)
	}
	if err != nil {
		t.Fatalf("unmount %s: %v", dir, err)
	}
}

func run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

// TestFileSystems runs a replica on the file systems of users, through a remount. The probe refuses file systems on
// which no map can be recovered.
func TestFileSystems(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, options string
		size          int64
		mkfs          []string
		refused       bool
	}{
		{"ext4", "", 300 << 20, []string{"mkfs.ext4", "-q", "-F", "-b", "4096"}, false},
		{"ext4-1k", "", 300 << 20, []string{"mkfs.ext4", "-q", "-F", "-b", "1024"}, true},
		{"ext4-bigalloc", "", 300 << 20, []string{"mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "bigalloc", "-C", "65536"}, false},
		{"xfs", "", 400 << 20, []string{"mkfs.xfs", "-q", "-f"}, false},
		{"xfs-reflink-off", "", 400 << 20, []string{"mkfs.xfs", "-q", "-f", "-m", "reflink=0"}, false},
		{"btrfs", "", 300 << 20, []string{"mkfs.btrfs", "-q", "-f"}, false},
		{"btrfs-zstd", ",compress-force=zstd", 300 << 20, []string{"mkfs.btrfs", "-q", "-f"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, remount := mounted(t, c.size, c.options, c.mkfs...)
			d, err := Add(context.Background(), dir)
			if c.refused {
				if !api.Is(err, api.Unsupported) {
					t.Fatalf("add: %v", err)
				}
				t.Log(err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, _, kind, err := d.Statfs(); err != nil || !strings.HasPrefix(c.name, kind) {
				t.Fatalf("kind %q, %v", kind, err)
			}
			onFileSystem(t, d, remount)
		})
	}
}

// TestDiskWhoseHolesWereFilledIsRefused: Open and Add refuse a copy without holes, which has zeros where the heads read
// lower layers. Open adds the file to a disk of an earlier version.
func TestDiskWhoseHolesWereFilledIsRefused(t *testing.T) {
	d := newDisk(t)
	name := filepath.Join(d.Path(), diskfs.HolesFile)
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(d.Path()); err != nil {
		t.Errorf("a disk without the file: %v", err)
	}
	if err := diskfs.CheckHoles(d.FS, d.Path()); err != nil {
		t.Errorf("after the open of a disk without the file: %v", err)
	}
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, open := range map[string]func() (*Disk, error){
		"opened": func() (*Disk, error) { return Open(d.Path()) },
		"added":  func() (*Disk, error) { return Add(context.Background(), d.Path()) },
	} {
		if _, err := open(); !api.Is(err, api.Corrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestLockOfAnUnmountedDiskMakesNoFile: the folder of an unmounted disk is the empty mount point, and Lock makes no
// file there. A mounted disk which lacks only the lock file gets a new lock file.
func TestLockOfAnUnmountedDiskMakesNoFile(t *testing.T) {
	d := newDisk(t)
	lock := d.Join(layer.LockFile)
	if err := os.Remove(lock); err != nil {
		t.Fatal(err)
	}
	unlock, err := d.Lock()
	if err != nil {
		t.Fatalf("a disk that lacks its lock: %v", err)
	}
	unlock()
	if err := errors.Join(os.Rename(d.Path(), d.Path()+".mounted"), os.Mkdir(d.Path(), 0o700)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Lock(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a disk that is not mounted: %v", err)
	}
	if left, err := os.ReadDir(d.Path()); err != nil || len(left) > 0 {
		t.Errorf("in the mount point are %v, %v", left, err)
	}
	if err := errors.Join(os.Remove(d.Path()), os.Rename(d.Path()+".mounted", d.Path())); err != nil {
		t.Fatal(err)
	}
}

// onFileSystem writes blocks of zeros over lower data, single blocks into holes, and punches; then remounts and compares.
func onFileSystem(t *testing.T, d *Disk, remount func()) {
	ctx, loop := context.Background(), startLoop(t)
	e := make(expect)
	all := make([]int64, 512)
	for i := range all {
		all[i] = int64(i)
	}
	const size = int64(4) << 20
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size,
		Layers: []string{filledLayer(t, d, size, all, 1<<32, e)}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	for round := range uint64(2) {
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		if err != nil {
			t.Fatal(err)
		}
		buf := block.AlignedBuffer(16 << 10)
		for b := int64(round); b < 500; b += 7 {
			switch b % 3 {
			case 0:
				fill(buf[:blockSize], 0)
				mustIssue(t, loop, r, block.OpWrite, b<<blockBits, blockSize, buf[:blockSize])
				e.put(b, 0)
			case 1:
				fill(buf, uint64(b)<<8|round)
				mustIssue(t, loop, r, block.OpWrite, b<<blockBits, 3*blockSize, buf[:3*blockSize])
				for i := range int64(3) {
					e.put(b+i, uint64(b)<<8|round)
				}
			case 2:
				mustIssue(t, loop, r, block.OpDiscard, b<<blockBits, 2*blockSize, nil)
				e.put(b, 0)
				e.put(b+1, 0)
			}
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		e.check(t, d, loop, spec.UID)
		remount()
		if err := d.Verify(ctx, spec.Layers[0]); err != nil {
			t.Fatal(err)
		}
		e.check(t, d, loop, spec.UID)
	}
}

// TestFullDisk fills a disk under a replica and a layer. Both report the full disk, nothing is damaged, and the replica
// continues once the disk has room again.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir, _ := mounted(t, 64<<20, "", "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0")
	ctx, loop := context.Background(), startLoop(t)
	d, err := Add(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	e := make(expect)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 128 << 20,
		Layers: []string{filledLayer(t, d, 8<<20, []int64{0, 1, 2, 3, 100, 2000}, 1<<32, e)}}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(1 << 20)
	var failed []int64
	for off := int64(0); off < spec.Size; off += int64(len(buf)) {
		fill(buf, uint64(off)|1)
		err := issue(loop, r, block.OpWrite, off, int64(len(buf)), buf, false)
		if errors.Is(err, syscall.ENOSPC) {
			failed = append(failed, off)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for b := off >> blockBits; b < (off+int64(len(buf)))>>blockBits; b++ {
			e.put(b, uint64(off)|1)
		}
	}
	if len(failed) < 10 {
		t.Fatalf("only %d writes found no room", len(failed))
	}
	if err := issue(loop, r, block.OpFlush, 0, 0, nil, false); err != nil {
		t.Fatalf("flush on a full disk: %v", err)
	}
	// Half-written data reads the same now and after a recovery.
	half := func(r *Replica) []byte {
		out := make([]byte, 0, len(failed)<<20)
		for _, off := range failed {
			mustIssue(t, loop, r, block.OpRead, off, int64(len(buf)), buf)
			out = append(out, buf...)
		}
		return out
	}
	before := half(r)
	w, err := d.Create(ctx, string(api.NewUID()), 16<<20)
	if err == nil {
		for off := int64(0); off < 16<<20 && err == nil; off += int64(len(buf)) {
			fill(buf, 77)
			_, err = w.WriteAt(buf, off)
		}
		if !api.Is(err, api.Full) {
			t.Fatalf("layer on a full disk: %v", err)
		}
		if err := w.Abort(); err != nil {
			t.Fatal(err)
		}
	} else if !api.Is(err, api.Full) {
		t.Fatal(err)
	}
	if err := r.Expand(ctx, 256<<20); err != nil && !api.Is(err, api.Full) {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil && !api.Is(err, api.Full) {
		t.Fatal(err)
	}
	if r, err = d.OpenReplica(ctx, spec.UID, loop); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, half(r)) {
		t.Fatal("what a failed write left changed with the recovery")
	}
	// The replica can adopt sessions on the full disk, again and again.
	for e := int64(2); e < 20; e++ {
		exhaust(t, dir)
		if err := r.Adopt(ctx, e, e, []string{spec.UID}); err != nil {
			t.Fatalf("adopt on a full disk: %v", err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if r, err = d.OpenReplica(ctx, spec.UID, loop); err != nil {
			t.Fatalf("open on a full disk: %v", err)
		}
		if m := r.Meta(); m.Epoch != e {
			t.Fatalf("epoch %d is recorded, not %d", m.Epoch, e)
		}
	}
	if !bytes.Equal(before, half(r)) {
		t.Fatal("what a failed write left changed with the sessions")
	}
	// A discard works on the full disk, and makes room.
	if err := issue(loop, r, block.OpDiscard, 0, 8<<20, nil, false); err != nil {
		t.Fatalf("discard on a full disk: %v", err)
	}
	for b := range int64(8<<20) >> blockBits {
		e.put(b, 0)
	}
	off := failed[0]
	fill(buf, 42)
	if err := issue(loop, r, block.OpWrite, off, int64(len(buf)), buf, true); err != nil {
		t.Fatalf("write after there is room: %v", err)
	}
	for b := off >> blockBits; b < (off+int64(len(buf)))>>blockBits; b++ {
		e.put(b, 42)
	}
	for _, f := range failed[1:] { // undefined by contract, so left out
		mustIssue(t, loop, r, block.OpDiscard, f, int64(len(buf)), nil)
		for b := f >> blockBits; b < (f+int64(len(buf)))>>blockBits; b++ {
			e.put(b, 0)
		}
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	e.check(t, d, loop, spec.UID)
	if left, err := d.FS.ReadDir(d.Join(layer.Dir)); err != nil || len(left) != 1 {
		t.Fatalf("layers: %v, %v", left, err)
	}
}

// exhaust takes every free block.
func exhaust(t *testing.T, dir string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "ballast"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, blockSize))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	_ = f.Sync()
}

// TestAddAndOpen: a second Add of a folder succeeds. Open refuses a plain folder, Add refuses a disk without a disk
// record. The probe leaves nothing behind.
func TestAddAndOpen(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	if _, err := Open(dir); !api.Is(err, api.NotFound) {
		t.Fatalf("open of a plain folder: %v", err)
	}
	d, err := Add(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Add(ctx, dir)
	if err != nil || again.UID() != d.UID() {
		t.Fatalf("add again: %v", err)
	}
	entries, err := file.OS.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			t.Errorf("left behind: %s", e.Name())
		}
	}
	if err := os.Mkdir(d.Join(layer.Dir, string(api.NewUID())), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(d.Join(diskFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := Add(ctx, dir); !api.Is(err, api.Corrupt) {
		t.Fatalf("add of a disk that lost its record: %v", err)
	}
}
