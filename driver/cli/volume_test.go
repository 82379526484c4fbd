package cli_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
)

func detached(v *api.Volume) { v.Status.State, v.Status.Size = api.VolumeDetached, v.Spec.Size }

func TestVolumeCreateAndDelete(t *testing.T) {
	pen(t, "made", detached)
	drover(t, kubeconfig("volume", "create", "made", "--size", "11Mi", "--fs", "xfs")...).
		mustSay(t, 0, `volume "made" created: 12 MiB`)
	var v api.Volume
	if err := store.Get(t.Context(), client.ObjectKey{Name: "made"}, &v); err != nil || v.Spec.FSType != "xfs" {
		t.Errorf("%v, %+v", err, v.Spec)
	}
	drover(t, kubeconfig("volume", "create", "made", "--size", "11Mi")...).mustSay(t, 5, "already")
	att := &api.Attachment{Spec: api.AttachmentSpec{Volume: "made", Node: "elsewhere"}}
	att.Name = "made"
	if err := store.Create(t.Context(), att); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("volume", "delete", "made")...).mustSay(t, 5, `attached to node "elsewhere"`, "volume detach made")
	drover(t, kubeconfig("volume", "attach", "made")...).mustSay(t, 5, `attached to node "elsewhere"`)
	if err := store.Delete(t.Context(), att); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("volume", "delete", "made")...).mustSay(t, 0, "deleted")
	drover(t, kubeconfig("volume", "delete", "made")...).mustSay(t, 3)
}

func TestVolumeCreateGivesUpButTellsWhy(t *testing.T) {
	for _, patience := range []string{"1s", "5s", "30s"} { // on a busy machine the reason may come later than in a second
		name := "late-" + patience
		pen(t, name, func(v *api.Volume) {
			v.Status.State = api.VolumeCreating
			v.Status.Conditions = []metav1.Condition{{Type: api.ConditionScheduled, Status: "False", Reason: "NoDisk",
				Message: "no disk has 1 TiB", LastTransitionTime: metav1.Now()}}
		})
		r := drover(t, kubeconfig("volume", "create", name, "--size", "1Ti", "--timeout", patience)...)
		t.Cleanup(func() { _ = store.Delete(context.Background(), &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: name}}) })
		if patience == "30s" || strings.Contains(r.err, "no disk has 1 TiB") {
			r.mustSay(t, 4, "timed out after "+patience, "no disk has 1 TiB", "drover volume show "+name)
			return
		}
	}
}

// TestVolumeCreateRefusesAtOnce: volume create refuses impossible options before creating an object.
func TestVolumeCreateRefusesAtOnce(t *testing.T) {
	drover(t, kubeconfig("volume", "create", "odd", "--size", "1Gi", "--fs", "ntfs")...).mustSay(t, 2, "fsType", "ext4")
	drover(t, kubeconfig("volume", "create", strings.Repeat("a", 200), "--size", "1Gi")...).mustSay(t, 2, "128")
	for _, name := range []string{"odd"} {
		drover(t, kubeconfig("volume", "show", name)...).mustSay(t, 3)
	}
}

func TestVolumeFromImage(t *testing.T) {
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceFile,
		SourceParameters: map[string]string{"path": "/x"}}}
	img.Name = "base"
	if err := store.Create(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	pen(t, "base", func(i *api.BackingImage) { i.Status.State, i.Status.VirtualSize = api.ImageReady, 101<<20 })
	pen(t, "from-base", detached)
	drover(t, kubeconfig("volume", "create", "from-base", "--image", "base")...).
		mustSay(t, 0, `102 MiB from image "base"`)
	drover(t, kubeconfig("volume", "create", "small", "--image", "base", "--size", "50Mi")...).mustSay(t, 2, "101 MiB", "base")
	drover(t, kubeconfig("volume", "create", "small", "--image", "nosuch")...).mustSay(t, 3, "drover image list")
	drover(t, kubeconfig("image", "delete", "base")...).mustSay(t, 5, "in use by volume from-base")
	var made api.Volume
	if err := store.Get(t.Context(), client.ObjectKey{Name: "from-base"}, &made); err != nil {
		t.Fatal(err)
	}
	happened(t, "Volume", "from-base", made.UID, "Created", "made of an image")
	happened(t, "Volume", "from-base", "of-a-former-one", "Faulted", "long ago")
	happened(t, "Attachment", "from-base", "of-whichever", "Attached", "to a node")
	r := drover(t, kubeconfig("volume", "show", "from-base")...)
	r.mustSay(t, 0, "Events:", "Created", "made of an image", "to a node")
	if strings.Contains(r.out, "long ago") {
		t.Errorf("events of another volume that had the name are shown:\n%s", r.out)
	}
	drover(t, kubeconfig("image", "show", "base")...).mustSay(t, 0, "from-base")
}

func TestVolumeExpandOnlyGrows(t *testing.T) {
	pen(t, "grows", detached)
	drover(t, kubeconfig("volume", "create", "grows", "--size", "20Mi")...).mustSay(t, 0)
	drover(t, kubeconfig("volume", "expand", "grows", "10Mi")...).mustSay(t, 2, "cannot shrink")
	pen(t, "grows", func(v *api.Volume) { v.Status.Size = 30 << 20 })
	drover(t, kubeconfig("volume", "expand", "grows", "+10Mi")...).mustSay(t, 0, `volume "grows" is 30 MiB`)
}

// loopDevice is a real block device in place of the data role's device.
func loopDevice(t *testing.T, size int64) string {
	t.Helper()
	suite.System(t)
	file := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	dev := strings.TrimSpace(tool(t, "losetup", "-f", "--show", file))
	t.Cleanup(func() { tool(t, "losetup", "-d", dev) })
	return dev
}

func tool(t *testing.T, name string, argv ...string) string {
	t.Helper()
	out, err := exec.Command(name, argv...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, argv, err, out)
	}
	return string(out)
}

// attached creates a volume. The next attachments, as many as times, show the device with the given proof.
func attached(t *testing.T, name, fs, device string, blank bool, times int) {
	t.Helper()
	v := &api.Volume{Spec: api.VolumeSpec{Size: 512 << 20, FSType: fs}}
	v.Name = name
	if err := store.Create(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	t.Cleanup(func() { <-ready })
	go func() {
		defer close(ready)
		for range times {
			var uid types.UID
			if err := status(t.Context(), name, func(a *api.Attachment) {
				uid = a.UID
				a.Status.Ready, a.Status.Device, a.Status.Blank, a.Status.Size = true, device, blank, 512<<20
			}); err != nil {
				return
			}
			was := &api.Attachment{}
			was.Name, was.UID = name, uid
			if err := await.Gone(t.Context(), store, was, nil); err != nil {
				return
			}
		}
	}()
}

func TestMountMakesAFilesystemOnABlankVolumeOnly(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			dev, name, dir := loopDevice(t, 512<<20), "blank-"+fs, filepath.Join(t.TempDir(), "mnt")
			attached(t, name, fs, dev, true, 2)
			drover(t, kubeconfig("volume", "mount", name, dir)...).mustSay(t, 0, "mounted at "+dir, fs+" on "+dev)
			t.Cleanup(func() { _ = exec.Command("umount", dir).Run() })
			var v api.Volume
			if err := store.Get(t.Context(), client.ObjectKey{Name: name}, &v); err != nil ||
				v.Annotations[api.AnnotationFS] != fs || v.Annotations[api.AnnotationMkfs] != "" {
				t.Errorf("%v, annotations: %v", err, v.Annotations)
			}
			if err := os.WriteFile(dir+"/kept", []byte("kept"), 0o600); err != nil {
				t.Fatal(err)
			}
			drover(t, kubeconfig("volume", "mount", name, dir)...).mustSay(t, 5, "mounted at")
			drover(t, kubeconfig("volume", "detach", name)...).mustSay(t, 5, "is mounted at "+dir, "volume umount")
			drover(t, kubeconfig("volume", "show", name)...).mustSay(t, 0, "Mounted:", dir)
			drover(t, kubeconfig("volume", "umount", name)...).mustSay(t, 0, "unmounted and detached")
			// The proof is stale and still says blank at the second mount: the file system on the device wins.
			drover(t, kubeconfig("volume", "mount", name, dir)...).mustSay(t, 0, "mounted at "+dir)
			if got, err := os.ReadFile(dir + "/kept"); err != nil || string(got) != "kept" {
				t.Errorf("after mounting again: %q, %v", got, err)
			}
			drover(t, kubeconfig("volume", "umount", name)...).mustSay(t, 0)
		})
	}
}

func TestMountRefusesUnknownData(t *testing.T) {
	dev, dir := loopDevice(t, 64<<20), filepath.Join(t.TempDir(), "mnt")
	if err := os.WriteFile(dev, []byte(strings.Repeat("precious", 512)), 0); err != nil {
		t.Fatal(err)
	}
	attached(t, "raw", "", dev, false, 1)
	drover(t, kubeconfig("volume", "mount", "raw", dir)...).mustSay(t, 5, "holds data", "not formatted")
	got := make([]byte, 8)
	f, err := os.Open(dev)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Read(got); err != nil || string(got) != "precious" {
		t.Errorf("the data became %q, %v", got, err)
	}
	var a api.Attachment
	if err := store.Get(t.Context(), client.ObjectKey{Name: "raw"}, &a); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("a refused mount left the volume attached: %v", err)
	}
}

// TestMountMakesAHalfMadeFilesystemAnew: an interrupted mkfs leaves an annotation. Such a volume is no longer blank,
// but volume mount formats the volume again.
func TestMountMakesAHalfMadeFilesystemAnew(t *testing.T) {
	dev, dir := loopDevice(t, 64<<20), filepath.Join(t.TempDir(), "mnt")
	if err := os.WriteFile(dev, []byte(strings.Repeat("halfmade", 512)), 0); err != nil {
		t.Fatal(err)
	}
	attached(t, "half", "ext4", dev, false, 1)
	var v api.Volume
	if err := store.Get(t.Context(), client.ObjectKey{Name: "half"}, &v); err != nil {
		t.Fatal(err)
	}
	v.Annotations = map[string]string{api.AnnotationMkfs: "ext4"}
	if err := store.Update(t.Context(), &v); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("volume", "mount", "half", dir)...).mustSay(t, 0, "ext4")
	drover(t, kubeconfig("volume", "umount", "half")...).mustSay(t, 0)
}

// TestMountNeverMakesAFilesystemTwice: a former file system which is no longer recognised is damaged, not missing.
func TestMountNeverMakesAFilesystemTwice(t *testing.T) {
	dev, dir := loopDevice(t, 64<<20), filepath.Join(t.TempDir(), "mnt")
	attached(t, "was", "ext4", dev, true, 1)
	var v api.Volume
	if err := store.Get(t.Context(), client.ObjectKey{Name: "was"}, &v); err != nil {
		t.Fatal(err)
	}
	v.Annotations = map[string]string{api.AnnotationFS: "ext4"}
	if err := store.Update(t.Context(), &v); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("volume", "mount", "was", dir)...).mustSay(t, 1, "does not recognise any more", "does not format the volume again")
}

// happened records an event of an object.
func happened(t *testing.T, kind, name string, uid types.UID, reason, note string) {
	t.Helper()
	e := &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-", Namespace: "default"}, Reason: reason,
		Note: note, Type: "Normal", Action: "Test", ReportingController: "test", ReportingInstance: "test",
		EventTime: metav1.NowMicro(), Regarding: corev1.ObjectReference{Kind: kind, Name: name, UID: uid}}
	if err := store.Create(t.Context(), e); err != nil {
		t.Fatal(err)
	}
}

// TestDeletedVolumeIsNoSource: commands needing the current data of a deleted volume fail at once. No planner runs
// here, so an accepted command would wait.
func TestDeletedVolumeIsNoSource(t *testing.T) {
	v := &api.Volume{Spec: api.VolumeSpec{Size: 1 << 30}}
	v.Name, v.Finalizers = "leaving", []string{api.Finalizer}
	if err := store.Create(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	if err := store.Delete(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Get(context.Background(), client.ObjectKeyFromObject(v), v); err != nil {
			t.Fatal(err)
		}
		v.Finalizers = nil
		if err := store.Update(context.Background(), v); err != nil {
			t.Error(err)
		}
	})
	for _, argv := range [][]string{
		{"snapshot", "create", "leaving", "late"}, {"volume", "create", "copy", "--from", "leaving"},
		{"volume", "export", "leaving", filepath.Join(t.TempDir(), "file")}, {"image", "create", "of", "--from", "leaving"},
		{"volume", "attach", "leaving", "--node", "here"},
	} {
		drover(t, kubeconfig(append(argv, "--timeout", "20s")...)...).mustSay(t, 5, "deleted")
	}
}
