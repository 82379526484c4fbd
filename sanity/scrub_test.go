package sanity_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// damagedLayer: a byte changes on the disk. A read finds the damage, as a scrub does, and Drover reports volume,
// place and length. A read of the damaged part fails, other reads succeed; after the repair all reads succeed.
func damagedLayer(t *testing.T, w *world) {
	a, err := w.create("damaged", 64*mib, blockCap())
	must(t, err)
	must(t, a.up())
	f, err := os.OpenFile(a.target, os.O_RDWR|syscall.O_DIRECT, 0)
	must(t, err)
	defer f.Close()
	b := aligned(int(8 * mib))
	for i := range b {
		b[i] = byte(i>>12) | 1
	}
	_, err = f.WriteAt(b, 0)
	must(t, err)
	id, err := w.snap(a.id, "of-damaged")
	must(t, err)
	var s api.Snapshot
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "of-damaged"}, &s))
	dir := w.path("disk", "layers", string(s.Status.Layer))
	if !comes(func() bool { _, err := os.Stat(filepath.Join(dir, "layer.json")); return err == nil }) {
		w.fatal("the layer is not finished") // a layer without digests
	}
	if out := w.must("volume", "scrub", "damaged"); !strings.Contains(out, "match their digests") {
		t.Errorf("scrub: %s", out)
	}
	const at = 5*mib + 12345
	flip := func() {
		t.Helper()
		d, err := os.OpenFile(filepath.Join(dir, "data"), os.O_RDWR, 0)
		must(t, err)
		defer d.Close()
		one := make([]byte, 1)
		_, err = d.ReadAt(one, at)
		must(t, err)
		one[0] ^= 0x10
		_, err = d.WriteAt(one, at)
		must(t, err)
	}
	got := aligned(int(mib))
	intact := func(want bool) {
		t.Helper()
		ctx, cancel := timeout(t)
		defer cancel()
		_, err := await.Until(ctx, w.objects, "damaged", func(v *api.Volume) (bool, error) {
			for _, c := range v.Status.Conditions {
				if c.Type == api.ConditionIntact && (c.Status == "True") == want {
					return want || strings.Contains(c.Message, string(s.Status.Layer)), nil
				}
			}
			return false, nil
		})
		must(t, err)
	}
	flip() // before any scrub
	if _, err := f.ReadAt(got, 5*mib); !errors.Is(err, syscall.EIO) {
		t.Errorf("what is damaged was read: %v", err)
	}
	intact(false)
	flip()
	_, err = f.ReadAt(got, 5*mib)
	must(t, err)
	intact(true)
	flip()
	said, _ := w.command("volume", "scrub", "damaged")
	if !strings.Contains(said, string(s.Status.Layer)) || !strings.Contains(said, "4194304") ||
		!strings.Contains(said, "2097152") {
		t.Errorf("scrub: %s", said)
	}
	intact(false)
	if _, err := f.ReadAt(got, 5*mib); !errors.Is(err, syscall.EIO) {
		t.Errorf("what is damaged was read: %v", err)
	}
	_, err = f.ReadAt(got, 2*mib)
	must(t, err)
	if !bytes.Equal(got, b[2*mib:3*mib]) {
		t.Error("what is whole differs")
	}
	flip()
	w.must("volume", "scrub", "damaged")
	_, err = f.ReadAt(got, 5*mib)
	must(t, err)
	if !bytes.Equal(got, b[5*mib:6*mib]) {
		t.Error("what is whole again differs")
	}
	must(t, f.Close())
	if !comes(func() bool { return strings.Contains(w.must("volume", "show", "damaged"), "DataDamaged") }) {
		t.Error("the volume's events do not tell of damage")
	}
	w.unsnap(id)
	do(t, a.down, a.remove)
}
