package stack

import (
	"os"
	"slices"
	"testing"
	"time"

	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// TestReferencesFollowTheRecords: the cached references of a record count only while the record is the same file. A
// record replaced, removed or damaged by another process is read again at once.
func TestReferencesFollowTheRecords(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	d, err := Add(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	layerUID := func() string {
		t.Helper()
		uid := string(api.NewUID())
		w, err := d.Create(t.Context(), uid, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := w.Seal(t.Context()); err != nil {
			t.Fatal(err)
		}
		return uid
	}
	a, b := layerUID(), layerUID()
	img := block.Image{UID: string(api.NewUID()), Name: "golden", Layers: []string{a}}
	put := func(layers ...string) {
		t.Helper()
		img.Layers = layers
		other, err := Open(d.Path()) // another process
		if err != nil {
			t.Fatal(err)
		}
		if err := other.PutImage(img); err != nil {
			t.Fatal(err)
		}
	}
	named := func() (layers []string) {
		t.Helper()
		all, bad1, bad2 := d.readReferences()
		if bad1 != nil || bad2 != nil {
			t.Fatal(bad1, bad2)
		}
		for _, n := range all {
			layers = append(layers, n.layers...)
		}
		return layers
	}
	put(a)
	<-time.After(layer.SteadyAge + 100*time.Millisecond) // the record is old enough for the cache
	for range 2 {
		if got := named(); !slices.Equal(got, []string{a}) {
			t.Fatalf("%v", got)
		}
	}
	if len(d.references.known) != 1 {
		t.Fatalf("kept: %v", d.references.known)
	}
	for i := range 20 { // in quick succession
		want := []string{[]string{a, b}[i%2]}
		put(want...)
		if got := named(); !slices.Equal(got, want) {
			t.Fatalf("round %d: %v, want %v", i, got, want)
		}
	}
	record := d.Join(imagesDir, img.UID, imageFile)
	if err := os.WriteFile(record, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, bad := d.readReferences(); !api.Is(bad, api.Corrupt) {
		t.Fatalf("a damaged record: %v", bad)
	}
	if err := os.RemoveAll(d.Join(imagesDir, img.UID)); err != nil {
		t.Fatal(err)
	}
	if got := named(); len(got) != 0 || len(d.references.known) != 0 {
		t.Fatalf("%v, kept %v", got, d.references.known)
	}
}

// TestRemovalReportsMergeableReplicas: the removal of a replica reports whether another replica is now the only user of
// a layer, which may be merged. Without such a layer, the caller need not search the disk.
func TestRemovalReportsMergeableReplicas(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	images, replicas := fillDisk(t, d, 2)
	golden, err := d.readImage(images[0])
	if err != nil {
		t.Fatal(err)
	}
	clone := func() string {
		t.Helper()
		s := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: 1 << 20,
			Layers: golden.Layers}
		if err := d.CreateReplica(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		return s.UID
	}
	pinned := clone()
	if _, err := d.Pin(t.Context(), Pin{UID: pinned, For: "v", Disk: d.UID()}, pinned, ""); err != nil {
		t.Fatal(err)
	}
	unread, again := clone(), clone()
	take := func(what, uid string, want bool) {
		t.Helper()
		got, err := d.TakeReplica(uid)
		if err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("%s: mergeable %v, want %v", what, got, want)
		}
	}
	take("the image's last one", replicas[1], false)
	take("gone already", replicas[1], true)
	take("it has pinned what it named", pinned, true)
	if err := d.Unpin(pinned); err != nil {
		t.Fatal(err)
	}
	take("the image names it, too", unread, false)
	third := clone()
	if err := d.toTrash(imagesDir, gonePrefix, images[0]); err != nil { // otherwise the image shares the layer
		t.Fatal(err)
	}
	take("two others name it", third, false)
	record := d.Join(imagesDir, images[1], imageFile)
	was, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	fourth := clone()
	take("a record cannot be read", fourth, true)
	if err := os.WriteFile(record, was, 0o600); err != nil {
		t.Fatal(err)
	}
	take("one other names it", again, true)
	take("nobody else names it", replicas[0], false)
}
