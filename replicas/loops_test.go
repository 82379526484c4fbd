package replicas

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"drover.io/drover/api"
)

const mib = 1 << 20

// TestLifeOfAVolume is the whole way: create, attach, write, expand while in use, detach, attach again, read, delete;
// and then the disk is as empty as before.
func TestLifeOfAVolume(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := w.make("v1", 64*mib)
	if v.Status.Epoch != 1 || len(v.Status.Members) != 1 || v.Status.Robustness != api.RobustHealthy {
		t.Fatalf("%+v", v.Status)
	}
	w.create(attachment("v1"))
	a := w.attached("v1")
	if !a.Status.Blank || a.Status.Size != 64*mib || a.Status.Epoch != 2 {
		t.Fatalf("%+v", a.Status)
	}
	v = w.volumeState("v1", api.VolumeAttached)
	if v.Status.Epoch != 2 || v.Status.EngineNode != testNode || v.Status.AttachedNode != testNode {
		t.Fatalf("%+v", v.Status)
	}
	data := bytes.Repeat([]byte("drover"), mib/6)
	writeDevice(t, a.Status.Device, 512, data) // begins and ends within blocks

	edit(w, v, func(v *api.Volume) { v.Spec.Size = 128 * mib })
	w.volumeIs("v1", "expanded", func(v *api.Volume) bool { return v.Status.Size == 128*mib })
	writeDevice(t, a.Status.Device, 127*mib, data)

	// In use: the device stays.
	hold, err := os.Open(a.Status.Device)
	if err != nil {
		t.Fatal(err)
	}
	w.remove(a)
	await(w, a, &api.AttachmentList{}, "refused", func(a *api.Attachment) bool { return a.Status.Message != "" })
	w.remove(v)
	w.volumeIs("v1", "waiting for its detach", says("attached"))
	if err := hold.Close(); err != nil {
		t.Fatal(err)
	}
	gone(w, a, &api.AttachmentList{})
	gone(w, v, &api.VolumeList{})
	w.nothingLeft()
}

// nothingLeft checks that neither the API nor the disk has a replica or parts of a replica.
func (w *world) nothingLeft() {
	w.t.Helper()
	var list api.ReplicaList
	if err := w.c.List(w.ctx, &list); err != nil {
		w.t.Fatal(err)
	}
	if len(list.Items) > 0 {
		w.t.Errorf("replicas are left: %+v", list.Items)
	}
	left, err := filepath.Glob(filepath.Join(w.dir, "disk", "replicas", "*"))
	if err != nil || len(left) > 0 {
		w.t.Errorf("left on the disk: %v %v", left, err)
	}
}

func writeDevice(t *testing.T, dev string, off int64, data []byte) {
	t.Helper()
	f, err := os.OpenFile(dev, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(data, off); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

func checkDevice(t *testing.T, dev string, off int64, want []byte) {
	t.Helper()
	f, err := os.Open(dev)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, off); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s at %d is not what was written", dev, off)
	}
}

func TestDetachedData(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	a := attachment("v1")
	w.create(a)
	a = w.attached("v1")
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	writeDevice(t, a.Status.Device, 3*mib, data)
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
	v := w.volumeIs("v1", "detached, and known in size", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeDetached && v.Status.EngineNode == "" && v.Status.Used > 0
	})
	// Larger while detached.
	edit(w, v, func(v *api.Volume) { v.Spec.Size = 32 * mib })
	w.volumeIs("v1", "expanded", func(v *api.Volume) bool { return v.Status.Size == 32*mib })
	w.create(attachment("v1"))
	a = w.attached("v1")
	if a.Status.Blank || a.Status.Size != 32*mib {
		t.Fatalf("%+v", a.Status)
	}
	checkDevice(t, a.Status.Device, 3*mib, data)
	checkDevice(t, a.Status.Device, 31*mib, make([]byte, mib))
}

// TestResume stops the data role as the end of the process does, and starts the data role again without the API
// server.
func TestResume(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	w.create(attachment("v1"))
	a := w.attached("v1")
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	f, err := os.OpenFile(a.Status.Device, os.O_RDWR, 0) // in use all the time
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	writeDevice(t, a.Status.Device, 0, data)
	w.stopData()
	w.startData()
	if _, err := f.WriteAt(data, mib); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	checkDevice(t, a.Status.Device, 0, data)
	checkDevice(t, a.Status.Device, mib, data)
	a = w.attached("v1")
	v := w.volumeState("v1", api.VolumeAttached)
	if v.Status.Epoch != 2 || a.Status.Epoch != 2 {
		t.Fatalf("resuming is not attaching: epoch %d, %d", v.Status.Epoch, a.Status.Epoch)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
}

// TestAttachmentRemovedWhileDataIsAway: the next data process detaches a volume whose Attachment was removed
// meanwhile.
func TestAttachmentRemovedWhileDataIsAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	w.create(attachment("v1"))
	a := w.attached("v1")
	w.stopData()
	w.remove(a)
	w.startData()
	gone(w, a, &api.AttachmentList{})
	w.volumeIs("v1", "detached", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeDetached && v.Status.EngineNode == ""
	})
	if len(w.data.attachments.Sessions())+len(w.host.Held()) > 0 {
		t.Fatal("a device is left")
	}
}

func TestAPIWentBackInTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	w.create(attachment("v1"))
	a := w.attached("v1")
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
	v := w.volumeState("v1", api.VolumeDetached)
	editStatus(w, v, func(v *api.Volume) { v.Status.Epoch = 1 })
	w.create(attachment("v1"))
	await(w, attachment("v1"), &api.AttachmentList{}, "refused",
		func(a *api.Attachment) bool { return strings.Contains(a.Status.Message, "back in time") })
}

func TestTakenOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	w.create(attachment("v1"))
	a := w.attached("v1")
	dev := a.Status.Device
	f, err := os.OpenFile(dev, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	v := w.volumeState("v1", api.VolumeAttached)
	editStatus(w, v, func(v *api.Volume) {
		v.Status.Epoch++
		v.Status.EngineNode = "other"
	})
	await(w, a, &api.AttachmentList{}, "fenced", func(a *api.Attachment) bool {
		return a.Status.Epoch != 2 || !a.Status.Ready
	})
	buf := make([]byte, 4096)
	if _, err := f.WriteAt(buf, 0); err == nil {
		if err = f.Sync(); err == nil {
			t.Fatal("the fenced device still writes")
		}
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	two := volume("two", 16*mib)
	two.Spec.NumberOfReplicas = 2
	tagged := volume("tagged", 16*mib)
	tagged.Spec.DiskSelector = []string{"nvme"}
	elsewhere := volume("elsewhere", 16*mib)
	elsewhere.Spec.Nodes = []string{"n9"}
	huge := volume("huge", 1<<43)
	imaged := volume("imaged", 16*mib)
	imaged.Spec.BackingImage = "debian"
	w.create(two, tagged, elsewhere, huge, imaged)
	for name, want := range map[string]string{
		"two": "1 of 2 replicas are whole", "tagged": "lacks the tag nvme", "elsewhere": "must be on n9",
		"huge": "storage-over-provisioning-percentage", "imaged": "debian does not exist",
	} {
		w.volumeIs(name, "explained", says(want))
	}
	// After a change that makes a placement possible, the planner places without another request.
	edit(w, &api.Node{ObjectMeta: named(testNode)}, func(n *api.Node) {
		n.Spec.Disks[0].Tags = append(n.Spec.Disks[0].Tags, "nvme")
	})
	w.volumeState("tagged", api.VolumeDetached)
	w.create(&api.Setting{ObjectMeta: named("storage-over-provisioning-percentage"), Value: "100000000"})
	w.volumeState("huge", api.VolumeDetached)
	w.create(volume("beyond", 1<<44)) // more than a file of ext4 can have
	v := w.volumeState("beyond", api.VolumeFaulted)
	if !strings.Contains(v.Status.Message, "cannot hold a file of 16 TiB") {
		t.Fatal(v.Status.Message)
	}
	for _, name := range []string{"beyond", "two", "tagged", "elsewhere", "huge", "imaged"} {
		v := &api.Volume{ObjectMeta: named(name)}
		w.remove(v)
		gone(w, v, &api.VolumeList{})
	}
	w.nothingLeft()
}

// TestImage: a volume waits for its image, then for the copy on its disk, and then holds the image's bytes.
func TestImage(t *testing.T) {
	w := newWorld(t)
	var n api.Node
	n.Name = testNode
	await(w, &n, &api.NodeList{}, "ready", func(n *api.Node) bool {
		return len(n.Status.Disks) == 1 && n.Status.Disks[0].Ready
	})
	small, vol := volume("small", 16*mib), volume("v1", 64*mib)
	small.Spec.BackingImage, vol.Spec.BackingImage = "debian", "debian"
	w.create(small, vol)
	img := &api.BackingImage{ObjectMeta: named("debian"), Spec: api.BackingImageSpec{SourceType: api.SourceFile}}
	w.create(img)
	w.volumeIs("v1", "waiting", says("being prepared"))
	layer := api.NewUID()
	editStatus(w, img, func(i *api.BackingImage) {
		i.Status = api.BackingImageStatus{UUID: api.NewUID(), Layers: []api.UID{layer}, State: api.ImageReady,
			VirtualSize: 32 * mib}
	})
	w.volumeIs("small", "refused", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeFaulted && strings.Contains(v.Status.Message, "less than the 32 MiB")
	})
	w.volumeIs("v1", "waiting for a copy", says("copy of"))

	disk, err := w.disks.Layers(n.Status.Disks[0].UID)
	if err != nil {
		t.Fatal(err)
	}
	lw, err := disk.Create(w.ctx, string(layer), 32*mib)
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("golden!!"), mib/8)
	if _, err := lw.WriteAt(data, 5*mib); err != nil {
		t.Fatal(err)
	}
	if _, _, err := lw.Seal(w.ctx); err != nil {
		t.Fatal(err)
	}
	cp := &api.ImageCopy{ObjectMeta: named("copy"), Spec: api.ImageCopySpec{Image: "debian", UUID: img.Status.UUID,
		Layers: img.Status.Layers, Node: testNode, Disk: n.Status.Disks[0].UID}}
	w.create(cp)
	editStatus(w, cp, func(c *api.ImageCopy) { c.Status.State = api.ImageReady })
	w.volumeState("v1", api.VolumeDetached)
	a := attachment("v1")
	w.create(a)
	a = w.attached("v1")
	if a.Status.Blank {
		t.Fatal("a volume from an image is not blank")
	}
	checkDevice(t, a.Status.Device, 5*mib, data)
	writeDevice(t, a.Status.Device, 5*mib+512, []byte(strings.Repeat("x", 512)))
	copy(data[512:], strings.Repeat("x", 512))
	checkDevice(t, a.Status.Device, 5*mib, data)
	checkDevice(t, a.Status.Device, 40*mib, make([]byte, mib))

	found := map[string]bool{}
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if len(m.Label) > 0 && strings.Contains(m.String(), `value:"v1"`) {
				found[f.GetName()] = true
			}
		}
	}
	for _, name := range []string{"capacity_bytes", "actual_size_bytes", "state", "robustness", "ops_total", "bytes_total",
		"latency_seconds", "waiting_for_space"} {
		if !found["drover_volume_"+name] {
			t.Errorf("no metric drover_volume_%s of the volume", name)
		}
	}
}

// TestFullDisk fills the disk under a volume: writes wait, with a condition, and continue once the disk has room.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	mnt := filepath.Join(dir, "small")
	w := &world{t: t, ctx: t.Context()}
	w.sh("mkdir " + mnt + "; truncate -s 96M " + dir + "/img; mkfs.ext4 -q -b 4096 -m 0 " + dir + "/img; " +
		"mount -o loop " + dir + "/img " + mnt)
	t.Cleanup(func() {
		if out, err := exec.Command("umount", mnt).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	w = newWorld(t, mnt)
	w.make("v1", 128*mib)
	w.create(attachment("v1"))
	a := w.attached("v1")
	ballast := filepath.Join(mnt, "ballast")
	w.sh("fallocate -l 40M " + ballast)
	done := make(chan error, 1)
	data := bytes.Repeat([]byte("0123456789abcdef"), 60*mib/16)
	go func() {
		f, err := os.OpenFile(a.Status.Device, os.O_RDWR|syscall.O_SYNC, 0)
		if err == nil {
			_, err = f.WriteAt(data, 0)
			err = errors.Join(err, f.Close())
		}
		done <- err
	}()
	v := w.volumeIs("v1", "full", func(v *api.Volume) bool {
		return meta.IsStatusConditionFalse(v.Status.Conditions, api.ConditionSpace)
	})
	if !strings.Contains(v.Status.Message, mnt) || v.Status.State != api.VolumeAttached {
		t.Fatalf("%+v", v.Status)
	}
	select {
	case err := <-done:
		t.Fatalf("the writer did not wait: %v", err)
	default:
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	w.volumeIs("v1", "with room", func(v *api.Volume) bool {
		return meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionSpace) && v.Status.Message == ""
	})
	checkDevice(t, a.Status.Device, 0, data)

	// Full again, and no room follows: the user detaches by force.
	w.sh("fallocate -l 4M " + ballast)
	go func() {
		f, err := os.OpenFile(a.Status.Device, os.O_RDWR|syscall.O_SYNC, 0)
		if err == nil {
			_, err = f.WriteAt(data, 64*mib)
			err = errors.Join(err, f.Close())
		}
		done <- err
	}()
	w.volumeIs("v1", "full again", func(v *api.Volume) bool {
		return meta.IsStatusConditionFalse(v.Status.Conditions, api.ConditionSpace)
	})
	a = w.attached("v1")
	edit(w, a, func(a *api.Attachment) { a.Annotations = map[string]string{api.AnnotationForce: "true"} })
	w.remove(a)
	if err := <-done; err == nil {
		t.Error("a write that found no room succeeded")
	}
	gone(w, a, &api.AttachmentList{})
	w.volumeState("v1", api.VolumeDetached)
	// As full as can be, the volume is attached and read.
	w.sh("dd if=/dev/zero of=" + ballast + "2 bs=4k status=none 2>/dev/null || true; sync -f " + mnt)
	w.create(attachment("v1"))
	a = w.attached("v1")
	checkDevice(t, a.Status.Device, 0, data)
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
	w.sh("rm " + ballast + " " + ballast + "2")
	w.create(attachment("v1"))
	a = w.attached("v1")
	checkDevice(t, a.Status.Device, 0, data)
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
	for _, reason := range []string{"Created", "Attached", "DiskFull", "SpaceAvailable", "Forced"} {
		w.tells("v1", reason, "")
	}
	var events eventsv1.EventList
	if err := w.c.List(w.ctx, &events); err != nil {
		t.Fatal(err)
	}
	created := map[string]bool{}
	for _, e := range events.Items {
		if of := string(e.Regarding.UID); e.Reason == "Created" {
			if created[of] || e.Series != nil {
				t.Errorf("volume %s was created twice: %s", e.Regarding.Name, e.Note)
			}
			created[of] = true
		}
	}
}
