package sanity_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
)

func TestSnapshotStories(t *testing.T) {
	tell(t,
		story{"a mounted volume is cloned", cloneMounted},
		story{"a snapshot is restored, larger", restoreLarger},
		story{"snapshots under load", snapshotLoad},
		story{"many snapshots and clones at once", snapshotsAtOnce},
		story{"data is killed while snapshots are taken", snapshotKilled},
		story{"a volume that was never formatted", cloneBlank},
		story{"the words of CSI", snapshotWords},
		story{"command line", snapshotCommands})
}

func TestGroupAndFreezeStories(t *testing.T) {
	tell(t,
		story{"groups are of one instant", groupOrder},
		story{"changed blocks", snapshotMetadata},
		story{"a damaged layer", damagedLayer},
		story{"frozen file systems", frozenSnapshots},
		story{"data is killed while a file system is frozen", frozenKilled})
}

func TestSpaceAndCopyStories(t *testing.T) {
	tell(t,
		story{"trim over a snapshot", trimMounted},
		story{"a trim that removes snapshots", trimRemoves},
		story{"full copies", fullCopies},
		story{"data is killed while copies are made", copiesKilled},
		story{"snapshots that are images", imageSnapshots},
		story{"a file becomes a volume again", volumeImports})
}

func (w *world) snap(volume, name string) (string, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), settle)
	defer cancel()
	res, err := w.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: volume, Name: name,
		Parameters: map[string]string{"type": "snap"}})
	if err != nil {
		return "", err
	}
	if !res.Snapshot.ReadyToUse || res.Snapshot.SizeBytes == 0 || res.Snapshot.CreationTime == nil {
		return "", fmt.Errorf("snapshot %+v", res.Snapshot)
	}
	return res.Snapshot.SnapshotId, nil
}

func (w *world) unsnap(ids ...string) {
	w.t.Helper()
	for _, id := range ids {
		ctx, cancel := context.WithTimeout(w.t.Context(), settle)
		_, err := w.controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
		cancel()
		must(w.t, err)
	}
}

// from creates a volume of a snapshot's handle or a volume's id.
func (w *world) from(source, name string, size int64, c *csi.VolumeCapability, parameters ...string) (*pod, error) {
	req := &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{c},
		Parameters: map[string]string{}}
	for i := 0; i < len(parameters); i += 2 {
		req.Parameters[parameters[i]] = parameters[i+1]
	}
	if size > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	if strings.Contains(source, "://") {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: source}}}
	} else {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: source}}}
	}
	ctx, cancel := context.WithTimeout(w.t.Context(), settle)
	defer cancel()
	res, err := w.controller.CreateVolume(ctx, req)
	if err != nil {
		return nil, err
	}
	if res.Volume.ContentSource == nil {
		return nil, fmt.Errorf("volume %s has no content source", name)
	}
	id := res.Volume.VolumeId
	return &pod{w: w, id: id, cap: c, staging: w.path(id + "-staging"), target: w.path(id + "-target")}, nil
}

// cloneMounted clones a mounted volume, and the clone, and mounts all volumes side by side; then the source is
// deleted.
func cloneMounted(t *testing.T, w *world) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		a, err := w.create("source-"+fs, gib, mountCap(""), "fsType", fs)
		must(t, err)
		must(t, a.up())
		sum := a.write("file", 48*mib)
		began := time.Now()
		b, err := w.from(a.id, "clone-"+fs, 0, mountCap(""))
		must(t, err)
		took := time.Since(began)
		later := a.write("later", mib)
		do(t, b.up)
		b.check("file", sum)
		if _, err := os.Stat(b.file("later")); err == nil {
			t.Errorf("%s: the clone has what was written to the source after it", fs)
		}
		own := b.write("own", 8*mib)
		c, err := w.from(b.id, "clone-of-clone-"+fs, 0, mountCap(""))
		must(t, err)
		do(t, c.up)
		c.check("file", sum)
		c.check("own", own)
		a.check("later", later)
		do(t, a.down, a.remove, b.down, b.up)
		b.check("file", sum)
		do(t, b.down, b.remove, c.down, c.up)
		c.check("file", sum)
		c.check("own", own)
		do(t, c.down, c.remove)
		t.Logf("%s: cloned in %v", fs, took.Round(time.Millisecond))
	}
}

func restoreLarger(t *testing.T, w *world) {
	a, err := w.create("restored", gib, mountCap("ext4"))
	must(t, err)
	must(t, a.up())
	sum := a.write("file", 16*mib)
	id, err := w.snap(a.id, "of-restored")
	must(t, err)
	if again, err := w.snap(a.id, "of-restored"); again != id || err != nil {
		t.Errorf("again: %s, %v", again, err)
	}
	on := func(nodes ...string) (*csi.CreateSnapshotResponse, error) {
		r := &csi.TopologyRequirement{}
		for _, n := range nodes {
			r.Requisite = append(r.Requisite, &csi.Topology{Segments: map[string]string{api.TopologyNode: n}})
		}
		return w.controller.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{SourceVolumeId: a.id,
			Name: "on-" + strings.Join(nodes, "-or-"), AccessibilityRequirements: r})
	}
	_, err = on("elsewhere")
	wantCode(t, err, codes.ResourceExhausted, "no replica on elsewhere")
	here, err := on(w.name)
	must(t, err)
	is, err := w.controller.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: here.Snapshot.SnapshotId})
	must(t, err)
	if at := is.Snapshot.AccessibleTopology; len(at) != 1 || at[0].Segments[api.TopologyNode] != w.name {
		t.Errorf("the snapshot is on %v", at)
	}
	w.unsnap(here.Snapshot.SnapshotId)
	here, err = on("elsewhere", w.name)
	must(t, err)
	if at := here.Snapshot.AccessibleTopology; len(at) != 1 || at[0].Segments[api.TopologyNode] != w.name {
		t.Errorf("of two places the snapshot is on %v", at)
	}
	w.unsnap(here.Snapshot.SnapshotId)
	must(t, os.Remove(a.file("file")))
	do(t, a.down, a.remove) // the snapshot stays
	_, err = w.controller.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: a.id})
	wantCode(t, err, codes.NotFound, "deleted")
	_, err = w.from(id, "too-small", gib/2, mountCap("ext4"))
	wantCode(t, err, codes.OutOfRange, "less than")
	b, err := w.from(id, "larger", 3*gib, mountCap("ext4"))
	must(t, err)
	must(t, b.up())
	b.check("file", sum)
	if n := b.total(); n < 28*gib/10 {
		t.Errorf("the file system has %d bytes", n)
	}
	w.unsnap(id)
	b.check("file", sum)
	do(t, b.down, b.remove)
	w.unsnap(id, "snap://no/such", "nonsense")
	_, err = w.snap("none", "of-none")
	wantCode(t, err, codes.NotFound)
	_, err = w.from(id, "of-gone", 0, mountCap("ext4"))
	wantCode(t, err, codes.NotFound)
}

// counting writes numbers to a file, each number durable before the next, until stop.
type counting struct {
	n    atomic.Int64 // the last durable number
	stop chan struct{}
	end  chan error
}

// count begins with a durable number, and pauses after each number.
func (p *pod) count(name string, pause time.Duration) *counting {
	c := &counting{stop: make(chan struct{}), end: make(chan error, 1)}
	f, err := os.Create(p.file(name))
	must(p.w.t, err)
	write := func(n int64) error {
		_, err := f.WriteAt(fmt.Appendf(nil, "%012d", n), 0)
		if err == nil {
			err = f.Sync()
		}
		if err == nil {
			c.n.Store(n)
		}
		return err
	}
	must(p.w.t, write(1))
	go func() {
		defer f.Close()
		for n := int64(2); ; n++ {
			if err := write(n); err != nil {
				c.end <- err
				return
			}
			select {
			case <-c.stop:
				c.end <- nil
				return
			case <-time.After(pause):
			}
		}
	}()
	return c
}

func (p *pod) counted(name string) (n int64) {
	b, err := os.ReadFile(p.file(name))
	must(p.w.t, err)
	_, err = fmt.Sscan(strings.TrimLeft(string(b), "0"), &n)
	must(p.w.t, err)
	return n
}

// snapshotLoad: a snapshot has every write acknowledged before the snapshot, and no write begun after.
func snapshotLoad(t *testing.T, w *world) {
	a, err := w.create("load", gib, mountCap("ext4"))
	must(t, err)
	must(t, a.up())
	c := a.count("n", loadPace())
	var ids []string
	var before, after []int64
	for i := range suite.Count(t, "DROVER_ROUNDS", 4, 10) {
		before = append(before, c.n.Load())
		id, err := w.snap(a.id, fmt.Sprintf("load-%d", i))
		must(t, err)
		ids, after = append(ids, id), append(after, c.n.Load()+1)
	}
	close(c.stop)
	must(t, <-c.end)
	for i, id := range ids {
		p, err := w.from(id, fmt.Sprintf("loaded-%d", i), 0, mountCap("ext4"))
		must(t, err)
		must(t, p.up())
		if n := p.counted("n"); n < before[i] || n > after[i] {
			t.Errorf("snapshot %d holds %d, which was %d before and %d after", i, n, before[i], after[i])
		}
		do(t, p.down, p.remove)
	}
	w.unsnap(ids...)
	do(t, a.down, a.remove)
	t.Logf("%d synced writes, %d snapshots", c.n.Load(), len(ids))
}

// snapshotKilled: Drover takes a snapshot exactly once for any moment of death of the data process, and the load sees
// no error.
func snapshotKilled(t *testing.T, w *world) {
	a, err := w.create("killed", gib, mountCap("ext4"))
	must(t, err)
	must(t, a.up())
	c := a.count("n", loadPace())
	var ids []string
	for i := range kills(t, 3) {
		done := make(chan error, 1)
		before := c.n.Load()
		go func() {
			id, err := w.snap(a.id, fmt.Sprintf("killed-%d", i))
			ids = append(ids, id)
			done <- err
		}()
		time.Sleep(time.Duration(i*6) * time.Millisecond) // another moment each time
		if pid := w.child("data"); pid != 0 {
			must(t, syscall.Kill(pid, syscall.SIGKILL))
		}
		must(t, <-done)
		after := c.n.Load() + 1
		p, err := w.from(ids[i], fmt.Sprintf("kill-%d", i), 0, mountCap("ext4"))
		must(t, err)
		must(t, p.up())
		if n := p.counted("n"); n < before || n > after {
			t.Errorf("snapshot %d holds %d, which was %d before and %d after", i, n, before, after)
		}
		do(t, p.down, p.remove)
	}
	close(c.stop)
	must(t, <-c.end)
	list, err := w.controller.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SourceVolumeId: a.id})
	must(t, err)
	if len(list.Entries) != len(ids) {
		t.Errorf("%d snapshots, not %d", len(list.Entries), len(ids))
	}
	w.unsnap(ids...)
	do(t, a.down, a.remove)
}

func cloneBlank(t *testing.T, w *world) {
	a, err := w.create("blank", gib, mountCap("ext4"))
	must(t, err)
	b, err := w.from(a.id, "of-blank", 0, mountCap("ext4"))
	must(t, err)
	must(t, b.up())
	b.write("file", mib)
	do(t, b.down, b.remove, a.remove)
}

func snapshotCommands(t *testing.T, w *world) {
	dir := w.path("cli-mount")
	must(t, os.MkdirAll(dir, 0o700))
	w.must("volume", "create", "db", "--size", "256Mi")
	w.must("volume", "mount", "db", dir)
	must(t, os.WriteFile(filepath.Join(dir, "text"), []byte("first"), 0o600))
	syncAt(t, dir)
	w.must("snapshot", "create", "db", "one", "--label", "why=test")
	w.refused(5, "already", "snapshot", "create", "db", "one")
	w.refused(3, "does not exist", "snapshot", "create", "none")
	names, codes := make([]string, 4), make([]int, 4)
	var all sync.WaitGroup
	for i := range names { // without a name, drover names a snapshot by the second
		all.Go(func() { names[i], codes[i] = w.command("snapshot", "create", "db", "-o", "name") })
	}
	all.Wait()
	for i, name := range names {
		if codes[i] != 0 {
			t.Fatalf("a snapshot without a name, %d: %s", codes[i], name)
		}
		name = strings.TrimSpace(name)
		w.must("snapshot", "delete", name[strings.LastIndex(name, "/")+1:])
	}
	must(t, os.WriteFile(filepath.Join(dir, "text"), []byte("later"), 0o600))
	if out := w.must("snapshot", "list", "db"); !strings.Contains(out, "one") || !strings.Contains(out, "true") {
		t.Errorf("list: %s", out)
	}
	if out := w.must("snapshot", "show", "one"); !strings.Contains(out, "snap://db/one") || !strings.Contains(out, "why=test") {
		t.Errorf("show: %s", out)
	}
	w.refused(2, "less than", "volume", "create", "small", "--from", "one", "--size", "100Mi")
	w.must("volume", "create", "copy", "--from", "one", "--size", "512Mi")
	if out := w.must("volume", "show", "copy"); !strings.Contains(out, "snap://db/one (completed)") {
		t.Errorf("show: %s", out)
	}
	w.must("volume", "umount", "db")
	w.must("volume", "mount", "copy", dir)
	if b, err := os.ReadFile(filepath.Join(dir, "text")); string(b) != "first" {
		t.Errorf("the copy holds %q, %v", b, err)
	}
	w.must("volume", "umount", "copy")
	w.refused(5, "--keep-snapshots", "volume", "delete", "db")
	w.must("volume", "mount", "db", dir)
	w.refused(5, "attached", "snapshot", "revert", "one")
	w.must("volume", "umount", "db")
	w.must("snapshot", "revert", "one")
	w.must("volume", "mount", "db", dir)
	if b, err := os.ReadFile(filepath.Join(dir, "text")); string(b) != "first" {
		t.Errorf("the reverted volume holds %q, %v", b, err)
	}
	w.must("volume", "umount", "db")
	w.must("volume", "delete", "--keep-snapshots", "db")
	w.must("snapshot", "delete", "one")
	w.must("volume", "delete", "copy")
	var left api.VolumeList
	must(t, w.objects.List(t.Context(), &left))
	for _, v := range left.Items {
		if v.Name == "db" && v.DeletionTimestamp == nil || v.Name == "copy" {
			t.Errorf("volume %s is still there", v.Name)
		}
	}
}

// TestRecoverSnapshots: the API's state is lost; `drover recover` restores snapshots with their volumes and creation
// times, and repeats no earlier revert.
func TestRecoverSnapshots(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, err := w.create("a", 256*mib, mountCap("ext4"))
	must(t, err)
	must(t, a.up())
	sum := a.write("first", 8*mib)
	one, err := w.snap(a.id, "one")
	must(t, err)
	do(t, a.down)
	w.must("snapshot", "revert", "one")
	do(t, a.up)
	later := a.write("later", 8*mib)
	two, err := w.snap(a.id, "two")
	must(t, err)
	last := a.write("last", mib)
	b, err := w.from(one, "b", 0, mountCap("ext4"))
	must(t, err)
	do(t, a.down)
	var before api.Snapshot
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "one"}, &before))

	w.loseState("")
	if all, code := w.recover("--yes"); code != 0 || states(all, "Volume", "missing", "created") != 2 {
		w.fatal("recover: code %d", code)
	}
	ctx, cancel := timeout(t)
	defer cancel()
	for _, name := range []string{"one", "two"} {
		var s *api.Snapshot
		comes(func() bool { // the node finds snapshots after the volume has a member
			s, err = await.Until(ctx, w.objects, name, func(s *api.Snapshot) (bool, error) { return s.Status.ReadyToUse, nil })
			return !apierrors.IsNotFound(err)
		})
		must(t, err)
		if name == "one" && s.Status.CreationTime != before.Status.CreationTime || s.Spec.CreateSnapshot {
			t.Errorf("%s is %+v, was %+v", name, s, before)
		}
	}
	do(t, a.up, b.up)
	a.check("first", sum)
	a.check("later", later)
	a.check("last", last)
	b.check("first", sum)
	c, err := w.from(two, "c", 0, mountCap("ext4"))
	must(t, err)
	do(t, c.up)
	c.check("later", later)
	do(t, a.down, a.remove, b.down, b.remove, c.down, c.remove)
	w.unsnap(one, two)
}
