package sanity_test

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// flipImage changes a byte of an image's copy on a disk.
func (w *world) flipImage(name, disk string, at int64) {
	w.t.Helper()
	img := w.image(name, "is ready", func(i *api.BackingImage) bool { return i.Status.State == api.ImageReady })
	f, err := os.OpenFile(filepath.Join(disk, "layers", string(img.Status.Layers[0]), "data"), os.O_RDWR, 0)
	must(w.t, err)
	defer f.Close()
	one := make([]byte, 1)
	_, err = f.ReadAt(one, at)
	must(w.t, err)
	one[0] ^= 0x10
	_, err = f.WriteAt(one, at)
	must(w.t, err)
	must(w.t, f.Sync())
}

// finds damages an image copy and has a requested verification find the damage. On a busy machine the node's own
// scrub may come first: then well waits for the repair of the image, and finds damages the copy again.
func (w *world) finds(name, disk string, at int64, well func()) (said string) {
	w.t.Helper()
	for range 3 {
		w.flipImage(name, disk, at)
		said, code := w.command("image", "verify", name)
		if code == 1 {
			return said
		}
		if code != 0 && code != 6 { // 6: the copy was the only copy
			w.fatal("verify of %s: exit code %d: %s", name, code, said)
		}
		well()
	}
	w.fatal("no verification of %s finds the damage", name)
	return ""
}

// damagedImages: bytes of an image copy change on the disk. A verification finds the damage, and says where and with
// which remedy. The node repairs the copy from another copy or from the source, below a volume, too. After an upload
// without another copy, the message tells the user to upload again.
func damagedImages(t *testing.T, w *world) {
	at := w.disks("spare")
	first := at[0]
	sum := golden(t, w.path("damaged.qcow2"), 64*mib)
	url := serveFiles(t, w.dir) + "/damaged.qcow2"
	w.set("allow-private-image-sources", "true")
	says := func(said string, words ...string) {
		t.Helper()
		for _, w := range words {
			if !strings.Contains(said, w) {
				t.Errorf("verify does not say %q: %s", w, said)
			}
		}
	}
	byItself := func(name string, copies int32) func() {
		return func() {
			w.image(name, "is well again", func(i *api.BackingImage) bool { return i.Status.ReadyCopies == copies })
		}
	}
	whole := func(name, words string) { // for a moment the image's own state may be older
		t.Helper()
		var said string
		if !comes(func() bool {
			var code int
			said, code = w.command("image", "verify", name)
			return code == 0 && strings.Contains(said, words)
		}) {
			w.fatal("%s is not well again: %s", name, said)
		}
	}

	w.must("image", "import", url, "--name", "fetched", "--disk-selector", "spare")
	said := w.finds("fetched", at[1], 1100, byItself("fetched", 1))
	says(said, `image "fetched": 1 of 1 copies`, "disk "+at[1]+" of node "+w.name, "do not match their digest",
		"lost copies")
	whole("fetched", "verified: 1 copy matches its digests")

	w.must("image", "import", url, "--name", "twin", "--min-copies", "2")
	w.readyOn("twin", at...)
	must(t, os.Remove(w.path("damaged.qcow2"))) // from now on the other copy is the only source
	p, err := w.create("on-twin", 64*mib, mountCap(""), "backingImage", "twin")
	must(t, err)
	must(t, p.up())
	p.check("golden", sum)
	must(t, p.down())
	below := first
	var reps api.ReplicaList
	must(t, w.objects.List(t.Context(), &reps, client.MatchingLabels{api.LabelVolume: p.id}))
	if len(reps.Items) == 1 && reps.Items[0].Spec.Disk == w.diskAt(at[1]).UID {
		below = at[1]
	}
	said = w.finds("twin", below, 1100, byItself("twin", 2))
	says(said, `image "twin": 1 of 2 copies`, "disk "+below+" of node "+w.name, "do not match their digest",
		"lost copies")
	whole("twin", "verified: 2 copies match their digests")
	must(t, p.up())
	p.check("golden", sum)
	do(t, p.down, p.remove)

	b := make([]byte, 4*mib)
	_, err = rand.Read(b)
	must(t, err)
	must(t, os.WriteFile(w.path("sent.raw"), b, 0o600))
	upload := func() { w.must("image", "upload", w.path("sent.raw"), "--name", "sent", "--disk-selector", "spare") }
	upload()
	said = w.finds("sent", at[1], 1100, func() {
		w.must("image", "delete", "sent")
		upload()
	})
	says(said, `image "sent": 1 of 1 copies`, "do not match their digest", "delete the image and upload the image again")
	if out := w.must("image", "show", "sent"); !strings.Contains(out, "failed") ||
		!strings.Contains(out, "upload the image again") {
		t.Errorf("image show: %s", out)
	}
	w.must("image", "delete", "sent", "twin", "fetched")
	w.must("disk", "remove", at[1])
}
