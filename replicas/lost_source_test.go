package replicas

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// TestSourceOfACloneIsLost: while the disk of a clone's source gives no data, reads of uncopied data wait, a
// condition names the disk, and writes of whole blocks and reads of new data continue; when the disk is back, the
// waiting reads end with the right data, and the clone hydrates completely.
func TestSourceOfACloneIsLost(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	w.set("replica-copy-rate-limit", "1")
	w.on("a", "near", 128*mib)
	w.create(attachment("a"))
	data := pattern(120 * mib) // two minutes of copying: the source is lost before the end
	writeDevice(t, w.attached("a").Status.Device, 5*mib, data)
	w.detach("a")
	s := w.snapshot("a", "s1")
	near, err := w.disks.Get(disk["near"])
	if err != nil {
		t.Fatal(err)
	}
	for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C {
		if _, _, err := near.Digest(string(s.Status.Layer)); err == nil {
			tick.Stop()
			break
		}
		if w.ctx.Err() != nil {
			t.Fatal("the layer has no digests")
		}
	}
	w.begin("b", "snap://a/s1", "far", "", 128*mib)
	w.volumeState("b", api.VolumeDetached)
	w.create(attachment("b"))
	dev := w.attached("b").Status.Device
	checkDevice(t, dev, 5*mib, data[:mib])

	// The open file becomes empty at once, as on a pulled disk.
	name := filepath.Join(near.Path(), "layers", string(s.Status.Layer), "data")
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(name, 0); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(dev, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := func() []byte {
		b, err := unix.Mmap(-1, 0, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Munmap(b) })
		return b
	}
	got := page()
	read := make(chan error, 1)
	go func() {
		_, err := f.ReadAt(got, 124*mib)
		read <- err
	}()
	await(w, &api.Attachment{ObjectMeta: named("b")}, &api.AttachmentList{}, "lost", func(a *api.Attachment) bool {
		c := meta.FindStatusCondition(a.Status.Conditions, api.ConditionSourceLost)
		return c != nil && c.Status == "True" && strings.Contains(c.Message, near.Path()) && strings.Contains(c.Message, "wait")
	})
	own := page()
	copy(own, bytes.Repeat([]byte("own data"), mib/8))
	if _, err := f.WriteAt(own, 20*mib); err != nil {
		t.Fatal(err)
	}
	back := page()
	if _, err := f.ReadAt(back, 20*mib); err != nil || !bytes.Equal(back, own) {
		t.Fatalf("what was written is not read: %v", err)
	}
	select {
	case err := <-read:
		t.Fatalf("a read of what is lost ended: %v", err)
	default:
	}
	// The disk is back.
	w.set("replica-copy-rate-limit", "0")
	if err := os.WriteFile(name, whole, 0o444); err != nil {
		t.Fatal(err)
	}
	await(w, &api.Attachment{ObjectMeta: named("b")}, &api.AttachmentList{}, "found", func(a *api.Attachment) bool {
		return meta.FindStatusCondition(a.Status.Conditions, api.ConditionSourceLost) == nil
	})
	if err := <-read; err != nil || !bytes.Equal(got, data[119*mib:]) {
		t.Fatalf("the read that waited: %v", err)
	}
	await(w, w.memberOf("b"), &api.ReplicaList{}, "at home", func(r *api.Replica) bool {
		return !r.Status.Pinned && r.Status.Copy == nil
	})
	w.sh("blockdev --flushbufs " + dev)
	want := bytes.Clone(data)
	copy(want[15*mib:], own)
	checkDevice(t, dev, 5*mib, want)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	w.detach("b")
}
