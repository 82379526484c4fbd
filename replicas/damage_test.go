package replicas

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// replicaOf is the only replica of a volume.
func (w *world) replicaOf(volume string) *api.Replica {
	w.t.Helper()
	var list api.ReplicaList
	if err := w.c.List(w.ctx, &list); err != nil {
		w.t.Fatal(err)
	}
	for i := range list.Items {
		if list.Items[i].Spec.Volume == volume {
			return &list.Items[i]
		}
	}
	w.t.Fatalf("volume %s has no replica", volume)
	return nil
}

// stackFile is a replica's record on the disk.
func (w *world) stackFile(r *api.Replica) string {
	return filepath.Join(w.dir, "disk", "replicas", string(r.Spec.UID), "stack.json")
}

// TestUnreadableReplicaIsNotGivenUp: the replica reports a record that cannot be read for a while, and stays current.
func TestUnreadableReplicaIsNotGivenUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	r := w.replicaOf("v1")
	good, err := os.ReadFile(w.stackFile(r))
	if err != nil {
		t.Fatal(err)
	}
	w.stopData()
	if err := os.WriteFile(w.stackFile(r), []byte("not to be read"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.startData()
	r = await(w, r, &api.ReplicaList{}, "unreadable", func(r *api.Replica) bool { return r.Status.Message != "" })
	if r.Status.Mode != api.ReplicaCurrent || !strings.Contains(r.Status.Message, "stack.json") {
		t.Fatalf("%+v", r.Status)
	}
	if err := os.WriteFile(w.stackFile(r), good, 0o600); err != nil {
		t.Fatal(err)
	}
	await(w, r, &api.ReplicaList{}, "readable", func(r *api.Replica) bool { return r.Status.Message == "" })
	w.create(attachment("v1"))
	a := w.attached("v1")
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
}

// TestDestroyedReplicaCanBeDetached: the holder keeps the device of a destroyed replica until the deletion of the
// Attachment.
func TestDestroyedReplicaCanBeDetached(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	w.create(attachment("v1"))
	a := w.attached("v1")
	f, err := os.OpenFile(a.Status.Device, os.O_RDWR|syscall.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.stopData()
	stack := w.stackFile(w.replicaOf("v1"))
	if err := os.Rename(stack, stack+".away"); err != nil {
		t.Fatal(err)
	}
	w.lost = true
	w.startData()
	w.lost = false
	failed := make(chan error, 1)
	go func() {
		_, err := f.ReadAt(make([]byte, 4096), 0) // waits: only the user may give the volume up
		failed <- err
	}()
	await(w, a, &api.AttachmentList{}, "unserved", func(a *api.Attachment) bool { return a.Status.Message != "" })
	if held := w.host.Held(); len(held) != 1 {
		t.Fatalf("held: %v", held)
	}
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
	if err := <-failed; err == nil {
		t.Error("a read of a volume that is no more succeeded")
	}
	_ = f.Close()
	if len(w.host.Held()) > 0 {
		t.Error("the device is still held")
	}
	w.remove(volume("v1", 0))
	gone(w, volume("v1", 0), &api.VolumeList{})
}

// TestDeadDisk: after the user took a lost disk out of the node, the volumes on the disk can be detached and deleted.
func TestDeadDisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	w.make("v2", 16*mib)
	w.create(attachment("v1"))
	a := w.attached("v1")
	w.stopData()
	disk := filepath.Join(w.dir, "disk")
	if err := os.Rename(disk, disk+".away"); err != nil {
		t.Fatal(err)
	}
	w.lost = true
	w.startData()
	w.lost = false
	w.remove(a)
	w.remove(volume("v2", 0))
	notReady := func(n *api.Node) bool { return len(n.Status.Disks) == 1 && !n.Status.Disks[0].Ready }
	n := await(w, &api.Node{ObjectMeta: named(testNode)}, &api.NodeList{}, "without its disk", notReady)
	await(w, a, &api.AttachmentList{}, "waiting", func(a *api.Attachment) bool { return a.Status.Message != "" })
	if len(w.host.Held()) != 1 {
		t.Fatal("a device was given up while its disk may come back")
	}
	old := n.DeepCopy()
	n.Spec.Disks = nil
	if err := w.c.Patch(w.ctx, n, client.MergeFrom(old)); err != nil {
		t.Fatal(err)
	}
	gone(w, a, &api.AttachmentList{})
	gone(w, volume("v2", 0), &api.VolumeList{})
	w.remove(volume("v1", 0))
	gone(w, volume("v1", 0), &api.VolumeList{})
	await(w, n, &api.NodeList{}, "rid of the disk", func(n *api.Node) bool { return len(n.Status.Disks) == 0 })
}

// TestReplacedVolume: objects lost and created again under the same names never get the device of the old volume.
func TestReplacedVolume(t *testing.T) {
	t.Parallel()
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart=%v", restart), func(t *testing.T) { testReplaced(t, restart) })
	}
}

func testReplaced(t *testing.T, restart bool) {
	w := newWorld(t)
	w.make("v1", 16*mib)
	w.create(attachment("v1"))
	a := w.attached("v1")
	data := bytes.Repeat([]byte("old content here"), 4096)
	writeDevice(t, a.Status.Device, 0, data)
	f, err := os.OpenFile(a.Status.Device, os.O_RDWR, 0) // in use
	if err != nil {
		t.Fatal(err)
	}
	w.stopData()
	w.stopRoles()
	for _, o := range []client.Object{a, w.replicaOf("v1"), volume("v1", 0)} {
		w.abandon(o)
	}
	start := func() {
		w.roles([]string{filepath.Join(w.dir, "disk")})
		w.create(volume("v1", 16*mib), attachment("v1"))
	}
	if restart {
		start()
		w.startData()
	} else { // the reconcilers run when the session exists already
		w.startData()
		start()
	}
	a = await(w, attachment("v1"), &api.AttachmentList{}, "refused",
		func(a *api.Attachment) bool { return a.Status.Message != "" })
	if a.Status.Ready {
		t.Fatalf("the device of another volume: %+v", a.Status)
	}
	_ = f.Close()
	a = w.attached("v1")
	checkDevice(t, a.Status.Device, 0, make([]byte, len(data)))
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
}
