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
	"drover.io/drover/block/suite"
	"drover.io/drover/block/wire"
)

// TestResumeBesideAHungDisk: a disk that hangs at the start of the data process keeps its own volumes waiting,
// without an error, and no volumes of other disks.
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
	w.lost = true // Resume reports the waiting volume
	w.startData()
	w.lost = false
	write := func(f *os.File) error { // past the page cache: no sync waits for the write
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
	case <-w.ctx.Done():
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

// TestSyncsBesideAHungDisk: volumes with their only replica on a hung disk, more than an I/O thread lets block at a
// time, delay the syncs of volumes on other disks for a moment only.
func TestSyncsBesideAHungDisk(t *testing.T) {
	hung := mountedDisk(t, 300)
	w := newWorld(t, hung, filepath.Join(t.TempDir(), "well"))
	data, err := syscall.Mmap(-1, 0, 64<<10, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	copy(data, bytes.Repeat([]byte("0123456789abcdef"), 4096))
	var stuck, well []*os.File
	for i := range 6 {
		name, disk, list := fmt.Sprintf("hung%d", i), hung, &stuck
		if i%3 == 0 {
			name, disk, list = fmt.Sprintf("well%d", i), "well", &well
		}
		v := volume(name, 16*mib)
		v.Spec.DiskSelector = []string{filepath.Base(disk)}
		w.create(v)
		w.volumeState(name, api.VolumeDetached)
		w.create(attachment(name))
		f, err := os.OpenFile(w.attached(name).Status.Device, os.O_RDWR|syscall.O_DIRECT, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt(data, 0); err != nil {
			t.Fatal(err)
		}
		*list = append(*list, f)
	}
	thaw := freeze(t, hung)
	discards, syncs := make(chan error, len(stuck)), make(chan error, len(well))
	for _, f := range stuck {
		go func() {
			out, err := exec.Command("blkdiscard", "-o", "0", "-l", "65536", f.Name()).CombinedOutput()
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			discards <- err
		}()
	}
	time.Sleep(time.Second) // no event tells when the discards have reached the disk
	for _, f := range well {
		go func() {
			_, err := f.WriteAt(data, mib)
			if err == nil {
				err = f.Sync()
			}
			syncs <- err
		}()
	}
	late := time.After(time.Minute)
	for range well {
		select {
		case err := <-syncs:
			if err != nil {
				t.Error(err)
			}
		case <-late:
			t.Fatal("a volume waits for a disk that it is not on")
		}
	}
	if len(discards) > 0 {
		t.Errorf("nothing hangs: %v", <-discards)
	}
	thaw()
	for range stuck {
		if err := <-discards; err != nil {
			t.Error(err)
		}
	}
}

// freeze makes writes to a file system hang until thaw, or the end of the test.
func freeze(t *testing.T, dir string) (thaw func()) {
	t.Helper()
	// The guard thaws the file system even after the death of the test process.
	guard := exec.Command("sh", "-c", "sleep 900; fsfreeze --unfreeze "+dir)
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

// TestOwnDiskHangs: the disk of the engine's own node hangs without an error. The engine drops the local member, I/O
// continues with the other member, and the replica returns with the disk.
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
	t.Cleanup(func() { w.sh("umount --lazy " + disk) })
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
	// Parts of blocks, too, and memory in use again while the disk may still read the former request.
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

// hangingWrite writes to a device, and returns once the write is in progress; the channel gets the result.
func (w *world) hangingWrite(dev string, off int64) <-chan error {
	w.t.Helper()
	ended := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(dev, os.O_WRONLY|syscall.O_SYNC, 0)
		if err == nil {
			_, err = f.WriteAt(make([]byte, mib), off)
			_ = f.Close()
		}
		ended <- err
	}()
	inflight := "/sys/block/" + filepath.Base(dev) + "/inflight"
	for tick := time.NewTicker(10 * time.Millisecond); ; { // without a notification
		var reads, writes int
		if text, err := os.ReadFile(inflight); err != nil {
			w.t.Fatal(err)
		} else if _, err := fmt.Sscan(string(text), &reads, &writes); err != nil {
			w.t.Fatal(err)
		}
		if writes > 0 {
			tick.Stop()
			return ended
		}
		select {
		case err := <-ended: // the write ended before the first look
			ended <- err
			return ended
		case <-tick.C:
		case <-w.ctx.Done():
			w.t.Fatal("no write is on its way")
		}
	}
}

// mountedDisk is the mount point of a separate ext4 file system of size MiB.
func mountedDisk(t *testing.T, size int) string {
	t.Helper()
	suite.System(t)
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

// TestForcedDetachOfAHungDisk: the disk of a volume's only replica hangs without an error. A forced detach succeeds
// all the same, the volume's I/O fails, and the volume can be attached again once the disk works, with every
// acknowledged write.
func TestForcedDetachOfAHungDisk(t *testing.T) {
	hung := mountedDisk(t, 200)
	w := newWorld(t, hung)
	w.make("v", 16*mib)
	w.create(attachment("v"))
	a := w.attached("v")
	data := bytes.Repeat([]byte("answered"), mib/8)
	writeDevice(t, a.Status.Device, 0, data)
	thaw := freeze(t, hung)
	failed := w.hangingWrite(a.Status.Device, 2*mib)
	w.remove(a) // the detach waits until the user forces the end
	await(w, &api.Volume{ObjectMeta: named("v")}, &api.VolumeList{}, "detaching", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeDetaching
	})
	edit(w, a, func(a *api.Attachment) { a.Annotations = map[string]string{api.AnnotationForce: "now"} })
	began := time.Now()
	gone(w, a, &api.AttachmentList{})
	t.Logf("detached %v after", time.Since(began))
	if err := <-failed; err == nil {
		t.Error("a write was answered that no disk has")
	}
	w.volumeState("v", api.VolumeDetached)
	thaw()
	w.create(attachment("v"))
	checkDevice(t, w.attached("v").Status.Device, 0, data)
}

// TestSnapshotsOnAHungDisk: snapshots of a volume on a hung disk delay neither the I/O errors of a forced detach, nor
// snapshots on other disks.
func TestSnapshotsOnAHungDisk(t *testing.T) {
	hung := mountedDisk(t, 300)
	w := newWorld(t, hung, filepath.Join(t.TempDir(), "well"))
	for name, disk := range map[string]string{"v": hung, "other": "well"} {
		v := volume(name, 16*mib)
		v.Spec.DiskSelector = []string{filepath.Base(disk)}
		w.create(v)
		w.volumeState(name, api.VolumeDetached)
	}
	w.create(attachment("v"))
	a := w.attached("v")
	data := bytes.Repeat([]byte("answered"), mib/8)
	writeDevice(t, a.Status.Device, 0, data)
	thaw := freeze(t, hung)
	failed := w.hangingWrite(a.Status.Device, 2*mib)
	snap := func(name, of string) *api.Snapshot {
		return &api.Snapshot{ObjectMeta: named(name), Spec: api.SnapshotSpec{Volume: of, CreateSnapshot: true}}
	}
	for i := range 9 { // more than are made at once
		w.create(snap(fmt.Sprintf("hangs%d", i), "v"))
	}
	ready := func(s *api.Snapshot) bool { return s.Status.ReadyToUse }
	for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C { // no event tells when the first snapshot waits
		if w.data.Locks.Taken("v") {
			tick.Stop()
			break
		}
	}
	w.create(snap("made", "other"))
	await(w, snap("made", ""), &api.SnapshotList{}, "ready", ready)
	w.remove(a)
	edit(w, a, func(a *api.Attachment) { a.Annotations = map[string]string{api.AnnotationForce: "now"} })
	began := time.Now()
	select {
	case err := <-failed:
		if err == nil {
			t.Error("a write was answered that no disk has")
		}
		t.Logf("its I/O failed %v after", time.Since(began))
	case <-time.After(time.Minute):
		t.Error("the device was to be taken away by force, and its I/O waits")
	}
	thaw()
	gone(w, a, &api.AttachmentList{})
	for i := range 9 {
		await(w, snap(fmt.Sprintf("hangs%d", i), ""), &api.SnapshotList{}, "ready", ready)
	}
	w.create(attachment("v"))
	checkDevice(t, w.attached("v").Status.Device, 0, data)
}

// TestForcedDetachOfADiskThatHangsAtTheEnd: the disk hangs when the device is gone already and the node closes the
// replica. A forced detach does not wait for the close, and the volume can be attached again once the disk works.
func TestForcedDetachOfADiskThatHangsAtTheEnd(t *testing.T) {
	hung := mountedDisk(t, 200)
	w := newWorld(t, hung)
	w.make("v", 16*mib)
	w.create(attachment("v"))
	a := w.attached("v")
	data := bytes.Repeat([]byte("answered"), mib/8)
	writeDevice(t, a.Status.Device, 0, data)
	thaw := freeze(t, hung)
	w.remove(a)
	for tick := time.NewTicker(10 * time.Millisecond); ; { // no event tells when the device is gone
		if w.data.attachments.Ending() > 0 {
			tick.Stop()
			break
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			t.Fatal("the device is still there")
		}
	}
	edit(w, a, func(a *api.Attachment) { a.Annotations = map[string]string{api.AnnotationForce: "now"} })
	gone(w, a, &api.AttachmentList{})
	w.volumeState("v", api.VolumeDetached)
	thaw()
	w.create(attachment("v"))
	checkDevice(t, w.attached("v").Status.Device, 0, data)
}

// TestNoteOnAHungDisk: an update of a volume's record on a hung disk delays no forced detach.
func TestNoteOnAHungDisk(t *testing.T) {
	hung := mountedDisk(t, 200)
	w := newWorld(t, hung)
	w.make("v", 16*mib)
	w.create(attachment("v"))
	a := w.attached("v")
	data := bytes.Repeat([]byte("answered"), mib/8)
	writeDevice(t, a.Status.Device, 0, data)
	thaw := freeze(t, hung)
	edit(w, volume("v", 0), func(v *api.Volume) { v.Labels = map[string]string{"of": "record"} })
	edit(w, a, func(a *api.Attachment) { a.Annotations = map[string]string{api.AnnotationForce: "now"} })
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
	w.volumeState("v", api.VolumeDetached)
	thaw()
	w.create(attachment("v"))
	checkDevice(t, w.attached("v").Status.Device, 0, data)
}

// TestAttachBesideAHungMember: the disk of a member hangs when the volume is detached. Another node attaches the
// volume without the member, with every acknowledged write, and the member returns with the disk.
func TestAttachBesideAHungMember(t *testing.T) {
	hung := mountedDisk(t, 400)
	w := newWorld(t)
	disk := filepath.Join(w.dir, "a", "disk")
	w.sh("mkdir -p " + disk + "; mount --bind " + hung + " " + disk)
	t.Cleanup(func() { w.sh("umount --lazy " + disk) })
	w.three()
	v := volume("v", 64*mib)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "b"}
	w.create(v)
	members := func(n int) func(*api.Volume) bool {
		return func(v *api.Volume) bool { return len(v.Status.Members) == n }
	}
	w.volumeIs("v", "whole", members(2))
	w.volumeState("v", api.VolumeDetached)
	data := bytes.Repeat([]byte("answered"), mib/8)
	writeDevice(t, w.attachTo("a", "v"), 0, data)
	dev := w.attached("v").Status.Device
	thaw := freeze(t, hung)
	failed := w.hangingWrite(dev, 8*mib)
	edit(w, attachment("v"), func(a *api.Attachment) { a.Annotations = map[string]string{api.AnnotationForce: "now"} })
	w.detachFrom("v")
	if err := <-failed; err == nil {
		t.Log("the member that hangs was left out before the volume was detached")
	}
	dev = w.attachTo("b", "v")
	if v := w.volumeIs("v", "there", func(*api.Volume) bool { return true }); len(v.Status.Members) != 1 {
		t.Errorf("the members are %v, and the disk of one hangs", v.Status.Members)
	}
	checkDevice(t, dev, 0, data)
	writeDevice(t, dev, mib, data)
	thaw()
	w.volumeIs("v", "whole again", members(2))
	w.detachFrom("v")
	dev = w.attachTo("a", "v")
	checkDevice(t, dev, 0, data)
	checkDevice(t, dev, mib, data)
	w.detachFrom("v")
}

// TestForcedDetachOfAHeldDevice: the data process cannot resume a device, as the disk is away. A forced detach
// removes the device all the same, and the volume can be attached again when the disk is back.
func TestForcedDetachOfAHeldDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v", 16*mib)
	w.create(attachment("v"))
	a := w.attached("v")
	data := bytes.Repeat([]byte("answered"), mib/8)
	writeDevice(t, a.Status.Device, 0, data)
	w.stopData()
	disk := filepath.Join(w.dir, "disk")
	if err := os.Rename(disk, disk+".away"); err != nil {
		t.Fatal(err)
	}
	w.lost = true
	w.startData()
	w.lost = false
	w.remove(a)
	await(w, a, &api.AttachmentList{}, "waiting for its disk", func(a *api.Attachment) bool {
		return a.DeletionTimestamp != nil && a.Status.Message != ""
	})
	edit(w, a, func(a *api.Attachment) { a.Annotations = map[string]string{api.AnnotationForce: "now"} })
	gone(w, a, &api.AttachmentList{})
	if err := os.Rename(disk+".away", disk); err != nil {
		t.Fatal(err)
	}
	w.create(attachment("v"))
	checkDevice(t, w.attached("v").Status.Device, 0, data)
}
