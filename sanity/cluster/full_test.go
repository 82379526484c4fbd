package cluster

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
)

// TestFullDisks: a volume attached on a node without a replica waits while all its disks are full, names these disks,
// and continues once the disks have room.
func TestFullDisks(t *testing.T) {
	c := start(t, Options{Nodes: 3, Disks: []Disk{{Size: 256 << 20}}})
	on(t, c, "v", nil, c.Nodes[0], c.Nodes[1])
	c.attach(t, "v", c.Nodes[2].Name)
	device := deviceOf(t, c, "v")
	for _, m := range c.Nodes[:2] {
		must(t, m.Disks[0].Fill())
	}
	written := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(device, os.O_WRONLY|unix.O_SYNC, 0)
		if err == nil {
			_, err = f.WriteAt(someData("x"), 0)
			if cerr := f.Close(); err == nil {
				err = cerr
			}
		}
		written <- err
	}()
	awaitVolume(t, c, "v", "full, and said where", func(v *api.Volume) bool {
		for _, m := range c.Nodes[:2] { // perhaps in turn
			if !strings.Contains(v.Status.Message, m.Disks[0].Path+" of node "+m.Name) {
				return false
			}
		}
		return meta.IsStatusConditionFalse(v.Status.Conditions, api.ConditionSpace)
	})
	select {
	case err := <-written:
		t.Fatalf("the write did not wait: %v", err)
	default:
	}
	for _, m := range c.Nodes[:2] {
		must(t, m.Disks[0].Free())
	}
	must(t, <-written)
	awaitVolume(t, c, "v", "with room", func(v *api.Volume) bool {
		return meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionSpace) && v.Status.Message == ""
	})
	c.detach(t, "v")
}

// someData is 8 MiB of something.
func someData(what string) []byte { return []byte(strings.Repeat(what, 8<<20)) }
