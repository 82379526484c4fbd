package replicas

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/disks"
)

// other is a further node with disk, node role, holder and data role.
type other struct {
	w        *world
	name     string
	dir      string
	ca       *wire.Authority
	data     *Data
	deafen   func() // the data role loses the API
	mute     func() // the node sends no heartbeat
	stopData func()
}

func (w *world) identity(ca *wire.Authority, node, dir string) *wire.Identity {
	w.t.Helper()
	id, err := wire.OpenIdentity(dir, node)
	if err != nil {
		w.t.Fatal(err)
	}
	req, err := id.Request()
	if err != nil {
		w.t.Fatal(err)
	}
	cert, _, err := ca.Sign(req, node, wire.CertificateLife)
	if err == nil {
		err = id.Put(cert, ca.PEM())
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

func (w *world) other(ca *wire.Authority, name string) *other {
	w.t.Helper()
	o := &other{w: w, name: name, dir: filepath.Join(w.dir, name), ca: ca}
	run := filepath.Join(o.dir, "run")
	if err := os.MkdirAll(run, 0o700); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	socket := filepath.Join(run, "hold.sock")
	go func() { done <- device.RunHolder(ctx, socket) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	for tick := time.NewTicker(time.Millisecond); ; <-tick.C {
		if c, err := net.Dial("unixpacket", socket); err == nil {
			tick.Stop()
			_ = c.Close()
			break
		}
	}
	mgr := w.manager()
	if _, err := SetupNode(mgr, disks.Options{Name: name, Log: w.log, Heartbeat: 2 * time.Second, GoneAfter: 4 * time.Second,
		Disks: []api.DiskSpec{{Path: filepath.Join(o.dir, "disk")}}}); err != nil {
		w.t.Fatal(err)
	}
	o.mute = w.run(mgr)
	o.start()
	w.t.Cleanup(func() {
		for _, s := range o.data.attachments.Sessions() {
			if dev := s.Device(); dev != nil {
				_ = dev.Abort()
			}
		}
		o.stop()
	})
	return o
}

func (o *other) start() {
	w := o.w
	w.t.Helper()
	host, err := device.Open(w.ctx, filepath.Join(o.dir, "run"))
	if err != nil {
		w.t.Fatal(err)
	}
	ln, err := ListenPeers("127.0.0.1", o.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	o.data, err = NewData(DataOptions{Node: o.name, Host: host, Log: w.log, Heartbeat: time.Second,
		Peers: PeerOptions{Identity: w.identity(o.ca, o.name, o.dir), Listener: ln,
			State: filepath.Join(o.dir, "peers.json")}})
	if err != nil {
		w.t.Fatal(err)
	}
	w.resumes(o.data)
	mgr := w.manager()
	if err := SetupData(mgr, o.data); err != nil {
		w.t.Fatal(err)
	}
	stop := w.run(mgr)
	data := o.data
	o.deafen = stop
	o.stopData = func() {
		stop()
		if err := data.Close(); err != nil {
			w.t.Error(err)
		}
	}
}

func (o *other) stop() {
	if o.stopData != nil {
		o.stopData()
		o.stopData = nil
	}
}

// TestSeveral has a volume with three replicas on three nodes: written to, degraded, whole again, and moved.
func TestSeveral(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	both, err := wire.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := wire.LoadAuthority(both)
	if err != nil {
		t.Fatal(err)
	}
	a, b, c := w.other(ca, "a"), w.other(ca, "b"), w.other(ca, "c")
	for _, name := range []string{"a", "b", "c"} {
		await(w, &api.Node{ObjectMeta: named(name)}, &api.NodeList{}, "reachable",
			func(n *api.Node) bool {
				return n.Status.DataAddress != "" && len(n.Status.Disks) == 1 && n.Status.Disks[0].Ready
			})
	}
	v := volume("v", 64<<20)
	v.Spec.NumberOfReplicas = 2
	v.Spec.Nodes = []string{"a", "b", "c"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	at := attachment("v")
	at.Spec.Node = "a"
	w.create(at)
	dev := w.attached("v").Status.Device
	healthy := func(n int) func(*api.Volume) bool {
		return func(v *api.Volume) bool {
			want := api.RobustHealthy
			if n < 3 {
				want = api.RobustDegraded
			}
			return len(v.Status.Members) == n && v.Status.Robustness == want
		}
	}
	w.volumeIs("v", "whole", func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	})
	w.sh("dd if=/dev/urandom of=" + dev + " bs=1M count=64 oflag=direct status=none")
	// A third replica is new, and gets all data.
	w.volumeIs("v", "to have three", func(v *api.Volume) bool {
		v.Spec.NumberOfReplicas = 3
		return w.c.Update(w.ctx, v) == nil
	})
	w.volumeIs("v", "healthy", healthy(3))
	c.stop()
	w.sh("dd if=/dev/urandom of=" + dev + " bs=4k count=100 seek=77 oflag=direct conv=notrunc status=none")
	got := w.volumeIs("v", "degraded", healthy(2))
	if slices.ContainsFunc(got.Status.Members, func(m string) bool {
		var r api.Replica
		return w.c.Get(w.ctx, clientKey(m), &r) == nil && r.Spec.Node == c.name
	}) {
		t.Error("the replica that is away is a member")
	}
	w.sh("dd if=/dev/urandom of=" + dev + " bs=4k count=50 seek=9000 oflag=direct conv=notrunc status=none")
	sum := w.sh("sha256sum < " + dev)
	c.start()
	w.volumeIs("v", "healthy again", healthy(3))
	// A new data process of the engine resumes the device.
	a.stop()
	a.start()
	if now := w.sh("sha256sum < " + dev); now != sum {
		t.Error("after a restart of the engine's process the content is another one")
	}
	w.volumeIs("v", "healthy still", healthy(3)) // on a busy machine a member may be dropped, and return
	w.remove(at)
	gone(w, at, &api.AttachmentList{})
	at = attachment("v")
	at.Spec.Node = c.name
	w.create(at)
	dev = w.attached("v").Status.Device
	if now := w.sh("sha256sum < " + dev); now != sum {
		t.Error("on another node the content is another one")
	}
	w.volumeIs("v", "healthy there, too", healthy(3))
	w.remove(at)
	gone(w, at, &api.AttachmentList{})
	digests := map[string]bool{}
	for _, o := range []*other{a, b, c} {
		o.stop()
		digests[o.content(t)] = true
	}
	if len(digests) != 1 {
		t.Errorf("the replicas differ: %v", digests)
	}
}

// content digests the only replica on the node's disk.
func (o *other) content(t *testing.T) string {
	t.Helper()
	disks := o.data.Disks.Except(nil)
	if len(disks) != 1 {
		t.Fatalf("%d disks", len(disks))
	}
	list, err := disks[0].Replicas()
	if err != nil || len(list) != 1 {
		t.Fatalf("%d replicas: %v", len(list), err)
	}
	v, err := disks[0].OpenView(list[0].UID)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	b := make([]byte, v.Size())
	if _, err := v.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

func clientKey(name string) types.NamespacedName { return types.NamespacedName{Name: name} }
