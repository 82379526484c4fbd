package cluster

import (
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// onImageOf makes a cluster with the only copy of an image on the second node, and volumes on the image with replicas
// on the second and third node, attached on the third node. The copy to the third node is slow.
func onImageOf(t *testing.T, size int64, volumes ...string) (c *Cluster, device map[string]string) {
	t.Helper()
	c = startAlone(t, Options{Nodes: 3})
	n := c.Nodes
	schedulable := func(m *Machine, is bool) {
		eventually(t, m.Name+" is changed", func() bool {
			var o api.Node
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: m.Name}, &o))
			o.Spec.Schedulable = &is
			return c.Objects.Update(t.Context(), &o) == nil
		})
	}
	schedulable(n[0], false)
	schedulable(n[2], false)
	c.command(t, "image", "import", servePattern(t, c, size), "--name", "golden")
	if img := ready(t, c, "golden", 1); img.Status.Copies[0].Node != n[1].Name {
		t.Fatalf("the image is on %s", img.Status.Copies[0].Node)
	}
	schedulable(n[0], true)
	schedulable(n[2], true)
	c.Net.Between(n[1], n[2], Link{Delay: 150 * time.Millisecond})
	device = map[string]string{}
	for _, name := range volumes {
		v := &api.Volume{Spec: api.VolumeSpec{Size: size, BackingImage: "golden", NumberOfReplicas: 2,
			Nodes: []string{n[1].Name, n[2].Name}}}
		v.Name = name
		must(t, c.Objects.Create(t.Context(), v))
	}
	for _, name := range volumes {
		awaitVolume(t, c, name, "made, and degraded until the image is copied", func(v *api.Volume) bool {
			return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustDegraded &&
				strings.Contains(v.Status.Message, "still fetches")
		})
		c.attach(t, name, n[2].Name)
		device[name] = deviceOf(t, c, name)
		must(t, <-blockIO(device[name], 0, false))
	}
	return c, device
}

// blockIO reads or writes a block of a device, past the page cache.
func blockIO(dev string, off int64, write bool) chan error {
	done := make(chan error, 1)
	go func() {
		b := block.AlignedBuffer(4096)
		f, err := os.OpenFile(dev, os.O_RDWR|unix.O_DIRECT, 0)
		if err == nil {
			if write {
				_, err = f.WriteAt(b, off)
			} else {
				_, err = f.ReadAt(b, off)
			}
			_ = f.Close()
		}
		done <- err
	}()
	return done
}

// answered fails the test if I/O does not end in time.
func answered(t *testing.T, what string, done chan error) {
	t.Helper()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case <-time.After(2 * time.Minute):
		t.Errorf("%s is not answered", what)
	}
}

// TestImageNodeDies: the node with the only copy of an image and a replica dies, while a read of another replica
// waits for the image. The volume continues without the node, and the read ends when the node is back.
func TestImageNodeDies(t *testing.T) {
	const size = int64(512) << 20
	c, device := onImageOf(t, size, "v")
	node := c.Nodes[1]
	must(t, node.PowerOff())
	read := blockIO(device["v"], size-(4<<20), false)
	answered(t, "a write of a whole block", blockIO(device["v"], 2<<20, true))
	awaitVolume(t, c, "v", "without the node", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
	select {
	case err := <-read:
		t.Errorf("a read of bytes that nobody has ended: %v", err)
	default:
	}
	must(t, node.PowerOn())
	must(t, node.Serve(t.Context()))
	answered(t, "the read that waited", read)
	c.command(t, "volume", "detach", "v", "--force")
}

// TestImageServerStops: the process that serves images is away on the only node with a copy; the data process runs.
// The replica there answers reads, and the other replica stays a member.
func TestImageServerStops(t *testing.T) {
	const size = int64(512) << 20
	c, device := onImageOf(t, size, "v")
	var was, is api.Volume
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &was))
	must(t, c.Nodes[1].Kill("serve"))
	c.Nodes[1].Gone()
	for i := range int64(2) {
		answered(t, "a read of the image", blockIO(device["v"], size-(4<<20)-i*(8<<20), false))
		time.Sleep(5 * time.Second) // longer than the wait for a hanging disk
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &is))
		if len(is.Status.Members) != 2 || is.Status.Epoch != was.Status.Epoch {
			t.Errorf("members %v in epoch %d: %s", is.Status.Members, is.Status.Epoch, is.Status.Message)
		}
	}
	must(t, c.Nodes[1].Serve(t.Context()))
	c.command(t, "volume", "detach", "v", "--force")
}
