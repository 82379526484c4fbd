package replicas

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// layersUnder waits until the layers of the world's disk take less than so many bytes.
func (w *world) layersUnder(what string, bytes int64) {
	w.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for w.layersTake() >= bytes {
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			w.t.Fatalf("%s: the layers take %d bytes", what, w.layersTake())
		}
	}
}

// layersTake is how many bytes the layers of the world's disk take.
func (w *world) layersTake() int64 {
	w.t.Helper()
	list, err := filepath.Glob(filepath.Join(w.dir, "disk", "layers", "*", "data"))
	if err != nil {
		w.t.Fatal(err)
	}
	sum := int64(0)
	for _, f := range list {
		var st syscall.Stat_t
		if syscall.Stat(f, &st) == nil {
			sum += st.Blocks * 512
		}
	}
	return sum
}

const extentBlocks = 64 << 10

// layersUse waits until the layers of the world's disk take so many bytes, and no block more or less except the file
// system's own blocks for the extents of the files. Meanwhile again runs again and again.
func (w *world) layersUse(what string, bytes int64, again ...func()) {
	w.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		sum := w.layersTake()
		if sum >= bytes && sum-bytes <= extentBlocks {
			return
		}
		for _, do := range again {
			do()
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			w.t.Fatalf("%s: the layers take %d bytes, not %d", what, sum, bytes)
		}
	}
}

// TestTrimExact: a discard in the head frees space at once; a discard above snapshots frees space, to the block, with
// the deletion of the snapshots; data below a branch that other stacks need stays.
func TestTrimExact(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("exact", 64<<20)
	w.create(attachment("exact"))
	dev := w.attached("exact").Status.Device
	dd := func(mib, count int) {
		t.Helper()
		w.sh("dd if=/dev/urandom of=" + dev + " bs=1M oflag=direct conv=notrunc status=none seek=" + strconv.Itoa(mib) +
			" count=" + strconv.Itoa(count))
	}
	discard := func(off, n int) {
		t.Helper()
		w.sh("blkdiscard -o " + strconv.Itoa(off) + " -l " + strconv.Itoa(n) + " " + dev)
	}
	sum := func(from, mib int) string {
		return w.sh("dd if=" + dev + " bs=1M iflag=direct status=none skip=" + strconv.Itoa(from) + " count=" +
			strconv.Itoa(mib) + " | sha256sum")
	}
	dd(0, 16)
	w.snapshot("exact", "s1")
	dd(16, 8)
	w.snapshot("exact", "s2")
	dd(24, 4)
	keep := sum(0, 4)
	w.layersUse("before", 24<<20)
	discard(4<<20, 20<<20) // of s1's 16 the upper 12, and all of s2's 8
	w.layersUse("with the snapshots", 24<<20)
	for _, name := range []string{"s2", "s1"} {
		s := &api.Snapshot{ObjectMeta: named(name)}
		w.remove(s)
		gone(w, s, &api.SnapshotList{})
	}
	w.layersUse("without them", 8<<20) // 4 of s1's, and the 4 of the head, which was cut to merge
	if sum(0, 4) != keep {
		t.Error("what was kept differs")
	}
	if zero := sum(4, 20); zero != w.sh("head -c 20971520 /dev/zero | sha256sum") {
		t.Error("what was discarded is not zero")
	}

	// A reclaim frees discards above the remaining layers, too, if large enough or on request.
	discard(3<<20, 1<<20)
	if err := w.data.attachments.Reclaim(w.ctx, w.data.attachments.Session("exact"), false); err != nil {
		t.Fatal(err)
	}
	w.layersUse("too little to be worth it", 8<<20)
	w.layersUse("asked for", 7<<20, func() { // beside a merge, which may not be over yet, nothing is done
		if err := w.data.attachments.Reclaim(w.ctx, w.data.attachments.Session("exact"), true); err != nil && !api.Is(err, api.Busy) {
			t.Fatal(err)
		}
	})
	keep = sum(0, 4)
	dd(32, 1)
	w.layersUse("in the head", 7<<20)

	// Below a branch, data of other stacks stays.
	s3 := w.snapshot("exact", "s3")
	w.layersUse("again", 8<<20)
	w.clone("exact-c", "snap://exact/s3", 64<<20)
	discard(0, 64<<20)
	w.remove(s3)
	gone(w, s3, &api.SnapshotList{})
	w.layersUse("a clone's", 8<<20)
	w.create(attachment("exact-c"))
	w.attached("exact-c")
	if w.sh("dd if="+w.device("exact-c")+" bs=1M iflag=direct status=none count=4 | sha256sum") != keep {
		t.Error("the clone differs")
	}
	w.detach("exact-c")
	w.remove(volume("exact-c", 0))
	gone(w, volume("exact-c", 0), &api.VolumeList{})
	w.layersUse("without the clone", 0)
	w.detach("exact")
}

// trims requests a trim and waits for the result.
func (w *world) trims(volume, id string) *api.TrimFact {
	w.t.Helper()
	v := &api.Volume{ObjectMeta: named(volume)}
	if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(v), v); err != nil {
		w.t.Fatal(err)
	}
	base := v.DeepCopy()
	v.Spec.Trim = id
	if err := w.c.Patch(w.ctx, v, client.MergeFrom(base)); err != nil {
		w.t.Fatal(err)
	}
	return w.volumeIs(volume, "trimmed", func(v *api.Volume) bool {
		is := v.Status.Trimmed
		return is != nil && is.ID == id && is.State != api.CloneInitiated
	}).Status.Trimmed
}

// TestTrim: a mounted file system is trimmed once per request; a trim also deletes snapshots if the volume or the
// setting says so, down to a branch, but no snapshots taken later.
func TestTrim(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("trims", 256<<20)
	if is := w.trims("trims", "early"); is.State != api.CloneFailed || !strings.Contains(is.Message, "not attached") {
		t.Errorf("%+v", is)
	}
	w.create(attachment("trims"))
	w.attached("trims")
	if is := w.trims("trims", "block"); is.State != api.CloneFailed || !strings.Contains(is.Message, "not mounted") {
		t.Errorf("%+v", is)
	}
	dir := filepath.Join(w.dir, "mnt")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	dev := w.device("trims")
	w.sh("mkfs.ext4 -q -Enodiscard " + dev + " && mount " + dev + " " + dir)
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	file := func(name string) {
		t.Helper()
		w.sh("head -c 33554432 /dev/urandom > " + dir + "/" + name + " && sync -f " + dir)
	}
	file("keep")
	keep := w.sh("sha256sum < " + dir + "/keep")
	file("one")
	w.snapshot("trims", "s1")
	w.clone("trims-c", "snap://trims/s1", 256<<20) // a clone is no branch of the stack
	file("two")
	w.snapshot("trims", "s2")
	w.sh("rm " + dir + "/one " + dir + "/two && sync -f " + dir)
	if is := w.trims("trims", "first"); is.State != api.CloneCompleted || is.Bytes < 64<<20 || len(is.Snapshots) > 0 {
		t.Errorf("%+v", is)
	}
	w.ready("s1")
	w.ready("s2")

	w.create(&api.Setting{ObjectMeta: named("remove-snapshots-during-filesystem-trim"), Value: "true"})
	v := w.volumeState("trims", api.VolumeAttached)
	base := v.DeepCopy()
	v.Spec.UnmapMarkSnapChainRemoved = "disabled"
	if err := w.c.Patch(w.ctx, v, client.MergeFrom(base)); err != nil {
		t.Fatal(err)
	}
	if is := w.trims("trims", "second"); len(is.Snapshots) > 0 {
		t.Errorf("the volume does not want that: %+v", is)
	}
	base = v.DeepCopy()
	v.Spec.UnmapMarkSnapChainRemoved = "" // the setting's turn
	if err := w.c.Patch(w.ctx, v, client.MergeFrom(base)); err != nil {
		t.Fatal(err)
	}
	w.volumeIs("trims", "without a wish", func(v *api.Volume) bool { return v.Spec.UnmapMarkSnapChainRemoved == "" })
	is := w.trims("trims", "third")
	if is.State != api.CloneCompleted || !slices.Equal(is.Snapshots, []string{"s1", "s2"}) {
		t.Errorf("%+v", is)
	}
	for _, name := range []string{"s1", "s2"} {
		gone(w, &api.Snapshot{ObjectMeta: named(name)}, &api.SnapshotList{})
	}
	w.tells("trims", "SnapshotsRemoved", "s1")
	w.snapshot("trims", "s3")
	w.ready("s3")
	if w.sh("sha256sum < "+dir+"/keep") != keep {
		t.Error("what was kept differs")
	}
	w.sh("umount " + dir)
	w.detach("trims")

	// Not again with the next device, nor by the next process.
	w.stopData()
	w.startData()
	w.create(attachment("trims"))
	w.attached("trims")
	w.ready("s3")
	if now := w.volumeState("trims", api.VolumeAttached).Status.Trimmed; now == nil || now.ID != "third" {
		t.Errorf("%+v", now)
	}
	w.detach("trims")
}

// TestTrimBesideAMerge: a trim during a merge says in its message that space comes back later, and the space does.
func TestTrimBesideAMerge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("trims", 256<<20)
	w.create(attachment("trims"))
	dev := w.attached("trims").Status.Device
	dir := filepath.Join(w.dir, "mnt")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	w.sh("mkfs.ext4 -q -Enodiscard " + dev + " && mount " + dev + " " + dir)
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	var files []string
	for i, name := range []string{"s1", "s2"} {
		w.sh("head -c " + strconv.Itoa((2-i)*8<<20) + " /dev/urandom > " + dir + "/" + name + " && sync -f " + dir)
		w.snapshot("trims", name)
		is := w.snapshotIs(name, "with a digest", func(s *api.Snapshot) bool { return s.Status.Checksum != "" })
		files = append(files, filepath.Join(w.dir, "disk", "layers", string(is.Status.Layer), "data"))
	}
	if out, err := exec.Command("chattr", append([]string{"+i"}, files...)...).CombinedOutput(); err != nil {
		t.Skipf("files cannot be made immutable here: %v: %s", err, out)
	}
	free := func() {
		for _, file := range files {
			_ = exec.Command("chattr", "-i", file).Run() // for files still there
		}
	}
	t.Cleanup(free)
	for _, name := range []string{"s1", "s2"} {
		s := &api.Snapshot{ObjectMeta: named(name)}
		w.remove(s)
		gone(w, s, &api.SnapshotList{})
	}
	w.conditionIs("trims", api.ConditionMerged, "False")
	w.sh("rm " + dir + "/s1 " + dir + "/s2 && sync -f " + dir)
	if is := w.trims("trims", "beside"); is.State != api.CloneCompleted || !strings.Contains(is.Message, "a merge") {
		t.Errorf("%+v", is)
	}
	free()
	w.conditionIs("trims", api.ConditionMerged, "True")
	w.layersUnder("after the merge", 12<<20) // the 24 of the files came back, though 24 are few
	w.sh("umount " + dir)
	w.detach("trims")
}

// TestTrimBranch: a trim deletes no snapshot below another branch.
func TestTrimBranch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("trims", 16<<20)
	for _, name := range []string{"s1", "s2", "s3"} {
		w.snapshot("trims", name)
	}
	if is := w.revert("trims", "s2", "back"); is.State != api.CloneCompleted {
		t.Fatalf("%+v", is)
	}
	w.snapshot("trims", "s4")
	w.snapshot("trims", "s5")
	w.create(attachment("trims"))
	w.attached("trims")
	open, _ := w.data.attachments.Opened("trims", w.memberOf("trims").Spec.UID)
	var names []string
	for _, k := range w.data.snapshots.Chain(open.Meta()) {
		names = append(names, k.Name)
	}
	if !slices.Equal(names, []string{"s5", "s4"}) {
		t.Errorf("%v", names)
	}
	w.detach("trims")
}
