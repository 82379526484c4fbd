package images

import (
	"context"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// copies are the ImageCopies of an API.
type copies struct {
	client.Reader
	items []api.ImageCopy
}

func (c copies) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*api.ImageCopyList).Items = c.items
	return nil
}

// disk opens layers, and notes them.
type disk struct {
	block.SnapshotDisk
	opened string
}

func (d *disk) OpenStack(layers []string, size int64) (block.Source, error) {
	d.opened = strings.Join(layers, " ")
	return nil, nil
}

// TestOnlyReadyCopiesOfTheChecksumAreOpened: on a disk of the node that answers; the error tells where else the image is.
func TestOnlyReadyCopiesOfTheChecksumAreOpened(t *testing.T) {
	here := api.ImageCopy{Spec: api.ImageCopySpec{Image: "golden", Node: "node-1", Disk: "d1", Layers: []api.UID{"a", "b"}},
		Status: api.ImageCopyStatus{State: api.ImageReady, Checksum: "abc", VirtualSize: 4096}}
	there, other, half, broken := here, here, here, here
	there.Spec.Node = "node-2"
	other.Status.Checksum = ""
	half.Status.State = api.ImageInProgress
	broken.Spec.Disk = "d2"
	for _, c := range []struct {
		items  []api.ImageCopy
		kind   api.Kind
		part   string
		opened string
	}{
		{[]api.ImageCopy{other, half, there, broken, here}, 0, "", "a b"},
		{[]api.ImageCopy{other, half}, api.NotFound, "no ready image", ""},
		{[]api.ImageCopy{there, half}, api.NotFound, "golden", ""},
		{[]api.ImageCopy{there, broken}, api.Unavailable, "golden", ""},
	} {
		d := &disk{}
		disks := Disks{Reader: copies{items: c.items}, Node: "node-1", Disk: func(uid api.UID) (block.SnapshotDisk, error) {
			if uid != "d1" {
				return nil, api.Errorf(api.Unavailable, "disk %s does not answer", uid)
			}
			return d, nil
		}}
		_, err := disks.Open(t.Context(), "abc")
		if d.opened != c.opened || c.kind == 0 && err != nil ||
			c.kind != 0 && (!api.Is(err, c.kind) || !strings.Contains(err.Error(), c.part)) {
			t.Errorf("opened %q, %v; want kind %v with %q", d.opened, err, c.kind, c.part)
		}
	}
}
