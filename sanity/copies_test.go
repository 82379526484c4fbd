package sanity_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// fullCopies: a full copy of a claim has all data of the claim, is larger, and outlives all its sources; so does a
// copy of a copy of a clone.
func fullCopies(t *testing.T, w *world) {
	a, err := w.create("first", gib, mountCap("ext4"))
	must(t, err)
	must(t, a.up())
	sum := a.write("file", 64*mib)
	b, err := w.from(a.id, "linked", 0, mountCap("ext4"), "cloneMode", "linked-clone")
	must(t, err)
	must(t, b.up())
	b.check("file", sum)
	own := b.write("own", 8*mib)
	c, err := w.from(b.id, "copied", 2*gib, mountCap("ext4"), "cloneMode", "full-copy")
	must(t, err)
	if s := w.volume(c.id).Status.CloneStatus; s.State != api.CloneCompleted || s.Progress != 100 {
		t.Errorf("%+v", s)
	}
	do(t, a.down, a.remove, b.down, b.remove)
	must(t, c.up())
	c.check("file", sum)
	c.check("own", own)
	if n := c.total(); n < 18*gib/10 {
		t.Errorf("the file system has %d bytes", n)
	}
	d, err := w.from(c.id, "again", 3*gib, mountCap("ext4"), "cloneMode", "full-copy")
	must(t, err)
	do(t, c.down, c.remove, d.up)
	d.check("file", sum)
	d.check("own", own)
	do(t, d.down, d.remove)
	_, err = w.from("none", "of-none", 0, mountCap("ext4"), "cloneMode", "full-copy")
	wantCode(t, err, codes.NotFound)
}

func (w *world) imageSnap(volume, name string, parameters ...string) (*csi.Snapshot, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), settle)
	defer cancel()
	p := map[string]string{"type": "bi"}
	for i := 0; i < len(parameters); i += 2 {
		p[parameters[i]] = parameters[i+1]
	}
	res, err := w.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: volume, Name: name, Parameters: p})
	return res.GetSnapshot(), err
}

// imageSnapshots: a VolumeSnapshot of type bi is a backing image: ready with the image, with one creation time,
// listed, a source of volumes, a file for QEMU, independent of the volume, and gone after its deletion.
func imageSnapshots(t *testing.T, w *world) {
	a, err := w.create("golden", gib, mountCap("ext4"))
	must(t, err)
	must(t, a.up())
	sum := a.write("file", 48*mib)
	snap, err := w.imageSnap(a.id, "as-image")
	must(t, err)
	want := "bi://backing?backingImage=as-image&backingImageDataSourceType=export-from-volume&export-type=raw&volume-name=" +
		a.id
	if snap.SnapshotId != want || !snap.ReadyToUse || snap.SizeBytes != gib || snap.CreationTime == nil {
		t.Errorf("%+v", snap)
	}
	again, err := w.imageSnap(a.id, "as-image")
	must(t, err)
	if !again.CreationTime.AsTime().Equal(snap.CreationTime.AsTime()) || again.SnapshotId != snap.SnapshotId {
		t.Errorf("again: %+v", again)
	}
	other, err := w.create("other", gib, mountCap("ext4"))
	must(t, err)
	_, err = w.imageSnap(other.id, "as-image")
	wantCode(t, err, codes.AlreadyExists)
	_, err = w.imageSnap(a.id, "of-no-type", "type", "nonsense")
	wantCode(t, err, codes.InvalidArgument)
	_, err = w.imageSnap("none", "of-none")
	wantCode(t, err, codes.NotFound)
	is, err := w.controller.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: want})
	must(t, err)
	if is.Snapshot.SourceVolumeId != a.id {
		t.Errorf("%+v", is.Snapshot)
	}
	list, err := w.controller.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SourceVolumeId: a.id})
	must(t, err)
	if len(list.Entries) != 1 || list.Entries[0].Snapshot.SnapshotId != want {
		t.Errorf("%+v", list.Entries)
	}
	var snaps api.SnapshotList
	must(t, w.objects.List(t.Context(), &snaps, client.MatchingLabels{api.LabelVolume: a.id}))
	for _, s := range snaps.Items {
		if s.DeletionTimestamp == nil {
			t.Errorf("snapshot %s is left", s.Name)
		}
	}
	a.write("later", mib)
	do(t, a.down, a.remove, other.remove) // the image stays
	b, err := w.from(want, "of-image", 2*gib, mountCap("ext4"))
	must(t, err)
	must(t, b.up())
	b.check("file", sum)
	if _, err := os.Stat(b.file("later")); err == nil {
		t.Error("the image has what was written later")
	}
	_, err = w.controller.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: want})
	wantCode(t, err, codes.FailedPrecondition, "in use")
	same, err := w.from(want, "of-image", 2*gib, mountCap("ext4"))
	must(t, err)
	if same.id != b.id {
		t.Errorf("another volume: %s", same.id)
	}
	c, err := w.from("bi://backing?backingImage=as-image", "by-hand", 0, mountCap("ext4"))
	must(t, err)
	must(t, c.up())
	c.check("file", sum)
	do(t, b.down, b.remove, c.down, c.remove)
	exported(t, w, "as-image")
	w.unsnap(want, "bi://backing?backingImage=never", "bi://nonsense")
	_, err = w.from(want, "of-gone", 0, mountCap("ext4"))
	wantCode(t, err, codes.NotFound)
}

// exported: QEMU finds the files exported from an image sound and equal.
func exported(t *testing.T, w *world, image string) {
	raw, packed, plain := w.path("image.raw"), w.path("image.zstd.qcow2"), w.path("image.qcow2")
	w.must("image", "export", image, raw)
	w.refused(5, "already", "image", "export", image, raw)
	w.must("image", "export", image, raw, "--force")
	w.must("image", "export", image, plain, "--format", "qcow2")
	w.must("image", "export", image, packed, "--format", "qcow2", "--compress")
	st, err := os.Stat(raw)
	must(t, err)
	if n := st.Size(); n != gib {
		t.Errorf("%d bytes", n)
	}
	if out, err := exec.Command("sh", "-c", fmt.Sprintf("du -m %s | cut -f1", raw)).Output(); err != nil ||
		len(strings.TrimSpace(string(out))) > 3 {
		t.Errorf("not sparse: %s MiB, %v", out, err)
	}
	for _, f := range []string{plain, packed} {
		for _, args := range [][]string{{"check", "-f", "qcow2", f}, {"compare", "-f", "raw", "-F", "qcow2", raw, f}} {
			if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
				t.Errorf("qemu-img %v: %v\n%s", args, err, out)
			}
		}
	}
	w.must("volume", "create", "v", "--image", image)
	w.must("volume", "export", "v", w.path("volume.raw"))
	w.must("snapshot", "create", "v", "vs")
	w.must("snapshot", "export", "vs", w.path("snapshot.qcow2"), "--format", "qcow2")
	w.must("image", "create", "of-v", "--from", "vs")
	w.must("image", "export", "of-v", w.path("of-v.raw"))
	for f, format := range map[string]string{"volume.raw": "raw", "snapshot.qcow2": "qcow2", "of-v.raw": "raw"} {
		if out, err := exec.Command("qemu-img", "compare", "-f", "raw", "-F", format, raw, w.path(f)).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", f, err, out)
		}
	}
	w.must("image", "delete", "of-v")
	w.must("snapshot", "delete", "vs")
	w.must("volume", "delete", "v")
}
