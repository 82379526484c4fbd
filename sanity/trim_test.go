package sanity_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// syncAt writes out one file system's cached data: other file systems may be slow or full.
func syncAt(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	must(t, unix.Syncfs(int(f.Fd())))
}

// headUsed is the size of a volume's head on the disk, in bytes.
func (p *pod) headUsed() int64 {
	p.w.t.Helper()
	var reps api.ReplicaList
	must(p.w.t, p.w.objects.List(p.w.t.Context(), &reps, client.MatchingLabels{api.LabelVolume: p.id}))
	if len(reps.Items) != 1 {
		p.w.t.Fatalf("%d replicas of %s", len(reps.Items), p.id)
	}
	var sum int64
	var err error
	if !comes(func() bool { // a rename may hit a file between list and stat: all again
		sum, err = taken(p.w.path("disk", "replicas", string(reps.Items[0].Spec.UID)))
		return !errors.Is(err, os.ErrNotExist)
	}) || err != nil {
		p.w.t.Fatal(err)
	}
	return sum
}

// taken is the disk space of a folder's files, in bytes.
func taken(dir string) (sum int64, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		var st syscall.Stat_t
		if err := syscall.Stat(dir+"/"+e.Name(), &st); err != nil {
			return 0, fmt.Errorf("%s of %s: %w", e.Name(), dir, err)
		}
		sum += st.Blocks * 512
	}
	return sum, nil
}

// trim runs fstrim until the head takes no more than most: xfs frees the blocks of a deleted file in the background,
// and an early trim does not see these blocks; fstrim also returns before the last discards are done.
func (p *pod) trim(most int64) {
	p.w.t.Helper()
	for end := time.Now().Add(settle); ; {
		out, err := exec.Command("fstrim", "-v", p.target).CombinedOutput()
		if err != nil {
			p.w.t.Fatalf("fstrim: %v: %s", err, out)
		}
		now := p.headUsed()
		if now <= most {
			return
		}
		if time.Now().After(end) {
			p.w.t.Errorf("%s: the head takes %d bytes, %d are wanted; fstrim: %s", p.id, now, most, out)
			return
		}
	}
}

// trimMounted: fstrim on a mounted volume over a snapshot gives space back, shows no old data, and leaves the
// snapshot as before; the deletion of the snapshot frees the snapshot's space, too.
func trimMounted(t *testing.T, w *world) {
	for _, fs := range []string{"ext4", "xfs"} {
		a, err := w.create("trim-"+fs, gib, mountCap(fs))
		must(t, err)
		must(t, a.up())
		keep := a.write("keep", 8*mib)
		sum := a.write("old", 64*mib)
		syncAt(t, a.target)
		id, err := w.snap(a.id, "of-trim-"+fs)
		must(t, err)
		a.write("later", 64*mib)
		must(t, os.Remove(a.file("old")))
		syncAt(t, a.target)
		full := a.headUsed()
		must(t, os.Remove(a.file("later")))
		syncAt(t, a.target)
		c := a.count("n", 50*time.Millisecond) // under writes, but too few for the journal to take the freed space
		a.trim(full - 40*mib)
		close(c.stop)
		must(t, <-c.end)
		if n := a.counted("n"); n != c.n.Load() {
			t.Errorf("%s: %d was written last, and %d is there", fs, c.n.Load(), n)
		}
		a.check("keep", keep)
		do(t, a.down, a.up)
		a.check("keep", keep)
		b, err := w.from(id, "trimmed-"+fs, 0, mountCap(fs))
		must(t, err)
		must(t, b.up())
		b.check("old", sum)
		do(t, b.down, b.remove)
		w.unsnap(id)
		w.layersTake(30*mib, func() {}) // after the merge no layer has the trimmed blocks
		a.check("keep", keep)

		// The file deleted next is in a layer without a snapshot.
		gone := a.write("gone", 64*mib)
		id, err = w.snap(a.id, "again-"+fs)
		must(t, err)
		w.unsnap(id)
		a.check("gone", gone)
		must(t, os.Remove(a.file("gone")))
		syncAt(t, a.target)
		w.layersTake(30*mib, func() { w.must("volume", "trim", a.id) })
		a.check("keep", keep)
		do(t, a.down, a.up)
		a.check("keep", keep)
		do(t, a.down, a.remove)
	}
}

// layersTake waits until all layers take no more than most, and calls do again and again.
func (w *world) layersTake(most int64, do func()) {
	w.t.Helper()
	dir := w.path("disk", "layers")
	ctx, cancel := timeout(w.t)
	defer cancel()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		do()
		sum := int64(0)
		entries, err := os.ReadDir(dir)
		must(w.t, err)
		for _, e := range entries {
			var st syscall.Stat_t
			if syscall.Stat(fmt.Sprintf("%s/%s/data", dir, e.Name()), &st) == nil {
				sum += st.Blocks * 512
			}
		}
		if sum <= most {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.t.Errorf("the layers still take %d bytes", sum)
			return
		}
	}
}

// trimRemoves: with unmapMarkSnapChainRemoved a trim deletes the snapshots below the volume, and frees their space; a
// clone of such a snapshot keeps its data.
func trimRemoves(t *testing.T, w *world) {
	for _, fs := range []string{"ext4", "xfs"} {
		a, err := w.create("trimall-"+fs, gib, mountCap(fs), "unmapMarkSnapChainRemoved", "enabled")
		must(t, err)
		if out, code := w.command("volume", "trim", a.id); code == 0 || !strings.Contains(out, "not attached") {
			t.Errorf("%s: %d: %s", fs, code, out)
		}
		must(t, a.up())
		keep := a.write("keep", 8*mib)
		sum := a.write("old", 64*mib)
		one, err := w.snap(a.id, "one-"+fs)
		must(t, err)
		b, err := w.from(one, "trimmed-all-"+fs, 0, mountCap(fs))
		must(t, err)
		a.write("later", 64*mib)
		_, err = w.snap(a.id, "two-"+fs)
		must(t, err)
		must(t, os.Remove(a.file("old")))
		must(t, os.Remove(a.file("later")))
		syncAt(t, a.target)
		if out := w.must("volume", "trim", a.id); !strings.Contains(out, "removed: one-"+fs+", two-"+fs) {
			t.Errorf("%s: %s", fs, out)
		}
		w.layersTake(110*mib, func() { w.must("volume", "trim", a.id) }) // the clone's data and the kept file
		must(t, b.up())
		b.check("old", sum)
		do(t, b.down, b.remove)
		w.layersTake(30*mib, func() { w.must("volume", "trim", a.id) })
		a.check("keep", keep)
		for _, name := range []string{"one-", "two-"} {
			err := w.objects.Get(t.Context(), client.ObjectKey{Name: name + fs}, &api.Snapshot{})
			if client.IgnoreNotFound(err) != nil || err == nil {
				t.Errorf("%s%s: %v", name, fs, err)
			}
		}
		do(t, a.down, a.remove)
	}
}
