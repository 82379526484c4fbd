package imagestore_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/planner"
	"drover.io/drover/replicas/stack"
)

// change edits an image's object.
func (w *world) change(name string, f func(*api.BackingImage)) {
	w.t.Helper()
	w.eventually("image "+name+" takes the change", func() bool {
		img := &api.BackingImage{}
		if err := w.client.Get(w.t.Context(), client.ObjectKey{Name: name}, img); err != nil {
			w.t.Fatal(err)
		}
		f(img)
		return w.client.Update(w.t.Context(), img) == nil
	})
}

// nodeIs edits the node's object and then the status.
func (w *world) nodeIs(spec func(*api.NodeSpec), status func(*api.NodeStatus)) {
	w.t.Helper()
	w.eventually("the node takes the change", func() bool {
		n := &api.Node{}
		if err := w.client.Get(w.t.Context(), client.ObjectKey{Name: w.node}, n); err != nil {
			w.t.Fatal(err)
		}
		if spec != nil {
			spec(&n.Spec)
			if w.client.Update(w.t.Context(), n) != nil {
				return false
			}
		}
		if status == nil {
			return true
		}
		status(&n.Status)
		n.Status.Heartbeat = alive()
		return w.client.Status().Update(w.t.Context(), n) == nil
	})
}

// mounted makes a disk answer, or not.
func (w *world) mounted(i int, is bool) {
	w.t.Helper()
	w.mu.Lock()
	if w.away == nil {
		w.away = map[string]bool{}
	}
	w.away[w.disks[i].UID()] = !is
	w.mu.Unlock()
	w.nodeIs(nil, func(s *api.NodeStatus) {
		for j := range s.Disks {
			if string(s.Disks[j].UID) == w.disks[i].UID() {
				s.Disks[j].Ready, s.Disks[j].Message = is, ""
				if !is {
					s.Disks[j].Message = "its file system is not mounted"
				}
			}
		}
	})
}

func (w *world) evict(i int, is bool) {
	w.t.Helper()
	w.nodeIs(func(s *api.NodeSpec) { s.Disks[i].EvictionRequested = is }, nil)
}

// on lists the disks with a copy of the image, by number, also copies in deletion.
func (w *world) on(img *api.BackingImage) (disks []int) {
	for _, c := range img.Status.Copies {
		for i, d := range w.disks {
			if string(c.Disk) == d.UID() {
				disks = append(disks, i)
			}
		}
	}
	slices.Sort(disks)
	return disks
}

func (w *world) isOn(name string, disks ...int) *api.BackingImage {
	w.t.Helper()
	return w.await(name, fmt.Sprintf("is ready on the disks %v alone", disks), func(i *api.BackingImage) bool {
		return int(i.Status.ReadyCopies) == len(disks) && slices.Equal(w.on(i), disks)
	})
}

func (w *world) condition(name, kind, reason, says string) {
	w.t.Helper()
	w.await(name, fmt.Sprintf("has the condition %s %s, %q", kind, reason, says), func(i *api.BackingImage) bool {
		c := meta.FindStatusCondition(i.Status.Conditions, kind)
		return c != nil && c.Reason == reason && strings.Contains(c.Message, says)
	})
}

// unused makes the copies look unused for as long as since.
func (w *world) unused(name string, since time.Duration) {
	w.t.Helper()
	w.eventually("the times are set back", func() bool {
		var img api.BackingImage
		if err := w.client.Get(w.t.Context(), client.ObjectKey{Name: name}, &img); err != nil {
			w.t.Fatal(err)
		}
		for i := range img.Status.Copies {
			if c := &img.Status.Copies[i]; !c.LastUsed.IsZero() {
				c.LastUsed = metav1.NewTime(time.Now().Add(-since))
			}
		}
		return w.client.Status().Update(w.t.Context(), &img) == nil
	})
}

func onDisk0(s *api.BackingImageSpec) { s.DiskSelector = []string{"disk-0"} }

// TestUnusedCopiesGo: the planner removes copies unused for the wait interval, but not below the minimum, and never
// under a volume.
func TestUnusedCopiesGo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	b := content(1<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b), func(s *api.BackingImageSpec) { s.MinNumberOfCopies = 3 })
	img := w.isOn("golden", 0, 1, 2)
	w.volume("vol", "golden", 2)
	w.await("golden", "is used on disk 2", func(i *api.BackingImage) bool {
		return slices.ContainsFunc(i.Status.Copies, func(c api.ImageCopySummary) bool {
			return string(c.Disk) == w.disks[2].UID() && c.LastUsed.IsZero()
		})
	})
	w.change("golden", func(i *api.BackingImage) { i.Spec.MinNumberOfCopies = 2 })
	w.unused("golden", 59*time.Minute)
	w.isOn("golden", 0, 1, 2)
	w.unused("golden", 61*time.Minute)
	w.await("golden", "is on two disks", func(i *api.BackingImage) bool {
		return len(i.Status.Copies) == 2 && i.Status.ReadyCopies == 2
	})
	w.holds(2, img, b)
	// With a minimum of 1, only the copy under the volume stays, also after the deletion of the volume.
	w.change("golden", func(i *api.BackingImage) { i.Spec.MinNumberOfCopies = 1 })
	w.unused("golden", 2*time.Hour)
	w.isOn("golden", 2)
	w.noVolume("vol")
	w.await("golden", "is used by nobody", func(i *api.BackingImage) bool { return !i.Status.Copies[0].LastUsed.IsZero() })
	w.unused("golden", 2*time.Hour)
	w.holds(2, w.isOn("golden", 2), b)

	// With the setting 0 every copy stays; a changed setting takes effect.
	never := &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: "backing-image-cleanup-wait-interval"}, Value: "0"}
	w.create(never)
	t.Cleanup(func() { _ = w.client.Delete(context.Background(), never) })
	w.change("golden", func(i *api.BackingImage) { i.Spec.MinNumberOfCopies = 2 })
	w.await("golden", "is on two disks", func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 2 })
	w.change("golden", func(i *api.BackingImage) { i.Spec.MinNumberOfCopies = 1 })
	w.unused("golden", 1000*time.Hour)
	w.await("golden", "is on two disks still", func(i *api.BackingImage) bool { return i.Status.ReadyCopies == 2 })
	never.Value = "60"
	if err := w.client.Update(t.Context(), never); err != nil {
		t.Fatal(err)
	}
	w.await("golden", "is on one disk", func(i *api.BackingImage) bool { return len(i.Status.Copies) == 1 })
}

// TestEviction: the image first moves away from an evicted disk. A copy which cannot move stays, with a condition, and
// the minimum does not hold a copy on the disk.
func TestEviction(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	b := content(1<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b), onDisk0)
	img := w.isOn("golden", 0)
	w.evict(0, true)
	w.condition("golden", planner.ConditionEviction, "Stays", "the image has no other ready copy")
	w.holds(0, w.isOn("golden", 0), b)
	w.change("golden", func(i *api.BackingImage) { i.Spec.DiskSelector = nil })
	w.holds(1, w.isOn("golden", 1), b)
	w.clean(0)
	w.await("golden", "has nothing to leave", func(i *api.BackingImage) bool {
		return meta.FindStatusCondition(i.Status.Conditions, planner.ConditionEviction) == nil
	})
	w.evict(0, false)

	w.change("golden", func(i *api.BackingImage) { i.Spec.MinNumberOfCopies = 3 })
	w.isOn("golden", 0, 1, 2)
	w.evict(1, true)
	w.isOn("golden", 0, 2)
	w.clean(1)
	w.condition("golden", api.ConditionReady, "TooFewCopies", "2 of 3 copies")
	w.volume("vol", "golden", 2)
	w.await("golden", "is used", func(i *api.BackingImage) bool {
		return i.Status.Copies[1].LastUsed.IsZero() || i.Status.Copies[0].LastUsed.IsZero()
	})
	w.evict(2, true)
	w.condition("golden", planner.ConditionEviction, "Stays", "a volume on the disk needs the copy")
	w.noVolume("vol")
	w.holds(0, w.isOn("golden", 0), b)
	w.clean(2)
	w.evict(1, false)
	w.isOn("golden", 0, 1)
	w.holds(1, img, b)
}

// TestDiskGoesAndComesBack: the copies of an unreachable disk are unknown, and a returning disk is used unchanged. A
// deletion meanwhile reports the disk, and ends when the disk returns or is removed.
func TestDiskGoesAndComesBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	b := content(1<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b), onDisk0)
	w.image("other", api.SourceFile, imageFile(t, b), onDisk0)
	w.isOn("golden", 0)
	w.isOn("other", 0)
	w.mounted(0, false)
	bad := w.state("golden", api.ImageUnknown)
	if !strings.Contains(bad.Status.Message, "not mounted") {
		t.Errorf("message %q", bad.Status.Message)
	}
	w.mounted(0, true)
	img := w.isOn("golden", 0)
	w.holds(0, img, b)

	w.mounted(0, false)
	w.state("golden", api.ImageUnknown)
	w.delete(&api.BackingImage{}, "golden")
	w.delete(&api.BackingImage{}, "other")
	w.condition("golden", planner.ConditionInUse, "CopyStays", "it is deleted when the disk is back")
	w.mounted(0, true)
	w.gone("golden")
	w.gone("other")
	w.clean(0)

	// The user removes the disk from the node while the disk does not answer.
	w.image("golden", api.SourceFile, imageFile(t, b), onDisk0)
	img = w.isOn("golden", 0)
	w.mounted(0, false)
	w.delete(&api.BackingImage{}, "golden")
	w.condition("golden", planner.ConditionInUse, "CopyStays", "disk remove")
	var spec api.DiskSpec
	w.nodeIs(func(s *api.NodeSpec) { spec, s.Disks = s.Disks[0], s.Disks[1:] }, nil)
	w.gone("golden")
	if n := len(w.copies("golden")); n != 0 {
		t.Errorf("%d copies are left", n)
	}
	// An image of the same name on the other disk, beside the files of the first image.
	w.image("golden", api.SourceFile, imageFile(t, b))
	again := w.isOn("golden", 1)
	if again.Status.UUID == img.Status.UUID {
		t.Error("the same UUID")
	}
	w.mounted(0, true)
	w.nodeIs(func(s *api.NodeSpec) { s.Disks = slices.Insert(s.Disks, 0, spec) }, nil)
	w.holds(1, w.isOn("golden", 1), b)
	if err := w.disks[0].RemoveImage(string(img.Status.UUID)); err != nil { // the files stay on the removed disk
		t.Error(err)
	}
}

func (w *world) spoil(i int, img *api.BackingImage, b []byte) {
	w.t.Helper()
	f, err := os.OpenFile(filepath.Join(w.disks[i].Path(), "layers", string(img.Status.Layers[0]), "data"), os.O_RDWR, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{b[5000] ^ 1}, 5000); err != nil {
		w.t.Fatal(err)
	}
}

// TestVerify: a verification reads every copy. A damaged copy is made again from another copy, also for an upload,
// which cannot be asked again.
func TestVerify(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	b := content(3<<20, 1)
	w.image("sent", api.SourceUpload, map[string]string{}, func(s *api.BackingImageSpec) { s.MinNumberOfCopies = 2 })
	if code, said := sendUpload(t, w.uploadURL("sent"), strings.NewReader(string(b)), int64(len(b))); code != 200 {
		t.Fatalf("%d %s", code, said)
	}
	img := w.isOn("sent", 0, 1)
	verified := func(token string) {
		t.Helper()
		w.change("sent", func(i *api.BackingImage) { i.Annotations = map[string]string{api.AnnotationVerify: token} })
		w.eventually("both copies are verified", func() bool {
			for _, c := range w.copies("sent") {
				if c.Status.Verified != token || c.Status.LastVerified.IsZero() {
					return false
				}
			}
			return true
		})
	}
	verified("one")
	for _, c := range w.copies("sent") {
		if c.Status.State != api.ImageReady {
			t.Errorf("disk %s: %s %s", c.Spec.Disk, c.Status.State, c.Status.Message)
		}
	}
	for i := range 2 {
		w.spoil(i, img, b)
		verified(fmt.Sprintf("bad-%d", i))
		w.eventually("the copy is made again from the other", func() bool {
			return w.disks[i].Verify(t.Context(), string(img.Status.Layers[0])) == nil
		})
		w.holds(i, w.isOn("sent", 0, 1), b)
	}
	for _, c := range w.copies("sent") {
		if c.Spec.From == "" || c.Spec.From == c.Spec.Disk {
			t.Errorf("disk %s: made from %q", c.Spec.Disk, c.Spec.From)
		}
	}

	// Without a request: the last verification is long ago. The file's own touch is older than the process.
	w.stop()
	for _, c := range w.copies("sent") {
		c.Status.LastVerified = metav1.NewTime(time.Now().Add(-169 * time.Hour))
		if err := w.client.Status().Update(t.Context(), &c); err != nil {
			t.Fatal(err)
		}
	}
	w.start()
	w.eventually("both copies are verified again", func() bool {
		for _, c := range w.copies("sent") {
			if time.Since(c.Status.LastVerified.Time) > time.Hour {
				return false
			}
		}
		return true
	})
	w.isOn("sent", 0, 1)
}

// readCounter is a disk that counts how many of its layers are read at once.
type readCounter struct {
	*stack.Disk
	mu        sync.Mutex
	now, most int
}

func (c *readCounter) Open(uid string) (block.Source, error) {
	s, err := c.Disk.Open(uid)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now++
	c.most = max(c.most, c.now)
	return &countedSource{s, c}, nil
}

type countedSource struct {
	block.Source
	of *readCounter
}

func (s *countedSource) Close() error {
	s.of.mu.Lock()
	s.of.now--
	s.of.mu.Unlock()
	return s.Source.Close()
}

// TestSendsPerDisk: a disk sends as many copies at once as the setting says. A copy reads one layer at a time.
func TestSendsPerDisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 5)
	one := &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: "concurrent-image-copies-per-sender"}, Value: "1"}
	w.create(one)
	t.Cleanup(func() { _ = w.client.Delete(context.Background(), one) })
	var disks []*readCounter
	w.mu.Lock()
	w.instead = map[string]block.Layers{}
	for _, d := range w.disks {
		disks = append(disks, &readCounter{Disk: d})
		w.instead[d.UID()] = disks[len(disks)-1]
	}
	w.mu.Unlock()
	b := content(64<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b), func(s *api.BackingImageSpec) { s.MinNumberOfCopies = 5 })
	img := w.isOn("golden", 0, 1, 2, 3, 4)
	for i := range w.disks {
		w.holds(i, img, b)
	}
	sent := 0
	for i, d := range disks {
		d.mu.Lock()
		if sent += d.most; d.most > 1 {
			t.Errorf("disk %d sent %d copies at once", i, d.most)
		}
		d.mu.Unlock()
	}
	if sent == 0 {
		t.Error("no disk sent a copy")
	}
}
