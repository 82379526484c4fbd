package replicas

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
)

// TestResumeBesideAHungDisk: a disk that hangs while the data process starts keeps its own volumes waiting, without an
// error, and those of no other disk.
func TestResumeBesideAHungDisk(t *testing.T) {
	hung := mountedDisk(t, 300)
	w := newWorld(t, hung, filepath.Join(t.TempDir(), "well"))
	for name, disk := range map[string]string{"waits": hung, "goes-on": "well", "later": "well"} {
		v := volume(name, 16*mib)
		v.Spec.DiskSelector = []string{filepath.Base(disk)}
		w.create(v)
		w.volumeState(name, api.VolumeDetached)
	}
	data, err := syscall.Mmap(-1, 0, 64<<10, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	copy(data, bytes.Repeat([]byte("0123456789abcdef"), 4096))
	files := map[string]*os.File{}
	for _, name := range []string{"waits", "goes-on"} {
		w.create(attachment(name))
		f, err := os.OpenFile(w.attached(name).Status.Device, os.O_RDWR|syscall.O_DIRECT, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files[name] = f
		writeDevice(t, f.Name(), 0, data)
	}
	w.stopData()
	thaw := freeze(t, hung)
	w.lost = true // Resume tells of the one that waits
	w.startData()
	w.lost = false
	write := func(f *os.File) error { // not through the page cache: nobody's sync waits for it
		if _, err := f.WriteAt(data, mib); err != nil {
			return err
		}
		return f.Sync()
	}
	waited := make(chan error, 1)
	go func() { waited <- write(files["waits"]) }()
	if err := write(files["goes-on"]); err != nil {
		t.Fatal(err)
	}
	checkDevice(t, files["goes-on"].Name(), mib, data)
	w.create(attachment("later"))
	writeDevice(t, w.attached("later").Status.Device, 0, data)
	a := w.attached("later")
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
	select {
	case err := <-waited:
		t.Fatalf("the disk that hangs has taken a write: %v", err)
	default:
	}
	thaw()
	select {
	case err := <-waited:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the volume of the disk that hung does not go on")
	}
	checkDevice(t, files["waits"].Name(), 0, data)
	checkDevice(t, files["waits"].Name(), mib, data)
	for name, f := range files {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		a := w.attached(name)
		w.remove(a)
		gone(w, a, &api.AttachmentList{})
	}
}

// freeze has writes to a file system hang until thaw, or the end of the test.
func freeze(t *testing.T, dir string) (thaw func()) {
	t.Helper()
	// Whatever becomes of this process, the file system does not stay so.
	guard := exec.Command("sh", "-c", "sleep 90; fsfreeze --unfreeze "+dir)
	guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := guard.Start(); err != nil {
		t.Fatal(err)
	}
	thawed := false
	thaw = func() {
		if thawed {
			return
		}
		thawed = true
		if out, err := exec.Command("fsfreeze", "--unfreeze", dir).CombinedOutput(); err != nil {
			t.Errorf("thaw: %v: %s", err, out)
		}
		_ = syscall.Kill(-guard.Process.Pid, syscall.SIGKILL)
		_ = guard.Wait()
	}
	t.Cleanup(thaw) // before the world ends
	if out, err := exec.Command("fsfreeze", "--freeze", dir).CombinedOutput(); err != nil {
		t.Fatalf("freeze: %v: %s", err, out)
	}
	return thaw
}

// TestOwnDiskHangs: the disk of the engine's own node hangs without an error. Its replica is given up, I/O goes on with
// the other, and the replica comes back with the disk.
func TestOwnDiskHangs(t *testing.T) {
	hung := mountedDisk(t, 400)
	w := newWorld(t)
	both, err := wire.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := wire.LoadAuthority(both)
	if err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(w.dir, "a", "disk")
	w.sh("mkdir -p " + disk + "; mount --bind " + hung + " " + disk)
	t.Cleanup(func() { w.sh("umount " + disk) })
	a, b := w.other(ca, "a"), w.other(ca, "b")
	for _, name := range []string{"a", "b"} {
		await(w, &api.Node{ObjectMeta: named(name)}, &api.NodeList{}, "reachable", func(n *api.Node) bool {
			return n.Status.DataAddress != "" && len(n.Status.Disks) == 1 && n.Status.Disks[0].Ready
		})
	}
	v := volume("v", 64<<20)
	v.Spec.NumberOfReplicas = 2
	v.Spec.Nodes = []string{"a", "b"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	at := attachment("v")
	at.Spec.Node = "a"
	w.create(at)
	dev := w.attached("v").Status.Device
	members := func(n int) func(*api.Volume) bool {
		return func(v *api.Volume) bool { return len(v.Status.Members) == n }
	}
	w.volumeIs("v", "whole", members(2))
	w.sh("dd if=/dev/urandom of=" + dev + " bs=1M count=32 oflag=direct status=none")
	thaw := freeze(t, hung)
	began := time.Now()
	w.sh("dd if=/dev/urandom of=" + dev + " bs=1M count=16 seek=24 oflag=direct conv=notrunc,fsync status=none")
	// Parts of blocks, too, and memory that is used again while the disk may still read what it was given.
	w.sh("dd if=/dev/urandom of=" + dev + " bs=1536 count=200 seek=77 oflag=direct conv=notrunc status=none")
	t.Logf("written %v after the disk began to hang", time.Since(began))
	w.volumeIs("v", "without the replica", members(1))
	sum := w.sh("sha256sum < " + dev)
	thaw()
	began = time.Now()
	w.volumeIs("v", "whole again", members(2))
	t.Logf("whole %v after the disk went on", time.Since(began))
	w.sh("echo 1 > /proc/sys/vm/drop_caches; blockdev --flushbufs " + dev)
	if now := w.sh("sha256sum < " + dev); now != sum {
		t.Error("the volume holds something else")
	}
	w.remove(at)
	gone(w, at, &api.AttachmentList{})
	digests := map[string]bool{}
	for _, o := range []*other{a, b} {
		o.stop()
		digests[o.content(t)] = true
	}
	if len(digests) != 1 {
		t.Errorf("the replicas differ: %v", digests)
	}
}

// mountedDisk is the mount point of an ext4 of its own, of so many MiB.
func mountedDisk(t *testing.T, size int) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: file systems are mounted")
	}
	dir := t.TempDir()
	mnt := filepath.Join(dir, "small")
	run := func(command string) {
		t.Helper()
		if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	run(fmt.Sprintf("mkdir %s; truncate -s %dM %s/img; mkfs.ext4 -q -b 4096 -m 0 %[3]s/img; mount -o loop %[3]s/img %[1]s",
		mnt, size, dir))
	t.Cleanup(func() { run("umount " + mnt) })
	return mnt
}
