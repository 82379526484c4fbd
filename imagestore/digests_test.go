package imagestore_test

import (
	"context"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// undigested is a disk with a snapshot. The snapshot's layer gets digests once allowed is closed.
type undigested struct {
	*stack.Disk
	layer   string
	allowed chan struct{} // closed when the digests may be made
}

var _ block.Exporter = undigested{}

func (d undigested) Hold(context.Context, string, string, string, string) ([]string, int64, error) {
	return []string{d.layer}, 12 << 20, nil
}

func (d undigested) Name(_ context.Context, img block.Image) (block.Image, error) {
	img.Digest = ""
	return img, d.PutImage(img)
}

func (d undigested) Digests(ctx context.Context, img block.Image) (block.Image, error) {
	select {
	case <-d.allowed:
		return d.Disk.Digests(ctx, img)
	case <-ctx.Done():
		return img, ctx.Err()
	}
}

// TestReadyBeforeDigests: an image of a snapshot is ready at once. Copies on other disks and clones wait for the
// digests, also over a restart.
func TestReadyBeforeDigests(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	layer := api.NewUID()
	l, err := w.disks[0].Create(t.Context(), string(layer), 12<<20)
	if err != nil {
		t.Fatal(err)
	}
	content := []byte(strings.Repeat("snapshot", 1<<16))
	if _, err := l.WriteAt(content, 1<<20); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.Seal(t.Context()); err != nil {
		t.Fatal(err)
	}
	slow := undigested{w.disks[0], string(layer), make(chan struct{})}
	w.mu.Lock()
	w.instead = map[string]block.Layers{slow.UID(): slow}
	w.mu.Unlock()

	v := &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: api.VolumeSpec{Size: 12 << 20}}
	w.create(v)
	v.Status.UID, v.Status.State, v.Status.Members = api.NewUID(), api.VolumeDetached, []string{"v.r"}
	r := &api.Replica{ObjectMeta: metav1.ObjectMeta{Name: "v.r", Labels: map[string]string{api.LabelVolume: "v"}},
		Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: "v", VolumeUID: v.Status.UID, Node: w.node,
			Disk: api.UID(slow.UID()), Size: 12 << 20}}
	w.create(r)
	r.Status.Mode = api.ReplicaCurrent
	s := api.NewSnapshot(v, "s")
	s.Finalizers = nil // no reconciler here removes finalizers
	w.create(s)
	t.Cleanup(func() { w.delete(&api.Snapshot{}, "s") })
	s.Status = api.SnapshotStatus{ReadyToUse: true, VolumeUID: v.Status.UID, UID: api.NewUID(), Layer: layer,
		RestoreSize: 12 << 20, CreationTime: time.Now().UTC().Format(time.RFC3339)}
	w.putStatus(v)
	w.putStatus(r)
	w.putStatus(s)

	w.image("golden", api.SourceExport, map[string]string{api.ExportVolume: "v", api.ExportSnapshot: "s"},
		func(s *api.BackingImageSpec) { s.MinNumberOfCopies = 2 })
	used := func(i *api.BackingImage) bool {
		return i.Status.State == api.ImageReady && i.Status.ReadyCopies == 1 && i.Status.VirtualSize == 12<<20 &&
			i.Status.Size > 0 && i.Status.Digest == ""
	}
	w.await("golden", "is ready before its digests", used)
	w.image("clone", api.SourceClone, map[string]string{"backingImage": "golden"})
	w.await("clone", "waits", func(i *api.BackingImage) bool { return strings.Contains(i.Status.Message, "digests") })
	w.stop()
	w.start()
	img := w.await("golden", "is ready after a restart", used)
	if n := len(w.copies("golden")); n != 1 {
		t.Fatalf("%d copies", n)
	}
	close(slow.allowed)
	done := w.await("golden", "has its digests and copies", func(i *api.BackingImage) bool {
		return i.Status.Digest != "" && i.Status.ReadyCopies == 2
	})
	if done.Status.UUID != img.Status.UUID {
		t.Fatalf("image %s became %s", img.Status.UUID, done.Status.UUID)
	}
	w.state("clone", api.ImageReady)
	w.holds(1, done, append(make([]byte, 1<<20), content...))
}
