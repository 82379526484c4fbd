package replicas

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
)

// TestDiskMovesToAnotherNode: a disk taken out of one machine and put into another machine is used there, with its
// data and settings, as soon as the former node reports the disk as gone.
func TestDiskMovesToAnotherNode(t *testing.T) {
	fs := mountedDisk(t, 200)
	w := newWorld(t)
	both, err := wire.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := wire.LoadAuthority(both)
	if err != nil {
		t.Fatal(err)
	}
	was, is := filepath.Join(w.dir, "a", "disk"), filepath.Join(w.dir, "b", "moved")
	w.sh(fmt.Sprintf("mkdir -p %s %s; mount --bind %s %[1]s", was, is, fs))
	mounted := was
	t.Cleanup(func() { w.sh("umount " + mounted) })
	w.other(ca, "a")
	w.other(ca, "b")
	node := func(name, what string, ok func(*api.Node) bool) *api.Node {
		t.Helper()
		return await(w, &api.Node{ObjectMeta: named(name)}, &api.NodeList{}, what, ok)
	}
	at := func(n *api.Node, path string) api.DiskStatus {
		i := slices.IndexFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.Path == path })
		if i < 0 {
			return api.DiskStatus{}
		}
		return n.Status.Disks[i]
	}
	for _, name := range []string{"a", "b"} {
		node(name, "reachable", func(n *api.Node) bool {
			return n.Status.DataAddress != "" && len(n.Status.Disks) == 1 && n.Status.Disks[0].Ready
		})
	}
	no := false
	edit(w, &api.Node{ObjectMeta: named("a")}, func(n *api.Node) {
		n.Spec.Disks[0].Tags, n.Spec.Disks[0].ReservedBytes = []string{"fast"}, mib
	})
	v := volume("v", 16*mib)
	v.Spec.Nodes = []string{"a"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	edit(w, &api.Node{ObjectMeta: named("a")}, func(n *api.Node) { n.Spec.Disks[0].Schedulable = &no })
	att := attachment("v")
	att.Spec.Node = "a"
	w.create(att)
	data := bytes.Repeat([]byte("it moves"), mib/8)
	writeDevice(t, w.attached("v").Status.Device, 0, data)
	w.remove(att)
	gone(w, att, &api.AttachmentList{})

	// While both nodes have the disk, nothing moves, and the message says so; a copy of a disk looks the same.
	w.sh("mount --bind " + fs + " " + is)
	uid := at(node("a", "as it was", func(*api.Node) bool { return true }), was).UID
	edit(w, &api.Node{ObjectMeta: named("b")}, func(n *api.Node) { n.Spec.Disks = append(n.Spec.Disks, api.DiskSpec{Path: is}) })
	now := node("b", "in doubt", func(n *api.Node) bool {
		d := at(n, is)
		return d.Ready && d.UID == uid && strings.Contains(d.Message, "one of the two disks is a copy")
	})
	i := slices.IndexFunc(now.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == is })
	if d := now.Spec.Disks[i]; !slices.Equal(d.Tags, []string{"fast"}) || d.ReservedBytes != mib || d.Schedulable == nil || *d.Schedulable {
		t.Errorf("its settings: %+v", d)
	}
	r := &api.Replica{ObjectMeta: named(w.volumeState("v", api.VolumeDetached).Status.Members[0])}
	if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(r), r); err != nil || r.Spec.Node != "a" {
		t.Fatalf("%v, on node %s", err, r.Spec.Node)
	}
	w.sh("umount --lazy " + was) // no wait for readers of the disk
	mounted = is
	await(w, r, &api.ReplicaList{}, "on the other node", func(r *api.Replica) bool {
		return r.Spec.Node == "b" && r.Labels[api.LabelNode] == "b"
	})
	node("a", "told", func(n *api.Node) bool {
		return at(n, was).Gone && strings.Contains(at(n, was).Message, "node b has the disk now, at "+is) &&
			strings.Contains(at(n, was).Message, "drover disk remove "+was+" --node a")
	})
	node("b", "told", func(n *api.Node) bool {
		return strings.Contains(at(n, is).Message, "the disk came from node a") && strings.Contains(at(n, is).Message, "--node a")
	})
	att = attachment("v")
	att.Spec.Node = "b"
	w.create(att)
	checkDevice(t, w.attached("v").Status.Device, 0, data)
	w.remove(att)
	gone(w, att, &api.AttachmentList{})
	w.remove(v)
	gone(w, v, &api.VolumeList{})
	if left, err := os.ReadDir(filepath.Join(is, "replicas")); err != nil || len(left) > 0 {
		t.Errorf("left on the disk: %v, %v", left, err)
	}
	// The former node forgets the disk once the user removes the disk there.
	edit(w, &api.Node{ObjectMeta: named("a")}, func(n *api.Node) { n.Spec.Disks = nil })
	node("a", "without it", func(n *api.Node) bool { return len(n.Status.Disks) == 0 })
}

// TestDiskMovesWhileItsDeviceIsHeld: a volume is attached when the node's data process ends, and the disk moves to
// another node. No process can serve the device any more: the volume can be detached, and used on the disk's new
// node.
func TestDiskMovesWhileItsDeviceIsHeld(t *testing.T) {
	fs := mountedDisk(t, 200)
	w := newWorld(t)
	was, is := filepath.Join(w.dir, "a", "disk"), filepath.Join(w.dir, "b", "moved")
	w.sh(fmt.Sprintf("mkdir -p %s %s; mount --bind %s %[1]s", was, is, fs))
	mounted := was
	t.Cleanup(func() { w.sh("umount --lazy " + mounted) })
	a := w.three()[0]
	v := volume("v", 16*mib)
	v.Spec.Nodes = []string{"a"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	data := bytes.Repeat([]byte("it moves"), mib/8)
	writeDevice(t, w.attachTo("a", "v"), 0, data)
	a.stop()
	w.sh("umount --lazy " + was + "; mount --bind " + fs + " " + is) // no wait for readers of the disk
	mounted = is
	edit(w, &api.Node{ObjectMeta: named("b")}, func(n *api.Node) {
		n.Spec.Disks = append(n.Spec.Disks, api.DiskSpec{Path: is})
	})
	await(w, &api.Node{ObjectMeta: named("a")}, &api.NodeList{}, "without its disk", func(n *api.Node) bool {
		return slices.ContainsFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.Gone })
	})
	w.lost = true
	a.start()
	w.lost = false
	w.detachFrom("v")
	checkDevice(t, w.attachTo("b", "v"), 0, data)
	w.detachFrom("v")
}
