package imagestore_test

import (
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestClone: a clone is ready at once on the disks of the layers, has copies of its own, and outlives the cloned image.
func TestClone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	b := content(9<<20, 3)
	of := map[string]string{"backingImage": "golden"}
	w.image("early", api.SourceClone, of)
	if img := w.state("early", api.ImageFailed); !strings.Contains(img.Status.Message, "does not exist") {
		t.Fatalf("message %q", img.Status.Message)
	}
	w.delete(&api.BackingImage{}, "early")
	w.gone("early")

	w.image("golden", api.SourceFile, imageFile(t, b))
	golden := w.state("golden", api.ImageReady)
	w.image("twin", api.SourceClone, of)
	twin := w.state("twin", api.ImageReady)
	a, c := w.copies("golden"), w.copies("twin")
	if len(a) != 1 || len(c) != 1 || a[0].Spec.Disk != c[0].Spec.Disk {
		t.Fatalf("the clone is on %v, its origin on %v", c, a)
	}
	if twin.Status.UUID == golden.Status.UUID || twin.Status.Layers[0] != golden.Status.Layers[0] ||
		twin.Status.Digest != golden.Status.Digest || twin.Status.Checksum != sum(b) {
		t.Fatalf("origin %+v, clone %+v", golden.Status, twin.Status)
	}
	i := 0
	if w.disks[1].UID() == string(a[0].Spec.Disk) {
		i = 1
	}
	w.holds(i, twin, b)

	// A replica of a volume of the clone does not keep the cloned image, nor the other way round.
	rep := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 16 << 20,
		Layers: []string{string(twin.Status.Layers[0])}}
	if err := w.disks[i].CreateReplica(t.Context(), rep); err != nil {
		t.Fatal(err)
	}
	w.delete(&api.BackingImage{}, "golden")
	w.gone("golden")
	w.holds(i, twin, b)
	if err := w.disks[i].RemoveReplica(rep.UID); err != nil {
		t.Fatal(err)
	}
	w.delete(&api.BackingImage{}, "twin")
	w.gone("twin")
	w.clean(i)
}

// TestCloneElsewhere: a clone which may not be on the cloned image's disk gets a copy of the layers.
func TestCloneElsewhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	b := content(9<<20, 4)
	w.image("golden", api.SourceFile, imageFile(t, b))
	golden := w.state("golden", api.ImageReady)
	at := w.copies("golden")[0].Spec.Disk
	w.image("twin", api.SourceClone, map[string]string{"backingImage": "golden"}, func(s *api.BackingImageSpec) {
		s.CleanupDisks = []api.UID{at}
		s.Checksum = sum(b)
	})
	twin := w.state("twin", api.ImageReady)
	c := w.copies("twin")
	if len(c) != 1 || c[0].Spec.Disk == at || twin.Status.Digest != golden.Status.Digest {
		t.Fatalf("the clone is at %v, its origin on %s", c, at)
	}
	w.delete(&api.BackingImage{}, "golden")
	w.gone("golden")
	i := 0
	if w.disks[1].UID() != string(at) {
		i = 1
	}
	w.clean(1 - i)
	w.holds(i, twin, b)
}
